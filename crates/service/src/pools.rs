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

mod keeper;
mod taking;
mod warm;

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::SystemTime;

use domain::{Capacity, Pool, SandboxId};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::core::Core;
use crate::store::KeptPool;
use crate::{InForce, Service, ServiceError, measure};

pub(crate) use taking::{Claimed, Taken, WaitsForRoom};

/// The state of a pool at one moment.
#[derive(Clone, Debug)]
pub struct PoolReport {
    pub pool: Pool,
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
pub(crate) struct Warm {
    pub(crate) id: SandboxId,
    pub(crate) in_force: InForce,
}

/// All pools.
pub(crate) struct Pools {
    by_name: Mutex<BTreeMap<String, Arc<Kept>>>,
    /// Notified when a sandbox that was being made is ready or was given up.
    settled: Notify,
}

/// A pool in operation.
pub(crate) struct Kept {
    /// As it was created; its capacity may have changed since.
    pool: Pool,
    source: PoolSource,
    created: SystemTime,
    state: Mutex<State>,
    /// Wakes the keeper.
    changed: Notify,
    /// Ends the keeper; no sandbox is added from then on.
    closed: CancellationToken,
    /// Cancelled when the keeper of a closed pool has removed everything.
    emptied: CancellationToken,
}

struct State {
    capacity: Capacity,
    /// The resolved name of its image when the pool was last filled.
    image: Option<String>,
    /// Sorted by waiting time, longest first.
    ready: VecDeque<Warm>,
    /// A sandbox that died before it was ready is missing here.
    making: HashSet<SandboxId>,
    claims: u64,
    cold: u64,
    trouble: Option<String>,
}

impl Pools {
    /// The pools of the configuration, and the stored pools whose names are not used in the configuration.
    pub(crate) fn new(configured: &[Pool], kept: Vec<KeptPool>, now: SystemTime) -> Self {
        let mut by_name = BTreeMap::new();
        for KeptPool { pool, created } in kept {
            by_name.insert(pool.name.clone(), Kept::new(pool, PoolSource::Client, created));
        }
        for pool in configured {
            let own = Kept::new(pool.clone(), PoolSource::Configuration, now);
            if by_name.insert(pool.name.clone(), own).is_some() {
                tracing::warn!(
                    pool = pool.name,
                    "pool of the configuration replaces a pool of the same name that a client made"
                );
            }
        }
        Self { by_name: Mutex::new(by_name), settled: Notify::new() }
    }

    pub(crate) fn find(&self, name: &str) -> Option<Arc<Kept>> {
        self.lock().get(name).cloned()
    }

    pub(crate) fn all(&self) -> Vec<Arc<Kept>> {
        self.lock().values().cloned().collect()
    }

