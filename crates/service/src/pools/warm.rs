//! Warm sandboxes: making, adopting and removing them.

use std::sync::Arc;
use std::time::Duration;

use backend::SandboxDeath;
use domain::{Owner, Phase, SandboxId};
use futures_util::StreamExt;

use super::{PoolState, WarmSandbox};
use crate::agent::client::AgentClient;
use crate::core::Core;
use crate::error::error_chain;
use crate::reconcile::{SandboxFacts, WarmPlan, plan_warm};
use crate::sandboxes::driver::CREATE_TIMEOUT;
use crate::store::SandboxRecord;
use crate::{CreateSandboxRequest, ImageSource, ServiceError};

/// The shortest and the longest time before a failed removal is tried again.
const MIN_RETRY_DELAY: Duration = Duration::from_secs(1);
const MAX_RETRY_DELAY: Duration = Duration::from_secs(60);

/// How many sandboxes are removed at the same time.
const MAX_CONCURRENT_REMOVALS: usize = 8;

impl Core {
    /// Reserves room for another warm sandbox; `None` if there is none.
    pub(super) fn begin_warm(&self, pool_state: &PoolState) -> Result<Option<SandboxRecord>, ServiceError> {
        let record = self.warm_record(pool_state)?;
        // The id is added before room is reserved: a caller that finds no room must see what takes it up.
        pool_state.lock().making.insert(record.sandbox.id.clone());
        if self.lifecycle.registry.add_warm(self.config().sandboxes) {
            return Ok(Some(record));
        }
        pool_state.lock().making.remove(&record.sandbox.id);
        Ok(None)
    }

    /// Makes a warm sandbox in its reserved room. If that fails, nothing is left of it.
    pub(super) async fn make_warm(
        self: &Arc<Self>,
        pool_state: &PoolState,
        record: SandboxRecord,
    ) -> Result<(), ServiceError> {
        let made = self.warm_up(pool_state, record).await;
        self.catalog.pools.settled.notify_waiters();
        made
    }

    fn warm_record(&self, pool_state: &PoolState) -> Result<SandboxRecord, ServiceError> {
        let request = CreateSandboxRequest {
            origin: "pool",
            source: ImageSource::from_name(&pool_state.pool.template.image),
            spec: pool_state.pool.template.clone(),
            labels: Default::default(),
            notes: Vec::new(),
            timeout: None,
            idle_timeout: None,
            defaulted: Vec::new(),
            merge_notes: |own, _| own.to_vec(),
        };
        let mut record = self.new_record(&Owner::unclaimed(), None, request)?;
        record.sandbox.pool = Some(pool_state.pool.name.clone());
        Ok(record)
    }

    async fn warm_up(
        self: &Arc<Self>,
        pool_state: &PoolState,
        mut record: SandboxRecord,
    ) -> Result<(), ServiceError> {
        let id = record.sandbox.id.clone();
        let made = self.create_warm_in_backend(&mut record).await;
        let warm = WarmSandbox { id: id.clone(), in_force: record.sandbox.in_force };
        if pool_state.finish_making(warm, made.is_ok()) {
            return Ok(());
        }
        self.remove_warm(&id).await;
        made
    }

    async fn create_warm_in_backend(&self, record: &mut SandboxRecord) -> Result<(), ServiceError> {
        let note = |action| move |source| ServiceError::Store { action, source };
        self.store.insert_sandbox(record).await.map_err(note("record the warm sandbox"))?;
        let id = record.sandbox.id.clone();
        let made = self.create_in_backend(&id, record.sandbox.spec.clone());
        record.sandbox.in_force = self.host.ask_backend("create", &id, CREATE_TIMEOUT, made).await?;
        AgentClient::new(Arc::clone(&self.host.backend), id).ping().await?;
        record.sandbox.phase = Phase::Running;
        self.store.update_sandbox(record).await.map_err(note("record that the sandbox is warm"))
    }

