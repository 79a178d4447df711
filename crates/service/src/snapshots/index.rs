//! Every existing snapshot, in memory. The store is the durable copy.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

use domain::{Bytes, Owner, SandboxId, Snapshot, SnapshotId, SnapshotState};

use super::{SnapshotFilter, SnapshotPage};
use crate::ServiceError;
use crate::core::Core;
use crate::tenancy::quota::{QuotaExcess, QuotaResource};

#[derive(Default)]
pub(crate) struct SnapshotIndex(Mutex<HashMap<SnapshotId, SnapshotEntry>>);

struct SnapshotEntry {
    snapshot: Snapshot,
    /// How many sandboxes are being made from it.
    uses: usize,
}

/// A sandbox is being made from a snapshot until this is dropped.
pub(crate) struct SnapshotGuard {
    core: Arc<Core>,
    id: SnapshotId,
}

impl Drop for SnapshotGuard {
    fn drop(&mut self) {
        if let Some(entry) = self.core.catalog.snapshots.lock().get_mut(&self.id) {
            entry.uses = entry.uses.saturating_sub(1);
        }
    }
}

impl SnapshotIndex {
    /// Adds a new snapshot if its owner may have another, no other snapshot of the same sandbox is being taken, and the
    /// sum of the sizes does not exceed `left`, if that is bounded.
    pub(super) fn add(
        &self,
        snapshot: Snapshot,
        limit: usize,
        left: impl FnOnce() -> Option<u64>,
    ) -> Result<(), ServiceError> {
        let mut all = self.lock();
        let owned = all.values().filter(|entry| entry.snapshot.owner == snapshot.owner);
        if owned.clone().count() >= limit {
            return Err(ServiceError::TooManySnapshots { limit });
        }
        let taking = |entry: &SnapshotEntry| {
            entry.snapshot.sandbox == snapshot.sandbox
                && matches!(entry.snapshot.state, SnapshotState::Creating(_))
        };
        if owned.clone().any(taking) {
            return Err(ServiceError::SnapshotInProgress(snapshot.sandbox));
        }
        let sum = sum_sizes(owned).saturating_add(snapshot.size.0);
        if let Some(left) = left().filter(|left| sum > *left) {
            let excess = QuotaExcess::new(QuotaResource::Disk, Bytes(sum), Bytes(left));
            return Err(ServiceError::OverQuota { owner: snapshot.owner, excess });
        }
        all.insert(snapshot.id.clone(), SnapshotEntry { snapshot, uses: 0 });
        Ok(())
    }

    /// Replaces the entry of a snapshot.
    pub(super) fn put(&self, snapshot: Snapshot) {
        let mut all = self.lock();
        let uses = all.get(&snapshot.id).map_or(0, |entry| entry.uses);
        all.insert(snapshot.id.clone(), SnapshotEntry { snapshot, uses });
    }

    pub(super) fn remove(&self, id: &SnapshotId) {
        self.lock().remove(id);
    }

    /// A snapshot of another owner is reported as not found.
    pub(super) fn find(&self, owner: &Owner, id: &SnapshotId) -> Option<Snapshot> {
        let all = self.lock();
        let entry = all.get(id).filter(|entry| entry.snapshot.owner == *owner)?;
        Some(entry.snapshot.clone())
    }

    /// The sandbox that a snapshot was taken of. It may no longer exist.
    pub(crate) fn source_of(&self, id: &SnapshotId) -> Option<SandboxId> {
        self.lock().get(id).map(|entry| entry.snapshot.sandbox.clone())
    }

    /// All snapshots of one owner, or of all owners, newest first.
    pub(crate) fn all(&self, owner: Option<&Owner>) -> Vec<Snapshot> {
        let all = self.lock();
        let shown = all.values().map(|entry| &entry.snapshot);
        let shown = shown.filter(|snapshot| owner.is_none_or(|owner| snapshot.owner == *owner));
        let mut found: Vec<Snapshot> = shown.cloned().collect();
        found.sort_by(|one, other| (other.created, &other.id).cmp(&(one.created, &one.id)));
        found
    }

    pub(super) fn list(&self, owner: &Owner, filter: &SnapshotFilter<'_>) -> SnapshotPage {
        let passes = |snapshot: &Snapshot| {
            snapshot.owner == *owner
                && filter.sandbox.is_none_or(|id| id == snapshot.sandbox.as_str())
                && filter.name.is_none_or(|name| snapshot.name.as_deref() == Some(name))
                && (filter.state)(&snapshot.state)
        };
        let all = self.lock();
        let mut found: Vec<&Snapshot> =
            all.values().map(|entry| &entry.snapshot).filter(|snapshot| passes(snapshot)).collect();
        found.sort_by(|one, other| (other.created, &other.id).cmp(&(one.created, &one.id)));
        let items = found.iter().skip(filter.offset).take(filter.limit).map(|&one| one.clone()).collect();
        SnapshotPage { items, total: found.len() }
    }

    /// The sum of the sizes of an owner's snapshots, including those reserved for snapshots that are being taken.
    pub(crate) fn size_of(&self, owner: &Owner) -> u64 {
        let all = self.lock();
        let owned = all.values().filter(|entry| entry.snapshot.owner == *owner);
        sum_sizes(owned)
    }

    /// Marks a snapshot for deletion. One that is being taken or in use is refused.
    pub(super) fn begin_to_delete(&self, owner: &Owner, id: &SnapshotId) -> Result<Snapshot, ServiceError> {
        let mut all = self.lock();
        let entry = all.get_mut(id).filter(|entry| entry.snapshot.owner == *owner);
        let entry = entry.ok_or_else(|| ServiceError::NoSnapshot(id.clone()))?;
        if matches!(entry.snapshot.state, SnapshotState::Creating(_)) {
            return Err(ServiceError::SnapshotUnfinished(id.clone()));
        }
        if entry.uses > 0 {
            return Err(ServiceError::SnapshotInUse(id.clone()));
        }
        entry.snapshot.state = SnapshotState::Deleting;
        Ok(entry.snapshot.clone())
    }

    /// Protects a snapshot from deletion while a sandbox is made from it.
    pub(super) fn start_using(
        &self,
        core: &Arc<Core>,
        owner: &Owner,
        id: &SnapshotId,
    ) -> Result<(Snapshot, SnapshotGuard), ServiceError> {
        let mut all = self.lock();
        let entry = all.get_mut(id).filter(|entry| entry.snapshot.owner == *owner);
        let entry = entry.ok_or_else(|| ServiceError::NoSnapshot(id.clone()))?;
        if entry.snapshot.state != SnapshotState::Ready {
            let state = entry.snapshot.state.name();
            return Err(ServiceError::SnapshotNotReady { id: id.clone(), state });
        }
        entry.uses += 1;
        Ok((entry.snapshot.clone(), SnapshotGuard { core: Arc::clone(core), id: id.clone() }))
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<SnapshotId, SnapshotEntry>> {
        self.0.lock().expect("no thread panics while moving a snapshot")
    }
}

fn sum_sizes<'a>(entries: impl Iterator<Item = &'a SnapshotEntry>) -> u64 {
    entries.fold(0, |sum, entry| sum.saturating_add(entry.snapshot.size.0))
}
