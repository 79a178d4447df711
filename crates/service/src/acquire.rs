//! Acquire by key: the same key, the same sandbox, for everybody who asks.
//!
//! ```text
//! acquire ─► there, alive, taken? ──────────────────────────► it
//!              │ no                                            ▲
//!              └► wait for the key's turn ─► look again ─► make ┘
//! ```
//! Whoever finds the sandbox waits for nobody. A turn is one key's alone, so no key ever waits
//! for another, and a caller that goes away while waiting leaves nothing behind. One that goes away
//! while its sandbox is made leaves that: its next attempt finds it.

use std::sync::Arc;
use std::time::Duration;

use domain::{Cause, Key, Owner, Phase};
use tokio::task::JoinHandle;

use crate::agent_client::AgentError;
use crate::core::Core;
use crate::driver::Command;
use crate::error::chain;
use crate::names::{Place, Slot};
use crate::registry::Handle;
use crate::{Acquired, Create, ErrorKind, Outcome, Sandbox, ServiceError};

/// How long an agent may take to show that it lives, before it is believed to.
const PROBE: Duration = Duration::from_secs(2);

impl Core {
    pub(crate) async fn acquire(self: &Arc<Self>, key: &Key, wish: Create) -> Result<Acquired, ServiceError> {
        let place = self.names.place(key);
        if let Some(sandbox) = self.reuse(&place).await? {
            return Ok(Acquired { sandbox, fresh: false });
        }
        let turn = Arc::clone(&place.turn).lock_owned().await;
        if let Some(sandbox) = self.reuse(&place).await? {
            return Ok(Acquired { sandbox, fresh: false });
        }
        let (core, key) = (Arc::clone(self), key.clone());
        let work = self.tasks.spawn(async move {
            let _turn = turn;
            tokio::select! {
                made = core.make_for(&key, &place, wish) => made,
                () = core.stop.cancelled() => Err(ServiceError::Stopping),
            }
        });
        let sandbox = work.await.unwrap_or(Err(ServiceError::Stopping))?;
        Ok(Acquired { sandbox, fresh: true })
    }

    /// Makes the sandbox that a key leads to from now on. Whoever asked may go away meanwhile: with
    /// the key the sandbox is found again, and one who asks impatiently, over and over, gets one.
    async fn make_for(
        self: &Arc<Self>,
        key: &Key,
        place: &Place,
        wish: Create,
    ) -> Result<Sandbox, ServiceError> {
        let retired = match self.retire(place) {
            Some((handle, retired)) => {
                // Nobody is to see two that live under one key, so its end is told first.
                tokio::time::timeout(PROBE, handle.ending()).await.ok();
                Some(retired)
            }
            None => None,
        };
        let sandbox = match (self.create(key.owner(), Some(key), wish.clone()).await, retired) {
            // The dead one may still take up the room that its successor needs.
            (Err(error), Some(retired)) if matches!(error.kind(), ErrorKind::Exhausted { .. }) => {
                if !matches!(tokio::time::timeout(PROBE, retired).await, Ok(Ok(Outcome::Done))) {
                    return Err(error);
                }
                self.create(key.owner(), Some(key), wish).await?
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
    async fn lives(&self, handle: &Handle) -> bool {
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
            if let Err(error) = core.order(&handle, Command::Destroy).await {
                tracing::debug!(sandbox = %handle.id, error = %chain(&error), "its remains are removed later");
                return Outcome::AlreadySo;
            }
            Outcome::Done
        });
        Some((handle, retired))
    }

    /// Takes away what has died and then what is parked, until there is room below the soft limit
    /// or none is left. One that lives never goes for the number of the dead.
    pub(crate) async fn make_room(&self) {
        let Some(soft) = self.config().soft_sandboxes else { return };
        while self.registry.count() >= soft && self.evict_dead(None).await {}
        while self.registry.living() >= soft && self.evict_parked(None).await {}
    }

    /// Takes away one sandbox, of this owner if one is named, that nobody can use or nobody needs;
    /// `false` if all are needed.
    pub(crate) async fn evict(&self, owner: Option<&Owner>) -> bool {
        self.evict_dead(owner).await || self.evict_parked(owner).await
    }

    /// Takes away the sandbox that has been dead for the longest time. Nobody can take or use it
    /// any more, so neither its key's turn nor its hold matters.
    pub(crate) async fn evict_dead(&self, owner: Option<&Owner>) -> bool {
        for handle in self.dead(owner) {
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

    /// Whether a sandbox, of this owner if one is named, may be taken away.
    pub(crate) fn has_evictable(&self, owner: Option<&Owner>) -> bool {
        !self.dead(owner).is_empty() || !self.parked(owner).is_empty()
    }

    /// The sandboxes, of this owner if one is named, that have died, the first of them first.
    fn dead(&self, owner: Option<&Owner>) -> Vec<Arc<Handle>> {
        let mut dead = self.registry.all();
        dead.retain(|handle| handle.is_dead() && owner.is_none_or(|owner| *owner == handle.owner));
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
                (handle.key.is_some() && owner.is_none_or(|owner| *owner == handle.owner))
                    .then_some((since, handle))
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
