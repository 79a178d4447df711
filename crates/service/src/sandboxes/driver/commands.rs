//! How a driver carries out its commands.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use domain::{EndCause, Labels, LifecycleRequest, MountSpec, Phase, SandboxHooks, ShutdownHook, Verdict};

use super::Driver;
use crate::sandboxes::reaper::DueReason;
use crate::{ErrorKind, Outcome, Sandbox, ServiceError};

/// The most bytes that the labels of one sandbox may add up to. All of them are kept in memory, written at every change
/// and returned in every list.
const MAX_LABEL_BYTES: usize = 256 << 10;

/// How long a backend may take to freeze or thaw a sandbox.
const FREEZE_TIMEOUT: Duration = Duration::from_secs(30);

/// How long a backend may take to add mounts.
const ATTACH_TIMEOUT: Duration = Duration::from_secs(30);

impl Driver {
    pub(super) async fn pause(&mut self) -> Result<Outcome, ServiceError> {
        if self.check_request(LifecycleRequest::Pause)? == Verdict::Unchanged {
            return Ok(Outcome::Unchanged);
        }
        self.enter_phase(Phase::Pausing);
        let (core, id) = (&self.core, &self.handle.id);
        if let Err(error) =
            core.host.ask_backend("pause", id, FREEZE_TIMEOUT, core.host.backend.pause(id)).await
        {
            if error.kind() == ErrorKind::Unsupported {
                // The backend refused before it did anything, and could not thaw either.
                self.enter_phase(Phase::Running);
                return Err(error);
            }
            // The sandbox may be partly frozen, so it is thawed. If that fails too, its state is unknown; it is called
            // paused, because a paused sandbox can be resumed while one called running would hang.
            let thawed =
                core.host.ask_backend("resume", id, FREEZE_TIMEOUT, core.host.backend.resume(id)).await;
            self.enter_phase(if thawed.is_ok() { Phase::Running } else { Phase::Paused });
            return Err(error);
        }
        self.enter_phase(Phase::Paused);
        self.core.store.update_sandbox_later(&self.record).await;
        Ok(Outcome::Done)
    }

    pub(super) async fn resume(&mut self) -> Result<Outcome, ServiceError> {
        if self.check_request(LifecycleRequest::Resume)? == Verdict::Unchanged {
            return Ok(Outcome::Unchanged);
        }
        if matches!(self.phase(), Phase::Failed(_)) {
            // The sandbox died while the command was queued. This function does not decide whether it restarts.
            let (id, phase) = (self.handle.id.clone(), self.phase());
            return Err(ServiceError::Denied { id, request: LifecycleRequest::Resume, phase });
        }
        self.enter_phase(Phase::Resuming);
        let (core, id) = (&self.core, &self.handle.id);
        if let Err(error) =
            core.host.ask_backend("resume", id, FREEZE_TIMEOUT, core.host.backend.resume(id)).await
        {
            self.enter_phase(Phase::Paused);
            return Err(error);
        }
        self.handle.activity.touch();
        self.enter_phase(Phase::Running);
        self.core.store.update_sandbox_later(&self.record).await;
        Ok(Outcome::Done)
    }

    /// Adds mounts to the sandbox and to its record.
    pub(super) async fn attach_mounts(&mut self, mounts: Vec<MountSpec>) -> Result<Sandbox, ServiceError> {
        self.check_request(LifecycleRequest::Use)?;
        let (core, id) = (&self.core, &self.handle.id);
        let attach = async { core.host.backend.required_reconfigure()?.attach_mounts(id, &mounts).await };
        let measures = core.host.ask_backend("attach to", id, ATTACH_TIMEOUT, attach).await?;
        self.record.sandbox.in_force.replace_measures(measures);
        self.record.sandbox.spec.mounts.extend(mounts);
        self.core.store.update_sandbox_later(&self.record).await;
        Ok(self.publish_state())
    }

    pub(super) async fn destroy(&mut self) -> Result<Outcome, ServiceError> {
        // A sandbox that is already stopping could not be removed so far; this is another attempt.
        let verdict = self.check_request(LifecycleRequest::Destroy)?;
        self.end_sandbox(EndCause::Destroyed).await?;
        Ok(if verdict == Verdict::Unchanged { Outcome::Unchanged } else { Outcome::Done })
    }

