//! Acquire by key: the same key leads to the same sandbox for every caller.
//!
//! ```text
//! acquire ─► exists, alive, held? ────────────────────────────────────────► return it
//!              │ no                                                         ▲
//!              └► wait for the key's turn ─► check again ─► restart or make ┘
//! ```
//! A sandbox that died is restarted with its files, unless its creator asked for an empty one instead; one whose files
//! are lost is replaced, and the result says so.
//!
//! A caller that finds the sandbox does not wait for other callers. Each key has its own turn, so no key ever waits for
//! another, and a caller that disconnects while waiting leaves nothing behind. If a caller disconnects while its
//! sandbox is made, the sandbox stays, and the next attempt finds it.

use std::sync::Arc;
use std::time::Duration;

use domain::{EndCause, OnDeath, Owner, Phase, SandboxId, SandboxKey};
use tokio::sync::OwnedMutexGuard;
use tokio::task::JoinHandle;

use crate::agent::client::AgentError;
use crate::core::Core;
use crate::error::error_chain;
use crate::sandboxes::driver::DriverCommand;
use crate::sandboxes::registry::SandboxHandle;
use crate::sandboxes::sandbox_keys::{KeyGuard, KeySlot};
use crate::tenancy::quota::QuotaResource;
use crate::{
    AcquiredSandbox, CreateSandboxRequest, ErrorKind, Outcome, RETRY_KEY_SPACE, RevivalKind, Sandbox,
    SandboxRevival, ServiceError,
};

/// How long an agent may take to answer before it is assumed to be alive.
const PROBE_TIMEOUT: Duration = Duration::from_secs(2);

impl Core {
    pub(crate) async fn acquire_by_key(
        self: &Arc<Self>,
        key: &SandboxKey,
        request: CreateSandboxRequest,
    ) -> Result<AcquiredSandbox, ServiceError> {
        let guard = self.lifecycle.names.guard_key(key);
        if let Some(sandbox) = self.reuse_sandbox(&guard).await? {
            return Ok(AcquiredSandbox { sandbox, fresh: false, revival: None });
        }
        let turn = Arc::clone(&guard.turn).lock_owned().await;
        if let Some(sandbox) = self.reuse_sandbox(&guard).await? {
            return Ok(AcquiredSandbox { sandbox, fresh: false, revival: None });
        }
        self.make_in_turn(key, guard, turn, request).await
    }

    /// Makes the sandbox of a key whose turn the caller has. If the caller disconnects, this is finished nevertheless.
    pub(crate) async fn make_in_turn(
        self: &Arc<Self>,
        key: &SandboxKey,
        guard: KeyGuard,
        turn: OwnedMutexGuard<()>,
        request: CreateSandboxRequest,
    ) -> Result<AcquiredSandbox, ServiceError> {
        let (_caller, create) = self.lifecycle.detached_creates.watch_create(key.owner())?;
        let (core, key) = (Arc::clone(self), key.clone());
        let work = self.tasks.spawn(async move {
            let _held = (turn, create);
            tokio::select! {
                acquired = core.revive_or_make(&key, &guard, request) => acquired,
                () = core.tasks.cancelled() => Err(ServiceError::Stopping),
            }
        });
        work.await.unwrap_or(Err(ServiceError::Stopping))
    }

    /// Restarts the dead sandbox of a key, or makes one that the key leads to from now on.
    async fn revive_or_make(
        self: &Arc<Self>,
        key: &SandboxKey,
        guard: &KeyGuard,
        mut request: CreateSandboxRequest,
    ) -> Result<AcquiredSandbox, ServiceError> {
        let former = guard.sandbox().and_then(|id| self.lifecycle.registry.find(&id));
        let mut revival = None;
        if let Some(handle) = former.filter(|handle| honours_on_death(key, handle)) {
            let how = handle.current_state().spec.on_death();
            if how == OnDeath::Restart {
                match self.restart_sandbox(&handle).await {
                    Ok(resumed) => {
                        let revival = resumed.revival;
                        return Ok(AcquiredSandbox {
                            sandbox: handle.current_state(),
                            fresh: false,
                            revival,
                        });
                    }
                    // The files still exist, so an empty sandbox would not be what the caller wants.
                    Err(error) if !error.is_beyond_restart() => return Err(error),
                    Err(error) => {
                        tracing::warn!(sandbox = %handle.id, error = %error_chain(&error), "files of the dead sandbox are lost; replacing it");
                    }
                }
            }
            let cause = if let Phase::Failed(cause) = handle.phase() { cause } else { EndCause::AgentDied };
            let how = if how == OnDeath::Replace { RevivalKind::Replaced } else { RevivalKind::FilesLost };
            revival = Some(SandboxRevival { how, cause });
            self.inherit_from_former(&handle, &mut request);
        }
        let sandbox = self.make_for_key(key, guard, request, revival).await?;
        Ok(AcquiredSandbox { sandbox, fresh: true, revival })
    }

