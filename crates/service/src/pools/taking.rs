//! Taking a warm sandbox, for somebody who asks for one like it or for the room that it has.

use std::sync::Arc;

use backend::ResolvedImage;
use domain::Network;

use super::{Kept, Warm};
use crate::core::Core;
use crate::store::Record;
use crate::{Create, ServiceError, measure};

/// A warm sandbox in one pair of hands. If nothing comes of it, it goes back: nothing was bound.
/// Where its pool was closed meanwhile it is removed.
pub(crate) struct Taken {
    core: Arc<Core>,
    kept: Arc<Kept>,
    warm: Option<Warm>,
    /// The image by the name that was asked for, if its pool has another name for it.
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
        self.warm.as_ref().expect("it is there until it is kept")
    }

    /// Makes a new record that of the warm sandbox.
    pub(crate) fn mark(&self, record: &mut Record) {
        record.sandbox.id = self.warm().id.clone();
        record.sandbox.in_force = self.warm().in_force.clone();
        if let Some(named) = &self.named {
            record.sandbox.in_force.stand_in = named.stand_in.clone();
        }
        record.sandbox.pool = Some(self.kept.pool.name.clone());
    }

    /// From now on it never goes back.
    pub(crate) fn keep(mut self) -> Claimed {
        self.warm = None;
        self.kept.lock().claims += 1;
        self.kept.changed.notify_one();
        measure::claimed(&self.kept.pool.name);
        Claimed(Arc::clone(&self.kept))
    }
}

/// Somebody needs room for as long as this lives, and nothing is warmed meanwhile.
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

/// A warm sandbox that has an owner, to whom everything else is still to be bound.
pub(crate) struct Claimed(Arc<Kept>);

impl Claimed {
    /// What it was made of.
    pub(crate) fn template(&self) -> &domain::Spec {
        &self.0.pool.template
    }

    pub(crate) fn pool(&self) -> &str {
        &self.0.pool.name
    }

    /// It was of no use.
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
    /// Adds to a wish that names a pool what the pool decides: the image, unless its files are those
    /// of a snapshot, and limits that are left open.
    pub(crate) fn complete(&self, wish: &mut Create) -> Result<(), ServiceError> {
        let Some(name) = &wish.pool else { return Ok(()) };
        let kept = self.pools.find(name).ok_or_else(|| ServiceError::NoPool(name.clone()))?;
        let (own, template) = (&mut wish.spec.resources, &kept.pool.template);
        if wish.spec.snapshot.is_none() {
            wish.spec.image = template.image.clone();
        }
        own.memory = own.memory.or(template.resources.memory);
        own.cpus = own.cpus.or(template.resources.cpus);
        own.pids = own.pids.or(template.resources.pids);
        own.disk = own.disk.or(template.resources.disk);
        Ok(())
    }

    /// A warm sandbox of the pool that the wish names, or of one that fits. There may be none, and
    /// that is no error.
    pub(crate) async fn take_warm(self: &Arc<Self>, wish: &Create) -> Option<Taken> {
        let (kept, named) = match &wish.pool {
            Some(name) => (self.pools.find(name)?, None),
            None => self.fitting(wish).await?,
        };
        if !kept.pool.fits(&wish.spec) || !self.can_be_bound(&kept, wish) {
            kept.count_cold();
            return None;
        }
        let Some(warm) = kept.pop() else {
            kept.count_cold();
            return None;
        };
        Some(Taken { core: Arc::clone(self), kept, warm: Some(warm), named })
    }

    /// The pool with the most warm sandboxes of this image, by whatever name. If the pool has
    /// another name for it, the image that the wish's name leads to comes along.
    async fn fitting(&self, wish: &Create) -> Option<(Arc<Kept>, Option<ResolvedImage>)> {
        let mut pools = self.pools.all();
        pools.retain(|kept| kept.pool.fits(&wish.spec));
        if pools.is_empty() {
            return None;
        }
        let image = &wish.spec.image;
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

    /// Whether the backend can add what a warm sandbox lacks.
    fn can_be_bound(&self, kept: &Kept, wish: &Create) -> bool {
        let mounts = wish.spec.mounts.is_empty() || self.capabilities.attach;
        mounts && self.can_connect(kept.pool.template.network, wish.spec.network)
    }

    /// Whether a sandbox that was made with one network can have another. A network can be given
    /// late, but not be taken away.
    fn can_connect(&self, there: Network, wanted: Network) -> bool {
        match (there, wanted) {
            (Network::Off | Network::Auto, Network::On) => self.capabilities.network,
            // It gets one if it can, and stays without otherwise.
            (Network::Off | Network::On, Network::Auto) => true,
            (there, wanted) => there == wanted,
        }
    }

    /// Removes a warm sandbox, because somebody needs its room; waits for one that is being made.
    /// `false` if there is none.
    pub(crate) async fn give_up_warm(self: &Arc<Self>) -> bool {
        loop {
            let settled = self.pools.settled.notified();
            let pools = self.pools.all();
            let fullest = pools.iter().max_by_key(|kept| kept.lock().ready.len());
            if let Some(warm) = fullest.and_then(|kept| kept.pop()) {
                tracing::info!(sandbox = %warm.id, "a warm sandbox makes room");
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
    /// Puts one back, or answers it if the pool is closed: nobody may empty it any more then.
    fn put_back(&self, warm: Warm) -> Option<Warm> {
        let mut state = self.lock();
        if self.closed.is_cancelled() {
            return Some(warm);
        }
        state.ready.push_back(warm);
        measure::warm(&self.pool.name, state.ready.len());
        None
    }

    /// The image that the warm ones really have, or the next would.
    fn image(&self) -> Option<String> {
        let state = self.lock();
        let ready = state.ready.front().map(|warm| &warm.in_force.image);
        ready.or(state.image.as_ref()).cloned()
    }
}
