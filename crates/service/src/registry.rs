//! Every sandbox that exists, in memory: by id, and by owner from the newest to the oldest.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::{Duration, SystemTime};

use domain::{Cause, Files, Key, Labels, OnDeath, Owner, Phase, ProcessId, SandboxId};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use crate::activity::Activity;
use crate::agent_client::Agent;
use crate::commands::Commands;
use crate::driver::Command;
use crate::hold::Hold;
use crate::quota::{Cost, Excess, Quota};
use crate::{Filter, Page, RETRIES, Sandbox};

/// What everybody but its driver knows of a sandbox.
pub(crate) struct Handle {
    pub(crate) id: SandboxId,
    pub(crate) owner: Owner,
    pub(crate) created: SystemTime,
    pub(crate) epoch: u64,
    /// The client's name for it.
    pub(crate) key: Option<Key>,
    /// The pool it was taken from.
    pub(crate) pool: Option<String>,
    pub(crate) hold: Hold,
    pub(crate) cost: Cost,
    /// The time to live that it was created with.
    pub(crate) timeout: Option<Duration>,
    pub(crate) idle_timeout: Option<Duration>,
    /// Its main process, which is the sandbox itself and not a use of it.
    pub(crate) entrypoint: Option<ProcessId>,
    pub(crate) agent: Agent,
    pub(crate) activity: Arc<Activity>,
    pub(crate) commands: Arc<Commands>,
    /// Orders for its driver.
    pub(crate) mailbox: mpsc::Sender<Command>,
    /// What its driver last published.
    pub(crate) state: watch::Receiver<Sandbox>,
    /// Tells its driver that whoever asked for it has gone before it was handed over.
    pub(crate) abandoned: CancellationToken,
    /// Tells its driver that it has died, without waiting for a place in the mailbox.
    pub(crate) death: watch::Sender<Option<Cause>>,
}

#[derive(Default)]
pub(crate) struct Registry(RwLock<Shelf>);

#[derive(Default)]
struct Shelf {
    by_id: HashMap<SandboxId, Arc<Handle>>,
    /// Each owner's, the newest last.
    by_age: HashMap<Owner, Vec<Entry>>,
    /// How many sandboxes are warm, or about to be. They belong to nobody and stand in no list,
    /// but take up room.
    warm: usize,
    /// How many wait for room. Nothing is warmed meanwhile.
    waiting: usize,
}

/// Where a sandbox finds room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Room {
    /// If there are fewer than so many.
    Below(usize),
    /// In the place of a warm one, which it was until now.
    OfWarm,
}

/// A line of a list. It repeats the phase, so that counting what passes a filter walks over
/// one piece of memory and not over a thousand.
struct Entry {
    phase: Phase,
    handle: Arc<Handle>,
}

/// There is no room for another sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum NoRoom {
    Full,
    /// Its owner would have more of this than it may.
    OverQuota(Excess),
}

impl Handle {
    pub(crate) fn phase(&self) -> Phase {
        self.state.borrow().phase
    }

    /// Whether it has died. Its files may still be there.
    pub(crate) fn is_dead(&self) -> bool {
        matches!(self.phase(), Phase::Failed(_))
    }

    /// Whether it has died and nothing of its files is left.
    pub(crate) fn has_lost_files(&self) -> bool {
        self.is_dead() && self.state.borrow().files == Files::Lost
    }

    /// Whether it has died and comes back, with its files, when somebody asks for its name.
    pub(crate) fn comes_back(&self) -> bool {
        let state = self.state.borrow();
        let restarts = state.files == Files::Kept && state.spec.on_death() == OnDeath::Restart;
        let named = self.key.as_ref().is_some_and(|key| key.space() != RETRIES);
        matches!(state.phase, Phase::Failed(_)) && restarts && named
    }

    /// Waits until it is told that it ends or has ended.
    pub(crate) async fn ending(&self) {
        let ends =
            |sandbox: &Sandbox| matches!(sandbox.phase, Phase::Stopping | Phase::Stopped | Phase::Failed(_));
        // Who says nothing more has ended.
        self.state.clone().wait_for(ends).await.map(drop).unwrap_or_default();
    }

    pub(crate) fn current(&self) -> Sandbox {
        self.state.borrow().clone()
    }

    fn has_labels(&self, wanted: &Labels) -> bool {
        let has =
            |sandbox: &Sandbox| wanted.iter().all(|(name, value)| sandbox.labels.get(name) == Some(value));
        wanted.is_empty() || has(&self.state.borrow())
    }

    fn age(&self) -> (SystemTime, &SandboxId) {
        (self.created, &self.id)
    }
}

impl Registry {
    pub(crate) fn add(&self, handle: Arc<Handle>, room: Room, quota: &Quota) -> Result<(), NoRoom> {
        let mut shelf = self.write();
        if matches!(room, Room::Below(limit) if shelf.population() >= limit) {
            return Err(NoRoom::Full);
        }
        if let Some(excess) = shelf.cost_of(&handle.owner).and(handle.cost).exceeds(quota) {
            return Err(NoRoom::OverQuota(excess));
        }
        let owned = shelf.by_age.entry(handle.owner.clone()).or_default();
        let place = owned.partition_point(|entry| entry.handle.age() < handle.age());
        owned.insert(place, Entry { phase: handle.phase(), handle: Arc::clone(&handle) });
        shelf.by_id.insert(handle.id.clone(), handle);
        if room == Room::OfWarm {
            shelf.warm -= 1;
        }
        Ok(())
    }

