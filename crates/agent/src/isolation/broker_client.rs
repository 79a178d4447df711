//! The agent's side of the namespace broker: whether there is one, and how it is asked.

use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::process::Pid;
use wire::{Fault, FaultKind};

use crate::context::AgentContext;
use crate::fault;
use crate::isolation::limit_view::THREADS_VARIABLE;
use crate::isolation::namespace_broker::{self, BrokerRequest, ConfigUpdate};

/// The namespace broker of a sandbox, if it has one.
#[derive(Debug, Default)]
pub(crate) struct BrokerClient {
    /// The channel on which it takes requests, and its pid.
    broker: Option<(OwnedFd, Pid)>,
    /// There was a broker, and it has ended or failed to answer.
    failed: bool,
}

impl BrokerClient {
    pub(crate) fn new(channel: OwnedFd, pid: Pid) -> Self {
        Self { broker: Some((channel, pid)), failed: false }
    }

    pub(crate) fn pid(&self) -> Option<Pid> {
        self.broker.as_ref().map(|(_, pid)| *pid)
    }

    /// The broker is gone, so no more sessions can be isolated.
    pub(crate) fn mark_failed(&mut self) {
        self.failed |= self.broker.take().is_some();
    }
}

impl AgentContext {
    /// Whether this sandbox supports isolated sessions.
    pub(crate) fn check_isolation_supported(&self) -> Result<(), Fault> {
        let without = |why: &str| Err(fault::from_kind(FaultKind::Unsupported, "isolate session", why));
        match (&self.broker.broker, &self.commands) {
            (Some(_), Some(_)) => Ok(()),
            (_, None) => {
                without("this host gives sandboxes no control groups, which are needed to end a session")
            }
            (None, _) if self.broker.failed => without("the process that creates the namespaces has ended"),
            (None, _) => without("the sandbox was created without isolated sessions"),
        }
    }

    /// The parts of the configuration that a request needs.
    pub(crate) fn config_update(&self) -> ConfigUpdate {
        let mut env = self.config.env.clone();
        if let Some(threads) = self.config.threads {
            env.entry(THREADS_VARIABLE.to_owned()).or_insert_with(|| threads.to_string());
        }
        ConfigUpdate { env, env_file: self.config.env_file.clone() }
    }

    /// Sends a request to the namespace broker. A broker that fails to answer is not used again.
    pub(crate) fn send_broker_request(
        &mut self,
        request: &BrokerRequest,
        with: &[BorrowedFd<'_>],
    ) -> Result<Option<Pid>, Fault> {
        self.check_isolation_supported()?;
        let (channel, _) = self.broker.broker.as_ref().expect("the check above has found it");
        match namespace_broker::send_request(channel, request, with) {
            Ok(answer) => answer.0.map_err(|errno| fault::from_errno(errno, "start", "in the session")),
            Err(error) => {
                self.broker.mark_failed();
                Err(fault::from_io(&error, "isolate session", "the process that creates the namespaces"))
            }
        }
    }
}
