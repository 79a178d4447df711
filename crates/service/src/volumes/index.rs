//! Every existing volume, in memory, and which sandboxes use it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard};
use std::time::SystemTime;

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
    /// Whether the volume is being removed, so that no sandbox may begin to use it.
    closed: bool,
}

/// The result of looking up a volume for a sandbox.
pub(super) enum VolumeLookup {
    /// The sandbox uses it now; `new` if it did not before.
    Used {
        id: VolumeId,
        new: bool,
    },
    Nothing,
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
        let entry = VolumeEntry { volume, created, users: user.into_iter().collect(), closed: false };
        self.lock().insert(entry.volume.id.clone(), entry);
    }

    pub(super) fn find(&self, owner: &Owner, name: &VolumeName) -> Option<Volume> {
        let shelf = self.lock();
        shelf.values().find(|entry| entry.has_name(owner, name)).map(|entry| entry.volume.clone())
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
        let mut shelf = self.lock();
        match shelf.values_mut().find(|entry| entry.has_name(owner, name)) {
            None => Ok(VolumeLookup::Nothing),
            Some(entry) if entry.closed => Err(ServiceError::VolumeRemoving(name.clone())),
            Some(entry) => {
                let new = entry.users.insert(sandbox.clone());
                Ok(VolumeLookup::Used { id: entry.volume.id.clone(), new })
            }
        }
    }

    /// Like [`VolumeIndex::use_by_name`], by id; returns whether the use is new.
    pub(super) fn use_by_id(
        &self,
        owner: &Owner,
        id: &VolumeId,
        sandbox: &SandboxId,
    ) -> Result<bool, ServiceError> {
        match self.lock().get_mut(id).filter(|entry| entry.volume.owner == *owner) {
            None => Err(ServiceError::NoVolumeId(id.clone())),
            Some(entry) if entry.closed => Err(ServiceError::VolumeRemoving(entry.volume.name.clone())),
            Some(entry) => Ok(entry.users.insert(sandbox.clone())),
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

    /// Ends the uses of a sandbox, of all volumes or of the given ones. Returns the volumes to remove.
    pub(super) fn end_uses(&self, sandbox: &SandboxId, only: Option<&[VolumeId]>) -> Vec<VolumeId> {
        let mut unused = Vec::new();
        for (id, entry) in self.lock().iter_mut() {
            if only.is_none_or(|only| only.contains(id)) && entry.users.remove(sandbox) && entry.is_unused() {
                unused.push(id.clone());
            }
        }
        unused
    }

    /// The unused volumes whose lifetime is that of their sandboxes.
    pub(super) fn unused_volumes(&self) -> Vec<VolumeId> {
        let shelf = self.lock();
        let unused = shelf.iter().filter(|(_, entry)| entry.is_unused());
        unused.map(|(id, _)| id.clone()).collect()
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
        let shelf = self.lock();
        let own = shelf.values().filter(|entry| entry.volume.owner == *owner);
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
        let shelf = self.lock();
        let own = shelf.values().filter(|entry| entry.volume.owner == *owner);
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

    fn is_unused(&self) -> bool {
        self.users.is_empty() && self.volume.lifetime == VolumeLifetime::WithSandboxes
    }

    fn status(&self) -> VolumeStatus {
        let sandboxes = self.users.iter().cloned().collect();
        VolumeStatus { volume: self.volume.clone(), created: self.created, sandboxes, used: None }
    }
}
