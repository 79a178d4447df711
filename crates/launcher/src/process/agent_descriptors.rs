//! The descriptors that an agent inherits, and the configuration that contains their numbers.

use std::io::{self, Write};
use std::os::fd::OwnedFd;

use rustix::fs::MemfdFlags;
use wire::AgentConfig;
use wire::config::{LimitViewConfig, MemoryFiles};

use crate::cgroups::LimitFiles;

/// The agent's descriptors in the order of their numbers, from 3 on.
pub(super) struct AgentDescriptors {
    /// A slot is empty as long as its descriptor has not been made.
    pub(super) descriptors: Vec<Option<OwnedFd>>,
    pub(super) commands: Option<i32>,
    pub(super) tasks: Vec<i32>,
    pub(super) shares: Vec<i32>,
    pub(super) oom: Option<i32>,
    pub(super) limit_view: Option<LimitViewConfig>,
}

impl AgentDescriptors {
    const CONFIG_INDEX: usize = 0;
    pub(super) const LISTEN_INDEX: usize = 1;
    pub(super) const READY_INDEX: usize = 2;
    pub(super) const JOURNAL_INDEX: usize = 3;

    pub(super) fn new(ready: OwnedFd, listen: OwnedFd) -> Self {
        let descriptors = vec![None, Some(listen), Some(ready), None];
        Self {
            descriptors,
            commands: None,
            tasks: Vec::new(),
            shares: Vec::new(),
            oom: None,
            limit_view: None,
        }
    }

    pub(super) fn fd_number(index: usize) -> i32 {
        wire::config::CONFIG_FD + i32::try_from(index).expect("an agent inherits only a few descriptors")
    }

    fn add(&mut self, descriptor: OwnedFd) -> i32 {
        self.descriptors.push(Some(descriptor));
        Self::fd_number(self.descriptors.len() - 1)
    }

    pub(super) fn add_groups(&mut self, commands: OwnedFd, tasks: Vec<OwnedFd>, oom: Option<OwnedFd>) {
        self.commands = Some(self.add(commands));
        self.tasks = tasks.into_iter().map(|fd| self.add(fd)).collect();
        self.oom = oom.map(|fd| self.add(fd));
    }

    pub(super) fn add_shares(&mut self, shares: Vec<OwnedFd>) {
        self.shares = shares.into_iter().map(|fd| self.add(fd)).collect();
    }

    /// Adds the descriptors that the agent needs to show the sandbox its limits. Returns the indexes of
    /// those that the jail makes, in the order of the agent's `LimitView`, or `None` if no control group enforces a
    /// limit.
    pub(super) fn add_limit_view(&mut self, readings: LimitFiles) -> Option<[usize; 3]> {
        if readings.memory.is_none() && readings.cpu.is_none() {
            return None;
        }
        let memory = readings.memory.map(|memory| MemoryFiles {
            limit_fd: self.add(memory.limit),
            usage_fd: self.add(memory.usage),
            stat_fd: self.add(memory.stat),
        });
        let cpu_fd = readings.cpu.map(|fd| self.add(fd));
        let places @ [files, stat, cpuinfo] =
            [self.add_placeholder(), self.add_placeholder(), self.add_placeholder()];
        self.limit_view = Some(LimitViewConfig {
            files_fd: Self::fd_number(files),
            stat_fd: Self::fd_number(stat),
            cpuinfo_fd: Self::fd_number(cpuinfo),
            memory,
            cpu_fd,
        });
        Some(places)
    }

    /// Adds a slot for a descriptor that is made later, and returns its index.
    pub(super) fn add_placeholder(&mut self) -> usize {
        self.descriptors.push(None);
        self.descriptors.len() - 1
    }

    pub(super) fn set_config(&mut self, config: OwnedFd) {
        self.descriptors[Self::CONFIG_INDEX] = Some(config);
    }
}

pub(super) fn write_config_memfd(config: &AgentConfig) -> io::Result<OwnedFd> {
    let fd = rustix::fs::memfd_create("config", MemfdFlags::CLOEXEC)?;
    let mut file = std::fs::File::from(fd);
    file.write_all(&serde_json::to_vec(config)?)?;
    rustix::fs::seek(&file, rustix::fs::SeekFrom::Start(0))?;
    Ok(file.into())
}
