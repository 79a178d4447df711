//! Files that show a sandbox its own limits where `/proc` and `/sys` would show the host's values.
//!
//! ```text
//! a directory in memory ── read-only ──► /proc/meminfo, /proc/cpuinfo, /proc/stat, /sys
//!       └── a descriptor of it ──► the agent, which fills the files and keeps them current
//! ```
//! The files are empty until the agent starts the first command. Nothing inside can write to them:
//! the mounts are read-only, and only the agent has a descriptor of the writable one.

use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use linux::mounts::{self, MountAttrs, MountDepth};
use rustix::fs::{Mode, OFlags, ResolveFlags};

use super::enter::make_mount_target;

/// The directory in which glibc and others find the number of processors.
const CPU_DIRECTORY: &str = "sys/devices/system/cpu";
const CPU_LISTS: [&str; 3] = ["online", "possible", "present"];

/// The limits that are shown, and the indexes of the agent's descriptors.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EntryLimitView {
    /// The indexes, among the inherited descriptors, of the directory, the host's `stat` and its
    /// `cpuinfo`.
    pub descriptor_indexes: [usize; 3],
    /// Whether a control group limits memory.
    pub memory: bool,
    /// Whether a control group limits processor time.
    pub cpus: bool,
}

/// Makes the files in a directory of the scratch filesystem and mounts them over those of the new root.
/// Returns the descriptors for the agent in the order of the indexes.
pub(super) fn mount_limit_view(
    view: &EntryLimitView,
    scratch: &Path,
    root: &Path,
) -> io::Result<[OwnedFd; 3]> {
    let directory = scratch.join("view");
    fs::create_dir(&directory)?;
    let quiet = MountAttrs::NO_SUID.and(MountAttrs::NO_DEV).and(MountAttrs::NO_EXEC);
    let proc = root.join("proc");
    let open = |name: &str| fs::File::open(proc.join(name)).map(OwnedFd::from);
    let host = [open("stat")?, open("cpuinfo")?];
    let root = rustix::fs::open(root, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let show = |name: &str, target: &str| {
        let tree = mounts::clone_tree(&directory.join(name), MountDepth::Single)?;
        mounts::set_attributes(tree.as_fd(), quiet.and(MountAttrs::READ_ONLY), None, MountDepth::Single)?;
        let target = make_mount_target(root.as_fd(), target, tree.as_fd(), ResolveFlags::IN_ROOT)?;
        mounts::attach_mount_on(tree.as_fd(), target.as_fd())
    };
    if view.memory {
        make_file(&directory.join("meminfo"))?;
        show("meminfo", "/proc/meminfo")?;
    }
    if view.cpus {
        let processors = directory.join(CPU_DIRECTORY);
        fs::create_dir_all(&processors)?;
        CPU_LISTS.iter().try_for_each(|name| make_file(&processors.join(name)))?;
        for name in ["cpuinfo", "stat"] {
            make_file(&directory.join(name))?;
            show(name, &format!("/proc/{name}"))?;
        }
        show("sys", "/sys")?;
    }
    let files = mounts::clone_tree(&directory, MountDepth::Single)?;
    mounts::set_attributes(files.as_fd(), quiet, None, MountDepth::Single)?;
    let [stat, cpuinfo] = host;
    Ok([files, stat, cpuinfo])
}

fn make_file(path: &Path) -> io::Result<()> {
    // One call makes an empty file without opening it.
    let mode = Mode::from_raw_mode(0o444);
    rustix::fs::mknodat(rustix::fs::CWD, path, rustix::fs::FileType::RegularFile, mode, 0).map_err(Into::into)
}
