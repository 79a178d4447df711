//! Pools of warm sandboxes.
//!
//! ```text
//! keeper ── makes ──► ready ── taken ──► driver: the owner is written, then the rest is bound
//!   ▲                   │ died, or its room is needed        │ failed
//!   └── woken by every change ◄── removed ◄──────────────────┘
//! ```
//! A warm sandbox is a real sandbox without an owner: its row names its pool, so that a crash loses no count, and it is
//! in no list. From the moment its row names an owner it never returns to the pool: it becomes that owner's, or it is
//! removed.

mod claim;
mod keeper;
mod warm;

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::SystemTime;

use domain::{PoolCapacity, PoolSpec, SandboxId};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::core::Core;
use crate::store::StoredPool;
use crate::telemetry::service_metrics;
use crate::{Enforced, Service, ServiceError};

pub(crate) use claim::{ClaimedWarm, ReservedWarm, RoomWaiter};

/// The state of a pool at one moment.
#[derive(Clone, Debug)]
pub struct PoolReport {
    pub pool: PoolSpec,
    pub source: PoolSource,
    pub created: SystemTime,
    /// How many sandboxes are ready to be taken.
    pub warm: usize,
    /// How many sandboxes taken from the pool still exist.
    pub taken: usize,
    /// How often a sandbox was taken since the server started.
    pub claims: u64,
    /// How often a request that fits the pool got no warm sandbox from it.
    pub cold: u64,
    /// Why the pool cannot be filled at the moment.
    pub trouble: Option<String>,
}

/// The origin of a pool, which decides whether clients may change it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PoolSource {
    /// It is defined in the configuration.
    Configuration,
    Client,
}

/// A sandbox that no client has used.
#[derive(Clone, Debug)]
pub(crate) struct WarmSandbox {
    pub(crate) id: SandboxId,
    pub(crate) in_force: Enforced,
}

/// All pools.
pub(crate) struct PoolRegistry {
    by_name: Mutex<BTreeMap<String, Arc<PoolState>>>,
    /// Notified when a sandbox that was being made is ready or was given up.
    settled: Notify,
}

/// A pool in operation.
pub(crate) struct PoolState {
    /// As it was created; its capacity may have changed since.
    pool: PoolSpec,
    source: PoolSource,
    created: SystemTime,
    state: Mutex<PoolContents>,
    /// Wakes the keeper.
    changed: Notify,
    /// Ends the keeper; no sandbox is added from then on.
    closed: CancellationToken,
    /// Cancelled when the keeper of a closed pool has removed everything.
    emptied: CancellationToken,
}

struct PoolContents {
    capacity: PoolCapacity,
    /// The resolved name of its image when the pool was last filled.
    image: Option<String>,
    /// Sorted by waiting time, longest first.
    ready: VecDeque<WarmSandbox>,
    /// A sandbox that died before it was ready is missing here.
    making: HashSet<SandboxId>,
    claims: u64,
    cold: u64,
    trouble: Option<String>,
}

impl PoolRegistry {
    /// The pools of the configuration, and the stored pools whose names are not used in the configuration.
    pub(crate) fn new(configured: &[PoolSpec], kept: Vec<StoredPool>, now: SystemTime) -> Self {
        let mut by_name = BTreeMap::new();
        for StoredPool { pool, created } in kept {
            by_name.insert(pool.name.clone(), PoolState::new(pool, PoolSource::Client, created));
        }
        for pool in configured {
            let own = PoolState::new(pool.clone(), PoolSource::Configuration, now);
            if by_name.insert(pool.name.clone(), own).is_some() {
                tracing::warn!(
                    pool = pool.name,
                    "pool of the configuration replaces a pool of the same name that a client made"
                );
            }
        }
        Self { by_name: Mutex::new(by_name), settled: Notify::new() }
    }

    pub(crate) fn find(&self, name: &str) -> Option<Arc<PoolState>> {
        self.lock().get(name).cloned()
    }

    pub(crate) fn all(&self) -> Vec<Arc<PoolState>> {
        self.lock().values().cloned().collect()
    }

    /// Makes every keeper check whether there is room now.
    pub(crate) fn wake_keepers(&self) {
        self.lock().values().for_each(|kept| kept.changed.notify_one());
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Arc<PoolState>>> {
        self.by_name.lock().expect("no thread panics while looking up a pool")
    }
}

impl PoolState {
    fn new(pool: PoolSpec, source: PoolSource, created: SystemTime) -> Arc<Self> {
        let state = PoolContents {
            capacity: pool.capacity,
            image: None,
            ready: VecDeque::new(),
            making: HashSet::new(),
            claims: 0,
            cold: 0,
            trouble: None,
        };
        Arc::new(Self {
            pool,
            source,
            created,
            state: Mutex::new(state),
            changed: Notify::new(),
            closed: CancellationToken::new(),
            emptied: CancellationToken::new(),
        })
    }

    /// The pool with its current capacity.
    fn current_spec(&self) -> PoolSpec {
        PoolSpec { capacity: self.lock().capacity, ..self.pool.clone() }
    }

    fn report(&self, core: &Core) -> PoolReport {
        let pool = self.current_spec();
        let taken = core.lifecycle.registry.count_taken_from(&pool.name);
        let state = self.lock();
        PoolReport {
            pool,
            source: self.source,
            created: self.created,
            warm: state.ready.len(),
            taken,
            claims: state.claims,
            cold: state.cold,
            trouble: state.trouble.clone(),
        }
    }

