//! The control group of egress, which bounds its memory: it reads what hostile programs send.
//!
//! It is beside the group of the instance and not in it, because limits of all sandboxes together are set there. An
//! ordinary user's egress has none.

use std::fs;
use std::io;
use std::path::Path;

use super::limits::read_host_tcp_memory;
use super::{ROOT_GROUP_NAME, mount_table, write_if_present};

/// The least that egress gets, on a host with little memory.
const MIN_MEMORY: u64 = 256 << 20;

/// Returns the name of the group for an instance.
pub(super) fn group_name(instance: &str) -> String {
    format!("{instance}.egress")
}

/// Moves this process, which must have one thread, to the group of egress. Returns whether this host has a hierarchy that
/// bounds memory. Call it as root.
pub fn join_egress_group(instance: &str) -> io::Result<bool> {
    let limit = (total_memory()? / 4).max(MIN_MEMORY).to_string();
    for mount in mount_table::read_cgroup_mounts()? {
        let group = mount.path.join(ROOT_GROUP_NAME).join(group_name(instance));
        if mount.kind == "cgroup" && mount.has_option("memory") {
            fs::create_dir_all(&group)?;
            fs::write(group.join("memory.limit_in_bytes"), limit)?;
            limit_tcp_memory(&group)?;
            fs::write(group.join("tasks"), "0")?;
            return Ok(true);
        }
        if mount.kind == "cgroup2" && has_memory(&mount.path.join("cgroup.controllers"))? {
            fs::create_dir_all(&group)?;
            for above in [&mount.path, &mount.path.join(ROOT_GROUP_NAME)] {
                fs::write(above.join("cgroup.subtree_control"), "+memory")?;
            }
            fs::write(group.join("memory.max"), limit)?;
            fs::write(group.join("cgroup.procs"), "0")?;
            return Ok(true);
        }
    }
    Ok(false)
}

/// Limits the TCP buffers of egress to a quarter of what the host allows for all its sockets. v1 counts them apart from other
/// memory: without a limit, connections whose clients read nothing could use up the host's.
fn limit_tcp_memory(group: &Path) -> io::Result<()> {
    let Some(most) = read_host_tcp_memory()? else { return Ok(()) };
    write_if_present(&group.join("memory.kmem.tcp.limit_in_bytes"), &(most / 4).to_string())
}

fn has_memory(controllers: &Path) -> io::Result<bool> {
    Ok(fs::read_to_string(controllers)?.split_whitespace().any(|name| name == "memory"))
}

fn total_memory() -> io::Result<u64> {
    let info = fs::read_to_string("/proc/meminfo")?;
    let total = info.lines().find_map(|line| line.strip_prefix("MemTotal:")?.split_whitespace().next());
    let kib: u64 = total.and_then(|kib| kib.parse().ok()).ok_or(io::ErrorKind::InvalidData)?;
    Ok(kib << 10)
}
