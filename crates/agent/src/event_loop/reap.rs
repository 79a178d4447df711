//! Reaps children: commands, workers, and every orphan in the sandbox.

use linux::spawn::{self, ReapedChild};

use crate::event_loop::agent::Agent;
use crate::event_loop::handles::RunningHandle;
use crate::process::child_table::ChildRole;

impl Agent {
    /// Reaps all children that have ended.
    pub(crate) fn reap_children(&mut self) {
        // The signal is cleared before the children are reaped: a child that ends in between
        // signals again.
        self.child_signals.clear().expect("our own descriptor can be read");
        while let Ok(Some(reaped)) = spawn::reap_child() {
            self.on_child_end(reaped);
        }
    }

    fn on_child_end(&mut self, reaped: ReapedChild) {
        match self.children.take_role(reaped.pid) {
            Some(ChildRole::Leader(running)) => self.leader_ended(running, reaped.end, reaped.usage),
            Some(ChildRole::Runner(running)) => self.runner_ended(running),
            Some(kind @ (ChildRole::Worker | ChildRole::Watcher)) => {
                self.file_workers.worker_ended(kind, &mut self.context, &mut self.children);
            }
            Some(ChildRole::NamespaceBroker) => self.context.broker.mark_failed(),
            None => {}
        }
    }

    /// A runner ends after its last child, or was killed. In the latter case its children now
    /// belong to the agent, and the kernel reports the command's end directly.
    fn runner_ended(&mut self, running: RunningHandle) {
        self.on_runner_readable(running);
        self.on_exec_report(running);
    }
}
