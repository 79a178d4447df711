//! A file that is being written under a temporary name.
//!
//! The draft is in the directory of the file that it will replace. A user who may write a file but
//! not change its directory cannot create a draft; the data is then written into the file itself,
//! as any program would do. In that case a partial file is visible, and it stays if the sender
//! disconnects.

use std::fs::File;
use std::io::{self, Seek, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags, RenameFlags};
use rustix::io::Errno;
use wire::Fault;

use super::attributes::ResolvedAttributes;
use super::transfer::{DEFAULT_FILE_MODE, check_regular, not_regular_fault};
use super::{ErrorContext, temporary_name};
use crate::fault;

pub(super) struct DraftFile {
    file: File,
    target: PathBuf,
    /// Its temporary name. `None` means that `file` is the target itself.
    name: Option<PathBuf>,
    emptied: bool,
}

impl DraftFile {
    /// Creates a draft for a target that is a regular file or does not exist.
    pub(super) fn new(target: &Path) -> Result<Self, Fault> {
        let there = match target.symlink_metadata() {
            Ok(old) if old.is_dir() => {
                return Err(fault::from_errno(Errno::ISDIR, "write", &target.to_string_lossy()));
            }
            Ok(old) if !old.is_file() => return Err(not_regular_fault(target)),
            looked => looked.is_ok(),
        };
        let name = temporary_name(target)?;
        let (file, name) =
            match File::options().read(true).write(true).create_new(true).mode(0o600).open(&name) {
                Err(error) if there && is_permission_error(&error) => (open_target(target)?, None),
                file => (file.or_fault("create", target)?, Some(name)),
            };
        Ok(Self { file, target: target.to_owned(), name, emptied: false })
    }

    pub(super) fn append_bytes(&mut self, bytes: &[u8]) -> Result<(), Fault> {
        self.truncate_target()?;
        self.file.write_all(bytes).or_fault("write", &self.target)
    }

    /// Truncates the target only when there is something to replace its bytes.
    fn truncate_target(&mut self) -> Result<(), Fault> {
        let first = !std::mem::replace(&mut self.emptied, true);
        if first && self.name.is_none() {
            self.file.set_len(0).or_fault("truncate", &self.target)?;
        }
        Ok(())
    }

    /// Sets the attributes, by default those of the old file, and renames the draft to the target.
    pub(super) fn put_in_place(mut self, wanted: &ResolvedAttributes) -> Result<(), Fault> {
        self.truncate_target()?;
        let Some(name) = &self.name else { return change_attributes(&self.file, &self.target, wanted) };
        self.apply_attributes(wanted)?;
        match std::fs::rename(name, &self.target) {
            // In a sticky directory only the owner of a file may replace it.
            Err(error) if is_permission_error(&error) => self.copy_to_target(wanted),
            renamed => {
                renamed.or_fault("rename", &self.target)?;
                self.name = None;
                Ok(())
            }
        }
    }

    /// Like [`DraftFile::put_in_place`], for a target that must not exist.
    pub(super) fn put_in_place_if_new(mut self, wanted: &ResolvedAttributes) -> Result<(), Fault> {
        let Some(name) = &self.name else {
            return Err(fault::from_errno(Errno::EXIST, "create", &self.target.to_string_lossy()));
        };
        self.apply_attributes(wanted)?;
        match rustix::fs::renameat_with(CWD, name, CWD, &self.target, RenameFlags::NOREPLACE) {
            // Some filesystems cannot do this. A new link does not replace a file either, and the
            // temporary name is removed with the draft.
            Err(Errno::INVAL) => std::fs::hard_link(name, &self.target).or_fault("create", &self.target),
            renamed => {
                renamed.or_fault("create", &self.target)?;
                self.name = None;
                Ok(())
            }
        }
    }

    fn apply_attributes(&self, wanted: &ResolvedAttributes) -> Result<(), Fault> {
        let old = self.target.metadata().ok();
        if let Some(old) = &old {
            // Only root may change the owner; otherwise the new file belongs to the caller.
            let owner = rustix::fs::Uid::from_raw(old.uid());
            let group = rustix::fs::Gid::from_raw(old.gid());
            rustix::fs::fchown(&self.file, Some(owner), Some(group)).ok();
        }
        let new = wanted.new_mode.unwrap_or(DEFAULT_FILE_MODE);
        let mode = old.map_or(new, |old| Mode::from_raw_mode(old.mode() & 0o7777));
        let wanted = ResolvedAttributes { mode: wanted.mode.or(Some(mode)), ..*wanted };
        wanted.apply_to_file(&self.file, &self.target)
    }

    fn copy_to_target(&mut self, wanted: &ResolvedAttributes) -> Result<(), Fault> {
        let mut file = open_target(&self.target)?;
        self.file.rewind().or_fault("seek", &self.target)?;
        file.set_len(0).or_fault("truncate", &self.target)?;
        io::copy(&mut self.file, &mut file).or_fault("write", &self.target)?;
        change_attributes(&file, &self.target, wanted)
    }
}

impl Drop for DraftFile {
    fn drop(&mut self) {
        if let Some(name) = &self.name {
            std::fs::remove_file(name).ok();
        }
    }
}

/// Whether the directory may not be changed.
fn is_permission_error(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::ACCESS | Errno::PERM | Errno::ROFS))
}

/// Opens the target, which may be another file by now.
fn open_target(target: &Path) -> Result<File, Fault> {
    let flags = OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::open(target, flags, Mode::empty()).or_fault("open", target)?);
    check_regular(&file, target)?;
    Ok(file)
}

/// Changes the attributes of an existing file, but only those that differ: setting an attribute to
/// its present value would fail for a user who is not the owner.
fn change_attributes(file: &File, path: &Path, wanted: &ResolvedAttributes) -> Result<(), Fault> {
    let old = file.metadata().or_fault("stat", path)?;
    wanted.changes_from(&old).apply_to_file(file, path)
}
