//! Writes the limits of one sandbox into its groups, in the words of either version.

use std::fs;
use std::io;

use domain::MAX_PIDS;

use super::{Controller, Extent, Hierarchies, write_if_present};
use crate::jail::plan::Limits;

/// The agent's own bounds: it forks workers and its journal passes through the page cache.
const AGENT_MEMORY: u64 = 256 << 20;
const AGENT_PIDS: u32 = 128;
/// An honest agent has one thread, and its workers are charged to the commands: one core never
/// slows it down, and all that a subverted one can burn is that core.
const AGENT_CPUS: u32 = 1000;

impl Hierarchies {
    /// Bounds the commands as the sandbox's limits say, and the agent beside them.
    pub(super) fn limit(&self, id: &str, limits: &Limits) -> io::Result<()> {
        if self.extent != Extent::Whole {
            // Root inside owns `cmd` with all its files here, and a subverted agent could lift its
            // own limits. What lies above it cannot reach.
            self.limit_memory(id, "", limits.memory.saturating_add(AGENT_MEMORY))?;
            self.limit_pids(id, "", limits.pids.saturating_add(AGENT_PIDS))?;
        }
        self.limit_memory(id, "cmd", limits.memory)?;
        self.limit_memory(id, "agent", AGENT_MEMORY)?;
        self.limit_pids(id, "cmd", limits.pids)?;
        self.limit_pids(id, "agent", AGENT_PIDS)?;
        self.limit_cpus(id, "cmd", limits.cpus)?;
        self.limit_cpus(id, "agent", AGENT_CPUS)
    }

    /// As [`Hierarchies::limit`], for groups that have limits already.
    pub fn resize(&self, id: &str, limits: &Limits) -> io::Result<()> {
        if let Controller::Legacy(root) = &self.memory {
            // The limit on memory with swap must not be below the one on memory at any moment.
            let both = self.legacy_home(root, id, "cmd").join("memory.memsw.limit_in_bytes");
            write_if_present(&both, "-1")?;
        }
        self.limit(id, limits)
    }

    /// `cpus` in thousandths of a core.
    fn limit_cpus(&self, id: &str, part: &str, cpus: u32) -> io::Result<()> {
        const PERIOD: u64 = 100_000;
        let quota = (u64::from(cpus) * PERIOD / 1000).max(1000);
        match &self.cpu {
            Controller::Unified => {
                fs::write(self.home(id).join(part).join("cpu.max"), format!("{quota} {PERIOD}"))
            }
            Controller::Legacy(root) => {
                fs::write(self.legacy_home(root, id, part).join("cpu.cfs_quota_us"), quota.to_string())
            }
            Controller::Absent => Ok(()),
        }
    }

    fn limit_memory(&self, id: &str, part: &str, bytes: u64) -> io::Result<()> {
        match &self.memory {
            Controller::Unified => {
                let group = self.home(id).join(part);
                fs::write(group.join("memory.max"), bytes.to_string())?;
                // Swap would let a sandbox have more than it was given; the file is absent
                // where the kernel has no swap accounting.
                write_if_present(&group.join("memory.swap.max"), "0")
            }
            Controller::Legacy(root) => {
                let group = self.legacy_home(root, id, part);
                fs::write(group.join("memory.limit_in_bytes"), bytes.to_string())?;
                // Buffers of sockets are counted apart here; v2 counts them with the rest.
                fs::write(group.join("memory.kmem.tcp.limit_in_bytes"), (bytes / 4).to_string())?;
                write_if_present(&group.join("memory.memsw.limit_in_bytes"), &bytes.to_string())
            }
            Controller::Absent => Ok(()),
        }
    }

    fn limit_pids(&self, id: &str, part: &str, count: u32) -> io::Result<()> {
        let count = count.min(MAX_PIDS);
        match &self.pids {
            Controller::Unified => fs::write(self.home(id).join(part).join("pids.max"), count.to_string()),
            Controller::Legacy(root) => {
                fs::write(self.legacy_home(root, id, part).join("pids.max"), count.to_string())
            }
            Controller::Absent => Ok(()),
        }
    }
}
