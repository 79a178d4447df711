//! Writes the limits of one sandbox into its groups, for both cgroup versions.

use std::fs;
use std::io;

use domain::{MAX_PIDS, SandboxId};

use super::{CgroupAccess, CgroupController, CgroupHierarchies, ROOT_GROUP_NAME, write_if_present};
use crate::jail::plan::JailLimits;

/// The memory limit of the agent: it forks workers, and its journal uses the page cache.
const MAX_AGENT_MEMORY: u64 = 256 << 20;
const MAX_AGENT_PIDS: u32 = 128;
/// An honest agent has one thread, and its workers are charged to the commands, so one core never
/// slows it down. A subverted agent can use at most that core.
const MAX_AGENT_CPUS: u32 = 1000;

/// The time over which a limit on processor time holds.
pub(super) const CPU_PERIOD_MICROS: u64 = 100_000;

/// Returns the processor time in each period for `cpus` thousandths of a core.
pub(super) fn cpu_quota(cpus: u32) -> u64 {
    (u64::from(cpus) * CPU_PERIOD_MICROS / 1000).max(1000)
}

impl CgroupHierarchies {
    /// Sets the fixed limits of a sandbox's agent.
    pub(super) fn set_agent_limits(&self, id: &SandboxId) -> io::Result<()> {
        self.limit_memory(id, "agent", MAX_AGENT_MEMORY)?;
        self.limit_pids(id, "agent", MAX_AGENT_PIDS)?;
        self.limit_cpus(id, "agent", MAX_AGENT_CPUS)
    }

    /// Sets the sandbox's limits on the commands.
    pub(super) fn set_sandbox_limits(&self, id: &SandboxId, limits: &JailLimits) -> io::Result<()> {
        if self.extent != CgroupAccess::Whole {
            // Here root inside owns `cmd` with all its files, so a subverted agent could remove those
            // limits. It cannot reach the group above, so that one has limits too.
            self.limit_memory(id, "", limits.memory.saturating_add(MAX_AGENT_MEMORY))?;
            self.limit_pids(id, "", limits.pids.saturating_add(MAX_AGENT_PIDS))?;
        }
        self.limit_memory(id, "cmd", limits.memory)?;
        self.limit_pids(id, "cmd", limits.pids)?;
        self.limit_cpus(id, "cmd", limits.cpus)
    }

    /// Like `CgroupHierarchies::set_sandbox_limits`, for groups that already have limits.
    pub(crate) fn replace_limits(&self, id: &SandboxId, limits: &JailLimits) -> io::Result<()> {
        if let CgroupController::Legacy(root) = &self.memory {
            // The limit on memory with swap must never be below the limit on memory.
            let both = self.legacy_group(root, id, "cmd").join("memory.memsw.limit_in_bytes");
            write_if_present(&both, "-1")?;
        }
        self.set_sandbox_limits(id, limits)
    }

    /// Limits the TCP buffers of all sandboxes together to half of what the host allows for all its sockets.
    /// v1 counts them apart from other memory, so the limits on memory do not cover them; v2 counts them with
    /// the rest.
    pub(super) fn limit_total_tcp_memory(&self) -> io::Result<()> {
        let CgroupController::Legacy(root) = &self.memory else { return Ok(()) };
        let Some(most) = read_host_tcp_memory()? else { return Ok(()) };
        let group = root.join(ROOT_GROUP_NAME).join(&self.instance);
        write_if_present(&group.join("memory.kmem.tcp.limit_in_bytes"), &(most / 2).to_string())
    }

    /// Sets the limit on processor time; `cpus` is in thousandths of a core.
    fn limit_cpus(&self, id: &SandboxId, part: &str, cpus: u32) -> io::Result<()> {
        // On v1 a group cannot have more than the one above it.
        let quota = cpu_quota(self.total_cpus.map_or(cpus, |total| cpus.min(total)));
        match &self.cpu {
            CgroupController::Unified => fs::write(
                self.sandbox_group(id).join(part).join("cpu.max"),
                format!("{quota} {CPU_PERIOD_MICROS}"),
            ),
            CgroupController::Legacy(root) => {
                fs::write(self.legacy_group(root, id, part).join("cpu.cfs_quota_us"), quota.to_string())
            }
            CgroupController::Absent => Ok(()),
        }
    }

    fn limit_memory(&self, id: &SandboxId, part: &str, bytes: u64) -> io::Result<()> {
        match &self.memory {
            CgroupController::Unified => {
                let group = self.sandbox_group(id).join(part);
                fs::write(group.join("memory.max"), bytes.to_string())?;
                // Swap would let a sandbox use more than its limit; the file is absent if the kernel
                // has no swap accounting.
                write_if_present(&group.join("memory.swap.max"), "0")
            }
            CgroupController::Legacy(root) => {
                let group = self.legacy_group(root, id, part);
                fs::write(group.join("memory.limit_in_bytes"), bytes.to_string())?;
                // v1 counts socket buffers separately; v2 counts them with the rest.
                fs::write(group.join("memory.kmem.tcp.limit_in_bytes"), (bytes / 4).to_string())?;
                write_if_present(&group.join("memory.memsw.limit_in_bytes"), &bytes.to_string())
            }
            CgroupController::Absent => Ok(()),
        }
    }

    fn limit_pids(&self, id: &SandboxId, part: &str, count: u32) -> io::Result<()> {
        let count = count.min(MAX_PIDS);
        match &self.pids {
            CgroupController::Unified => {
                fs::write(self.sandbox_group(id).join(part).join("pids.max"), count.to_string())
            }
            CgroupController::Legacy(root) => {
                fs::write(self.legacy_group(root, id, part).join("pids.max"), count.to_string())
            }
            CgroupController::Absent => Ok(()),
        }
    }
}

/// Returns the bytes that all TCP buffers of the host may have; `None` if this kernel has no TCP. See tcp(7).
pub(super) fn read_host_tcp_memory() -> io::Result<Option<u64>> {
    let text = match fs::read_to_string("/proc/sys/net/ipv4/tcp_mem") {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        text => text?,
    };
    let pages: Option<u64> = text.split_whitespace().nth(2).and_then(|word| word.parse().ok());
    let pages = pages.ok_or_else(|| io::Error::other("could not parse tcp_mem"))?;
    Ok(Some(pages.saturating_mul(rustix::param::page_size() as u64)))
}
