//! A `/proc` that shows its own processes and little else. See proc(5).

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::fs::{Mode, OFlags};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags};

use crate::mounts::{self, MountAttrs};
use crate::readonly;

/// Files that expose information about the host, or change it.
const HIDDEN_FILES: [&str; 13] = [
    "kcore",
    "keys",
    "key-users",
    "timer_list",
    "sysrq-trigger",
    "kmsg",
    "sched_debug",
    "latency_stats",
    // How the host was booted and built, its disks, and what its devices do.
    "cmdline",
    "config.gz",
    "partitions",
    "diskstats",
    "interrupts",
];

/// Directories about the host's filesystems and devices. The first exists on every kernel.
const HIDDEN_DIRECTORIES: [&str; 4] = ["fs", "bus", "acpi", "scsi"];

/// Directories with kernel settings.
const READ_ONLY_DIRECTORIES: [&str; 2] = ["sys", "irq"];

/// Mounts a fresh `/proc` for this pid namespace, with the files about the host covered by `null`.
pub fn mount_proc(proc: &Path, null: &Path) -> io::Result<()> {
    mount_uncovered_proc(proc)?;
    cover_proc(proc, null, None)
}

/// The first half of [`mount_proc`]: its settings can still be written. A setting of a namespace is
/// better written here than in the host's `/proc`: there each namespace adds an entry of the same name
/// in the same directory, and every later search walks over all of them.
pub fn mount_uncovered_proc(proc: &Path) -> io::Result<()> {
    let attributes = MountAttrs::NO_SUID.and(MountAttrs::NO_DEV).and(MountAttrs::NO_EXEC);
    mounts::mount_filesystem("proc", proc, attributes, "")
}

/// The second half of [`mount_proc`]. Files and directories that this kernel does not have are skipped. Directories
/// are covered by `empty`, an empty directory that is reachable by no other path later, or by a new filesystem.
pub fn cover_proc(proc: &Path, null: &Path, empty: Option<&Path>) -> io::Result<()> {
    // A missing file would otherwise look like a missing target.
    std::fs::symlink_metadata(null)?;
    for file in HIDDEN_FILES.map(|name| proc.join(name)) {
        skip_missing(mounts::bind_mount(null, &file))?;
    }
    hide_directories(proc, empty)?;
    for directory in READ_ONLY_DIRECTORIES.map(|name| proc.join(name)) {
        if skip_missing(mounts::bind_mount(&directory, &directory))?.is_some() {
            readonly::restrict_mount(&directory, true)?;
        }
    }
    Ok(())
}

/// Covers directories with one empty directory that nothing can be written to.
fn hide_directories(proc: &Path, empty: Option<&Path>) -> io::Result<()> {
    let attributes =
        MountAttrs::READ_ONLY.and(MountAttrs::NO_SUID).and(MountAttrs::NO_DEV).and(MountAttrs::NO_EXEC);
    let [first, others @ ..] = HIDDEN_DIRECTORIES.map(|name| proc.join(name));
    match empty {
        Some(empty) => mounts::bind_mount_with(empty, &first, attributes)?,
        None => mounts::mount_filesystem("tmpfs", &first, attributes, "mode=0555,size=4k,nr_inodes=1")?,
    }
    for directory in others {
        if directory.exists() {
            mounts::bind_mount(&first, &directory)?;
        }
    }
    Ok(())
}

fn skip_missing(mounted: io::Result<()>) -> io::Result<Option<()>> {
    match mounted {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        other => other.map(Some),
    }
}

/// A `/proc` of its own that is mounted nowhere, for settings of namespaces that this process enters.
#[derive(Debug)]
pub struct DetachedProc(OwnedFd);

impl DetachedProc {
    pub fn mount() -> io::Result<Self> {
        let context = rustix::mount::fsopen("proc", FsOpenFlags::FSOPEN_CLOEXEC)?;
        rustix::mount::fsconfig_create(context.as_fd())?;
        let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID
            | MountAttrFlags::MOUNT_ATTR_NODEV
            | MountAttrFlags::MOUNT_ATTR_NOEXEC;
        Ok(Self(rustix::mount::fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, attributes)?))
    }

    /// Writes a setting, by its path below `/proc/sys`.
    pub fn write_setting(&self, name: &str, value: &str) -> io::Result<()> {
        let flags = OFlags::WRONLY | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&self.0, format!("sys/{name}"), flags, Mode::empty())?;
        let written = rustix::io::write(&file, value.as_bytes())?;
        if written == value.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
    }
}
