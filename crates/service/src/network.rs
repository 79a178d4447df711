//! What a sandbox may reach: its policy, the log of what it tried, and the bounds that the operator sets.
//!
//! The driver of a sandbox makes all changes of its policy, one after the other. The new policy is stored before the
//! backend gets it, and the caller has an answer when it is in force.

use std::sync::Arc;
use std::time::Duration;

use backend::{BackendError, EnforcedMeasures, LogWait, NetworkLogPage};
use domain::{NetworkAccess, NetworkPolicy, Phase, PolicyEdit, SandboxId, SandboxSpec};

use crate::core::Core;
use crate::sandboxes::driver::DriverCommand;
use crate::{Outcome, Sandbox, SandboxRef, ServiceError};

/// How long a backend may take to apply a policy.
const POLICY_TIMEOUT: Duration = Duration::from_secs(20);
/// How long a backend may take to connect a sandbox to a network.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);
/// How long a backend may take to return a part of a log. It may wait for a record for a part of that time.
const LOG_TIMEOUT: Duration = Duration::from_secs(90);
/// The most records that are read at once.
const MAX_LOG_RECORDS: u32 = 1000;

/// The network of one sandbox.
#[derive(Clone, Copy)]
pub struct SandboxNetwork<'a>(pub(crate) &'a SandboxRef);

/// The result of a change to a policy.
#[derive(Clone, Debug)]
pub struct PolicyChange {
    /// The policy in force now.
    pub policy: Arc<NetworkPolicy>,
    pub outcome: Outcome,
}

impl Sandbox {
    /// Whether the network is a filtered one.
    pub fn is_filtered(&self) -> bool {
        self.spec.network == NetworkAccess::Filtered
    }

    /// The policy that describes what the sandbox may reach. Without a filter it is all or nothing.
    pub fn network_policy(&self) -> Arc<NetworkPolicy> {
        // The spec alone does not say whether there is a network: it may leave that open.
        let reaches_all = match self.in_force.network() {
            Some(state) => state.is_on(),
            None => self.spec.network == NetworkAccess::On,
        };
        match (self.is_filtered(), reaches_all) {
            (true, _) => self.spec.policy_or_deny_all(),
            (false, true) => Arc::new(NetworkPolicy::allow_all()),
            (false, false) => Arc::new(NetworkPolicy::deny_all()),
        }
    }
}

impl SandboxNetwork<'_> {
    /// The policy in force.
    pub fn policy(self) -> Arc<NetworkPolicy> {
        self.0.read_state(Sandbox::network_policy)
    }

    /// Changes the policy. A sandbox without a filter gets one, unless the change leaves what it may reach as it is. It
    /// never loses the filter again. Returns when the change is in force, also for open connections.
    pub async fn edit_policy(self, edit: PolicyEdit) -> Result<PolicyChange, ServiceError> {
        let SandboxRef { core, handle } = self.0;
        let edited = core.send_command(handle, |answer| DriverCommand::EditPolicy(edit, answer)).await;
        edited.inspect_err(self.0.record_failure("set policy"))
    }

    /// Returns at most `limit` records of connections with a number above `after`, without waiting for any.
    pub async fn read_log(self, after: u64, limit: u32) -> Result<NetworkLogPage, ServiceError> {
        self.check_logged()?;
        let SandboxRef { core, handle } = self.0;
        core.read_network_log(&handle.id, after, limit.min(MAX_LOG_RECORDS), LogWait::No).await
    }

    /// Reads the records with a number above `after`, those to come included.
    pub fn follow_log(self, after: u64) -> Result<NetworkLogReader, ServiceError> {
        self.check_logged()?;
        Ok(NetworkLogReader { sandbox: self.0.clone(), after })
    }

    fn check_logged(self) -> Result<(), ServiceError> {
        match self.0.read_state(|sandbox| sandbox.phase) {
            Phase::Stopped => Err(ServiceError::NoSandbox(self.0.id().clone())),
            _ => self.0.core.check_filter(),
        }
    }
}

