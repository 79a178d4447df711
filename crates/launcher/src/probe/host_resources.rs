//! Resources of the whole host that no control group divides: what all sandboxes together may use, beside
//! what the host has. docs/security-model.md lists their limits.

use domain::Bytes;
use serde::{Deserialize, Serialize};

use super::read_kernel_setting;
use crate::jail::host_shares;
use crate::plan::JailLimits;

/// The largest number of sandboxes and the limits of one that requests none.
#[derive(Clone, Copy, Debug)]
pub struct SandboxCapacity {
    pub sandboxes: usize,
    pub limits: JailLimits,
    /// The largest number of commands in one sandbox.
    pub commands: u32,
}

/// One resource of the host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostResource {
    pub resource: String,
    /// What all sandboxes may use together, at the largest number of them and at their default limits.
    pub sandboxes: u64,
    /// What the host has for all its processes.
    pub host: u64,
    /// What to do if sandboxes may use more than the host has.
    pub hint: Option<String>,
}

/// The bytes of compiled code of one system call filter.
const FILTER_BYTES: u64 = 16 << 10;

/// Where the amount of a resource that the host has comes from. Most amounts are a single file of the kernel; the others
/// must be computed from several, so they are passed as a number.
enum HostAmount {
    /// The amount is the number in this file.
    Setting(&'static str),
    /// The amount was computed. It is `None` if this host does not count the resource.
    Known(Option<u64>),
}

/// Compares what all sandboxes together may use with what the host has, so that an operator sees which resource a full
/// server could exhaust. A resource is left out if this host does not count it, or if all sandboxes together have a limit
/// that is lower than the host's, since they cannot exhaust it then.
pub fn compare_resources(capacity: &SandboxCapacity) -> Vec<HostResource> {
    let SandboxCapacity { sandboxes, limits, commands } = capacity;
    let pids = u64::from(limits.pids);
    let own = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let files = host_shares::open_file_limit(own, limits.pids).maximum.unwrap_or(u64::MAX);
    let terminals = kernel_number("/proc/sys/kernel/pty/max")
        .zip(kernel_number("/proc/sys/kernel/pty/reserve"))
        .map(|(most, reserved)| most.saturating_sub(reserved));
    let inotify = host_shares::inotify_limits();
    let inotify_share = inotify.iter().find(|(name, _)| *name == "max_inotify_instances");
    let mut rows = vec![
        (
            "processes",
            pids,
            HostAmount::Setting("/proc/sys/kernel/pid_max"),
            "all sandboxes of a server together get at most seven eighths: `sysctl -w kernel.pid_max=4194304` raises it",
        ),
        (
            "open files",
            files.saturating_mul(pids),
            HostAmount::Setting("/proc/sys/fs/file-max"),
            "the sandbox with the most is ended at `limits.open_files_percent`: raise `fs.file-max`, or lower `limits.pids`",
        ),
        (
            "terminals",
            host_shares::MAX_TERMINALS,
            HostAmount::Known(terminals),
            "sandboxes without terminals are possible: raise `kernel.pty.max`",
        ),
        (
            "memory in bytes",
            limits.memory,
            HostAmount::Known(total_memory()),
            "the host may run out of memory, and the kernel then ends sandboxes first: lower `limits.max_sandboxes` or `limits.memory`",
        ),
        (
            "net namespaces",
            1,
            HostAmount::Setting("/proc/sys/user/max_net_namespaces"),
            "creates fail beyond it: raise `user.max_net_namespaces`",
        ),
        (
            "compiled filters in bytes",
            u64::from(*commands).saturating_add(2).saturating_mul(FILTER_BYTES),
            HostAmount::Setting("/proc/sys/net/core/bpf_jit_limit"),
            "commands fail to start beyond it: raise `net.core.bpf_jit_limit`, or lower `limits.max_commands`",
        ),
    ];
    // The kernel counts these for each user. Sandboxes of root have uids of their own.
    if let Some((_, share)) = inotify_share.filter(|_| !linux::privileges::is_host_root()) {
        rows.push((
            "inotify instances",
            *share,
            HostAmount::Setting("/proc/sys/user/max_inotify_instances"),
            "programs that watch files fail beyond it: raise `fs.inotify.max_user_instances`",
        ));
    }
    let compare = |(resource, each, host, hint): (&str, u64, HostAmount, &str)| {
        let host = match host {
            HostAmount::Setting(path) => kernel_number(path)?,
            HostAmount::Known(amount) => amount?,
        };
        let sandboxes = each.saturating_mul(*sandboxes as u64);
        let hint = (sandboxes > host).then(|| hint.to_owned());
        Some(HostResource { resource: resource.to_owned(), sandboxes, host, hint })
    };
    rows.into_iter().filter_map(compare).collect()
}

/// Reads the number in a kernel setting.
fn kernel_number(path: &str) -> Option<u64> {
    read_kernel_setting(path)?.parse().ok()
}

fn total_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let kibibytes: u64 = text
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:"))?
        .trim()
        .strip_suffix(" kB")?
        .parse()
        .ok()?;
    Some(Bytes(kibibytes.saturating_mul(1024)).0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn capacity(sandboxes: usize) -> SandboxCapacity {
        let limits = JailLimits { memory: 1 << 30, cpus: 1000, pids: 512, disk: 1 << 30 };
        SandboxCapacity { sandboxes, limits, commands: 64 }
    }

    #[test]
    fn tables_that_sandboxes_can_fill_have_a_hint() {
        let find = |tables: &[HostResource], name: &str| {
            tables.iter().find(|table| table.resource == name).cloned().expect("every kernel has it")
        };
        let many = compare_resources(&capacity(4_000_000));
        assert!(find(&many, "processes").hint.is_some());
        assert!(find(&many, "memory in bytes").hint.is_some());
        let one = compare_resources(&capacity(1));
        let processes = find(&one, "processes");
        assert_eq!((processes.sandboxes, processes.hint), (512, None));
        assert!(find(&one, "open files").hint.is_none(), "one sandbox has at most half of the table");
    }
}
