//! Reaps children: commands, workers, and every orphan in the sandbox.

use linux::spawn::{self, Reaped};

use crate::agent::{Agent, Child};

impl Agent {
    /// Reaps all children that have ended.
    pub(crate) fn reap(&mut self) {
        // The signal is cleared before the children are reaped: a child that ends in between
        // signals again.
        self.child_signals.clear().expect("our own descriptor can be read");
        while let Ok(Some(reaped)) = spawn::reap() {
            self.on_child_end(reaped);
        }
    }

    fn on_child_end(&mut self, reaped: Reaped) {
        match self.children.remove(&reaped.pid) {
            Some(Child::Leader(body)) => self.leader_ended(body, reaped.end, reaped.usage),
            Some(Child::Runner(body)) => self.runner_ended(body),
            Some(kind @ (Child::Worker | Child::Watcher)) => self.worker_ended(kind),
            Some(Child::Nester) => self.nester_ended(),
            None => {}
        }
    }

    /// A runner ends after its last child, or was killed. In the latter case its children now
    /// belong to the agent, and the kernel reports the command's end directly.
    fn runner_ended(&mut self, body: u64) {
        self.on_runner(body);
        self.on_report(body);
    }
}
