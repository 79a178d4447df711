//! Blocks a command while the reader that started it is slow, if the caller asked for it.
//!
//! While that reader lags too far behind, nothing is read from the command's pipes. They fill, and
//! the command blocks in its write, as it would with the reader's own pipe. Other followers never
//! block a command.
//!
//! ```text
//!            reader lags                 stall limit passed
//!  running ───────────────► held ──────────────────────────────► released (output may be dropped)
//!     ▲                      │                                      │
//!     └── reader caught up ──┴──────────── reader took a byte ──────┘
//! ```

use std::time::{Duration, Instant};

use rustix::event::epoll::EventFlags;

use crate::event_loop::agent::Agent;
use crate::event_loop::alarms::Alarm;
use crate::event_loop::connection::ConnectionStage;
use crate::event_loop::handles::{ConnectionId, ProcessHandle};

/// The lag that is always allowed, however little is kept.
const MIN_LAG: u64 = 256 << 10;

/// Back-pressure of one process.
#[derive(Debug, Default)]
pub(crate) struct BackpressureState {
    /// The connection that started the process, if it follows.
    pub(crate) reader: Option<ConnectionId>,
    /// When the reader counts as stalled, while the process is held.
    stalled_at: Option<Instant>,
    /// The reader stalled, and has taken no byte since.
    released: bool,
}

impl Agent {
    /// Pauses or resumes reading from a process's pipes, depending on its reader.
    pub(crate) fn update_backpressure(&mut self, process: ProcessHandle) {
        let Some(running) = self.processes.get_mut(&process) else { return };
        let retention = running.journal.retention();
        if !retention.lossless || running.ended.is_some() {
            return;
        }
        let reader = running.backpressure.reader.and_then(|reader| self.connections.get(&reader));
        let position = reader.and_then(|reader| match reader.stage {
            ConnectionStage::Following { cursor, .. } => Some(cursor),
            _ => None,
        });
        let released = running.backpressure.released;
        running.journal.pin(position.map(|cursor| cursor.offset).filter(|_| !released));
        // Half of the retained size; the other half is for what the pipes still hold.
        let most = (retention.last / 2).max(MIN_LAG);
        let lags = position.is_some_and(|cursor| {
            let behind = running.journal.written().saturating_sub(cursor.offset);
            behind > most || running.journal.backlog(&cursor) > running.journal.max_tail_bytes() / 2
        });
        let held = lags && !released;
        let stalled_at = running.backpressure.stalled_at;
        let interest = if held { EventFlags::empty() } else { EventFlags::IN };
        if let Some(body) = running.running.and_then(|body| self.running_processes.get_mut(&body)) {
            for (_, source) in &mut body.outputs {
                source.set_interest(interest);
            }
        }
        if let Some(session) = running.session.clone() {
            self.set_report_interest(&session, interest);
        }
        match (held, stalled_at, retention.stall_ms) {
            (true, None, Some(limit)) => {
                let stalled_at = self.alarms.set(Duration::from_millis(limit), Alarm::Stall(process));
                self.set_stalled_at(process, stalled_at);
            }
            (false, Some(_), _) => self.stop_stall_alarm(process),
            _ => {}
        }
    }

    /// The reader took bytes: it is not stalled, and its lag blocks the command again.
    pub(crate) fn reader_advanced(&mut self, process: ProcessHandle, connection: ConnectionId) {
        let Some(running) = self.processes.get_mut(&process) else { return };
        if running.backpressure.reader == Some(connection) {
            running.backpressure.released = false;
            self.stop_stall_alarm(process);
        }
    }

    /// The reader took no byte for the whole stall limit.
    pub(crate) fn reader_stalled(&mut self, process: ProcessHandle) {
        if let Some(running) = self.processes.get_mut(&process) {
            running.backpressure.stalled_at = None;
            running.backpressure.released = true;
        }
        self.update_backpressure(process);
    }

    fn set_stalled_at(&mut self, process: ProcessHandle, stalled_at: Option<Instant>) {
        if let Some(running) = self.processes.get_mut(&process) {
            running.backpressure.stalled_at = stalled_at;
        }
    }

    pub(crate) fn stop_stall_alarm(&mut self, process: ProcessHandle) {
        let Some(running) = self.processes.get_mut(&process) else { return };
        let stalled_at = running.backpressure.stalled_at.take();
        self.alarms.stop(stalled_at, Alarm::Stall(process));
    }
}