/// A position in the log of a sandbox.
pub struct NetworkLogReader {
    sandbox: SandboxRef,
    after: u64,
}

impl NetworkLogReader {
    /// Waits for records, for a limited time; a page without records says only that time has passed. `None` when the
    /// sandbox has ended or the server stops. Dropping the future loses no record.
    pub async fn next_page(&mut self) -> Option<Result<NetworkLogPage, ServiceError>> {
        let SandboxRef { core, handle } = &self.sandbox;
        let mut state = handle.state.clone();
        let ended = state.wait_for(|sandbox| matches!(sandbox.phase, Phase::Stopped | Phase::Failed(_)));
        let page = tokio::select! {
            biased;
            page = core.read_network_log(&handle.id, self.after, MAX_LOG_RECORDS, LogWait::ForRecord) => page,
            _ = ended => return None,
            () = core.tasks.cancelled() => return None,
        };
        if let Ok(NetworkLogPage { records, .. }) = &page
            && let Some(last) = records.last()
        {
            self.after = last.number;
        }
        Some(page)
    }
}

impl Core {
    /// Refuses a network that no request may have on this server.
    pub(crate) fn check_network(&self, spec: &SandboxSpec) -> Result<(), ServiceError> {
        let most = self.config().most_network;
        if !spec.network.is_within(most) {
            return Err(ServiceError::NetworkTooWide { wanted: spec.network, most });
        }
        if spec.network == NetworkAccess::Filtered { self.check_filter() } else { Ok(()) }
    }

    /// Decides what a spec leaves open: `auto` is no network where the operator does not allow an open one, and a filtered
    /// network without a policy gets the operator's.
    pub(crate) fn complete_network(&self, spec: &mut SandboxSpec) {
        let config = self.config();
        if spec.network == NetworkAccess::Auto && !NetworkAccess::On.is_within(config.most_network) {
            spec.network = NetworkAccess::Off;
        }
        spec.policy = match spec.network {
            NetworkAccess::Filtered => spec.policy.take().or_else(|| config.default_policy.clone()),
            NetworkAccess::Off | NetworkAccess::On | NetworkAccess::Auto => None,
        };
    }

    pub(crate) fn check_filter(&self) -> Result<(), ServiceError> {
        if self.host.capabilities.filtered { Ok(()) } else { Err(ServiceError::NoNetworkFilter) }
    }

    /// Returns when the policy is in force.
    pub(crate) async fn set_network_policy(
        &self,
        id: &SandboxId,
        policy: &Arc<NetworkPolicy>,
    ) -> Result<(), ServiceError> {
        let set = async { self.host.backend.required_network_filter()?.set_policy(id, policy).await };
        self.host.ask_backend("set the network policy of", id, POLICY_TIMEOUT, set).await
    }

    /// Gives a sandbox a network that it does not have, or a filter.
    pub(crate) async fn connect_network(
        &self,
        id: &SandboxId,
        network: NetworkAccess,
    ) -> Result<EnforcedMeasures, ServiceError> {
        let connect = async { self.host.backend.required_reconfigure()?.connect_network(id, network).await };
        self.host.ask_backend("connect", id, CONNECT_TIMEOUT, connect).await
    }

    async fn read_network_log(
        &self,
        id: &SandboxId,
        after: u64,
        limit: u32,
        wait: LogWait,
    ) -> Result<NetworkLogPage, ServiceError> {
        let read =
            async { self.host.backend.required_network_filter()?.read_log(id, after, limit, wait).await };
        self.host.ask_backend("read the network log of", id, LOG_TIMEOUT, read).await
    }

    /// Sets the policy of a sandbox that a former server made.
    pub(crate) fn restore_network_policy(
        &self,
        id: &SandboxId,
        policy: &Arc<NetworkPolicy>,
    ) -> Result<(), BackendError> {
        self.host.backend.required_network_filter()?.restore_policy(id, policy);
        Ok(())
    }
}
