//! Warm sandboxes: making, adopting and removing them.

use std::sync::Arc;
use std::time::Duration;

use backend::{Condition, Death};
use domain::{Owner, Phase, SandboxId};
use futures_util::StreamExt;

use super::{Kept, Warm};
use crate::agent_client::Agent;
use crate::core::Core;
use crate::driver::CREATE;
use crate::error::chain;
use crate::store::Record;
use crate::{Create, ServiceError};

/// The shortest and the longest time before a failed removal is tried again.
const FIRST_RETRY: Duration = Duration::from_secs(1);
const LAST_RETRY: Duration = Duration::from_secs(60);

/// How many sandboxes are removed at the same time.
const AT_ONCE: usize = 8;

impl Core {
    /// Reserves room for another warm sandbox; `None` if there is none.
    pub(super) fn begin_warm(&self, kept: &Kept) -> Result<Option<Record>, ServiceError> {
        let record = self.warm_record(kept)?;
        // The id is added before room is reserved: a caller that finds no room must see what takes it up.
        kept.lock().making.insert(record.sandbox.id.clone());
        if self.registry.add_warm(self.config().sandboxes) {
            return Ok(Some(record));
        }
        kept.lock().making.remove(&record.sandbox.id);
        Ok(None)
    }

    /// Makes a warm sandbox in its reserved room. If that fails, nothing is left of it.
    pub(super) async fn make_warm(self: &Arc<Self>, kept: &Kept, record: Record) -> Result<(), ServiceError> {
        let made = self.warm_up(kept, record).await;
        self.pools.settled.notify_waiters();
        made
    }

    fn warm_record(&self, kept: &Kept) -> Result<Record, ServiceError> {
        let request = Create {
            origin: "pool",
            spec: kept.pool.template.clone(),
            labels: Default::default(),
            notes: Vec::new(),
            timeout: None,
            idle_timeout: None,
            pool: None,
            defaulted: Vec::new(),
            merge_notes: |own, _| own.to_vec(),
        };
        let mut record = self.record(&Owner::nobody(), None, request)?;
        record.sandbox.pool = Some(kept.pool.name.clone());
        Ok(record)
    }

    async fn warm_up(self: &Arc<Self>, kept: &Kept, mut record: Record) -> Result<(), ServiceError> {
        let id = record.sandbox.id.clone();
        let made = self.bring_up_warm(&mut record).await;
        let warm = Warm { id: id.clone(), in_force: record.sandbox.in_force };
        if kept.settle(warm, made.is_ok()) {
            return Ok(());
        }
        self.remove_warm(&id).await;
        made
    }

    async fn bring_up_warm(&self, record: &mut Record) -> Result<(), ServiceError> {
        let note = |action| move |source| ServiceError::Store { action, source };
        self.store.insert(record).await.map_err(note("record the warm sandbox"))?;
        let id = record.sandbox.id.clone();
        let made = self.backend.create(&id, &record.sandbox.spec);
        record.sandbox.in_force = self.ask_backend("create", &id, CREATE, made).await?;
        Agent::new(Arc::clone(&self.backend), id).ping().await?;
        record.sandbox.phase = Phase::Running;
        self.store.update(record).await.map_err(note("record that the sandbox is warm"))
    }

    /// Returns a sandbox that a former server made to its pool, if a new one would be made the same way now, and
    /// removes it otherwise. `condition` is `None` if it was not found or is of another boot.
    pub(crate) async fn adopt_warm(self: &Arc<Self>, record: Record, condition: Option<Condition>) {
        let sandbox = record.sandbox;
        let whole = sandbox.phase == Phase::Running && condition == Some(Condition::Alive);
        let kept = sandbox.pool.as_deref().and_then(|pool| self.pools.find(pool));
        let kept = kept.filter(|kept| whole && sandbox.spec == kept.pool.template);
        self.registry.add_warm(usize::MAX);
        let same_image = match &kept {
            Some(kept) => {
                let resolved = self.backend.resolve(&kept.pool.template.image).await;
                resolved.is_ok_and(|resolved| resolved.name == sandbox.in_force.image)
            }
            None => false,
        };
        match kept.filter(|_| same_image) {
            Some(kept) => {
                tracing::info!(sandbox = %sandbox.id, pool = kept.pool.name, "adopted a warm sandbox");
                kept.push(Warm { id: sandbox.id, in_force: sandbox.in_force });
            }
            None => {
                tracing::info!(sandbox = %sandbox.id, ?condition, "removing a warm sandbox that no longer fits its pool");
                self.remove_warm(&sandbox.id).await;
            }
        }
    }

    /// Handles the death of a warm sandbox.
    pub(crate) fn lose_warm(self: &Arc<Self>, death: &Death) {
        for kept in self.pools.all() {
            if !kept.lose(&death.id) {
                continue;
            }
            tracing::warn!(sandbox = %death.id, cause = death.cause.name(), "warm sandbox died; removing it");
            let (core, id) = (Arc::clone(self), death.id.clone());
            self.tasks.spawn(async move { core.remove_warm(&id).await });
        }
    }

    /// Removes all sandboxes that are ready.
    pub(super) async fn empty_pool(self: &Arc<Self>, kept: &Kept) {
        let ready: Vec<Warm> = std::iter::from_fn(|| kept.pop()).collect();
        let removed = |warm: Warm| async move { self.remove_warm(&warm.id).await };
        futures_util::stream::iter(ready).for_each_concurrent(AT_ONCE, removed).await;
    }

    /// Removes a warm sandbox and frees its room; a failed removal is retried.
    pub(super) async fn remove_warm(self: &Arc<Self>, id: &SandboxId) {
        if let Err(error) = self.destroy(id).await {
            tracing::error!(sandbox = %id, error = %chain(&error), "failed to remove a warm sandbox; retrying later");
            self.tasks.spawn(Arc::clone(self).remove_warm_later(id.clone()));
            return;
        }
        self.forget_warm(id).await;
    }

    async fn remove_warm_later(self: Arc<Self>, id: SandboxId) {
        let mut pause = FIRST_RETRY;
        loop {
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = self.stop.cancelled() => return,
            }
            if self.destroy(&id).await.is_ok() {
                return self.forget_warm(&id).await;
            }
            pause = (pause * 2).min(LAST_RETRY);
        }
    }

    async fn forget_warm(&self, id: &SandboxId) {
        if let Err(error) = self.store.delete(id).await {
            tracing::warn!(sandbox = %id, error = %chain(&error), "failed to delete the row of a removed warm sandbox; the next start removes it");
        }
        self.registry.remove_warm();
        self.pools.look_again();
    }
}

impl Kept {
    /// Ends the making of a sandbox: it becomes ready if it was made, still lives and is still needed.
    fn settle(&self, warm: Warm, made: bool) -> bool {
        let mut state = self.lock();
        let lives = state.making.remove(&warm.id);
        let ready = made && lives && !self.closed.is_cancelled();
        if ready {
            state.ready.push_back(warm);
            crate::measure::warm(&self.pool.name, state.ready.len());
        }
        ready
    }

    /// Removes a sandbox that died from the pool; `true` if the caller must destroy it.
    fn lose(&self, id: &SandboxId) -> bool {
        let mut state = self.lock();
        // The task that makes the sandbox finds it missing, and removes it.
        state.making.remove(id);
        let before = state.ready.len();
        state.ready.retain(|warm| warm.id != *id);
        crate::measure::warm(&self.pool.name, state.ready.len());
        state.ready.len() < before
    }
}
