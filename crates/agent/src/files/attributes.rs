//! Permission bits and owners.

use std::fs::Metadata;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::{Gid, Mode, Uid};
use wire::files::FileAttributes;
use wire::{Fault, FaultKind};

use super::ErrorContext;
use crate::accounts::AccountFiles;
use crate::fault;

/// Attributes with names resolved to ids.
#[derive(Clone, Copy, Debug)]
pub(super) struct ResolvedAttributes {
    pub(super) mode: Option<Mode>,
    /// The mode of a new file if `mode` is not given.
    pub(super) new_mode: Option<Mode>,
    pub(super) uid: Option<Uid>,
    pub(super) gid: Option<Gid>,
}

impl ResolvedAttributes {
    pub(super) fn new(attributes: &FileAttributes) -> Result<Self, Fault> {
        let accounts = AccountFiles::read();
        let uid = attributes.owner.as_ref().map(|name| {
            let known = accounts.by_name(name).map(|account| account.uid);
            resolve_id(known, name).map(Uid::from_raw).ok_or_else(|| not_found_fault("find user", name))
        });
        let gid = attributes.group.as_ref().map(|name| {
            let known = accounts.gid_of(name);
            resolve_id(known, name).map(Gid::from_raw).ok_or_else(|| not_found_fault("find group", name))
        });
        let mode = |bits: u32| Mode::from_raw_mode(bits & 0o7777);
        let (mode, new_mode) = (attributes.mode.map(mode), attributes.new_mode.map(mode));
        Ok(Self { mode, new_mode, uid: uid.transpose()?, gid: gid.transpose()? })
    }

    /// The attributes that differ from those a file has.
    pub(super) fn changes_from(&self, old: &Metadata) -> Self {
        Self {
            mode: self.mode.filter(|mode| mode.as_raw_mode() != old.mode() & 0o7777),
            uid: self.uid.filter(|uid| uid.as_raw() != old.uid()),
            gid: self.gid.filter(|gid| gid.as_raw() != old.gid()),
            ..*self
        }
    }

    /// Changes the owner first, because a change of owner clears set-id bits.
    pub(super) fn apply_to_path(&self, path: &Path) -> Result<(), Fault> {
        if self.changes_owner() {
            rustix::fs::chown(path, self.uid, self.gid).or_fault("change owner", path)?;
        }
        match self.mode {
            Some(mode) => rustix::fs::chmod(path, mode).or_fault("change mode", path),
            // Without attributes this still checks that the path exists. A chown that changes
            // nothing would check it too, but would clear set-id bits.
            None => rustix::fs::stat(path).map(drop).or_fault("look at", path),
        }
    }

    fn changes_owner(&self) -> bool {
        self.uid.is_some() || self.gid.is_some()
    }

    /// Like [`ResolvedAttributes::apply_to_path`], for an open file that will be known as `path`.
    pub(super) fn apply_to_file(&self, file: impl AsFd, path: &Path) -> Result<(), Fault> {
        if self.changes_owner() {
            rustix::fs::fchown(&file, self.uid, self.gid).or_fault("change owner", path)?;
        }
        match self.mode {
            Some(mode) => rustix::fs::fchmod(&file, mode).or_fault("change mode", path),
            None => Ok(()),
        }
    }
}

/// To the kernel the largest number means "unchanged"; it is not a valid id.
fn resolve_id(known: Option<u32>, name: &str) -> Option<u32> {
    known.or_else(|| name.parse().ok()).filter(|number| *number != u32::MAX)
}

fn not_found_fault(operation: &str, name: &str) -> Fault {
    fault::from_kind(FaultKind::NotFound, operation, name)
}
