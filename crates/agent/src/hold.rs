//! Holding a command back while its readers are slow, where the caller asked for it.
//!
//! Nothing is read from the command's pipes while a follower lags too far behind; they fill,
//! and the command waits in its write, as it would with the reader's own pipe.

use rustix::event::epoll::EventFlags;

use crate::agent::Agent;
use crate::connection::Stage;

impl Agent {
    /// Stops or goes on reading from a process's pipes, as its followers demand.
    pub(crate) fn balance(&mut self, process: u64) {
        let Some(running) = self.processes.get(&process) else { return };
        let retention = running.journal.retention();
        if !retention.hold || running.ended.is_some() {
            return;
        }
        // Half of what is kept: the other half has room for what the pipes still hold.
        let most = retention.last / 2;
        let positions =
            running.followers.iter().filter_map(|follower| match self.connections.get(follower)?.stage {
                Stage::Following { cursor, .. } => Some(cursor.offset),
                _ => None,
            });
        let behind = positions.min().map_or(0, |slowest| running.journal.written().saturating_sub(slowest));
        let interest = if behind > most { EventFlags::empty() } else { EventFlags::IN };
        let Some(body) = running.body.and_then(|body| self.bodies.get_mut(&body)) else { return };
        for (_, source) in &mut body.outputs {
            source.want(interest);
        }
        if let Some(session) = running.session.clone() {
            self.hold_reports(&session, interest);
        }
    }
}
