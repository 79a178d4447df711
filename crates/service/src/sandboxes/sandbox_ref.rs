//! A sandbox that its owner may use: found once, then used any number of times.
//!
//! ```text
//! service.sandbox(owner, id) ─► SandboxRef ─┬─► pause, resume, destroy, …      this file
//!                                           ├─► files()                        files.rs
//!                                           ├─► processes() sessions() contexts() terminals()   exec/
//!                                           ├─► ports()                        ports.rs
//!                                           ├─► network()                      network.rs
//!                                           ├─► vault()                        vaults.rs
//!                                           └─► snapshots()                    snapshots.rs
//! ```
//! A `SandboxRef` may outlive its sandbox; every call then answers that there is no such sandbox.

use std::any::Any;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use domain::{Owner, Phase, SandboxId, SandboxKey};

use crate::clock;
use crate::core::Core;
use crate::exec::contexts::SandboxContexts;
use crate::exec::processes::SandboxProcesses;
use crate::exec::sessions::SandboxSessions;
use crate::exec::terminals::SandboxTerminals;
use crate::files::SandboxFiles;
use crate::network::SandboxNetwork;
use crate::ports::SandboxPorts;
use crate::sandboxes::activity::ActivityGuard;
use crate::sandboxes::driver::DriverCommand;
use crate::sandboxes::registry::SandboxHandle;
use crate::snapshots::SandboxSnapshots;
use crate::vaults::SandboxVault;
use crate::{Outcome, ResumeOutcome, Sandbox, SandboxUsage, Service, ServiceError, UsageSample};

/// A sandbox of the owner that asked for it. A clone refers to the same sandbox and copies nothing large.
#[derive(Clone)]
pub struct SandboxRef {
    pub(crate) core: Arc<Core>,
    pub(crate) handle: Arc<SandboxHandle>,
}

impl Service {
    /// Finds a sandbox of this owner. A sandbox of another owner is reported as not found.
    pub fn sandbox(&self, owner: &Owner, id: &SandboxId) -> Result<SandboxRef, ServiceError> {
        self.0.find_sandbox(owner, id).map(|handle| self.sandbox_ref(handle))
    }

    /// Finds a sandbox of one owner, or of any owner if the caller may see all.
    pub fn sandbox_of(&self, owner: Option<&Owner>, id: &SandboxId) -> Result<SandboxRef, ServiceError> {
        self.0.lookup_sandbox(owner, id).map(|handle| self.sandbox_ref(handle))
    }

    pub(crate) fn sandbox_ref(&self, handle: Arc<SandboxHandle>) -> SandboxRef {
        SandboxRef { core: Arc::clone(&self.0), handle }
    }
}

impl fmt::Debug for SandboxRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("SandboxRef").field(self.id()).finish()
    }
}

impl SandboxRef {
    pub fn id(&self) -> &SandboxId {
        &self.handle.id
    }

    pub fn owner(&self) -> &Owner {
        &self.handle.owner
    }

    /// The key that leads to this sandbox.
    pub fn key(&self) -> Option<&SandboxKey> {
        self.handle.key.as_ref()
    }

    pub fn created(&self) -> SystemTime {
        self.handle.created
    }

    /// A copy of the whole state.
    pub fn current_state(&self) -> Sandbox {
        self.handle.current_state()
    }

    /// Reads a part of the state without copying the rest. `read` must not call back into the service.
    pub fn read_state<T>(&self, read: impl FnOnce(&Sandbox) -> T) -> T {
        read(&self.handle.state.borrow())
    }

    /// The notes that a front stored with the sandbox, in its own form. Notes never change, so they are parsed only at
    /// the first call.
    pub fn parsed_notes<T: Any + Send + Sync>(&self, parse: fn(&[u8]) -> T) -> Arc<T> {
        let parse_now = || Arc::new(parse(&self.handle.state.borrow().notes));
        let parsed = self.handle.parsed_notes.get_or_init(|| parse_now());
        // Another front may have parsed them first, in another form.
        Arc::clone(parsed).downcast().unwrap_or_else(|_other| parse_now())
    }

