//! The processes that the agent remembers, by handle and by name.

use std::collections::{HashMap, VecDeque};
use std::rc::Rc;

use wire::process::ProcessStatus;
use wire::{AgentConfig, Fault, FaultKind};

use crate::event_loop::handles::ProcessHandle;
use crate::fault;
use crate::process::child_table::ChildTable;
use crate::process::{ManagedProcess, is_safe_name};

/// All processes: those that run, and those that have ended and are not yet forgotten.
#[derive(Debug, Default)]
pub(crate) struct ProcessTable {
    /// Boxed, because a map has room for up to twice as many entries as it contains.
    processes: HashMap<ProcessHandle, Box<ManagedProcess>>,
    names: HashMap<Rc<str>, ProcessHandle>,
    /// Ended processes, the oldest first.
    finished: VecDeque<ProcessHandle>,
}

impl ProcessTable {
    pub(crate) fn insert(&mut self, process: ManagedProcess) {
        self.names.insert(process.name.clone(), process.number);
        self.processes.insert(process.number, Box::new(process));
    }

    pub(crate) fn remove(&mut self, number: ProcessHandle) -> Option<Box<ManagedProcess>> {
        let process = self.processes.remove(&number)?;
        self.names.remove(&process.name);
        self.finished.retain(|finished| *finished != number);
        Some(process)
    }

    pub(crate) fn get(&self, number: ProcessHandle) -> Option<&ManagedProcess> {
        self.processes.get(&number).map(Box::as_ref)
    }

    pub(crate) fn get_mut(&mut self, number: ProcessHandle) -> Option<&mut ManagedProcess> {
        self.processes.get_mut(&number).map(Box::as_mut)
    }

    pub(crate) fn find(&self, name: &str) -> Result<&ManagedProcess, Fault> {
        let process = self.names.get(name).and_then(|number| self.get(*number));
        process.ok_or_else(|| fault::from_kind(FaultKind::NotFound, "find process", name))
    }

    /// Checks that a process may be started under this name, which becomes a file name.
    pub(crate) fn check_new_name(&self, name: &str, config: &AgentConfig) -> Result<(), Fault> {
        if !is_safe_name(name) {
            return Err(fault::from_kind(FaultKind::Invalid, "start", "the name of the process"));
        }
        if self.names.contains_key(name) {
            return Err(fault::from_kind(FaultKind::AlreadyExists, "start", name));
        }
        let most = usize::try_from(config.max_processes).unwrap_or(usize::MAX);
        if self.processes.len() - self.finished.len() >= most {
            return Err(fault::from_kind(FaultKind::Busy, "start", "too many processes are running"));
        }
        Ok(())
    }

    /// The statuses of as many processes as fit in one message, in the order of their start. If not
    /// all fit, processes that run or have left something running take precedence, then the newest.
    pub(crate) fn statuses(&self, children: &ChildTable) -> Vec<ProcessStatus> {
        let mut processes: Vec<&ManagedProcess> = self.values().collect();
        let over = |process: &ManagedProcess| process.ended.is_some() && !children.has_leftovers(process);
        processes.sort_unstable_by_key(|process| (over(process), std::cmp::Reverse(process.number)));
        let mut room = wire::frame::MAX_PAYLOAD / 2;
        let mut listed = Vec::new();
        for process in processes {
            let status = children.status_of(process);
            // JSON may write a byte as six, and the fields besides the text need some room.
            let size = status.command.len() * 6 + 1024;
            if size > room {
                break;
            }
            room -= size;
            listed.push((process.number, status));
        }
        listed.sort_unstable_by_key(|(number, _)| *number);
        listed.into_iter().map(|(_, status)| status).collect()
    }

    pub(crate) fn values(&self) -> impl Iterator<Item = &ManagedProcess> {
        self.processes.values().map(Box::as_ref)
    }

    pub(crate) fn finished_count(&self) -> usize {
        self.finished.len()
    }

    /// Records that a process has ended.
    pub(crate) fn mark_finished(&mut self, number: ProcessHandle) {
        self.finished.push_back(number);
    }

    /// The oldest finished process that may be forgotten or, if there is none, the oldest of all.
    pub(crate) fn oldest_finished(
        &self,
        may_forget: impl Fn(&ManagedProcess) -> bool,
    ) -> Option<ProcessHandle> {
        let is_over = |number: &&ProcessHandle| self.get(**number).is_none_or(&may_forget);
        self.finished.iter().find(is_over).or(self.finished.front()).copied()
    }
}
