//! Every existing sandbox, in memory: by id, and by owner sorted by age.

use std::any::Any;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, OnceLock, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::{Duration, SystemTime};

use domain::{EndCause, FilesState, Labels, OnDeath, Owner, Phase, ProcessId, SandboxId, SandboxKey};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use crate::agent::client::AgentClient;
use crate::exec::command_slots::CommandSlots;
use crate::sandboxes::activity::SandboxActivity;
use crate::sandboxes::driver::DriverCommand;
use crate::sandboxes::lease::SandboxLease;
use crate::telemetry::cpu_share::CpuMeter;
use crate::tenancy::quota::{OwnerQuota, QuotaExcess, ResourceCost};
use crate::{RETRY_KEY_SPACE, Sandbox, SandboxFilter, SandboxPage};

/// The part of a sandbox's state that is shared outside its driver.
pub(crate) struct SandboxHandle {
    pub(crate) id: SandboxId,
    pub(crate) owner: Owner,
    pub(crate) created: SystemTime,
    pub(crate) epoch: u64,
    /// The key that leads to this sandbox.
    pub(crate) key: Option<SandboxKey>,
    /// The pool that the sandbox was taken from.
    pub(crate) pool: Option<String>,
    pub(crate) lease: SandboxLease,
    pub(crate) cost: ResourceCost,
    /// The time to live that the sandbox was created with.
    pub(crate) timeout: Option<Duration>,
    pub(crate) idle_timeout: Option<Duration>,
    /// The main process, which is the sandbox itself and not a use of it.
    pub(crate) entrypoint: Option<ProcessId>,
    pub(crate) agent: AgentClient,
    pub(crate) activity: Arc<SandboxActivity>,
    pub(crate) commands: Arc<CommandSlots>,
    pub(crate) cpu_meter: CpuMeter,
    /// Sends commands to the driver.
    pub(crate) mailbox: mpsc::Sender<DriverCommand>,
    /// The notes of the state, in the form that the front parsed them into.
    pub(crate) parsed_notes: OnceLock<Arc<dyn Any + Send + Sync>>,
    /// The state that the driver last published.
    pub(crate) state: watch::Receiver<Sandbox>,
    /// Cancelled to notify the driver that the client disconnected before the sandbox was handed over.
    pub(crate) abandoned: CancellationToken,
    /// Notifies the driver of a death, without waiting for room in the mailbox.
    pub(crate) death: watch::Sender<Option<EndCause>>,
}

#[derive(Default)]
pub(crate) struct SandboxRegistry(RwLock<RegistryState>);

#[derive(Default)]
struct RegistryState {
    by_id: HashMap<SandboxId, Arc<SandboxHandle>>,
    /// The sandboxes of each owner, newest last.
    by_age: HashMap<Owner, Vec<RegistryEntry>>,
    /// How many sandboxes are warm or about to be. They have no owner and are in no list, but take up room.
    warm: usize,
    /// How many callers wait for room. No sandbox is warmed meanwhile.
    waiting: usize,
}

/// How a new sandbox finds room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RoomRequirement {
    /// There must be fewer sandboxes than this.
    Below(usize),
    /// The sandbox was a warm one until now and keeps that room.
    OfWarm,
}

/// An entry of an owner's list. It repeats the phase, so that counting the entries that pass a filter walks over one
/// piece of memory instead of a thousand.
struct RegistryEntry {
    phase: Phase,
    handle: Arc<SandboxHandle>,
}

/// There is no room for another sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum NoRoom {
    Full,
    /// The owner would exceed its quota.
    OverQuota(QuotaExcess),
}

impl SandboxHandle {
    pub(crate) fn phase(&self) -> Phase {
        self.state.borrow().phase
    }

    /// Whether the sandbox has died. Its files may still exist.
    pub(crate) fn is_dead(&self) -> bool {
        matches!(self.phase(), Phase::Failed(_))
    }

    /// Whether the sandbox has died and its files are lost.
    pub(crate) fn has_lost_files(&self) -> bool {
        self.is_dead() && self.state.borrow().files == FilesState::Lost
    }

