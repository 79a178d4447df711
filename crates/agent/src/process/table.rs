//! The processes that the agent remembers, by handle and by name.

use std::collections::{HashMap, VecDeque};

use crate::event_loop::handles::ProcessHandle;
use crate::process::ManagedProcess;

/// All processes: those that run, and those that have ended and are not yet forgotten.
#[derive(Debug, Default)]
pub(crate) struct ProcessTable {
    processes: HashMap<ProcessHandle, ManagedProcess>,
    names: HashMap<String, ProcessHandle>,
    /// Ended processes, the oldest first.
    finished: VecDeque<ProcessHandle>,
}

impl ProcessTable {
    pub(crate) fn insert(&mut self, process: ManagedProcess) {
        self.names.insert(process.name.clone(), process.number);
        self.processes.insert(process.number, process);
    }

    pub(crate) fn remove(&mut self, number: ProcessHandle) -> Option<ManagedProcess> {
        let process = self.processes.remove(&number)?;
        self.names.remove(&process.name);
        self.finished.retain(|finished| *finished != number);
        Some(process)
    }

    pub(crate) fn get(&self, number: &ProcessHandle) -> Option<&ManagedProcess> {
        self.processes.get(number)
    }

    pub(crate) fn get_mut(&mut self, number: &ProcessHandle) -> Option<&mut ManagedProcess> {
        self.processes.get_mut(number)
    }

    pub(crate) fn find(&self, name: &str) -> Option<&ManagedProcess> {
        self.names.get(name).and_then(|number| self.processes.get(number))
    }

    pub(crate) fn values(&self) -> impl Iterator<Item = &ManagedProcess> {
        self.processes.values()
    }

    pub(crate) fn running_count(&self) -> usize {
        self.processes.len() - self.finished.len()
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
        let is_over = |number: &&ProcessHandle| self.get(number).is_none_or(&may_forget);
        self.finished.iter().find(is_over).or(self.finished.front()).copied()
    }
}
