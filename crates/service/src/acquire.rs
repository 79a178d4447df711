//! Acquire by key: the same key, the same sandbox, for everybody who asks.
//!
//! ```text
//! acquire ─► there, alive, taken? ──────────────────────────────────────► it
//!              │ no                                                        ▲
//!              └► wait for the key's turn ─► look again ─► restart or make ┘
//! ```
//! A sandbox that died is started again with its files, unless its creator wanted an empty one in
//! its place; one whose files are lost is replaced, and the answer says so.
//!
//! Whoever finds the sandbox waits for nobody. A turn is one key's alone, so no key ever waits
//! for another, and a caller that goes away while waiting leaves nothing behind. One that goes away
//! while its sandbox is made leaves that: its next attempt finds it.

use std::sync::Arc;
use std::time::Duration;

use domain::{Cause, Key, OnDeath, Owner, Phase, SandboxId};
use tokio::task::JoinHandle;

use crate::agent_client::AgentError;
use crate::core::Core;
use crate::driver::Command;
use crate::error::chain;
use crate::names::{Place, Slot};
use crate::registry::Handle;
use crate::{Acquired, Create, ErrorKind, Outcome, RETRIES, Revival, Revived, Sandbox, ServiceError};

/// How long an agent may take to show that it lives, before it is believed to.
const PROBE: Duration = Duration::from_secs(2);

impl Core {
    pub(crate) async fn acquire(self: &Arc<Self>, key: &Key, wish: Create) -> Result<Acquired, ServiceError> {
        let place = self.names.place(key);
        if let Some(sandbox) = self.reuse(&place).await? {
            return Ok(Acquired { sandbox, fresh: false, revival: None });
        }
        let turn = Arc::clone(&place.turn).lock_owned().await;
        if let Some(sandbox) = self.reuse(&place).await? {
            return Ok(Acquired { sandbox, fresh: false, revival: None });
        }
        let (core, key) = (Arc::clone(self), key.clone());
        let work = self.tasks.spawn(async move {
            let _turn = turn;
            tokio::select! {
                acquired = core.revive_or_make(&key, &place, wish) => acquired,
                () = core.stop.cancelled() => Err(ServiceError::Stopping),
            }
        });
        work.await.unwrap_or(Err(ServiceError::Stopping))
    }

    /// Starts the dead sandbox of a key again, or makes one that the key leads to from now on.
    async fn revive_or_make(
        self: &Arc<Self>,
        key: &Key,
        place: &Place,
        mut wish: Create,
    ) -> Result<Acquired, ServiceError> {
        let former = place.sandbox().and_then(|id| self.registry.find(&id));
        let mut revival = None;
        if let Some(handle) = former.filter(|handle| follows(key, handle)) {
            let how = handle.current().spec.on_death();
            if how == OnDeath::Restart {
                match self.restart(&handle).await {
                    Ok(resumed) => {
                        let revival = resumed.revival;
                        return Ok(Acquired { sandbox: handle.current(), fresh: false, revival });
                    }
                    // Its files are kept, so an empty one is not what is wanted.
                    Err(error) if !error.lost_all() => return Err(error),
                    Err(error) => {
                        tracing::warn!(sandbox = %handle.id, error = %chain(&error), "it is replaced");
                    }
                }
            }
            let cause = if let Phase::Failed(cause) = handle.phase() { cause } else { Cause::AgentDied };
            let how = if how == OnDeath::Replace { Revived::Replaced } else { Revived::FilesLost };
            revival = Some(Revival { how, cause });
            self.inherit_from_former(&handle, &mut wish);
        }
        let sandbox = self.make_for(key, place, wish, revival).await?;
        Ok(Acquired { sandbox, fresh: true, revival })
    }