    fn push_warm(&self, warm: WarmSandbox) {
        let mut state = self.lock();
        state.ready.push_back(warm);
        service_metrics::set_warm_count(&self.pool.name, state.ready.len());
    }

    /// Takes the sandbox that has waited longest.
    fn pop_warm(&self) -> Option<WarmSandbox> {
        let mut state = self.lock();
        let warm = state.ready.pop_front();
        service_metrics::set_warm_count(&self.pool.name, state.ready.len());
        warm
    }

    fn lock(&self) -> MutexGuard<'_, PoolContents> {
        self.state.lock().expect("no thread panics while counting warm sandboxes")
    }
}

impl Service {
    pub fn list_pools(&self) -> Vec<PoolReport> {
        self.0.catalog.pools.all().iter().map(|kept| kept.report(&self.0)).collect()
    }

    pub fn find_pool(&self, name: &str) -> Result<PoolReport, ServiceError> {
        Ok(self.0.find_pool(name)?.report(&self.0))
    }

    /// Makes a pool that survives server restarts, and begins to fill it.
    pub async fn create_pool(&self, pool: PoolSpec) -> Result<PoolReport, ServiceError> {
        self.0.create_pool(pool).await
    }

    /// Changes how many sandboxes a pool has.
    pub async fn set_pool_capacity(
        &self,
        name: &str,
        capacity: PoolCapacity,
    ) -> Result<PoolReport, ServiceError> {
        self.0.set_pool_capacity(name, capacity).await
    }

    /// Removes a pool with its warm sandboxes. Sandboxes that were taken from it stay.
    pub async fn remove_pool(&self, name: &str) -> Result<(), ServiceError> {
        self.0.remove_pool(name).await
    }

    /// Removes warm sandboxes, which have no owner, before the server ends. The pools stay.
    pub async fn drain_pools(&self) {
        let pools = self.0.catalog.pools.all();
        pools.iter().for_each(|kept| kept.closed.cancel());
        let emptied = futures_util::future::join_all(pools.iter().map(|kept| kept.emptied.cancelled()));
        if tokio::time::timeout(DRAIN_TIMEOUT, emptied).await.is_err() {
            tracing::warn!("failed to remove all warm sandboxes in time; the next server removes them");
        }
    }
}

/// How long removing warm sandboxes may delay the end of the server.
const DRAIN_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(5);

impl Core {
    /// Starts the keepers of all pools.
    pub(crate) fn start_pool_keepers(self: &Arc<Self>) {
        self.catalog.pools.all().into_iter().for_each(|kept| self.start_pool_keeper(kept));
    }

    fn start_pool_keeper(self: &Arc<Self>, kept: Arc<PoolState>) {
        self.tasks.spawn(keeper::run_keeper(Arc::clone(self), kept));
    }

    fn find_pool(&self, name: &str) -> Result<Arc<PoolState>, ServiceError> {
        self.catalog.pools.find(name).ok_or_else(|| ServiceError::NoPool(name.to_owned()))
    }

    async fn create_pool(self: &Arc<Self>, pool: PoolSpec) -> Result<PoolReport, ServiceError> {
        check_pool(&pool)?;
        self.check_network(&pool.template)?;
        let (name, created) = (pool.name.clone(), self.clock.now().wall);
        let kept = PoolState::new(pool.clone(), PoolSource::Client, created);
        {
            let mut pools = self.catalog.pools.lock();
            if pools.contains_key(&name) {
                return Err(ServiceError::PoolExists(name));
            }
            pools.insert(name.clone(), Arc::clone(&kept));
        }
        if let Err(source) = self.store.put_pool(&StoredPool { pool, created }).await {
            self.catalog.pools.lock().remove(&name);
            return Err(ServiceError::Store { action: "store the pool", source });
        }
        let report = kept.report(self);
        self.start_pool_keeper(kept);
        Ok(report)
    }

    async fn set_pool_capacity(
        &self,
        name: &str,
        capacity: PoolCapacity,
    ) -> Result<PoolReport, ServiceError> {
        let kept = self.changeable_pool(name)?;
        let pool = PoolSpec { capacity, ..kept.pool.clone() };
        check_pool(&pool)?;
        let failed = |source| ServiceError::Store { action: "store the pool", source };
        self.store.put_pool(&StoredPool { pool, created: kept.created }).await.map_err(failed)?;
        kept.lock().capacity = capacity;
        kept.changed.notify_one();
        Ok(kept.report(self))
    }

    async fn remove_pool(&self, name: &str) -> Result<(), ServiceError> {
        let kept = self.changeable_pool(name)?;
        let failed = |source| ServiceError::Store { action: "delete the pool", source };
        self.store.delete_pool(name).await.map_err(failed)?;
        kept.closed.cancel();
        self.catalog.pools.lock().remove(name);
        // The keeper does the work, so it continues if the caller disconnects.
        kept.emptied.cancelled().await;
        Ok(())
    }

    fn changeable_pool(&self, name: &str) -> Result<Arc<PoolState>, ServiceError> {
        let kept = self.find_pool(name)?;
        match kept.source {
            PoolSource::Client => Ok(kept),
            PoolSource::Configuration => Err(ServiceError::PoolConfigured(name.to_owned())),
        }
    }
}

fn check_pool(pool: &PoolSpec) -> Result<(), ServiceError> {
    pool.check().map_err(|error| ServiceError::Invalid(error.to_string()))
}
