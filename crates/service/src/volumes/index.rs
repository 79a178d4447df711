//! Every existing volume, in memory, and which sandboxes use it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, SystemTime};

use domain::volume::VolumeLifetime;
use domain::{Owner, SandboxId, Volume, VolumeId, VolumeName};

use super::VolumeStatus;
use crate::ServiceError;

#[derive(Default)]
pub(crate) struct VolumeIndex {
    entries: Mutex<BTreeMap<VolumeId, VolumeEntry>>,
    /// Held while a volume is made or removed, so that no two volumes of one name are made.
    pub(crate) turn: tokio::sync::Mutex<()>,
}

struct VolumeEntry {
    volume: Volume,
    created: SystemTime,
    users: BTreeSet<SandboxId>,
    /// When the volume is to be removed unless a sandbox uses it before, on the boot clock.
    due: Option<Duration>,
    /// Whether the volume is being removed, so that no sandbox may begin to use it.
    closed: bool,
}

/// The result of looking up a volume for a sandbox.
pub(super) enum VolumeLookup {
    /// The sandbox uses it now.
    Used {
        id: VolumeId,
        begun: BegunUse,
    },
    Nothing,
}

/// What changed when a sandbox was to use a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BegunUse {
    /// The sandbox did not use the volume before.
    pub(super) new: bool,
    /// The volume was to be removed some time after its last use.
    pub(super) was_due: bool,
}

/// The volumes that no sandbox uses any more.
#[derive(Debug, Default)]
pub(super) struct UnusedVolumes {
    /// Those whose lifetime is that of their sandboxes.
    pub(super) remove: Vec<VolumeId>,
    /// Those that are kept for a time from now on.
    pub(super) keep: Vec<VolumeId>,
}

/// Whether a volume can be removed.
pub(super) enum VolumeAvailability {
    Gone,
    Used(Volume, usize),
    /// No sandbox uses it, and none can begin to.
    Closed,
}

impl VolumeIndex {
    pub(super) fn add(&self, volume: Volume, created: SystemTime, user: Option<SandboxId>) {
        let users = user.into_iter().collect();
        let entry = VolumeEntry { volume, created, users, due: None, closed: false };
        self.lock().insert(entry.volume.id.clone(), entry);
    }

    pub(super) fn find(&self, owner: &Owner, name: &VolumeName) -> Option<Volume> {
        let entries = self.lock();
        entries.values().find(|entry| entry.has_name(owner, name)).map(|entry| entry.volume.clone())
    }

    pub(super) fn find_id(&self, owner: &Owner, name: &VolumeName) -> Option<VolumeId> {
        self.find(owner, name).map(|volume| volume.id)
    }

    /// Makes a sandbox use the volume of this name, if there is one.
    pub(super) fn use_by_name(
        &self,
        owner: &Owner,
        name: &VolumeName,
        sandbox: &SandboxId,
    ) -> Result<VolumeLookup, ServiceError> {
        let mut entries = self.lock();
        match entries.values_mut().find(|entry| entry.has_name(owner, name)) {
            None => Ok(VolumeLookup::Nothing),
            Some(entry) if entry.closed => Err(ServiceError::VolumeRemoving(name.clone())),
            Some(entry) => {
                let begun = entry.begin_use(sandbox);
                Ok(VolumeLookup::Used { id: entry.volume.id.clone(), begun })
            }
        }
    }

    /// Like [`VolumeIndex::use_by_name`], by id.
    pub(super) fn use_by_id(
        &self,
        owner: &Owner,
        id: &VolumeId,
        sandbox: &SandboxId,
    ) -> Result<BegunUse, ServiceError> {
        match self.lock().get_mut(id).filter(|entry| entry.volume.owner == *owner) {
            None => Err(ServiceError::NoVolumeId(id.clone())),
            Some(entry) if entry.closed => Err(ServiceError::VolumeRemoving(entry.volume.name.clone())),
            Some(entry) => Ok(entry.begin_use(sandbox)),
        }
    }

    /// Restores a use that a former server granted.
    pub(super) fn adopt_use(&self, id: &VolumeId, sandbox: &SandboxId) {
        if let Some(entry) = self.lock().get_mut(id) {
            entry.users.insert(sandbox.clone());
        }
    }

    /// Makes a second sandbox use all volumes of the first.
    pub(super) fn share_uses(&self, first: &SandboxId, second: &SandboxId) {
        for entry in self.lock().values_mut().filter(|entry| entry.users.contains(first)) {
            entry.users.insert(second.clone());
        }
    }

    /// Ends the uses of a sandbox, of all volumes or of the given ones. `now` is on the boot clock.
    pub(super) fn end_uses(
        &self,
        sandbox: &SandboxId,
        only: Option<&[VolumeId]>,
        now: Duration,
    ) -> UnusedVolumes {
        let mut unused = UnusedVolumes::default();
        for (id, entry) in self.lock().iter_mut() {
            let ended = only.is_none_or(|only| only.contains(id)) && entry.users.remove(sandbox);
            if !ended || !entry.users.is_empty() {
                continue;
            }
            match entry.volume.lifetime {
                VolumeLifetime::Kept => {}
                VolumeLifetime::WithSandboxes => unused.remove.push(id.clone()),
                VolumeLifetime::AfterUse(time) => {
                    entry.due = Some(now.saturating_add(time));
                    unused.keep.push(id.clone());
                }
            }
        }
        unused
    }