    /// Makes the sandbox that a key leads to from now on. The caller may disconnect meanwhile: the sandbox is found
    /// again by its key, so a caller that retries impatiently gets one in the end.
    async fn make_for_key(
        self: &Arc<Self>,
        key: &SandboxKey,
        guard: &KeyGuard,
        request: CreateSandboxRequest,
        revival: Option<SandboxRevival>,
    ) -> Result<Sandbox, ServiceError> {
        // Volumes that are removed with their last sandbox must not be removed before the successor uses them.
        let _volumes = guard.sandbox().map(|former| self.hold_volumes(&former)).transpose()?;
        if revival.is_some() {
            // A request that cannot be fulfilled must not cost the settings that the successor inherits.
            self.prepare_request(key.owner(), &mut request.clone()).await?;
        }
        let retired = match self.retire_former(guard) {
            Some((handle, retired)) => {
                // The end of the former sandbox is published first, so that no reader sees two living sandboxes under
                // one key.
                tokio::time::timeout(PROBE_TIMEOUT, handle.wait_until_ending()).await.ok();
                Some(retired)
            }
            None => None,
        };
        let make = |request| self.create_successor(key.owner(), Some(key), request, revival);
        let sandbox = match (make(request.clone()).await, retired) {
            // The dead sandbox may still take up the room that its successor needs.
            (Err(error), Some(retired)) if matches!(error.kind(), ErrorKind::Exhausted { .. }) => {
                if !matches!(tokio::time::timeout(PROBE_TIMEOUT, retired).await, Ok(Ok(Outcome::Done))) {
                    return Err(error);
                }
                make(request).await?
            }
            (made, _) => made?,
        };
        guard.point_to(sandbox.id.clone());
        if self.lifecycle.registry.find(&sandbox.id).is_none() {
            // The sandbox ended before the key led to it, so the key was not cleared then.
            self.lifecycle.names.forget_sandbox(key, &sandbox.id);
        }
        Ok(sandbox)
    }

    pub(crate) fn release_key(&self, key: &SandboxKey) -> Outcome {
        let handle = self.lifecycle.names.find_sandbox(key).and_then(|id| self.lifecycle.registry.find(&id));
        let released = handle.is_some_and(|handle| handle.lease.release());
        if released { Outcome::Done } else { Outcome::Unchanged }
    }

    /// Returns the existing sandbox if it lives and is not being removed.
    async fn reuse_sandbox(&self, slot: &KeySlot) -> Result<Option<Sandbox>, ServiceError> {
        let Some(handle) = slot.sandbox().and_then(|id| self.lifecycle.registry.find(&id)) else {
            return Ok(None);
        };
        if !handle.lease.take(&handle.activity) {
            return Ok(None);
        }
        let lives = match handle.phase() {
            Phase::Running | Phase::Exited(_) => self.is_agent_alive(&handle).await,
            // A sandbox that was killed while frozen dies only when it is resumed.
            Phase::Pausing | Phase::Paused | Phase::Resuming => {
                self.resume_for_reuse(&handle).await? && self.is_agent_alive(&handle).await
            }
            Phase::Starting | Phase::Stopping | Phase::Stopped | Phase::Failed(_) => false,
        };
        Ok(lives.then(|| handle.current_state()))
    }

    /// Resumes a sandbox; `false` if it is dead. A sandbox that merely failed to resume still has all its files, so
    /// that error is returned and the sandbox is not replaced.
    async fn resume_for_reuse(&self, handle: &SandboxHandle) -> Result<bool, ServiceError> {
        let Err(error) = self.send_command(handle, DriverCommand::Resume).await else { return Ok(true) };
        let ended = matches!(handle.phase(), Phase::Stopping | Phase::Stopped | Phase::Failed(_));
        if error.is_gone() || ended || !self.is_agent_alive(handle).await {
            tracing::warn!(sandbox = %handle.id, error = %error_chain(&error), "sandbox died while it was paused; replacing it");
            return Ok(false);
        }
        Err(error)
    }

