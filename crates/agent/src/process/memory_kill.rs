//! Killing the process that uses the most memory, when the sandbox is at its limit and makes no progress.
//!
//! The kernel kills a process only if nothing can be reclaimed. A program whose code does not fit beside its
//! data is read from the disk again and again instead. The server notices that and asks the agent, which can
//! tell the commands' followers why the process ended.

use rustix::process::{Pid, Signal};
use wire::{Fault, FaultKind};

use crate::event_loop::agent::Agent;
use crate::fault;
use crate::process::tree_status::{MAX_MEASURED, process_usage};

impl Agent {
    /// Kills the process with the most memory; it counts as killed for lack of memory.
    pub(crate) fn kill_largest_process(&mut self) -> Result<(), Fault> {
        let own = rustix::process::getpid();
        if !own.is_init() {
            // All processes in `/proc` are the sandbox's only if it has a pid namespace of its own.
            return Err(fault::from_kind(FaultKind::Unsupported, "kill", "the largest process"));
        }
        let spared = [Some(own), self.context.broker.pid()];
        let largest = list_processes()
            .filter(|pid| !spared.contains(&Some(*pid)))
            .filter_map(|pid| Some((process_usage(pid.as_raw_pid())?.1, pid)))
            .max_by_key(|(memory, _)| *memory);
        let Some((_, pid)) = largest else {
            return Err(fault::from_kind(FaultKind::NotFound, "kill", "the largest process"));
        };
        // First: the end may be noticed before this returns.
        self.context.memory_kills += 1;
        let killed = rustix::process::kill_process(pid, Signal::KILL);
        killed.map_err(|errno| fault::from_errno(errno, "kill", &pid.as_raw_pid().to_string()))
    }
}

fn list_processes() -> impl Iterator<Item = Pid> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| Pid::from_raw(entry.file_name().to_str()?.parse().ok()?));
    pids.take(MAX_MEASURED)
}
