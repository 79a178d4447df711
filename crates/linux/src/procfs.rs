//! A `/proc` that shows its own processes and little else. See proc(5).

use std::io;
use std::path::Path;

use crate::mounts::{self, MountAttrs};
use crate::readonly;

/// Files that expose information about the host, or change it.
const HIDDEN_FILES: [&str; 8] =
    ["kcore", "keys", "key-users", "timer_list", "sysrq-trigger", "kmsg", "sched_debug", "latency_stats"];

/// Directories with kernel settings.
const READ_ONLY_DIRECTORIES: [&str; 4] = ["sys", "irq", "bus", "fs"];

/// Mounts a fresh `/proc` for this pid namespace, with the files about the host covered by `null`.
pub fn mount_proc(proc: &Path, null: &Path) -> io::Result<()> {
    let attributes = MountAttrs::NO_SUID.and(MountAttrs::NO_DEV).and(MountAttrs::NO_EXEC);
    mounts::mount_filesystem("proc", proc, attributes, "")?;
    for file in HIDDEN_FILES.map(|name| proc.join(name)) {
        if file.exists() {
            mounts::bind_mount(null, &file)?;
        }
    }
    for directory in READ_ONLY_DIRECTORIES.map(|name| proc.join(name)) {
        if directory.exists() {
            mounts::bind_mount(&directory, &directory)?;
            readonly::restrict_mount(&directory, true)?;
        }
    }
    Ok(())
}
