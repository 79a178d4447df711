//! The filter of sandboxes with the network `filtered`, for backends that have one.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::SystemTime;

use domain::{NetworkPolicy, PolicyAction, SandboxId};

use crate::BackendError;

/// Decides what filtered sandboxes may reach, and records what they tried.
#[async_trait::async_trait]
pub trait NetworkFilter: Send + Sync {
    /// Sets the policy of a sandbox. It is in force when this returns, also for connections that are open. If this fails,
    /// the backend still keeps the policy and applies it as soon as it can, until the sandbox ends or gets another one;
    /// until then a former policy may be in force. Without any policy a filtered sandbox reaches nothing.
    async fn set_policy(&self, id: &SandboxId, policy: &Arc<NetworkPolicy>) -> Result<(), BackendError>;
    /// Does the same for a sandbox that a former server made, as soon as it can and without waiting: the filter may have
    /// been restarted since. A later [`NetworkFilter::set_policy`] wins.
    fn restore_policy(&self, id: &SandboxId, policy: &Arc<NetworkPolicy>);
    /// Returns records of a sandbox after the one with the number `after`, the oldest first.
    async fn read_log(
        &self,
        id: &SandboxId,
        after: u64,
        limit: u32,
        wait: LogWait,
    ) -> Result<NetworkLogPage, BackendError>;
    /// Returns the totals of all sandboxes whose traffic passes the filter.
    async fn counters(&self) -> Result<NetworkCounters, BackendError>;
}

/// Whether reading a log waits for a record if there is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogWait {
    No,
    /// Until there is one, or some seconds without any have passed.
    ForRecord,
}

/// Some records of a sandbox's log.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NetworkLogPage {
    pub records: Vec<NetworkRecord>,
    /// How many records between `after` and the first of these are no longer kept.
    pub dropped: u64,
}

/// One connection, when it was decided and again when it ended, or one denied name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetworkRecord {
    /// Increases; a number is never used twice for one sandbox.
    pub number: u64,
    pub time: SystemTime,
    pub kind: NetworkRecordKind,
    /// The name that the sandbox asked for, if it did.
    pub name: Option<String>,
    pub address: Option<SocketAddr>,
    pub verdict: PolicyAction,
    /// What decided: a rule, the default, or the name of a list or limit.
    pub reason: String,
    /// Known when the connection has ended.
    pub bytes_sent: u64,
    pub bytes_received: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NetworkRecordKind {
    /// A connection was allowed and dialled, or denied.
    Connection,
    /// An allowed connection ended.
    ConnectionEnd,
    /// A name was asked for and denied.
    Query,
}

impl NetworkRecordKind {
    /// The name used in APIs.
    pub fn name(self) -> &'static str {
        match self {
            Self::Connection => "connection",
            Self::ConnectionEnd => "end",
            Self::Query => "query",
        }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NetworkCounters {
    pub open_connections: u64,
    pub sandboxes: Vec<(SandboxId, NetworkTotals)>,
}

/// Totals of a sandbox. They start over when the process that counts them is restarted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NetworkTotals {
    pub allowed_connections: u64,
    pub denied_connections: u64,
    pub denied_queries: u64,
    pub bytes_sent: u64,
    pub bytes_received: u64,
}