    /// Makes the sandbox that a key leads to from now on. Whoever asked may go away meanwhile: with
    /// the key the sandbox is found again, and one who asks impatiently, over and over, gets one.
    async fn make_for(
        self: &Arc<Self>,
        key: &Key,
        place: &Place,
        wish: Create,
        revival: Option<Revival>,
    ) -> Result<Sandbox, ServiceError> {
        // What goes with its last sandbox must not go before the successor uses it.
        let _volumes = place.sandbox().map(|former| self.hold_volumes(&former)).transpose()?;
        if revival.is_some() {
            // A request that cannot be fulfilled must not cost the settings that its successor inherits.
            self.prepare(key.owner(), &mut wish.clone()).await?;
        }
        let retired = match self.retire(place) {
            Some((handle, retired)) => {
                // Nobody is to see two that live under one key, so its end is told first.
                tokio::time::timeout(PROBE, handle.ending()).await.ok();
                Some(retired)
            }
            None => None,
        };
        let make = |wish| self.create_successor(key.owner(), Some(key), wish, revival);
        let sandbox = match (make(wish.clone()).await, retired) {
            // The dead one may still take up the room that its successor needs.
            (Err(error), Some(retired)) if matches!(error.kind(), ErrorKind::Exhausted { .. }) => {
                if !matches!(tokio::time::timeout(PROBE, retired).await, Ok(Ok(Outcome::Done))) {
                    return Err(error);
                }
                make(wish).await?
            }
            (made, _) => made?,
        };
        place.lead_to(sandbox.id.clone());
        if self.registry.find(&sandbox.id).is_none() {
            // It has ended already, before there was anything to forget.
            self.names.forget(key, &sandbox.id);
        }
        Ok(sandbox)
    }

    pub(crate) fn release(&self, key: &Key) -> Outcome {
        let handle = self.names.find(key).and_then(|id| self.registry.find(&id));
        let released = handle.is_some_and(|handle| handle.hold.release());
        if released { Outcome::Done } else { Outcome::AlreadySo }
    }

    /// The sandbox that is there, if it lives and is not being taken away.
    async fn reuse(&self, slot: &Slot) -> Result<Option<Sandbox>, ServiceError> {
        let Some(handle) = slot.sandbox().and_then(|id| self.registry.find(&id)) else { return Ok(None) };
        if !handle.hold.take(&handle.activity) {
            return Ok(None);
        }
        let lives = match handle.phase() {
            Phase::Running | Phase::Exited(_) => self.lives(&handle).await,
            // One that was killed while it stood still dies only now.
            Phase::Pausing | Phase::Paused | Phase::Resuming => {
                self.wake(&handle).await? && self.lives(&handle).await
            }
            Phase::Starting | Phase::Stopping | Phase::Stopped | Phase::Failed(_) => false,
        };
        Ok(lives.then(|| handle.current()))
    }

    /// Resumes a sandbox; `false` if it lives no more. One that only could not be resumed now has
    /// all its files, so it is no reason for another.
    async fn wake(&self, handle: &Handle) -> Result<bool, ServiceError> {
        let Err(error) = self.order(handle, Command::Resume).await else { return Ok(true) };
        let ended = matches!(handle.phase(), Phase::Stopping | Phase::Stopped | Phase::Failed(_));
        if error.is_gone() || ended || !self.lives(handle).await {
            tracing::warn!(sandbox = %handle.id, error = %chain(&error), "it is replaced");
            return Ok(false);
        }
        Err(error)
    }

    /// Whether there is an agent. One that is slow or answers nonsense is alive all the same. One
    /// that hangs up may just be dying, so it is asked again: nobody picks up for the dead.
    pub(crate) async fn lives(&self, handle: &Handle) -> bool {
        let ask = || tokio::time::timeout(PROBE, handle.agent.ping());
        let answer = match ask().await {
            Ok(Err(ServiceError::Agent {
                source: AgentError::Broken(_) | AgentError::EndedEarly, ..
            })) => ask().await,
            answer => answer,
        };
        !matches!(answer, Ok(Err(error)) if error.is_gone())
    }

