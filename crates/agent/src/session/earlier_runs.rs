//! Keeps what earlier runs have left in a session apart from the run in progress.
//!
//! ```text
//! group 7    bash, job of the first run          the second run begins: bash moves
//! group 7    job of the first run                ends with the session
//! group 9    bash, what the second run starts    ends with the second run's deadline
//! ```
//! Without control groups a deadline ends everything in the session.

use super::Session;
use crate::context::AgentContext;
use crate::event_loop::agent::Agent;
use crate::event_loop::handles::SessionHandle;
use crate::process::child_table::ChildTable;
use crate::process::tree::CommandTree;

impl Agent {
    /// Moves the shell out of a group in which earlier runs have left processes. Between two runs the shell only waits,
    /// so nothing is forked meanwhile.
    pub(super) fn separate_earlier_runs(&mut self, number: SessionHandle) {
        let Some(session) = self.sessions.get_mut(number) else { return };
        let may_have_left = session.has_plain_shell() && session.shell_was_used();
        let Some(running) = session.running_process().filter(|_| may_have_left) else { return };
        // If this fails, the deadline of the next run reaches the earlier ones too.
        let left = self.children.split_group(running, &self.context, &mut self.events);
        session.earlier_runs.retain(|left| self.children.get(*left).is_some());
        session.earlier_runs.extend(left);
    }
}

impl Session {
    /// Kills what earlier runs have left.
    pub(super) fn kill_earlier_runs(&self, children: &ChildTable, context: &AgentContext) {
        for left in &self.earlier_runs {
            children.kill_tree(*left, context);
        }
    }

    /// Whether processes of earlier runs are still running in trees of their own.
    pub(super) fn has_earlier_runs(&self, children: &ChildTable, context: &AgentContext) -> bool {
        let left = self.earlier_runs.iter().filter_map(|left| children.get(*left));
        left.into_iter().any(|left| match left.tree {
            // A runner ends after the last process that it has started.
            CommandTree::Runner(_) => true,
            CommandTree::Group(_) | CommandTree::Gone => {
                !left.tree.members(context.commands.as_ref(), None, 1).is_empty()
            }
        })
    }

    /// Whether it has a shell that is not isolated. An isolated shell is in a pid namespace of its own.
    fn has_plain_shell(&self) -> bool {
        self.opens_with_its_shell() && self.open.isolation.is_none()
    }
}