    /// Whether the sandbox has died and will be restarted, with its files, at the next use of its name.
    pub(crate) fn will_restart(&self) -> bool {
        let state = self.state.borrow();
        let restarts = state.files == FilesState::Kept && state.spec.on_death() == OnDeath::Restart;
        let named = self.key.as_ref().is_some_and(|key| key.space() != RETRY_KEY_SPACE);
        matches!(state.phase, Phase::Failed(_)) && restarts && named
    }

    /// Waits until the published phase says that the sandbox ends or has ended.
    pub(crate) async fn wait_until_ending(&self) {
        let ends =
            |sandbox: &Sandbox| matches!(sandbox.phase, Phase::Stopping | Phase::Stopped | Phase::Failed(_));
        // A driver that is gone publishes nothing more, so its sandbox has ended.
        self.state.clone().wait_for(ends).await.map(drop).unwrap_or_default();
    }

    pub(crate) fn current_state(&self) -> Sandbox {
        self.state.borrow().clone()
    }

    fn has_labels(&self, wanted: &Labels) -> bool {
        let has =
            |sandbox: &Sandbox| wanted.iter().all(|(name, value)| sandbox.labels.get(name) == Some(value));
        wanted.is_empty() || has(&self.state.borrow())
    }

    fn age_key(&self) -> (SystemTime, &SandboxId) {
        (self.created, &self.id)
    }
}

impl SandboxRegistry {
    pub(crate) fn add(
        &self,
        handle: Arc<SandboxHandle>,
        room: RoomRequirement,
        quota: &OwnerQuota,
    ) -> Result<(), NoRoom> {
        let mut state = self.write();
        if matches!(room, RoomRequirement::Below(limit) if state.population() >= limit) {
            return Err(NoRoom::Full);
        }
        if let Some(excess) = state.cost_of(&handle.owner).and(handle.cost).exceeds(quota) {
            return Err(NoRoom::OverQuota(excess));
        }
        let owned = state.by_age.entry(handle.owner.clone()).or_default();
        let index = owned.partition_point(|entry| entry.handle.age_key() < handle.age_key());
        owned.insert(index, RegistryEntry { phase: handle.phase(), handle: Arc::clone(&handle) });
        state.by_id.insert(handle.id.clone(), handle);
        if room == RoomRequirement::OfWarm {
            state.warm -= 1;
        }
        Ok(())
    }

    /// Reserves room for a warm sandbox, unless a caller waits for room.
    pub(crate) fn add_warm(&self, limit: usize) -> bool {
        let mut state = self.write();
        let fits = state.waiting == 0 && state.population() < limit;
        state.warm += usize::from(fits);
        fits
    }

    /// Releases the room of a warm sandbox.
    pub(crate) fn remove_warm(&self) {
        self.write().warm -= 1;
    }

    /// Records that a caller needs room: no sandbox is warmed until it finds room or gives up.
    pub(crate) fn begin_waiting(&self) {
        self.write().waiting += 1;
    }

    pub(crate) fn end_waiting(&self) {
        self.write().waiting -= 1;
    }

    /// The number of sandboxes that were taken from this pool.
    pub(crate) fn count_taken_from(&self, pool: &str) -> usize {
        self.read().by_id.values().filter(|handle| handle.pool.as_deref() == Some(pool)).count()
    }

    pub(crate) fn remove(&self, handle: &SandboxHandle) {
        let mut state = self.write();
        state.by_id.remove(&handle.id);
        if let Some((owned, index)) = state.index_of(handle) {
            owned.remove(index);
            if owned.is_empty() {
                state.by_age.remove(&handle.owner);
            }
        }
    }