    /// Has what is left of a dead sandbox removed. Nobody waits for it: a removal that fails is
    /// its driver's business, which tries again.
    fn retire(self: &Arc<Self>, slot: &Slot) -> Option<(Arc<Handle>, JoinHandle<Outcome>)> {
        let handle = self.registry.find(&slot.sandbox()?)?;
        tracing::info!(sandbox = %handle.id, phase = %handle.phase(), "its key leads to a new one from now on");
        let (core, retiring) = (Arc::clone(self), Arc::clone(&handle));
        let retired = self.tasks.spawn(async move {
            let handle = retiring;
            let ended = core.order(&handle, |answer| Command::End(Cause::Replaced, answer)).await;
            if let Err(error) = ended {
                tracing::debug!(sandbox = %handle.id, error = %chain(&error), "its remains are removed later");
                return Outcome::AlreadySo;
            }
            Outcome::Done
        });
        Some((handle, retired))
    }

    /// Takes away what has died and then what is parked, until there is room below the soft limit
    /// or none is left. One that lives never goes for the number of the dead, and one that comes
    /// back with its files when its name is used goes only when there is no other room at all.
    /// `owner` is who needs the room: the dead of others keep their files.
    pub(crate) async fn make_room(&self, owner: &Owner) {
        let Some(soft) = self.config().soft_sandboxes else { return };
        while self.registry.count() >= soft && self.evict_dead(owner).await {}
        while self.registry.living() >= soft && self.evict_parked(None).await {}
    }

    /// Takes away one sandbox of this owner so that it has more of what a quota bounds; `false` if
    /// none would help or all are needed. The dead have neither processors nor memory to give.
    pub(crate) async fn evict_for(
        &self,
        owner: &Owner,
        what: &'static str,
        except: Option<&SandboxId>,
    ) -> bool {
        let dead_help = dead_have(what);
        (dead_help && self.evict_unrestartable(owner, except).await)
            || self.evict_parked(Some(owner)).await
            || (dead_help && self.evict_restartable(owner, except).await)
    }

    /// Takes away one dead sandbox for a new one of `owner`: the longest dead whose files are lost, of
    /// whatever owner, or else the longest dead of `owner` that does not come back. The files of a dead
    /// sandbox are its owner's data, so nobody else's need for room removes them.
    pub(crate) async fn evict_dead(&self, owner: &Owner) -> bool {
        self.evict_first_of(self.dead(None, None, Handle::has_lost_files)).await
            || self.evict_unrestartable(owner, None).await
    }

    /// Takes away the sandbox of this owner that has been dead for the longest time and comes back for
    /// nobody, so neither its key's turn nor its hold matters.
    async fn evict_unrestartable(&self, owner: &Owner, except: Option<&SandboxId>) -> bool {
        self.evict_first_of(self.dead(Some(owner), except, |handle| !handle.comes_back())).await
    }

    /// Takes away the sandbox of this owner that has been dead for the longest time, although it would
    /// come back with its files at the next use of its name.
    pub(crate) async fn evict_restartable(&self, owner: &Owner, except: Option<&SandboxId>) -> bool {
        self.evict_first_of(self.dead(Some(owner), except, Handle::comes_back)).await
    }

    async fn evict_first_of(&self, dead: Vec<Arc<Handle>>) -> bool {
        for handle in dead {
            // One that resists is removed in its own time, and nobody waits for that.
            let ended = tokio::time::timeout(PROBE, self.end_evicted(&handle)).await;
            if ended.unwrap_or(false) || self.registry.find(&handle.id).is_none() {
                return true;
            }
        }
        false
    }

    /// Takes away the sandbox that nobody has needed for the longest time.
    pub(crate) async fn evict_parked(&self, owner: Option<&Owner>) -> bool {
        for handle in self.parked(owner) {
            if self.take_away(&handle).await {
                return true;
            }
        }
        false
    }