    /// Whether the agent is alive. An agent that is slow or answers nonsense counts as alive. An agent that hangs up
    /// may be dying, so it is asked again: a dead agent's socket refuses connections.
    pub(crate) async fn is_agent_alive(&self, handle: &SandboxHandle) -> bool {
        let ask = || tokio::time::timeout(PROBE_TIMEOUT, handle.agent.ping());
        let answer = match ask().await {
            Ok(Err(ServiceError::Agent {
                source: AgentError::Broken(_) | AgentError::EndedEarly, ..
            })) => ask().await,
            answer => answer,
        };
        !matches!(answer, Ok(Err(error)) if error.is_gone())
    }

    /// Has the remains of a dead sandbox removed in the background. If the removal fails, the driver retries it.
    fn retire_former(self: &Arc<Self>, slot: &KeySlot) -> Option<(Arc<SandboxHandle>, JoinHandle<Outcome>)> {
        let handle = self.lifecycle.registry.find(&slot.sandbox()?)?;
        tracing::info!(sandbox = %handle.id, phase = %handle.phase(), "removing the former sandbox of a key; the key leads to a new sandbox from now on");
        let (core, retiring) = (Arc::clone(self), Arc::clone(&handle));
        let retired = self.tasks.spawn(async move {
            let handle = retiring;
            let ended = core.send_command(&handle, |answer| DriverCommand::End(EndCause::Replaced, answer)).await;
            if let Err(error) = ended {
                tracing::debug!(sandbox = %handle.id, error = %error_chain(&error), "failed to remove the former sandbox of a key; its driver retries");
                return Outcome::Unchanged;
            }
            Outcome::Done
        });
        Some((handle, retired))
    }

    /// Evicts dead and then parked sandboxes until there is room below the soft limit or none is left. A living sandbox
    /// is never evicted because of the number of dead ones, and a dead sandbox that would be restarted with its files
    /// at the next use of its name is evicted only when there is no other room at all. `owner` needs the room: dead
    /// sandboxes of others keep their files, and so does the sandbox `except`.
    pub(crate) async fn make_room(&self, owner: &Owner, except: Option<&SandboxId>) {
        let Some(soft) = self.config().soft_sandboxes else { return };
        while self.lifecycle.registry.count() >= soft && self.evict_dead(owner, except).await {}
        while self.lifecycle.registry.count_living() >= soft && self.evict_parked(None, except).await {}
    }

    /// Evicts one sandbox of this owner so that the owner has more of the resource that a quota bounds; `false` if no
    /// sandbox would help or all are needed. Dead sandboxes have no processors and no memory to free.
    pub(crate) async fn evict_for_quota(
        &self,
        owner: &Owner,
        what: QuotaResource,
        except: Option<&SandboxId>,
    ) -> bool {
        let dead_help = dead_sandbox_occupies(what);
        (dead_help && self.evict_unrestartable(owner, except).await)
            || self.evict_parked(Some(owner), except).await
            || (dead_help && self.evict_restartable(owner, except).await)
    }

    /// Evicts one dead sandbox to make room for a new one of `owner`: the longest dead one of any owner whose files are
    /// lost, or else the longest dead one of `owner` that would not be restarted. The files of a dead sandbox are its
    /// owner's data, so another owner's need for room never removes them, nor does a sandbox that needs those of
    /// `except`.
    pub(crate) async fn evict_dead(&self, owner: &Owner, except: Option<&SandboxId>) -> bool {
        self.evict_first_of(self.dead_sandboxes(None, None, SandboxHandle::has_lost_files)).await
            || self.evict_unrestartable(owner, except).await
    }

    /// Evicts the sandbox of this owner that has been dead for the longest time and will not be
    /// restarted, so neither its key's turn nor its hold matters.
    async fn evict_unrestartable(&self, owner: &Owner, except: Option<&SandboxId>) -> bool {
        self.evict_first_of(self.dead_sandboxes(Some(owner), except, |handle| !handle.will_restart())).await
    }

    /// Evicts the sandbox of this owner that has been dead for the longest time, although it would be restarted with its
    /// files at the next use of its name.
    pub(crate) async fn evict_restartable(&self, owner: &Owner, except: Option<&SandboxId>) -> bool {
        self.evict_first_of(self.dead_sandboxes(Some(owner), except, SandboxHandle::will_restart)).await
    }

    async fn evict_first_of(&self, dead: Vec<Arc<SandboxHandle>>) -> bool {
        for handle in dead {
            // A sandbox that cannot be removed in time is removed later by its driver; this call does not wait for it.
            let ended = tokio::time::timeout(PROBE_TIMEOUT, self.end_evicted(&handle)).await;
            if ended.unwrap_or(false) || self.lifecycle.registry.find(&handle.id).is_none() {
                return true;
            }
        }
        false
    }

