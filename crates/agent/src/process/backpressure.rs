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
use crate::event_loop::alarms::{Alarm, AlarmQueue};
use crate::event_loop::connection::ConnectionStage;
use crate::event_loop::connection_table::ConnectionTable;
use crate::event_loop::handles::{ConnectionId, ProcessHandle};
use crate::process::table::ProcessTable;

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

/// Whether a process has to wait for its reader.
struct BackpressureVerdict {
    held: bool,
    stalled_at: Option<Instant>,
    stall_limit_ms: Option<u64>,
}

impl Agent {
    /// Pauses or resumes reading from a process's pipes, depending on its reader.
    pub(crate) fn update_backpressure(&mut self, number: ProcessHandle) {
        let Some(verdict) = self.processes.judge_backpressure(number, &self.connections) else { return };
        let Some(process) = self.processes.get(number) else { return };
        let interest = if verdict.held { EventFlags::empty() } else { EventFlags::IN };
        if let Some(running) = process.running {
            self.children.set_output_interest(running, interest);
        }
        if let Some(session) = &process.session {
            self.sessions.set_report_interest(session, interest);
        }
        let alarms = &mut self.events.alarms;
        match (verdict.held, verdict.stalled_at, verdict.stall_limit_ms) {
            (true, None, Some(limit)) => {
                let stalled_at = alarms.set(Duration::from_millis(limit), Alarm::Stall(number));
                self.processes.set_stalled_at(number, stalled_at);
            }
            (false, Some(_), _) => self.processes.stop_stall_alarm(number, alarms),
            _ => {}
        }
    }

    /// The reader took no byte for the whole stall limit.
    pub(crate) fn reader_stalled(&mut self, number: ProcessHandle) {
        if let Some(process) = self.processes.get_mut(number) {
            process.backpressure.stalled_at = None;
            process.backpressure.released = true;
        }
        self.update_backpressure(number);
    }
}

impl ProcessTable {
    /// Decides whether a process has to wait for its reader; `None` if it never does.
    fn judge_backpressure(
        &mut self,
        number: ProcessHandle,
        connections: &ConnectionTable,
    ) -> Option<BackpressureVerdict> {
        let process = self.get_mut(number)?;
        let retention = process.journal.retention();
        if !retention.lossless || process.ended.is_some() {
            return None;
        }
        let reader = process.backpressure.reader.and_then(|reader| connections.get(reader));
        let position = reader.and_then(|reader| match reader.stage {
            ConnectionStage::Following { cursor, .. } => Some(cursor),
            _ => None,
        });
        let released = process.backpressure.released;
        process.journal.pin(position.map(|cursor| cursor.offset).filter(|_| !released));
        // Half of the retained size; the other half is for what the pipes still hold.
        let most = (retention.last / 2).max(MIN_LAG);
        let lags = position.is_some_and(|cursor| {
            let behind = process.journal.written().saturating_sub(cursor.offset);
            behind > most || process.journal.backlog(&cursor) > process.journal.max_tail_bytes() / 2
        });
        let stalled_at = process.backpressure.stalled_at;
        Some(BackpressureVerdict { held: lags && !released, stalled_at, stall_limit_ms: retention.stall_ms })
    }

    /// The reader took bytes: it is not stalled, and its lag blocks the command again.
    pub(crate) fn reader_advanced(
        &mut self,
        number: ProcessHandle,
        connection: ConnectionId,
        alarms: &mut AlarmQueue,
    ) {
        let Some(process) = self.get_mut(number) else { return };
        if process.backpressure.reader == Some(connection) {
            process.backpressure.released = false;
            self.stop_stall_alarm(number, alarms);
        }
    }

    fn set_stalled_at(&mut self, number: ProcessHandle, stalled_at: Option<Instant>) {
        if let Some(process) = self.get_mut(number) {
            process.backpressure.stalled_at = stalled_at;
        }
    }

    pub(crate) fn stop_stall_alarm(&mut self, number: ProcessHandle, alarms: &mut AlarmQueue) {
        let Some(process) = self.get_mut(number) else { return };
        let stalled_at = process.backpressure.stalled_at.take();
        alarms.stop(stalled_at, Alarm::Stall(number));
    }
}
