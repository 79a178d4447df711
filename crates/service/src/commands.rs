//! How many commands of one sandbox run at once.
//!
//! The agent knows exactly, but asking it before each launch would double the cost of one. So
//! we count those we started, which is never too few, and ask only when the count says "full".

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

use domain::ProcessId;

use crate::ProcessStatus;

pub(crate) struct Commands {
    limit: u32,
    counted: Mutex<HashMap<ProcessId, Stage>>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// The agent may not know the process yet.
    Launching,
    Started,
}

/// One of the commands that may run at once. Dropping it before `started` frees it again.
pub(crate) struct Slot {
    commands: Arc<Commands>,
    process: ProcessId,
    stage: Stage,
}

impl Commands {
    pub(crate) fn new(limit: u32) -> Arc<Self> {
        Arc::new(Self { limit, counted: Mutex::default() })
    }

    pub(crate) fn limit(&self) -> u32 {
        self.limit
    }

    /// Takes a slot, if one is free according to our count.
    pub(crate) fn take(self: &Arc<Self>, process: &ProcessId) -> Option<Slot> {
        let mut counted = self.lock();
        if counted.len() >= usize::try_from(self.limit).unwrap_or(usize::MAX) {
            return None;
        }
        counted.insert(process.clone(), Stage::Launching);
        Some(Slot { commands: Arc::clone(self), process: process.clone(), stage: Stage::Launching })
    }

    /// Clears the count when the sandbox starts again and nothing runs any more.
    pub(crate) fn forget_all(&self) {
        self.lock().clear();
    }

    /// Corrects the count by the agent's list of processes.
    pub(crate) fn correct(&self, truth: &[ProcessStatus]) {
        let mut counted = self.lock();
        let running = |id: &ProcessId| truth.iter().any(|it| it.process == *id && it.ended.is_none());
        counted.retain(|process, stage| *stage == Stage::Launching || running(process));
        for status in truth.iter().filter(|status| status.ended.is_none()) {
            counted.entry(status.process.clone()).or_insert(Stage::Started);
        }
    }

    pub(crate) fn ended(&self, process: &ProcessId) {
        self.lock().remove(process);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<ProcessId, Stage>> {
        self.counted.lock().expect("no thread panics while counting")
    }
}

impl Slot {
    /// From now on the process is counted until it ends, whether or not a client follows it.
    pub(crate) fn started(mut self) {
        self.stage = Stage::Started;
        self.commands.lock().insert(self.process.clone(), Stage::Started);
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if self.stage == Stage::Launching {
            self.commands.ended(&self.process);
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
        let commands = Commands::new(1);
        drop(commands.take(&id(1)).expect("nothing runs"));
        commands.take(&id(2)).expect("the first never started").started();
        assert!(commands.take(&id(3)).is_none());
        commands.ended(&id(2));
        assert!(commands.take(&id(3)).is_some());
    }

    #[test]
    fn correction_by_the_agent_keeps_processes_being_launched() {
        let commands = Commands::new(2);
        commands.take(&id(1)).expect("nothing runs").started();
        let launching = commands.take(&id(2)).expect("one slot is left");
        commands.correct(&[]);
        assert!(commands.take(&id(3)).is_some(), "the first has ended without being followed");
        commands.correct(&[running(id(9))]);
        assert!(commands.take(&id(3)).is_none(), "one launches and one was started by another server");
        drop(launching);
    }
}