    /// Evicts the sandbox that has been parked for the longest time.
    pub(crate) async fn evict_parked(&self, owner: Option<&Owner>, except: Option<&SandboxId>) -> bool {
        for handle in self.parked_sandboxes(owner) {
            if except != Some(&handle.id) && self.evict_if_parked(&handle).await {
                return true;
            }
        }
        false
    }

    /// Whether a sandbox may be evicted for a new one of `owner` when the sandbox limit is reached.
    pub(crate) fn has_evictable_at_limit(&self, owner: &Owner) -> bool {
        let is_evictable = |handle: &SandboxHandle| handle.owner == *owner || handle.has_lost_files();
        !self.dead_sandboxes(None, None, is_evictable).is_empty() || !self.parked_sandboxes(None).is_empty()
    }

    /// Whether a sandbox of this owner may be evicted and would free the resource that a quota bounds.
    pub(crate) fn has_evictable_for_quota(&self, owner: &Owner, what: QuotaResource) -> bool {
        let dead = || !self.dead_sandboxes(Some(owner), None, |_| true).is_empty();
        (dead_sandbox_occupies(what) && dead()) || !self.parked_sandboxes(Some(owner)).is_empty()
    }

    /// The dead sandboxes, of this owner if one is given, that pass the filter, longest dead first.
    fn dead_sandboxes(
        &self,
        owner: Option<&Owner>,
        except: Option<&SandboxId>,
        passes: impl Fn(&SandboxHandle) -> bool,
    ) -> Vec<Arc<SandboxHandle>> {
        let mut dead = self.lifecycle.registry.all();
        dead.retain(|handle| handle.is_dead() && owner.is_none_or(|owner| *owner == handle.owner));
        dead.retain(|handle| except.is_none_or(|id| *id != handle.id) && passes(handle));
        dead.sort_by_key(|handle| handle.state.borrow().phase_since);
        dead
    }

    /// The parked sandboxes, of this owner if one is given, longest parked first.
    fn parked_sandboxes(&self, owner: Option<&Owner>) -> Vec<Arc<SandboxHandle>> {
        let now = self.clock.now().boot;
        let mut parked: Vec<_> = self
            .lifecycle
            .registry
            .all()
            .into_iter()
            .filter_map(|handle| {
                let since = handle.lease.parked_since(&handle.activity, now, self.config().park_after)?;
                let counts = handle.key.is_some() && !handle.is_dead();
                (counts && owner.is_none_or(|owner| *owner == handle.owner)).then_some((since, handle))
            })
            .collect();
        parked.sort_by_key(|(since, _)| *since);
        parked.into_iter().map(|(_, handle)| handle).collect()
    }

    /// Ends one sandbox if it is not needed. The turn of its key is held meanwhile, so a caller that asks for the key
    /// now waits and then gets a new sandbox.
    async fn evict_if_parked(&self, handle: &Arc<SandboxHandle>) -> bool {
        let Some(key) = &handle.key else { return false };
        let guard = self.lifecycle.names.guard_key(key);
        let Ok(_turn) = guard.turn.try_lock() else { return false };
        match tokio::time::timeout(PROBE_TIMEOUT, self.runs_something(handle)).await {
            Ok(false) => {}
            Ok(true) => return false,
            Err(_elapsed) => {
                // It is unknown what runs, and the agent is not asked again for a while: silent agents must not delay
                // callers that need room.
                handle.lease.take(&handle.activity);
                return false;
            }
        }
        let now = self.clock.now().boot;
        if !handle.lease.close_if_parked(&handle.activity, now, self.config().park_after) {
            return false;
        }
        self.end_evicted(handle).await
    }

    async fn end_evicted(&self, handle: &SandboxHandle) -> bool {
        let ended = self.send_command(handle, |answer| DriverCommand::End(EndCause::Evicted, answer)).await;
        ended.inspect_err(|error| tracing::warn!(error = %error_chain(error), "failed to evict sandbox; its driver retries the removal")).is_ok()
    }
}

/// Whether a key honours its sandbox's [`OnDeath`]. A retry key leads to a new sandbox instead, and so does a key whose
/// sandbox is being removed.
fn honours_on_death(key: &SandboxKey, handle: &SandboxHandle) -> bool {
    let goes = matches!(handle.phase(), Phase::Stopping | Phase::Stopped);
    key.space() != RETRY_KEY_SPACE && !goes && handle.lease.take(&handle.activity)
}

/// Whether a dead sandbox takes up some of the resource that a quota bounds.
fn dead_sandbox_occupies(what: QuotaResource) -> bool {
    matches!(what, QuotaResource::Sandboxes | QuotaResource::Disk)
}