    /// Takes a place for a warm sandbox, unless somebody needs it more.
    pub(crate) fn add_warm(&self, limit: usize) -> bool {
        let mut shelf = self.write();
        let fits = shelf.waiting == 0 && shelf.population() < limit;
        shelf.warm += usize::from(fits);
        fits
    }

    /// A warm sandbox is gone.
    pub(crate) fn remove_warm(&self) {
        self.write().warm -= 1;
    }

    /// Somebody needs room: nothing is warmed until it is found, or given up.
    pub(crate) fn begin_waiting(&self) {
        self.write().waiting += 1;
    }

    pub(crate) fn end_waiting(&self) {
        self.write().waiting -= 1;
    }

    /// How many that were taken from this pool there are.
    pub(crate) fn taken_from(&self, pool: &str) -> usize {
        self.read().by_id.values().filter(|handle| handle.pool.as_deref() == Some(pool)).count()
    }

    pub(crate) fn remove(&self, handle: &Handle) {
        let mut shelf = self.write();
        shelf.by_id.remove(&handle.id);
        if let Some((owned, place)) = shelf.place_of(handle) {
            owned.remove(place);
            if owned.is_empty() {
                shelf.by_age.remove(&handle.owner);
            }
        }
    }

    /// Counts a dead sandbox as one that runs again, if its owner's quota has room for that.
    pub(crate) fn revive(&self, handle: &Handle, quota: &Quota) -> Result<(), NoRoom> {
        let mut shelf = self.write();
        let others = shelf.by_age.get(&handle.owner).into_iter().flatten();
        let others = others.filter(|entry| entry.handle.id != handle.id);
        let cost = others.fold(handle.cost, |sum, entry| sum.and(entry.cost()));
        if let Some(excess) = cost.exceeds(quota) {
            return Err(NoRoom::OverQuota(excess));
        }
        if let Some((owned, place)) = shelf.place_of(handle) {
            owned[place].phase = Phase::Starting;
        }
        Ok(())
    }

    pub(crate) fn set_phase(&self, handle: &Handle, phase: Phase) {
        let mut shelf = self.write();
        if let Some((owned, place)) = shelf.place_of(handle) {
            owned[place].phase = phase;
        }
    }

    pub(crate) fn find(&self, id: &SandboxId) -> Option<Arc<Handle>> {
        self.read().by_id.get(id).cloned()
    }

    /// What an owner's sandboxes may use together.
    pub(crate) fn cost(&self, owner: &Owner) -> Cost {
        self.read().cost_of(owner)
    }

    pub(crate) fn count(&self) -> usize {
        self.read().by_id.len()
    }

    /// How many there are without those that have died or are going.
    pub(crate) fn living(&self) -> usize {
        let goes = |entry: &&Entry| matches!(entry.phase, Phase::Failed(_) | Phase::Stopping);
        let shelf = self.read();
        shelf.by_id.len() - shelf.by_age.values().flatten().filter(goes).count()
    }

    pub(crate) fn all(&self) -> Vec<Arc<Handle>> {
        self.read().by_id.values().cloned().collect()
    }

    /// A page of what passes the filter. Only the page is copied; the rest is only looked at.
    pub(crate) fn list(&self, owner: &Owner, filter: &Filter<'_>) -> Page {
        let mut page = Page { items: Vec::new(), total: 0 };
        let shelf = self.read();
        for entry in shelf.by_age.get(owner).into_iter().flatten().rev() {
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

    /// The sum of the disks of an owner's sandboxes.
    pub(crate) fn disk_of(&self, owner: &Owner) -> u64 {
        self.read().cost_of(owner).disk
    }

    pub(crate) fn counts(&self) -> BTreeMap<&'static str, usize> {
        let mut counts = BTreeMap::new();
        for entry in self.read().by_age.values().flatten() {
            *counts.entry(entry.phase.name()).or_default() += 1;
        }
        counts
    }

    fn read(&self) -> RwLockReadGuard<'_, Shelf> {
        self.0.read().expect("nobody panics while looking")
    }

    fn write(&self) -> RwLockWriteGuard<'_, Shelf> {
        self.0.write().expect("nobody panics while moving a handle")
    }
}

impl Entry {
    fn cost(&self) -> Cost {
        match self.phase {
            Phase::Failed(_) => self.handle.cost.of_dead(),
            _ => self.handle.cost,
        }
    }
}

impl Shelf {
    fn population(&self) -> usize {
        self.by_id.len() + self.warm
    }

    fn cost_of(&self, owner: &Owner) -> Cost {
        let owned = self.by_age.get(owner).into_iter().flatten();
        owned.fold(Cost::default(), |sum, entry| sum.and(entry.cost()))
    }

    fn place_of(&mut self, handle: &Handle) -> Option<(&mut Vec<Entry>, usize)> {
        let owned = self.by_age.get_mut(&handle.owner)?;
        let place = owned.binary_search_by(|entry| entry.handle.age().cmp(&handle.age())).ok()?;
        Some((owned, place))
    }
}
