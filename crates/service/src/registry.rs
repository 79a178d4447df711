//! Every sandbox that exists, in memory: by id, and by owner from the newest to the oldest.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::SystemTime;

use domain::{Cause, Labels, Owner, Phase, SandboxId};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use crate::activity::Activity;
use crate::agent_client::Agent;
use crate::commands::Commands;
use crate::driver::Command;
use crate::{Filter, Page, Sandbox};

/// What everybody but its driver knows of a sandbox.
pub(crate) struct Handle {
    pub(crate) id: SandboxId,
    pub(crate) owner: Owner,
    pub(crate) created: SystemTime,
    pub(crate) epoch: u64,
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
    by_age: HashMap<Owner, BTreeMap<Age, Arc<Handle>>>,
}

/// Newer ones come first.
type Age = (Reverse<SystemTime>, SandboxId);

/// There is no room for another sandbox.
pub(crate) struct Full;

impl Handle {
    pub(crate) fn phase(&self) -> Phase {
        self.state.borrow().phase
    }

    fn age(&self) -> Age {
        (Reverse(self.created), self.id.clone())
    }
}

impl Registry {
    pub(crate) fn add(&self, handle: Arc<Handle>, limit: usize) -> Result<(), Full> {
        let mut shelf = self.write();
        if shelf.by_id.len() >= limit {
            return Err(Full);
        }
        let owned = shelf.by_age.entry(handle.owner.clone()).or_default();
        owned.insert(handle.age(), Arc::clone(&handle));
        shelf.by_id.insert(handle.id.clone(), handle);
        Ok(())
    }

    pub(crate) fn remove(&self, handle: &Handle) {
        let mut shelf = self.write();
        shelf.by_id.remove(&handle.id);
        if let Some(owned) = shelf.by_age.get_mut(&handle.owner) {
            owned.remove(&handle.age());
            if owned.is_empty() {
                shelf.by_age.remove(&handle.owner);
            }
        }
    }

    pub(crate) fn find(&self, id: &SandboxId) -> Option<Arc<Handle>> {
        self.read().by_id.get(id).cloned()
    }

    pub(crate) fn all(&self) -> Vec<Arc<Handle>> {
        self.read().by_id.values().cloned().collect()
    }

    /// A page of what passes the filter. Only the page is copied; the rest is only looked at.
    pub(crate) fn list(&self, owner: &Owner, filter: &Filter<'_>) -> Page {
        let mut page = Page { items: Vec::new(), total: 0 };
        let shelf = self.read();
        for handle in shelf.by_age.get(owner).into_iter().flat_map(BTreeMap::values) {
            let sandbox = handle.state.borrow();
            if !has_labels(&sandbox.labels, &filter.labels) || !(filter.phase)(&sandbox.phase) {
                continue;
            }
            if page.total >= filter.offset && page.items.len() < filter.limit {
                page.items.push(sandbox.clone());
            }
            page.total += 1;
        }
        page
    }

    pub(crate) fn counts(&self) -> BTreeMap<&'static str, usize> {
        let mut counts = BTreeMap::new();
        for handle in self.read().by_id.values() {
            *counts.entry(handle.phase().name()).or_default() += 1;
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

fn has_labels(all: &Labels, wanted: &Labels) -> bool {
    wanted.iter().all(|(name, value)| all.get(name) == Some(value))
}