    /// Whether a sandbox may be taken away for a new one of `owner` when there are as many as may be.
    pub(crate) fn has_evictable_at_limit(&self, owner: &Owner) -> bool {
        let goes = |handle: &Handle| handle.owner == *owner || handle.has_lost_files();
        !self.dead(None, None, goes).is_empty() || !self.parked(None).is_empty()
    }

    /// Whether a sandbox of this owner may be taken away and has what a quota bounds.
    pub(crate) fn has_evictable_for(&self, owner: &Owner, what: &'static str) -> bool {
        let dead = || !self.dead(Some(owner), None, |_| true).is_empty();
        (dead_have(what) && dead()) || !self.parked(Some(owner)).is_empty()
    }

    /// The sandboxes, of this owner if one is named, that have died and pass, the first of them
    /// first.
    fn dead(
        &self,
        owner: Option<&Owner>,
        except: Option<&SandboxId>,
        passes: impl Fn(&Handle) -> bool,
    ) -> Vec<Arc<Handle>> {
        let mut dead = self.registry.all();
        dead.retain(|handle| handle.is_dead() && owner.is_none_or(|owner| *owner == handle.owner));
        dead.retain(|handle| except.is_none_or(|id| *id != handle.id) && passes(handle));
        dead.sort_by_key(|handle| handle.state.borrow().phase_since);
        dead
    }

    /// The sandboxes, of this owner if one is named, that nobody seems to need, beginning with the
    /// one that was parked first.
    fn parked(&self, owner: Option<&Owner>) -> Vec<Arc<Handle>> {
        let now = self.clock.now().boot;
        let mut parked: Vec<_> = self
            .registry
            .all()
            .into_iter()
            .filter_map(|handle| {
                let since = handle.hold.parked_since(&handle.activity, now, self.config().park_after)?;
                let counts = handle.key.is_some() && !handle.is_dead();
                (counts && owner.is_none_or(|owner| *owner == handle.owner)).then_some((since, handle))
            })
            .collect();
        parked.sort_by_key(|(since, _)| *since);
        parked.into_iter().map(|(_, handle)| handle).collect()
    }

    /// Ends one sandbox if nobody needs it. The turn of its key is held meanwhile, so that who
    /// asks for the key now waits and then gets a new one.
    async fn take_away(&self, handle: &Arc<Handle>) -> bool {
        let Some(key) = &handle.key else { return false };
        let place = self.names.place(key);
        let Ok(_turn) = place.turn.try_lock() else { return false };
        match tokio::time::timeout(PROBE, self.runs_something(handle)).await {
            Ok(false) => {}
            Ok(true) => return false,
            Err(_elapsed) => {
                // Nobody knows, and it is not asked again for a while: silent agents must not hold
                // up those who need room.
                handle.hold.take(&handle.activity);
                return false;
            }
        }
        let now = self.clock.now().boot;
        if !handle.hold.close(&handle.activity, now, self.config().park_after) {
            return false;
        }
        self.end_evicted(handle).await
    }

    async fn end_evicted(&self, handle: &Handle) -> bool {
        let ended = self.order(handle, |answer| Command::End(Cause::Evicted, answer)).await;
        ended.inspect_err(|error| tracing::warn!(error = %chain(error), "it is removed later")).is_ok()
    }
}

/// Whether a key follows what its sandbox says about its death. One of a retry leads to a new
/// sandbox, and so does one whose sandbox is on its way out.
fn follows(key: &Key, handle: &Handle) -> bool {
    let goes = matches!(handle.phase(), Phase::Stopping | Phase::Stopped);
    key.space() != RETRIES && !goes && handle.hold.take(&handle.activity)
}

/// Whether a dead sandbox takes up some of what a quota bounds.
fn dead_have(what: &str) -> bool {
    matches!(what, "sandboxes" | "disk")
}
