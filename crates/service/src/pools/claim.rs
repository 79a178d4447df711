//! Taking a warm sandbox, either to give it to an owner or to free its room.

use std::sync::Arc;

use domain::NetworkAccess;

use super::{PoolState, WarmSandbox};
use crate::core::Core;
use crate::images::aliases::ResolvedImage;
use crate::store::SandboxRecord;
use crate::telemetry::service_metrics;
use crate::{CreateSandboxRequest, ImageSource, ServiceError};

/// A warm sandbox that is taken from its pool. Dropping this puts it back, since nothing was bound to it; if the pool
/// was closed meanwhile, it is removed.
pub(crate) struct ReservedWarm {
    core: Arc<Core>,
    kept: Arc<PoolState>,
    warm: Option<WarmSandbox>,
    /// The image under the requested name, if the pool uses another name for it.
    named: Option<ResolvedImage>,
}

impl Drop for ReservedWarm {
    fn drop(&mut self) {
        let Some(warm) = self.warm.take() else { return };
        match self.kept.put_back(warm) {
            None => self.kept.changed.notify_one(),
            Some(warm) => {
                let core = Arc::clone(&self.core);
                self.core.tasks.spawn(async move { core.remove_warm(&warm.id).await });
            }
        }
    }
}

impl ReservedWarm {
    fn warm(&self) -> &WarmSandbox {
        self.warm.as_ref().expect("the sandbox is present until it is kept")
    }

    /// Turns a new record into that of the warm sandbox.
    pub(crate) fn mark_record(&self, record: &mut SandboxRecord) {
        record.sandbox.id = self.warm().id.clone();
        record.sandbox.in_force = self.warm().in_force.clone();
        if let Some(named) = &self.named {
            record.sandbox.in_force.stand_in = named.stand_in.as_ref().map(ToString::to_string);
        }
        record.sandbox.pool = Some(self.kept.pool.name.clone());
    }

    /// From now on the sandbox never returns to the pool.
    pub(crate) fn into_claimed(mut self) -> ClaimedWarm {
        self.warm = None;
        self.kept.lock().claims += 1;
        self.kept.changed.notify_one();
        service_metrics::count_claim(&self.kept.pool.name);
        ClaimedWarm(Arc::clone(&self.kept))
    }
}

/// A caller needs room until this is dropped; no sandbox is warmed meanwhile.
pub(crate) struct RoomWaiter(Arc<Core>);

impl RoomWaiter {
    pub(crate) fn begin(core: &Arc<Core>) -> Self {
        core.lifecycle.registry.begin_waiting();
        Self(Arc::clone(core))
    }
}

impl Drop for RoomWaiter {
    fn drop(&mut self) {
        self.0.lifecycle.registry.end_waiting();
        self.0.catalog.pools.wake_keepers();
    }
}

/// A warm sandbox that has an owner; the owner's resources are still to be bound.
pub(crate) struct ClaimedWarm(Arc<PoolState>);

impl ClaimedWarm {
    /// The spec that the warm sandbox was made from.
    pub(crate) fn template(&self) -> &domain::SandboxSpec {
        &self.0.pool.template
    }

    pub(crate) fn pool(&self) -> &str {
        &self.0.pool.name
    }

    /// Counts that the warm sandbox could not be used.
    pub(crate) fn count_failure(&self) {
        self.0.count_cold();
    }
}

impl PoolState {
    fn count_cold(&self) {
        self.lock().cold += 1;
        service_metrics::count_cold_create(&self.pool.name);
    }
}

impl Core {
    /// Completes a request that names a pool with the pool's settings: the image, and limits that the request leaves
    /// open.
    pub(crate) fn complete_from_pool(
        &self,
        name: &str,
        request: &mut CreateSandboxRequest,
    ) -> Result<(), ServiceError> {
        let kept = self.catalog.pools.find(name).ok_or_else(|| ServiceError::NoPool(name.to_owned()))?;
        let (own, template) = (&mut request.spec.resources, &kept.pool.template);
        request.spec.image = template.image.clone();
        own.memory = own.memory.or(template.resources.memory);
        own.cpus = own.cpus.or(template.resources.cpus);
        own.pids = own.pids.or(template.resources.pids);
        own.disk = own.disk.or(template.resources.disk);
        Ok(())
    }

