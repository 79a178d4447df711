//! Moves a tree by copying it, where the kernel cannot rename it.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::{AtFlags, CWD, FileType, Gid, Mode, RenameFlags, Timespec, Timestamps, Uid};
use wire::Fault;

use super::{ErrorContext, changes, temporary_name};

/// Copies to a temporary name beside the target, renames the copy, and removes the source.
pub(super) fn move_by_copy(from: &Path, to: &Path, flags: RenameFlags) -> Result<(), Fault> {
    let draft = temporary_name(to)?;
    let placed = copy_tree(from, &draft)
        .and_then(|()| rustix::fs::renameat_with(CWD, &draft, CWD, to, flags).or_fault("move", to));
    if let Err(fault) = placed {
        changes::remove_path(&draft, true)?;
        return Err(fault);
    }
    changes::remove_path(from, true)
}

/// Copies a file of any type with its attributes.
fn copy_tree(from: &Path, to: &Path) -> Result<(), Fault> {
    let metadata = from.symlink_metadata().or_fault("stat", from)?;
    let kind = metadata.file_type();
    if kind.is_dir() {
        copy_directory(from, to)?;
    } else if kind.is_symlink() {
        let target = std::fs::read_link(from).or_fault("read link", from)?;
        std::os::unix::fs::symlink(target, to).or_fault("make link", to)?;
    } else if kind.is_file() {
        std::fs::copy(from, to).or_fault("copy", from)?;
    } else {
        let kind = FileType::from_raw_mode(metadata.mode());
        let mode = Mode::from_raw_mode(metadata.mode() & 0o7777);
        rustix::fs::mknodat(CWD, to, kind, mode, metadata.rdev()).or_fault("make node", to)?;
    }
    copy_attributes(&metadata, to)
}

fn copy_directory(from: &Path, to: &Path) -> Result<(), Fault> {
    std::fs::create_dir(to).or_fault("make directory", to)?;
    for entry in std::fs::read_dir(from).or_fault("list", from)? {
        let name = entry.or_fault("list", from)?.file_name();
        copy_tree(&from.join(&name), &to.join(&name))?;
    }
    Ok(())
}

fn copy_attributes(metadata: &Metadata, to: &Path) -> Result<(), Fault> {
    let (uid, gid) = (Uid::from_raw(metadata.uid()), Gid::from_raw(metadata.gid()));
    // Only root may change the owner; otherwise the copy belongs to the caller.
    rustix::fs::chownat(CWD, to, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW).ok();
    if !metadata.is_symlink() {
        let mode = Mode::from_raw_mode(metadata.mode() & 0o7777);
        rustix::fs::chmod(to, mode).or_fault("change mode", to)?;
    }
    let times = Timestamps {
        last_access: Timespec { tv_sec: metadata.atime(), tv_nsec: metadata.atime_nsec() },
        last_modification: Timespec { tv_sec: metadata.mtime(), tv_nsec: metadata.mtime_nsec() },
    };
    rustix::fs::utimensat(CWD, to, &times, AtFlags::SYMLINK_NOFOLLOW).or_fault("set times", to)
}