    /// Counts a dead sandbox as running again, if its owner's quota has room for that.
    pub(crate) fn count_restarted(&self, handle: &SandboxHandle, quota: &OwnerQuota) -> Result<(), NoRoom> {
        let mut state = self.write();
        let others = state.by_age.get(&handle.owner).into_iter().flatten();
        let others = others.filter(|entry| entry.handle.id != handle.id);
        let cost = others.fold(handle.cost, |sum, entry| sum.and(entry.cost()));
        if let Some(excess) = cost.exceeds(quota) {
            return Err(NoRoom::OverQuota(excess));
        }
        if let Some((owned, index)) = state.index_of(handle) {
            owned[index].phase = Phase::Starting;
        }
        Ok(())
    }

    pub(crate) fn set_phase(&self, handle: &SandboxHandle, phase: Phase) {
        let mut state = self.write();
        if let Some((owned, index)) = state.index_of(handle) {
            owned[index].phase = phase;
        }
    }

    pub(crate) fn find(&self, id: &SandboxId) -> Option<Arc<SandboxHandle>> {
        self.read().by_id.get(id).cloned()
    }

    /// The sum of what an owner's sandboxes may use.
    pub(crate) fn owner_cost(&self, owner: &Owner) -> ResourceCost {
        self.read().cost_of(owner)
    }

    pub(crate) fn count(&self) -> usize {
        self.read().by_id.len()
    }

    /// The number of sandboxes, except those that have died or are being removed.
    pub(crate) fn count_living(&self) -> usize {
        let goes = |entry: &&RegistryEntry| matches!(entry.phase, Phase::Failed(_) | Phase::Stopping);
        let state = self.read();
        state.by_id.len() - state.by_age.values().flatten().filter(goes).count()
    }

    pub(crate) fn all(&self) -> Vec<Arc<SandboxHandle>> {
        self.read().by_id.values().cloned().collect()
    }

    /// Returns one page of the sandboxes that pass the filter. Only the page is cloned.
    pub(crate) fn list(&self, owner: &Owner, filter: &SandboxFilter<'_>) -> SandboxPage {
        let mut page = SandboxPage { items: Vec::new(), total: 0 };
        let state = self.read();
        for entry in state.by_age.get(owner).into_iter().flatten().rev() {
            if !(filter.phase)(&entry.phase) || !entry.handle.has_labels(&filter.labels) {
                continue;
            }
            if page.total >= filter.offset && page.items.len() < filter.limit {
                page.items.push(entry.handle.state.borrow().clone());
            }
            page.total += 1;
        }
        page
    }

    /// The sum of the disk limits of an owner's sandboxes.
    pub(crate) fn disk_of(&self, owner: &Owner) -> u64 {
        self.read().cost_of(owner).disk
    }

    pub(crate) fn count_by_phase(&self) -> BTreeMap<&'static str, usize> {
        let mut counts = BTreeMap::new();
        for entry in self.read().by_age.values().flatten() {
            *counts.entry(entry.phase.name()).or_default() += 1;
        }
        counts
    }

    fn read(&self) -> RwLockReadGuard<'_, RegistryState> {
        self.0.read().expect("no thread panics while reading this")
    }

    fn write(&self) -> RwLockWriteGuard<'_, RegistryState> {
        self.0.write().expect("no thread panics while moving a handle")
    }
}

impl RegistryEntry {
    fn cost(&self) -> ResourceCost {
        match self.phase {
            Phase::Failed(_) => self.handle.cost.while_dead(),
            _ => self.handle.cost,
        }
    }
}

impl RegistryState {
    fn population(&self) -> usize {
        self.by_id.len() + self.warm
    }

    fn cost_of(&self, owner: &Owner) -> ResourceCost {
        let owned = self.by_age.get(owner).into_iter().flatten();
        owned.fold(ResourceCost::default(), |sum, entry| sum.and(entry.cost()))
    }

    fn index_of(&mut self, handle: &SandboxHandle) -> Option<(&mut Vec<RegistryEntry>, usize)> {
        let owned = self.by_age.get_mut(&handle.owner)?;
        let index = owned.binary_search_by(|entry| entry.handle.age_key().cmp(&handle.age_key())).ok()?;
        Some((owned, index))
    }
}
