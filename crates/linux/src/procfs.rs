//! A `/proc` that shows its own processes and little else. See proc(5).

use std::io;
use std::path::Path;

use crate::mounts::{self, Attributes};
use crate::readonly;

/// Files that expose information about the host, or change it.
const HIDDEN: [&str; 8] =
    ["kcore", "keys", "key-users", "timer_list", "sysrq-trigger", "kmsg", "sched_debug", "latency_stats"];

/// Directories with kernel settings.
const READ_ONLY: [&str; 4] = ["sys", "irq", "bus", "fs"];

/// Mounts a fresh `/proc` for this pid namespace, with the files about the host covered by `null`.
pub fn mount(proc: &Path, null: &Path) -> io::Result<()> {
    let attributes = Attributes::NO_SUID.and(Attributes::NO_DEV).and(Attributes::NO_EXEC);
    mounts::mount("proc", proc, attributes, "")?;
    for file in HIDDEN.map(|name| proc.join(name)) {
        if file.exists() {
            mounts::bind(null, &file)?;
        }
    }
    for directory in READ_ONLY.map(|name| proc.join(name)) {
        if directory.exists() {
            mounts::bind(&directory, &directory)?;
            readonly::restrict(&directory, true)?;
        }
    }
    Ok(())
}
