//! Taking a warm sandbox, either to give it to an owner or to free its room.

use std::sync::Arc;

use backend::ResolvedImage;
use domain::Network;

use super::{Kept, Warm};
use crate::core::Core;
use crate::store::Record;
use crate::{Create, ServiceError, measure};

/// A warm sandbox that is taken from its pool. Dropping this puts it back, since nothing was bound to it; if the pool
/// was closed meanwhile, it is removed.
pub(crate) struct Taken {
    core: Arc<Core>,
    kept: Arc<Kept>,
    warm: Option<Warm>,
    /// The image under the requested name, if the pool uses another name for it.
    named: Option<ResolvedImage>,
}

impl Drop for Taken {
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

impl Taken {
    fn warm(&self) -> &Warm {
        self.warm.as_ref().expect("the sandbox is present until it is kept")
    }

    /// Turns a new record into that of the warm sandbox.
    pub(crate) fn mark(&self, record: &mut Record) {
        record.sandbox.id = self.warm().id.clone();
        record.sandbox.in_force = self.warm().in_force.clone();
        if let Some(named) = &self.named {
            record.sandbox.in_force.stand_in = named.stand_in.clone();
        }
        record.sandbox.pool = Some(self.kept.pool.name.clone());
    }

    /// From now on the sandbox never returns to the pool.
    pub(crate) fn keep(mut self) -> Claimed {
        self.warm = None;
        self.kept.lock().claims += 1;
        self.kept.changed.notify_one();
        measure::claimed(&self.kept.pool.name);
        Claimed(Arc::clone(&self.kept))
    }
}

/// A caller needs room until this is dropped; no sandbox is warmed meanwhile.
pub(crate) struct WaitsForRoom(Arc<Core>);

impl WaitsForRoom {
    pub(crate) fn begin(core: &Arc<Core>) -> Self {
        core.registry.begin_waiting();
        Self(Arc::clone(core))
    }
}

impl Drop for WaitsForRoom {
    fn drop(&mut self) {
        self.0.registry.end_waiting();
        self.0.pools.look_again();
    }
}

/// A warm sandbox that has an owner; the owner's resources are still to be bound.
pub(crate) struct Claimed(Arc<Kept>);

impl Claimed {
    /// The spec that the warm sandbox was made from.
    pub(crate) fn template(&self) -> &domain::Spec {
        &self.0.pool.template
    }

    pub(crate) fn pool(&self) -> &str {
        &self.0.pool.name
    }

    /// Counts that the warm sandbox could not be used.
    pub(crate) fn failed(&self) {
        self.0.count_cold();
    }
}

impl Kept {
    fn count_cold(&self) {
        self.lock().cold += 1;
        measure::cold(&self.pool.name);
    }
}

impl Core {
    /// Completes a request that names a pool with the pool's settings: the image, unless the files come from a
    /// snapshot, and limits that the request leaves open.
    pub(crate) fn complete(&self, request: &mut Create) -> Result<(), ServiceError> {
        let Some(name) = &request.pool else { return Ok(()) };
        let kept = self.pools.find(name).ok_or_else(|| ServiceError::NoPool(name.clone()))?;
        let (own, template) = (&mut request.spec.resources, &kept.pool.template);
        if request.spec.snapshot.is_none() {
            request.spec.image = template.image.clone();
        }
        own.memory = own.memory.or(template.resources.memory);
        own.cpus = own.cpus.or(template.resources.cpus);
        own.pids = own.pids.or(template.resources.pids);
        own.disk = own.disk.or(template.resources.disk);
        Ok(())
    }

    /// A warm sandbox of the pool that the request names, or of one that fits. `None` if there is none, which is not an
    /// error.
    pub(crate) async fn take_warm(self: &Arc<Self>, request: &Create) -> Option<Taken> {
        let (kept, named) = match &request.pool {
            Some(name) => (self.pools.find(name)?, None),
            None => self.fitting(request).await?,
        };
        if !kept.pool.fits(&request.spec) || !self.can_be_bound(&kept, request) {
            kept.count_cold();
            return None;
        }
        let Some(warm) = kept.pop() else {
            kept.count_cold();
            return None;
        };
        Some(Taken { core: Arc::clone(self), kept, warm: Some(warm), named })
    }

    /// The pool with the most warm sandboxes of this image, under any name. If the pool uses another name for it, the
    /// image that the requested name resolves to is returned as well.
    async fn fitting(&self, request: &Create) -> Option<(Arc<Kept>, Option<ResolvedImage>)> {
        let mut pools = self.pools.all();
        pools.retain(|kept| kept.pool.fits(&request.spec));
        if pools.is_empty() {
            return None;
        }
        let image = &request.spec.image;
        let mut named = None;
        if pools.iter().any(|kept| kept.pool.template.image == *image) {
            pools.retain(|kept| kept.pool.template.image == *image);
        } else {
            let resolved = self.backend.resolve(image).await.ok()?;
            pools.retain(|kept| kept.image().is_some_and(|image| image == resolved.name));
            named = Some(resolved);
        }
        let kept = pools.into_iter().max_by_key(|kept| kept.lock().ready.len())?;
        Some((kept, named))
    }

    /// Whether the backend can add the resources that a warm sandbox lacks.
    fn can_be_bound(&self, kept: &Kept, request: &Create) -> bool {
        let mounts = request.spec.mounts.is_empty() || self.capabilities.attach;
        mounts && self.can_connect(kept.pool.template.network, request.spec.network)
    }

    /// Whether a sandbox that was made with one network mode can get another. A network can be added later, but not
    /// removed.
    fn can_connect(&self, present: Network, wanted: Network) -> bool {
        match (present, wanted) {
            (Network::Off | Network::Auto, Network::On) => self.capabilities.network,
            // The sandbox gets a network if possible, and stays without one otherwise.
            (Network::Off | Network::On, Network::Auto) => true,
            (present, wanted) => present == wanted,
        }
    }

    /// Removes a warm sandbox because a caller needs its room; waits for one that is being made. `false` if there is
    /// none.
    pub(crate) async fn give_up_warm(self: &Arc<Self>) -> bool {
        loop {
            let settled = self.pools.settled.notified();
            let pools = self.pools.all();
            let fullest = pools.iter().max_by_key(|kept| kept.lock().ready.len());
            if let Some(warm) = fullest.and_then(|kept| kept.pop()) {
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

impl Kept {
    /// Puts a sandbox back, or returns it if the pool is closed: the keeper may have emptied the pool already.
    fn put_back(&self, warm: Warm) -> Option<Warm> {
        let mut state = self.lock();
        if self.closed.is_cancelled() {
            return Some(warm);
        }
        state.ready.push_back(warm);
        measure::warm(&self.pool.name, state.ready.len());
        None
    }

    /// The image that the warm sandboxes really have, or that the next one would have.
    fn image(&self) -> Option<String> {
        let state = self.lock();
        let ready = state.ready.front().map(|warm| &warm.in_force.image);
        ready.or(state.image.as_ref()).cloned()
    }
}
