//! How many commands of one sandbox run at once.
//!
//! The agent knows exactly, but asking it before each launch would double the cost of one. So
//! we count those we started, which is never too few, and ask only when the count says "full".

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

use domain::ProcessId;

use crate::ProcessStatus;

pub(crate) struct CommandSlots {
    limit: u32,
    counted: Mutex<HashMap<ProcessId, CommandStage>>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum CommandStage {
    /// The agent may not know the process yet.
    Launching,
    Started,
}

/// One of the commands that may run at once. Dropping it before `started` frees it again.
pub(crate) struct CommandSlot {
    commands: Arc<CommandSlots>,
    process: ProcessId,
    stage: CommandStage,
}

impl CommandSlots {
    pub(crate) fn new(limit: u32) -> Arc<Self> {
        Arc::new(Self { limit, counted: Mutex::default() })
    }

    pub(crate) fn limit(&self) -> u32 {
        self.limit
    }

    /// Takes a slot, if one is free according to our count.
    pub(crate) fn take(self: &Arc<Self>, process: &ProcessId) -> Option<CommandSlot> {
        let mut counted = self.lock();
        if counted.len() >= usize::try_from(self.limit).unwrap_or(usize::MAX) {
            return None;
        }
        counted.insert(process.clone(), CommandStage::Launching);
        Some(CommandSlot {
            commands: Arc::clone(self),
            process: process.clone(),
            stage: CommandStage::Launching,
        })
    }

    /// Clears the count when the sandbox starts again and nothing runs any more.
    pub(crate) fn free_all(&self) {
        self.lock().clear();
    }

    /// Corrects the count by the agent's list of processes.
    pub(crate) fn correct_count(&self, truth: &[ProcessStatus]) {
        let mut counted = self.lock();
        let running = |id: &ProcessId| truth.iter().any(|it| it.process == *id && it.ended.is_none());
        counted.retain(|process, stage| *stage == CommandStage::Launching || running(process));
        for status in truth.iter().filter(|status| status.ended.is_none()) {
            counted.entry(status.process.clone()).or_insert(CommandStage::Started);
        }
    }

    pub(crate) fn free_slot(&self, process: &ProcessId) {
        self.lock().remove(process);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<ProcessId, CommandStage>> {
        self.counted.lock().expect("no thread panics while counting")
    }
}

impl CommandSlot {
    /// From now on the process is counted until it ends, whether or not a client follows it.
    pub(crate) fn mark_started(mut self) {
        self.stage = CommandStage::Started;
        self.commands.lock().insert(self.process.clone(), CommandStage::Started);
    }
}

impl Drop for CommandSlot {
    fn drop(&mut self) {
        if self.stage == CommandStage::Launching {
            self.commands.free_slot(&self.process);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;

    fn id(byte: u8) -> ProcessId {
        ProcessId::from_entropy([byte; 16])
    }

    fn running(process: ProcessId) -> ProcessStatus {
        let started = SystemTime::UNIX_EPOCH;
        ProcessStatus {
            process,
            tag: None,
            session: None,
            command: String::new(),
            started,
            written: 0,
            first: 0,
            ended: None,
            left: false,
        }
    }

    #[test]
    fn slot_is_free_again_when_the_launch_fails_or_the_process_ends() {
        let commands = CommandSlots::new(1);
        drop(commands.take(&id(1)).expect("nothing runs"));
        commands.take(&id(2)).expect("the first never started").mark_started();
        assert!(commands.take(&id(3)).is_none());
        commands.free_slot(&id(2));
        assert!(commands.take(&id(3)).is_some());
    }

    #[test]
    fn correction_by_the_agent_keeps_processes_being_launched() {
        let commands = CommandSlots::new(2);
        commands.take(&id(1)).expect("nothing runs").mark_started();
        let launching = commands.take(&id(2)).expect("one slot is left");
        commands.correct_count(&[]);
        assert!(commands.take(&id(3)).is_some(), "the first has ended without being followed");
        commands.correct_count(&[running(id(9))]);
        assert!(commands.take(&id(3)).is_none(), "one launches and one was started by another server");
        drop(launching);
    }
}