    /// Makes every keeper check whether there is room now.
    pub(crate) fn look_again(&self) {
        self.lock().values().for_each(|kept| kept.changed.notify_one());
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Kept>>> {
        self.by_name.lock().expect("no thread panics while looking up a pool")
    }
}

impl Kept {
    fn new(pool: Pool, source: PoolSource, created: SystemTime) -> Arc<Self> {
        let state = State {
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
    fn current(&self) -> Pool {
        Pool { capacity: self.lock().capacity, ..self.pool.clone() }
    }

    fn report(&self, core: &Core) -> PoolReport {
        let pool = self.current();
        let taken = core.registry.taken_from(&pool.name);
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

    fn push(&self, warm: Warm) {
        let mut state = self.lock();
        state.ready.push_back(warm);
        measure::warm(&self.pool.name, state.ready.len());
    }

    /// Takes the sandbox that has waited longest.
    fn pop(&self) -> Option<Warm> {
        let mut state = self.lock();
        let warm = state.ready.pop_front();
        measure::warm(&self.pool.name, state.ready.len());
        warm
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no thread panics while counting warm sandboxes")
    }
}

impl Service {
    pub fn pools(&self) -> Vec<PoolReport> {
        self.0.pools.all().iter().map(|kept| kept.report(&self.0)).collect()
    }

    pub fn pool(&self, name: &str) -> Result<PoolReport, ServiceError> {
        Ok(self.0.kept_pool(name)?.report(&self.0))
    }

    /// Makes a pool that survives server restarts, and begins to fill it.
    pub async fn create_pool(&self, pool: Pool) -> Result<PoolReport, ServiceError> {
        self.0.create_pool(pool).await
    }

    /// Changes how many sandboxes a pool has.
    pub async fn set_pool(&self, name: &str, capacity: Capacity) -> Result<PoolReport, ServiceError> {
        self.0.set_pool(name, capacity).await
    }

    /// Removes a pool with its warm sandboxes. Sandboxes that were taken from it stay.
    pub async fn remove_pool(&self, name: &str) -> Result<(), ServiceError> {
        self.0.remove_pool(name).await
    }

    /// Removes warm sandboxes, which have no owner, before the server ends. The pools stay.
    pub async fn drain_pools(&self) {
        let pools = self.0.pools.all();
        pools.iter().for_each(|kept| kept.closed.cancel());
        let emptied = futures_util::future::join_all(pools.iter().map(|kept| kept.emptied.cancelled()));
        if tokio::time::timeout(DRAIN, emptied).await.is_err() {
            tracing::warn!("failed to remove all warm sandboxes in time; the next server removes them");
        }
    }
}

/// How long removing warm sandboxes may delay the end of the server.
const DRAIN: std::time::Duration = std::time::Duration::from_secs(5);

impl Core {
    /// Starts the keepers of all pools.
    pub(crate) fn keep_pools(self: &Arc<Self>) {
        self.pools.all().into_iter().for_each(|kept| self.keep_pool(kept));
    }

    fn keep_pool(self: &Arc<Self>, kept: Arc<Kept>) {
        self.tasks.spawn(keeper::keep(Arc::clone(self), kept));
    }

    fn kept_pool(&self, name: &str) -> Result<Arc<Kept>, ServiceError> {
        self.pools.find(name).ok_or_else(|| ServiceError::NoPool(name.to_owned()))
    }

    async fn create_pool(self: &Arc<Self>, pool: Pool) -> Result<PoolReport, ServiceError> {
        check(&pool)?;
        let (name, created) = (pool.name.clone(), self.clock.now().wall);
        let kept = Kept::new(pool.clone(), PoolSource::Client, created);
        {
            let mut pools = self.pools.lock();
            if pools.contains_key(&name) {
                return Err(ServiceError::PoolExists(name));
            }
            pools.insert(name.clone(), Arc::clone(&kept));
        }
        if let Err(source) = self.store.put_pool(&KeptPool { pool, created }).await {
            self.pools.lock().remove(&name);
            return Err(ServiceError::Store { action: "store the pool", source });
        }
        let report = kept.report(self);
        self.keep_pool(kept);
        Ok(report)
    }

    async fn set_pool(&self, name: &str, capacity: Capacity) -> Result<PoolReport, ServiceError> {
        let kept = self.changeable_pool(name)?;
        let pool = Pool { capacity, ..kept.pool.clone() };
        check(&pool)?;
        let failed = |source| ServiceError::Store { action: "store the pool", source };
        self.store.put_pool(&KeptPool { pool, created: kept.created }).await.map_err(failed)?;
        kept.lock().capacity = capacity;
        kept.changed.notify_one();
        Ok(kept.report(self))
    }

    async fn remove_pool(&self, name: &str) -> Result<(), ServiceError> {
        let kept = self.changeable_pool(name)?;
        let failed = |source| ServiceError::Store { action: "delete the pool", source };
        self.store.delete_pool(name).await.map_err(failed)?;
        kept.closed.cancel();
        self.pools.lock().remove(name);
        // The keeper does the work, so it continues if the caller disconnects.
        kept.emptied.cancelled().await;
        Ok(())
    }

    fn changeable_pool(&self, name: &str) -> Result<Arc<Kept>, ServiceError> {
        let kept = self.kept_pool(name)?;
        match kept.source {
            PoolSource::Client => Ok(kept),
            PoolSource::Configuration => Err(ServiceError::PoolConfigured(name.to_owned())),
        }
    }
}

fn check(pool: &Pool) -> Result<(), ServiceError> {
    pool.check().map_err(|error| ServiceError::Invalid(error.to_string()))
}
