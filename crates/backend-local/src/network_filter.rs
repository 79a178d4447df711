//! The filter of networks, which the egress process is.

use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use backend::{
    BackendError, LogWait, NetworkCounters, NetworkFilter, NetworkLogPage, NetworkRecord, NetworkRecordKind,
    NetworkTotals,
};
use domain::{NetworkPolicy, SandboxId};
use egress_protocol::{
    EgressCounters, EgressReplyBody, EgressRequestBody, LogKind, LogPage, LogRecord, SandboxCounters,
};

use crate::LocalBackend;
use crate::egress::{REQUEST_TIMEOUT, unexpected_reply};

/// How long egress may wait for a record before it replies without one.
const LOG_WAIT_TIMEOUT: Duration = Duration::from_secs(60);

#[async_trait::async_trait]
impl NetworkFilter for LocalBackend {
    async fn set_policy(&self, id: &SandboxId, policy: &Arc<NetworkPolicy>) -> Result<(), BackendError> {
        self.egress.set_policy(id, policy).await
    }

    fn restore_policy(&self, id: &SandboxId, policy: &Arc<NetworkPolicy>) {
        self.egress.restore_policy(id, policy);
    }

    async fn read_log(
        &self,
        id: &SandboxId,
        after: u64,
        limit: u32,
        wait: LogWait,
    ) -> Result<NetworkLogPage, BackendError> {
        let (wait, time) = match wait {
            LogWait::No => (false, REQUEST_TIMEOUT),
            LogWait::ForRecord => (true, REQUEST_TIMEOUT + LOG_WAIT_TIMEOUT),
        };
        let body = EgressRequestBody::ReadLog { sandbox: id.as_str().to_owned(), after, limit, wait };
        match self.egress.request(time, body).await {
            Ok(EgressReplyBody::Log(page)) => Ok(log_page(page)),
            Ok(_) => Err(unexpected_reply()),
            // Egress knows the sandboxes that it serves.
            Err(BackendError::Step { .. }) => Err(BackendError::Unsupported {
                message: "the sandbox has no connections that egress carries, so there is no log".to_owned(),
                hint: Some(
                    "`coracle policy allow ID TARGET` gives a running sandbox a filtered network".to_owned(),
                ),
            }),
            Err(error) => Err(error),
        }
    }

    async fn counters(&self) -> Result<NetworkCounters, BackendError> {
        match self.egress.request(REQUEST_TIMEOUT, EgressRequestBody::ReadCounters).await? {
            EgressReplyBody::Counters(counters) => Ok(network_counters(counters)),
            _ => Err(unexpected_reply()),
        }
    }
}

fn log_page(LogPage { records, dropped }: LogPage) -> NetworkLogPage {
    NetworkLogPage { records: records.into_iter().map(network_record).collect(), dropped }
}

fn network_record(record: LogRecord) -> NetworkRecord {
    NetworkRecord {
        number: record.number,
        time: UNIX_EPOCH + Duration::from_millis(record.unix_ms),
        kind: match record.kind {
            LogKind::Connection => NetworkRecordKind::Connection,
            LogKind::ConnectionEnd => NetworkRecordKind::ConnectionEnd,
            LogKind::Query => NetworkRecordKind::Query,
        },
        name: record.name,
        address: record.address,
        verdict: record.verdict.into(),
        reason: record.reason,
        bytes_sent: record.bytes_sent,
        bytes_received: record.bytes_received,
    }
}

fn network_counters(EgressCounters { open_connections, sandboxes }: EgressCounters) -> NetworkCounters {
    let totals = |counters: SandboxCounters| {
        let totals = NetworkTotals {
            allowed_connections: counters.allowed_connections,
            denied_connections: counters.denied_connections,
            denied_queries: counters.denied_queries,
            bytes_sent: counters.bytes_sent,
            bytes_received: counters.bytes_received,
        };
        Some((SandboxId::parse(&counters.sandbox).ok()?, totals))
    };
    NetworkCounters { open_connections, sandboxes: sandboxes.into_iter().filter_map(totals).collect() }
}