    /// Returns a sandbox that a former server made to its pool, if a new one would be made the same way now, and
    /// removes it otherwise.
    pub(crate) async fn adopt_warm(self: &Arc<Self>, record: SandboxRecord, facts: SandboxFacts) {
        let sandbox = record.sandbox;
        let kept = sandbox.pool.as_deref().and_then(|pool| self.catalog.pools.find(pool));
        let kept = kept.filter(|kept| sandbox.spec == kept.pool.template);
        self.lifecycle.registry.add_warm(usize::MAX);
        let same_image = match &kept {
            Some(kept) => {
                let resolved = self.resolve_image(&kept.pool.template.image).await;
                resolved.is_ok_and(|resolved| resolved.name == sandbox.in_force.image)
            }
            None => false,
        };
        match (plan_warm(facts, same_image), kept) {
            (WarmPlan::ReturnToPool, Some(kept)) => {
                tracing::info!(sandbox = %sandbox.id, pool = kept.pool.name, "adopted a warm sandbox");
                kept.push_warm(WarmSandbox { id: sandbox.id, in_force: sandbox.in_force });
            }
            (WarmPlan::Remove, _) | (_, None) => {
                tracing::info!(sandbox = %sandbox.id, found = ?facts.found, "removing a warm sandbox that no longer fits its pool");
                self.remove_warm(&sandbox.id).await;
            }
        }
    }

    /// Handles the death of a warm sandbox.
    pub(crate) fn handle_warm_death(self: &Arc<Self>, death: &SandboxDeath) {
        for kept in self.catalog.pools.all() {
            if !kept.remove_dead(&death.id) {
                continue;
            }
            tracing::warn!(sandbox = %death.id, cause = death.cause.name(), "warm sandbox died; removing it");
            let (core, id) = (Arc::clone(self), death.id.clone());
            self.tasks.spawn(async move { core.remove_warm(&id).await });
        }
    }

    /// Removes all sandboxes that are ready.
    pub(super) async fn empty_pool(self: &Arc<Self>, pool_state: &PoolState) {
        let ready: Vec<WarmSandbox> = std::iter::from_fn(|| pool_state.pop_warm()).collect();
        let removed = |warm: WarmSandbox| async move { self.remove_warm(&warm.id).await };
        futures_util::stream::iter(ready).for_each_concurrent(MAX_CONCURRENT_REMOVALS, removed).await;
    }

    /// Removes a warm sandbox and frees its room; a failed removal is retried.
    pub(super) async fn remove_warm(self: &Arc<Self>, id: &SandboxId) {
        if let Err(error) = self.destroy_in_backend(id).await {
            tracing::error!(sandbox = %id, error = %error_chain(&error), "failed to remove a warm sandbox; retrying later");
            self.tasks.spawn(Arc::clone(self).remove_warm_later(id.clone()));
            return;
        }
        self.forget_warm(id).await;
    }

    async fn remove_warm_later(self: Arc<Self>, id: SandboxId) {
        let mut pause = MIN_RETRY_DELAY;
        loop {
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = self.tasks.cancelled() => return,
            }
            if self.destroy_in_backend(&id).await.is_ok() {
                return self.forget_warm(&id).await;
            }
            pause = (pause * 2).min(MAX_RETRY_DELAY);
        }
    }

    async fn forget_warm(&self, id: &SandboxId) {
        if let Err(error) = self.store.delete_sandbox(id).await {
            tracing::warn!(sandbox = %id, error = %error_chain(&error), "failed to delete the row of a removed warm sandbox; the next start removes it");
        }
        self.lifecycle.registry.remove_warm();
        self.catalog.pools.wake_keepers();
    }
}

impl PoolState {
    /// Ends the making of a sandbox: it becomes ready if it was made, still lives and is still needed.
    fn finish_making(&self, warm: WarmSandbox, made: bool) -> bool {
        let mut state = self.lock();
        let lives = state.making.remove(&warm.id);
        let ready = made && lives && !self.closed.is_cancelled();
        if ready {
            state.ready.push_back(warm);
            crate::telemetry::service_metrics::set_warm_count(&self.pool.name, state.ready.len());
        }
        ready
    }

    /// Removes a sandbox that died from the pool; `true` if the caller must destroy it.
    fn remove_dead(&self, id: &SandboxId) -> bool {
        let mut state = self.lock();
        // The task that makes the sandbox finds it missing, and removes it.
        state.making.remove(id);
        let before = state.ready.len();
        state.ready.retain(|warm| warm.id != *id);
        crate::telemetry::service_metrics::set_warm_count(&self.pool.name, state.ready.len());
        state.ready.len() < before
    }
}
