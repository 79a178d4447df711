//! Restarting a dead sandbox.
//!
//! The row says "failed" until the sandbox runs. A server that dies in the middle therefore leaves a dead sandbox with
//! its files, however far the restart came: the next server stops the remains and can start over. A restart that fails
//! ends in the same state.

use domain::{Cause, Files, OnDeath, Phase, Request, Verdict};

use super::{CREATE, Driver};
use crate::registry::NoRoom;
use crate::{Outcome, Resumed, Revival, Revived, ServiceError, measure};

impl Driver {
    /// Restarts a sandbox that has died, and returns how.
    pub(super) async fn restart(&mut self) -> Result<Resumed, ServiceError> {
        self.notice_death().await;
        if self.judge(Request::Restart)? == Verdict::AlreadySo {
            return Ok(Outcome::AlreadySo.into());
        }
        let Phase::Failed(cause) = self.phase() else { return Ok(Outcome::AlreadySo.into()) };
        let how = self.record.sandbox.spec.on_death();
        if self.owed.is_some() {
            // The remains of the former life are removed first.
            self.stop_remains().await?;
        }
        if how == OnDeath::Restart && self.record.sandbox.files == Files::Lost {
            return Err(self.files_lost());
        }
        let owner = self.handle.owner.clone();
        let quota = self.core.quota_left_by_disks(&owner);
        match self.core.registry.revive(&self.handle, &quota) {
            Ok(()) => {}
            Err(NoRoom::OverQuota(excess)) => return Err(ServiceError::OverQuota { owner, excess }),
            Err(NoRoom::Full) => {
                return Err(ServiceError::TooManySandboxes { limit: self.core.config().sandboxes });
            }
        }
        self.enter_because(
            Phase::Starting,
            Some(if how == OnDeath::Replace { Cause::Replaced } else { cause }),
        );
        if let Err(error) = self.live_again(how).await {
            return Err(self.fail_again(cause, error).await);
        }
        tracing::info!(sandbox = %self.handle.id, cause = cause.name(), how = how.name(), "dead sandbox restarted");
        measure::restarted(how);
        let how = match how {
            OnDeath::Restart => Revived::Restarted,
            OnDeath::Replace => Revived::Replaced,
        };
        Ok(Resumed { outcome: Outcome::Done, revival: Some(Revival { how, cause }) })
    }

    /// A caller may know of a death before the backend has reported it.
    async fn notice_death(&mut self) {
        let runs = matches!(
            self.phase(),
            Phase::Running | Phase::Exited(_) | Phase::Pausing | Phase::Paused | Phase::Resuming
        );
        if runs && !self.core.lives(&self.handle).await {
            let reported = *self.death.borrow_and_update();
            self.die_of(reported.unwrap_or(Cause::AgentDied)).await;
        }
    }

    async fn live_again(&mut self, how: OnDeath) -> Result<(), ServiceError> {
        let (core, id) = (self.core.clone(), self.handle.id.clone());
        self.handle.death.send_replace(None);
        self.death.mark_unchanged();
        self.handle.commands.forget_all();
        match how {
            OnDeath::Restart => {
                let spec = self.record.sandbox.spec.clone();
                let made = core.backend.restart(&id, &spec);
                let in_force = core.ask_backend("restart", &id, CREATE, made).await?;
                // The sandbox keeps the image it had, which may have been a stand-in for another image name.
                let former = std::mem::replace(&mut self.record.sandbox.in_force, in_force);
                self.record.sandbox.in_force.stand_in = former.stand_in;
            }
            OnDeath::Replace => {
                core.destroy(&id).await?;
                self.record.sandbox.files = Files::Lost;
                self.create_in_backend().await?;
                self.record.sandbox.files = Files::Kept;
            }
        }
        self.record.boot_id = core.boot_id.clone();
        core.history.begin_again(&id, &self.handle.owner, core.clock.now());
        self.handle.agent.ping().await?;
        self.begin_life().await
    }

    /// Returns the sandbox to its dead state and removes whatever was started of it.
    async fn fail_again(&mut self, cause: Cause, error: ServiceError) -> ServiceError {
        self.entrypoint = None;
        self.hooks.clear();
        self.enter(Phase::Failed(cause));
        // The row may say that it runs, if only the confirmation of the store was missing.
        self.core.store.update_later(&self.record).await;
        self.retry().await;
        if error.is_gone() { self.files_lost() } else { error }
    }

    fn files_lost(&self) -> ServiceError {
        let reason = match self.core.capabilities.restart {
            true => "the disk is gone",
            false => "the files were in memory and are lost",
        };
        ServiceError::FilesLost { id: self.handle.id.clone(), phase: self.phase(), reason }
    }
}
