//! Pools of warm sandboxes.
//!
//! ```text
//! keeper ── makes ──► ready ── taken ──► driver: whose it is is written, then all else is bound
//!   ▲                   │ died, or its room is needed            │ failed
//!   └── woken by every change ◄── removed ◄──────────────────────┘
//! ```
//! A warm sandbox is a real one that belongs to nobody: its row names its pool, so that a crash
//! loses no count, and it stands in no list. From the moment in which its row names an owner it
//! never comes back: it becomes that owner's, or it is removed.

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

/// A pool as it is at one moment.
#[derive(Clone, Debug)]
pub struct PoolReport {
    pub pool: Pool,
    pub source: PoolSource,
    pub created: SystemTime,
    /// Ready to be taken.
    pub warm: usize,
    /// Taken from it, and still there.
    pub taken: usize,
    /// How often one was taken since the server started.
    pub claims: u64,
    /// How often somebody who could have used a warm one got another.
    pub cold: u64,
    /// Why it cannot be filled at the moment.
    pub trouble: Option<String>,
}

/// Who may change a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PoolSource {
    /// It is written in the configuration.
    Configuration,
    Client,
}

/// A sandbox that nobody has used.
#[derive(Clone, Debug)]
pub(crate) struct Warm {
    pub(crate) id: SandboxId,
    pub(crate) in_force: InForce,
}

/// All pools.
pub(crate) struct Pools {
    by_name: Mutex<BTreeMap<String, Arc<Kept>>>,
    /// One that was being made is ready, or was given up.
    settled: Notify,
}

/// A pool at work.
pub(crate) struct Kept {
    /// As it was made; how many there are to be may have changed since.
    pool: Pool,
    source: PoolSource,
    created: SystemTime,
    state: Mutex<State>,
    /// Wakes the keeper.
    changed: Notify,
    /// Ends the keeper; nothing is added from then on.
    closed: CancellationToken,
    /// The keeper of a closed pool has removed everything.
    emptied: CancellationToken,
}

struct State {
    capacity: Capacity,
    /// What the name of its image stood for when it was last filled.
    image: Option<String>,
    /// The longest waiting first.
    ready: VecDeque<Warm>,
    /// One that died before it was ready is missing here.
    making: HashSet<SandboxId>,
    claims: u64,
    cold: u64,
    trouble: Option<String>,
}

impl Pools {
    /// Those of the configuration, and those that were kept unless their name is taken by one of
    /// them.
    pub(crate) fn new(configured: &[Pool], kept: Vec<KeptPool>, now: SystemTime) -> Self {
        let mut by_name = BTreeMap::new();
        for KeptPool { pool, created } in kept {
            by_name.insert(pool.name.clone(), Kept::new(pool, PoolSource::Client, created));
        }
        for pool in configured {
            let own = Kept::new(pool.clone(), PoolSource::Configuration, now);
            if by_name.insert(pool.name.clone(), own).is_some() {
                tracing::warn!(pool = pool.name, "the configuration hides a pool that a client made");
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

    /// Has every keeper look whether there is room now.
    pub(crate) fn look_again(&self) {
        self.lock().values().for_each(|kept| kept.changed.notify_one());
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Kept>>> {
        self.by_name.lock().expect("nobody panics while looking up a pool")
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

    /// The pool with the numbers that hold now.
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

    /// The longest waiting one.
    fn pop(&self) -> Option<Warm> {
        let mut state = self.lock();
        let warm = state.ready.pop_front();
        measure::warm(&self.pool.name, state.ready.len());
        warm
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("nobody panics while counting warm sandboxes")
    }
}

impl Service {
    pub fn pools(&self) -> Vec<PoolReport> {
        self.0.pools.all().iter().map(|kept| kept.report(&self.0)).collect()
    }

    pub fn pool(&self, name: &str) -> Result<PoolReport, ServiceError> {
        Ok(self.0.kept_pool(name)?.report(&self.0))
    }

    /// Makes a pool that survives restarts, and begins to fill it.
    pub async fn create_pool(&self, pool: Pool) -> Result<PoolReport, ServiceError> {
        self.0.create_pool(pool).await
    }

    /// Changes how many sandboxes a pool has.
    pub async fn set_pool(&self, name: &str, capacity: Capacity) -> Result<PoolReport, ServiceError> {
        self.0.set_pool(name, capacity).await
    }

    /// Removes a pool with its warm sandboxes. Those that were taken stay.
    pub async fn remove_pool(&self, name: &str) -> Result<(), ServiceError> {
        self.0.remove_pool(name).await
    }

    /// Removes warm sandboxes, which belong to nobody, before the server ends. The pools stay.
    pub async fn drain_pools(&self) {
        let pools = self.0.pools.all();
        pools.iter().for_each(|kept| kept.closed.cancel());
        let emptied = futures_util::future::join_all(pools.iter().map(|kept| kept.emptied.cancelled()));
        if tokio::time::timeout(DRAIN, emptied).await.is_err() {
            tracing::warn!("not all warm sandboxes could be removed; the next server does it");
        }
    }
}

/// How long removing warm sandboxes may hold up the end of the server.
const DRAIN: std::time::Duration = std::time::Duration::from_secs(5);

impl Core {
    /// Begins to look after the pools there are.
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
            return Err(ServiceError::Store { action: "keep the pool", source });
        }
        let report = kept.report(self);
        self.keep_pool(kept);
        Ok(report)
    }

    async fn set_pool(&self, name: &str, capacity: Capacity) -> Result<PoolReport, ServiceError> {
        let kept = self.changeable_pool(name)?;
        let pool = Pool { capacity, ..kept.pool.clone() };
        check(&pool)?;
        let failed = |source| ServiceError::Store { action: "keep the pool", source };
        self.store.put_pool(&KeptPool { pool, created: kept.created }).await.map_err(failed)?;
        kept.lock().capacity = capacity;
        kept.changed.notify_one();
        Ok(kept.report(self))
    }

    async fn remove_pool(&self, name: &str) -> Result<(), ServiceError> {
        let kept = self.changeable_pool(name)?;
        let failed = |source| ServiceError::Store { action: "forget the pool", source };
        self.store.delete_pool(name).await.map_err(failed)?;
        kept.closed.cancel();
        self.pools.lock().remove(name);
        // Its keeper does the work: whoever asked may go away meanwhile.
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