    /// The unused volumes whose lifetime is that of their sandboxes.
    pub(super) fn unused_volumes(&self) -> Vec<VolumeId> {
        let entries = self.lock();
        let unused = entries.iter().filter(|(_, entry)| entry.is_unused());
        unused.map(|(id, _)| id.clone()).collect()
    }

    /// Sets when an unused volume is to be removed, if it is kept for a time after its last use. `unused` is how long it
    /// was not used until `now`. Returns whether it did.
    pub(super) fn schedule_removal(&self, id: &VolumeId, now: Duration, unused: Duration) -> bool {
        let mut entries = self.lock();
        let Some(entry) = entries.get_mut(id).filter(|entry| entry.users.is_empty()) else { return false };
        let VolumeLifetime::AfterUse(time) = entry.volume.lifetime else { return false };
        entry.due = Some(now.saturating_add(time.saturating_sub(unused)));
        true
    }

    /// Returns the volumes that were unused for long enough. Each is returned once, unless it is used again.
    pub(super) fn take_due(&self, now: Duration) -> Vec<VolumeId> {
        let mut due = Vec::new();
        for (id, entry) in self.lock().iter_mut() {
            if entry.users.is_empty() && entry.due.is_some_and(|time| time <= now) {
                entry.due = None;
                due.push(id.clone());
            }
        }
        due
    }

    /// Whether the volume is to be removed some time after its last use.
    pub(super) fn is_due(&self, id: &VolumeId) -> bool {
        self.lock().get(id).is_some_and(|entry| entry.due.is_some())
    }

    /// When the next volume is due, on the boot clock.
    pub(crate) fn next_due(&self) -> Option<Duration> {
        self.lock().values().filter(|entry| entry.users.is_empty()).filter_map(|entry| entry.due).min()
    }

    /// Closes a volume that [`VolumeIndex::take_due`] returned; `false` if it was used since.
    pub(super) fn close_due(&self, id: &VolumeId) -> bool {
        let mut entries = self.lock();
        let unused = entries
            .get_mut(id)
            .filter(|entry| entry.users.is_empty() && entry.due.is_none() && !entry.closed);
        unused.is_some_and(|entry| {
            entry.closed = true;
            true
        })
    }

    pub(super) fn close(&self, id: &VolumeId) -> VolumeAvailability {
        match self.lock().get_mut(id) {
            None => VolumeAvailability::Gone,
            Some(entry) if !entry.users.is_empty() => {
                VolumeAvailability::Used(entry.volume.clone(), entry.users.len())
            }
            Some(entry) => {
                entry.closed = true;
                VolumeAvailability::Closed
            }
        }
    }

    pub(super) fn forget(&self, id: &VolumeId) {
        self.lock().remove(id);
    }

    pub(super) fn count(&self, owner: &Owner) -> usize {
        self.lock().values().filter(|entry| entry.volume.owner == *owner).count()
    }

    /// The sum of the sizes of an owner's volumes.
    pub(crate) fn total_bytes(&self, owner: &Owner) -> u64 {
        let entries = self.lock();
        let own = entries.values().filter(|entry| entry.volume.owner == *owner);
        own.fold(0, |sum, entry| sum.saturating_add(entry.volume.size.0))
    }

    /// The volumes of every owner, sorted by owner and name.
    pub(crate) fn all(&self) -> Vec<VolumeStatus> {
        let mut all: Vec<VolumeStatus> = self.lock().values().map(VolumeEntry::status).collect();
        all.sort_by(|one, other| {
            (&one.volume.owner, &one.volume.name).cmp(&(&other.volume.owner, &other.volume.name))
        });
        all
    }

    pub(super) fn list(&self, owner: &Owner) -> Vec<VolumeStatus> {
        let entries = self.lock();
        let own = entries.values().filter(|entry| entry.volume.owner == *owner);
        let mut all: Vec<VolumeStatus> = own.map(VolumeEntry::status).collect();
        all.sort_by(|one, other| one.volume.name.cmp(&other.volume.name));
        all
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<VolumeId, VolumeEntry>> {
        self.entries.lock().expect("no thread panics while reading this")
    }
}

impl VolumeEntry {
    fn has_name(&self, owner: &Owner, name: &VolumeName) -> bool {
        self.volume.owner == *owner && self.volume.name == *name
    }

    fn begin_use(&mut self, sandbox: &SandboxId) -> BegunUse {
        // A volume that was taken to be removed, but is not closed, has no due time and is unused.
        let was_due = self.users.is_empty() && matches!(self.volume.lifetime, VolumeLifetime::AfterUse(_));
        self.due = None;
        BegunUse { new: self.users.insert(sandbox.clone()), was_due }
    }

    fn is_unused(&self) -> bool {
        self.users.is_empty() && self.volume.lifetime == VolumeLifetime::WithSandboxes
    }

    fn status(&self) -> VolumeStatus {
        let sandboxes = self.users.iter().cloned().collect();
        VolumeStatus { volume: self.volume.clone(), created: self.created, sandboxes, used: None }
    }
}
