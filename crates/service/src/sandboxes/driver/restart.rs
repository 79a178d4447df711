//! Restarting a dead sandbox.
//!
//! The row says "failed" until the sandbox runs. A server that dies in the middle therefore leaves a dead sandbox with
//! its files, however far the restart came: the next server stops the remains and can start over. A restart that fails
//! ends in the same state.

use domain::{EndCause, FilesState, LifecycleRequest, OnDeath, Phase, SandboxSpec, Verdict};

use super::{CREATE_TIMEOUT, Driver};
use crate::sandboxes::registry::NoRoom;
use crate::telemetry::service_metrics;
use crate::{Outcome, ResumeOutcome, RevivalKind, Sandbox, SandboxRevival, ServiceError};

impl Driver {
    /// Restarts a sandbox that has died, and returns how.
    pub(super) async fn restart(&mut self) -> Result<ResumeOutcome, ServiceError> {
        self.detect_death().await;
        if self.check_request(LifecycleRequest::Restart)? == Verdict::Unchanged {
            return Ok(Outcome::Unchanged.into());
        }
        let Phase::Failed(cause) = self.phase() else { return Ok(Outcome::Unchanged.into()) };
        let how = self.record.sandbox.spec.on_death();
        if self.pending_cleanup.is_some() {
            // The remains of the former life are removed first.
            self.stop_remains().await?;
        }
        if how == OnDeath::Restart && self.record.sandbox.files == FilesState::Lost {
            return Err(self.files_lost_error());
        }
        let owner = self.handle.owner.clone();
        let quota = self.core.quota_left_by_disks(&owner);
        match self.core.lifecycle.registry.count_restarted(&self.handle, &quota) {
            Ok(()) => {}
            Err(NoRoom::OverQuota(excess)) => return Err(ServiceError::OverQuota { owner, excess }),
            Err(NoRoom::Full) => {
                return Err(ServiceError::TooManySandboxes { limit: self.core.config().sandboxes });
            }
        }
        self.enter_phase_because(
            Phase::Starting,
            Some(if how == OnDeath::Replace { EndCause::Replaced } else { cause }),
        );
        if let Err(error) = self.start_again(how).await {
            return Err(self.return_to_failed(cause, error).await);
        }
        tracing::info!(sandbox = %self.handle.id, cause = cause.name(), how = how.name(), "dead sandbox restarted");
        service_metrics::count_restart(how);
        let how = match how {
            OnDeath::Restart => RevivalKind::Restarted,
            OnDeath::Replace => RevivalKind::Replaced,
        };
        Ok(ResumeOutcome { outcome: Outcome::Done, revival: Some(SandboxRevival { how, cause }) })
    }

    /// A caller may know of a death before the backend has reported it.
    async fn detect_death(&mut self) {
        let runs = matches!(
            self.phase(),
            Phase::Running | Phase::Exited(_) | Phase::Pausing | Phase::Paused | Phase::Resuming
        );
        if runs && !self.core.is_agent_alive(&self.handle).await {
            let reported = *self.death.borrow_and_update();
            self.record_death(reported.unwrap_or(EndCause::AgentDied)).await;
        }
    }

    async fn start_again(&mut self, how: OnDeath) -> Result<(), ServiceError> {
        let (core, id) = (self.core.clone(), self.handle.id.clone());
        self.handle.death.send_replace(None);
        self.death.mark_unchanged();
        self.handle.commands.free_all();
        match how {
            OnDeath::Restart => {
                let Sandbox { spec, in_force, .. } = &self.record.sandbox;
                let plan = core.plan_sandbox(SandboxSpec { image: in_force.image.clone(), ..spec.clone() });
                let made = core.host.backend.restart(&id, &plan);
                let in_force = core.host.ask_backend("restart", &id, CREATE_TIMEOUT, made).await?;
                // The sandbox keeps the image it had, which may have been a stand-in for another image name.
                let former = std::mem::replace(&mut self.record.sandbox.in_force, in_force);
                self.record.sandbox.in_force.stand_in = former.stand_in;
            }
            OnDeath::Replace => {
                core.destroy_in_backend(&id).await?;
                self.record.sandbox.files = FilesState::Lost;
                self.create_in_backend().await?;
                self.record.sandbox.files = FilesState::Kept;
            }
        }
        self.record.boot_id = core.host.boot_id.clone();
        core.telemetry.history.restart_metering(&id, &self.handle.owner, core.clock.now());
        self.handle.agent.ping().await?;
        self.start_entrypoint().await
    }

    /// Returns the sandbox to its dead state and removes whatever was started of it.
    async fn return_to_failed(&mut self, cause: EndCause, error: ServiceError) -> ServiceError {
        self.entrypoint = None;
        self.hooks.clear();
        self.enter_phase(Phase::Failed(cause));
        // The row may say that it runs, if only the confirmation of the store was missing.
        self.core.store.update_sandbox_later(&self.record).await;
        self.retry_cleanup().await;
        if error.is_gone() { self.files_lost_error() } else { error }
    }

    fn files_lost_error(&self) -> ServiceError {
        let reason = match self.core.host.capabilities.restart {
            true => "the disk is gone",
            false => "the files were in memory and are lost",
        };
        ServiceError::FilesLost { id: self.handle.id.clone(), phase: self.phase(), reason }
    }
}