    pub fn files(&self) -> SandboxFiles<'_> {
        SandboxFiles(self)
    }

    pub fn processes(&self) -> SandboxProcesses<'_> {
        SandboxProcesses(self)
    }

    pub fn sessions(&self) -> SandboxSessions<'_> {
        SandboxSessions(self)
    }

    pub fn contexts(&self) -> SandboxContexts<'_> {
        SandboxContexts(self)
    }

    pub fn terminals(&self) -> SandboxTerminals<'_> {
        SandboxTerminals(self)
    }

    pub fn ports(&self) -> SandboxPorts<'_> {
        SandboxPorts(self)
    }

    pub fn network(&self) -> SandboxNetwork<'_> {
        SandboxNetwork(self)
    }

    pub fn vault(&self) -> SandboxVault<'_> {
        SandboxVault(self)
    }

    pub fn snapshots(&self) -> SandboxSnapshots<'_> {
        SandboxSnapshots(self)
    }

    /// Refuses a sandbox that accepts no requests in its phase. This call does not count as a use.
    pub fn check_usable(&self) -> Result<(), ServiceError> {
        let state = self.handle.state.borrow();
        match state.phase {
            Phase::Stopped => Err(ServiceError::NoSandbox(self.id().clone())),
            _ => state.check_usable(),
        }
    }

    /// Whether a client has begun to remove the sandbox, whatever its phase is.
    pub fn is_being_removed(&self) -> bool {
        self.handle.lease.is_closed_for_removal()
    }

    /// If an agent failed because its sandbox ended or was paused meanwhile, that is the error that its caller can act on.
    pub(crate) fn explain_failure(&self, error: ServiceError) -> ServiceError {
        match error {
            ServiceError::Agent { .. } => self.check_usable().err().unwrap_or(error),
            other => other,
        }
    }

    /// Returns the sandbox if its phase allows it to be used now. This call does not count as a use.
    pub(crate) fn usable_now(&self) -> Result<&SandboxHandle, ServiceError> {
        self.check_usable().map(|()| &*self.handle)
    }

    /// Like [`SandboxRef::usable_now`], and the sandbox counts as in use until the [`ActivityGuard`] is dropped.
    pub(crate) fn begin_use(&self) -> Result<(&SandboxHandle, ActivityGuard), ServiceError> {
        // The use begins before the phase is read, so a sandbox about to be ended for idleness either sees this use, or
        // is seen here in the phase "stopping".
        let activity = self.handle.activity.start_use();
        Ok((self.usable_now()?, activity))
    }

    pub(crate) fn record_failure(&self, operation: &'static str) -> impl Fn(&ServiceError) {
        self.core.record_failure(operation, self.owner(), Some(self.id()))
    }

    /// Sets the labels that have a value and removes those that have none.
    pub async fn patch_labels(
        &self,
        patch: BTreeMap<String, Option<String>>,
    ) -> Result<Sandbox, ServiceError> {
        self.core.send_command(&self.handle, |answer| DriverCommand::PatchLabels(patch, answer)).await
    }

    /// Moves the expiry to an earlier or later time. Renewing a sandbox that never expires is a conflict.
    pub async fn renew_expiry(&self, expires: SystemTime) -> Result<Sandbox, ServiceError> {
        let expires = clock::truncate_to_micros(expires);
        self.core.send_command(&self.handle, |answer| DriverCommand::Renew(expires, answer)).await
    }

    /// Moves the expiry to `timeout` from now, or to the longest time that this server allows, because the sandbox was
    /// accessed. Nothing changes if it never expires, or if that would gain no more than `interval`. A failure is only
    /// logged, because it must not fail the access.
    pub async fn renew_on_access(&self, timeout: Duration, interval: Duration) {
        let Some(expires) = self.read_state(|sandbox| sandbox.expires) else { return };
        let timeout = self.core.config().max_timeout.map_or(timeout, |longest| timeout.min(longest));
        let wanted = SystemTime::now() + timeout;
        if expires + interval < wanted
            && let Err(error) = self.renew_expiry(wanted).await
        {
            tracing::warn!(sandbox = %self.id(), %error, "failed to renew sandbox on access; the next access retries");
        }
    }

    /// Returns when the sandbox is paused.
    pub async fn pause(&self) -> Result<Outcome, ServiceError> {
        let paused = self.core.send_command(&self.handle, DriverCommand::Pause).await;
        paused.inspect_err(self.record_failure("pause"))
    }

    /// Returns when the sandbox runs. A sandbox that has died is restarted, and the result says so.
    pub async fn resume(&self) -> Result<ResumeOutcome, ServiceError> {
        let resumed = match self.core.send_command(&self.handle, DriverCommand::Resume).await {
            Err(_) if self.handle.is_dead() => self.core.restart_sandbox(&self.handle).await,
            resumed => resumed.map(ResumeOutcome::from),
        };
        resumed.inspect_err(self.record_failure("resume"))
    }

    /// Restarts a sandbox that has died. Returns when it runs.
    pub async fn restart(&self) -> Result<ResumeOutcome, ServiceError> {
        self.core.restart_sandbox(&self.handle).await.inspect_err(self.record_failure("restart"))
    }

    /// Returns when the sandbox is removed.
    pub async fn destroy(&self) -> Result<Outcome, ServiceError> {
        // From here on its key leads no caller to it, even if its driver is busy, and no request replaces it.
        self.handle.lease.close_for_removal();
        if self.handle.phase() == Phase::Starting {
            // Its driver may be busy with the hook before the entrypoint and not read its mailbox.
            self.handle.abandoned.cancel();
        }
        match self.core.send_command(&self.handle, DriverCommand::Destroy).await {
            // The sandbox ended while the command was queued: another request removed it, or it expired.
            Err(ServiceError::NoSandbox(_)) => Ok(Outcome::Unchanged),
            outcome => outcome.inspect_err(self.record_failure("destroy")),
        }
    }

    /// What the sandbox uses now.
    pub async fn current_usage(&self) -> Result<SandboxUsage, ServiceError> {
        match self.handle.phase() {
            Phase::Stopped => Err(ServiceError::NoSandbox(self.id().clone())),
            _ => self.core.host.usage_of(self.id()).await,
        }
    }

    /// The usage in the last hour, oldest sample first.
    pub fn usage_samples(&self) -> Vec<UsageSample> {
        self.core.telemetry.history.samples(self.id())
    }
}