    /// A warm sandbox of the pool that the request names, or of one that fits. `None` if there is none, which is not an
    /// error.
    pub(crate) async fn reserve_warm(
        self: &Arc<Self>,
        request: &CreateSandboxRequest,
    ) -> Option<ReservedWarm> {
        let (kept, named) = match &request.source {
            ImageSource::Pool(name) => (self.catalog.pools.find(name)?, None),
            ImageSource::Named { .. } | ImageSource::Snapshot(_) => self.find_fitting_pool(request).await?,
        };
        if !kept.pool.fits_spec(&request.spec) || !self.can_be_bound(&kept, request) {
            kept.count_cold();
            return None;
        }
        let Some(warm) = kept.pop_warm() else {
            kept.count_cold();
            return None;
        };
        Some(ReservedWarm { core: Arc::clone(self), kept, warm: Some(warm), named })
    }

    /// The pool with the most warm sandboxes of this image, under any name. If the pool uses another name for it, the
    /// image that the requested name resolves to is returned as well.
    async fn find_fitting_pool(
        &self,
        request: &CreateSandboxRequest,
    ) -> Option<(Arc<PoolState>, Option<ResolvedImage>)> {
        let mut pools = self.catalog.pools.all();
        pools.retain(|kept| kept.pool.fits_spec(&request.spec));
        if pools.is_empty() {
            return None;
        }
        let image = &request.spec.image;
        let mut named = None;
        if pools.iter().any(|kept| kept.pool.template.image == *image) {
            pools.retain(|kept| kept.pool.template.image == *image);
        } else {
            let resolved = self.resolve_image(image).await.ok()?;
            pools.retain(|kept| kept.warm_image().is_some_and(|image| image == resolved.name));
            named = Some(resolved);
        }
        let kept = pools.into_iter().max_by_key(|kept| kept.lock().ready.len())?;
        Some((kept, named))
    }

    /// Whether the backend can add the resources that a warm sandbox lacks.
    fn can_be_bound(&self, pool_state: &PoolState, request: &CreateSandboxRequest) -> bool {
        let template = &pool_state.pool.template;
        let mounts = request.spec.mounts.is_empty() || self.host.capabilities.attach;
        let limits =
            request.spec.resources == template.resources || self.host.backend.reconfigure().is_some();
        mounts && limits && self.can_connect(template.network, request.spec.network)
    }

    /// Whether a sandbox that was made with one network mode can get another. A network can be added or filtered later,
    /// but neither the network nor the filter can be removed.
    fn can_connect(&self, present: NetworkAccess, wanted: NetworkAccess) -> bool {
        match (present, wanted) {
            (present, wanted) if self.host.backend.reconfigure().is_none() => present == wanted,
            (NetworkAccess::Off | NetworkAccess::Auto, NetworkAccess::On) => self.host.capabilities.network,
            (_, NetworkAccess::Filtered) => self.host.capabilities.filtered,
            // The sandbox gets a network if possible, and stays without one otherwise.
            (NetworkAccess::Off | NetworkAccess::On, NetworkAccess::Auto) => true,
            (present, wanted) => present == wanted,
        }
    }

    /// Removes a warm sandbox because a caller needs its room; waits for one that is being made. `false` if there is
    /// none.
    pub(crate) async fn evict_warm(self: &Arc<Self>) -> bool {
        loop {
            let settled = self.catalog.pools.settled.notified();
            let pools = self.catalog.pools.all();
            let fullest = pools.iter().max_by_key(|kept| kept.lock().ready.len());
            if let Some(warm) = fullest.and_then(|kept| kept.pop_warm()) {
                tracing::info!(sandbox = %warm.id, "removing a warm sandbox to make room");
                let core = Arc::clone(self);
                let removed = self.tasks.spawn(async move { core.remove_warm(&warm.id).await });
                return removed.await.is_ok();
            }
            if pools.iter().all(|kept| kept.lock().making.is_empty()) {
                return false;
            }
            settled.await;
        }
    }
}

impl PoolState {
    /// Puts a sandbox back, or returns it if the pool is closed: the keeper may have emptied the pool already.
    fn put_back(&self, warm: WarmSandbox) -> Option<WarmSandbox> {
        let mut state = self.lock();
        if self.closed.is_cancelled() {
            return Some(warm);
        }
        state.ready.push_back(warm);
        service_metrics::set_warm_count(&self.pool.name, state.ready.len());
        None
    }

    /// The image that the warm sandboxes really have, or that the next one would have.
    fn warm_image(&self) -> Option<String> {
        let state = self.lock();
        let ready = state.ready.front().map(|warm| &warm.in_force.image);
        ready.or(state.image.as_ref()).cloned()
    }
}
