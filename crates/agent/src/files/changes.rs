//! Moves, removes and creates files and directories.

use std::io::ErrorKind;
use std::path::Path;

use rustix::fs::{CWD, RenameFlags};
use rustix::io::Errno;
use wire::files::FileAttributes;
use wire::{Fault, FaultKind};

use super::attributes::ResolvedAttributes;
use super::{ErrorContext, copy, make_parents, temporary_name};
use crate::fault;

/// Renames, or copies where a rename is impossible: to another filesystem, or a directory from a
/// read-only layer.
pub(super) fn move_file(from: &Path, to: &Path, overwrite: bool) -> Result<(), Fault> {
    // Without this check a missing source would leave the new parents behind.
    from.symlink_metadata().or_fault("move", from)?;
    make_parents(to)?;
    let flags = if overwrite { RenameFlags::empty() } else { RenameFlags::NOREPLACE };
    match rustix::fs::renameat_with(CWD, from, CWD, to, flags) {
        Ok(()) => Ok(()),
        Err(Errno::XDEV) => copy::move_by_copy(from, to, flags),
        // The source was found above, so for these errors the target is in the way.
        Err(errno @ (Errno::EXIST | Errno::NOTEMPTY | Errno::ISDIR | Errno::NOTDIR)) => {
            Err(fault::from_errno(errno, "move", &to.to_string_lossy()))
        }
        Err(errno) => Err(fault::from_errno(errno, "move", &from.to_string_lossy())),
    }
}

/// Removing a missing path succeeds. Links are removed, never followed.
pub(super) fn remove_path(path: &Path, recursive: bool) -> Result<(), Fault> {
    let directory = match path.symlink_metadata() {
        Ok(metadata) => metadata.is_dir(),
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(fault::from_io(&error, "remove", &path.to_string_lossy())),
    };
    let removed = match (directory, recursive) {
        (true, true) => std::fs::remove_dir_all(path),
        (true, false) => Err(Errno::ISDIR.into()),
        (false, _) => std::fs::remove_file(path),
    };
    match removed {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        other => other.or_fault("remove", path),
    }
}

/// Creates a directory and its parents, which get default attributes. A directory that exists
/// already keeps its attributes.
pub(super) fn make_directory(path: &Path, attributes: &FileAttributes) -> Result<(), Fault> {
    let wanted = ResolvedAttributes::new(attributes)?;
    let missing: Vec<&Path> =
        path.ancestors().take_while(|above| above.symlink_metadata().is_err()).collect();
    if missing.is_empty() {
        let there = std::fs::metadata(path).or_fault("make directory", path)?.is_dir();
        let in_the_way = || fault::from_errno(Errno::EXIST, "make directory", &path.to_string_lossy());
        return if there { Ok(()) } else { Err(in_the_way()) };
    }
    let mut new = false;
    for directory in missing.iter().rev() {
        match std::fs::create_dir(directory) {
            // Another process created it in the meantime, so it is not new.
            Err(error) if error.kind() == ErrorKind::AlreadyExists => new = false,
            made => {
                made.or_fault("make directory", directory)?;
                new = true;
            }
        }
    }
    if new { wanted.apply_to_path(path) } else { Ok(()) }
}

/// Makes a symbolic link in the place of a file or link that may be there; a directory stays. It gets
/// its name by a rename, so the old one is there until the new one is.
pub(super) fn make_link(path: &Path, target: &str) -> Result<(), Fault> {
    if target.is_empty() || target.contains('\0') {
        return Err(fault::from_kind(FaultKind::Invalid, "make link", target));
    }
    make_parents(path)?;
    let draft = temporary_name(path)?;
    std::os::unix::fs::symlink(target, &draft).or_fault("make link", path)?;
    let placed = std::fs::rename(&draft, path).or_fault("make link", path);
    if placed.is_err() {
        std::fs::remove_file(&draft).ok();
    }
    placed
}