    pub(super) async fn patch_labels(
        &mut self,
        patch: BTreeMap<String, Option<String>>,
    ) -> Result<Sandbox, ServiceError> {
        let former = self.record.sandbox.labels.clone();
        let labels = &mut self.record.sandbox.labels;
        for (name, value) in patch {
            match value {
                Some(value) => labels.insert(name, value),
                None => labels.remove(&name),
            };
        }
        let size = |labels: &Labels| labels.iter().map(|(name, value)| name.len() + value.len()).sum();
        let (before, after): (usize, usize) = (size(&former), size(labels));
        if after > MAX_LABEL_BYTES && after > before {
            self.record.sandbox.labels = former;
            return Err(ServiceError::Invalid(format!("the labels exceed {MAX_LABEL_BYTES} bytes")));
        }
        if let Err(source) = self.core.store.update_sandbox(&self.record).await {
            self.record.sandbox.labels = former;
            return Err(ServiceError::Store { action: "store the labels", source });
        }
        Ok(self.publish_state())
    }

    pub(super) async fn put_shutdown_hook(&mut self, hook: ShutdownHook) -> Result<(), ServiceError> {
        self.check_request(LifecycleRequest::Use)?;
        let former = self.record.sandbox.spec.hooks.clone();
        let added = self.record.sandbox.spec.hooks.put_shutdown_hook(hook);
        added.map_err(|error| ServiceError::Invalid(error.to_string()))?;
        self.store_hooks(former).await
    }

    /// Returns whether there was a hook with this name.
    pub(super) async fn remove_shutdown_hook(&mut self, name: &str) -> Result<bool, ServiceError> {
        self.check_request(LifecycleRequest::Use)?;
        let former = self.record.sandbox.spec.hooks.clone();
        if !self.record.sandbox.spec.hooks.remove_shutdown_hook(name) {
            return Ok(false);
        }
        self.store_hooks(former).await.map(|()| true)
    }

    /// Stores changed hooks; a client that hears of them finds them after a restart.
    async fn store_hooks(&mut self, former: SandboxHooks) -> Result<(), ServiceError> {
        if let Err(source) = self.core.store.update_sandbox(&self.record).await {
            self.record.sandbox.spec.hooks = former;
            return Err(ServiceError::Store { action: "store the hooks", source });
        }
        self.publish_state();
        Ok(())
    }

    pub(super) async fn renew_expiry(&mut self, expires: SystemTime) -> Result<Sandbox, ServiceError> {
        self.check_request(LifecycleRequest::Renew)?;
        let (id, phase) = (self.handle.id.clone(), self.phase());
        let Some(former) = self.record.sandbox.expires else {
            return Err(ServiceError::NeverExpires { id, phase });
        };
        let now = self.core.clock.now();
        if expires <= now.wall {
            return Err(ServiceError::Invalid("the new expiry is not in the future".to_owned()));
        }
        // An earlier expiry than before is always accepted, as the maximum may have been lowered since.
        let timeout = expires.duration_since(now.wall).unwrap_or_default();
        if expires > former {
            self.core.check_timeout(timeout)?;
        }
        let former_boot = self.record.expires_boot;
        self.record.sandbox.expires = Some(expires);
        self.record.expires_boot = Some(now.at_wall(expires).boot);
        if let Err(source) = self.core.store.update_sandbox(&self.record).await {
            self.record.sandbox.expires = Some(former);
            self.record.expires_boot = former_boot;
            return Err(ServiceError::Store { action: "store the expiry", source });
        }
        self.schedule_expiry();
        Ok(self.publish_state())
    }

    pub(super) async fn end_if_expired(&mut self) {
        let now = self.core.clock.now().boot;
        if self.record.expires_boot.is_some_and(|expires| expires <= now) {
            self.end_or_retry_later(EndCause::Expired).await;
        }
    }

    /// Ends the sandbox if it was unused for long enough and nothing runs in it. The entrypoint does not count: it is
    /// the sandbox itself, not a use of it.
    pub(super) async fn end_if_idle(&mut self) {
        let Some(limit) = self.record.idle_timeout else { return };
        let now = self.core.clock.now().boot;
        let due = match (self.phase(), self.handle.activity.idle_since()) {
            (Phase::Running | Phase::Exited(_) | Phase::Failed(_), Some(since)) => {
                since.saturating_add(limit)
            }
            // A paused sandbox cannot be used, and one in use is checked again later.
            _ => now.saturating_add(limit),
        };
        let running = || self.core.runs_something(&self.handle);
        // The sandbox may have been used or acquired while the agent was asked what runs.
        if due <= now
            && !running().await
            && self.handle.lease.close_if_idle(&self.handle.activity, now, limit)
        {
            return self.end_or_retry_later(EndCause::Idle).await;
        }
        let again = if due > now { due } else { now.saturating_add(limit) };
        self.core.lifecycle.schedule.set_due(&self.handle.id, DueReason::Idle, again);
    }

    pub(super) async fn refresh_wall_expiry(&mut self) {
        let now = self.core.clock.now();
        let Some(expires) = self.record.expires_boot else { return };
        let left = expires.saturating_sub(now.boot);
        self.record.sandbox.expires = now.wall.checked_add(left);
        self.publish_state();
        self.core.store.update_sandbox_later(&self.record).await;
    }
}
