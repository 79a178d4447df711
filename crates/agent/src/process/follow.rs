//! Followers: connections that receive a process's output.
//!
//! A follower reads the journal at its own pace. Only a bounded part is in memory, so a slow
//! follower delays neither the process nor the other followers.

use std::os::fd::AsFd;

use wire::{AgentReply, StreamTag, frame};

use crate::event_loop::agent::Agent;
use crate::event_loop::connection::ConnectionStage;
use crate::event_loop::connection_table::ConnectionTable;
use crate::event_loop::handles::{ConnectionId, ProcessHandle};
use crate::process::journal::{JournalCursor, JournalPiece, MAX_RECORD_BYTES};
use crate::process::table::ProcessTable;

/// How much is encoded in advance for one follower.
const MAX_UNSENT_BYTES: usize = 256 << 10;

impl Agent {
    /// Sends the process's output, and then its end, to the connection from now on.
    pub(crate) fn follow_process(&mut self, connection: ConnectionId, process: ProcessHandle, from: u64) {
        let Some(following) = self.connections.get_mut(connection) else { return };
        following.stage = ConnectionStage::Following { process, cursor: JournalCursor::at(from) };
        if let Some(process) = self.processes.get_mut(process) {
            process.followers.push(connection);
        }
        self.pump_follower(connection);
    }

    /// How many bytes of the process's output before an offset were errors, if that is known.
    pub(crate) fn stderr_before(&mut self, process: ProcessHandle, offset: u64) -> Option<u64> {
        self.processes.get_mut(process)?.journal.stderr_before(self.context.journals.as_fd(), offset)
    }

    /// When the process's output from an offset on was read.
    pub(crate) fn output_times(&mut self, process: ProcessHandle, from: u64) -> Vec<(u64, u64)> {
        let Some(process) = self.processes.get_mut(process) else { return Vec::new() };
        let times = process.journal.read_times(self.context.journals.as_fd(), from);
        if process.followers.is_empty() {
            process.journal.close_if_finished();
        }
        times
    }

    pub(crate) fn stop_following(&mut self, process: ProcessHandle, connection: ConnectionId) {
        let Some(process) = self.processes.get_mut(process) else { return };
        process.followers.retain(|follower| *follower != connection);
        if process.backpressure.reader == Some(connection) {
            process.backpressure.reader = None;
            process.journal.pin(None);
        }
        if process.followers.is_empty() {
            process.journal.close_if_finished();
        }
        let number = process.number;
        self.update_backpressure(number);
    }

    /// Sends as much to a follower as its socket takes.
    pub(crate) fn pump_follower(&mut self, connection: ConnectionId) {
        let Some(following) = self.connections.get_mut(connection) else { return };
        let ConnectionStage::Following { process, cursor } = &mut following.stage else { return };
        let Some(process) = self.processes.get_mut(*process) else {
            self.close_connection(connection);
            return;
        };
        let mut cursor_now = *cursor;
        let mut more = true;
        while following.unsent_bytes() < MAX_UNSENT_BYTES {
            match process.journal.read(self.context.journals.as_fd(), &mut cursor_now, &mut self.buffers.page)
            {
                JournalPiece::Output { stream, offset, length } => {
                    frame::encode_output(&mut following.out, stream, offset, &self.buffers.page[..length]);
                }
                JournalPiece::Gap { from, to, stderr } => {
                    let stderr_before = Some(stderr);
                    following.queue_message(&AgentReply::Gap { from, to, stderr_before });
                }
                JournalPiece::Nothing => {
                    more = false;
                    break;
                }
            }
        }
        following.stage = ConnectionStage::Following { process: process.number, cursor: cursor_now };
        if !more && let Some(ended) = &process.ended {
            following.queue_message(&AgentReply::Ended(ended.clone()));
            let number = process.number;
            following.stage = ConnectionStage::Leaving;
            self.stop_following(number, connection);
            self.connections.flush(connection);
            return;
        }
        let number = process.number;
        match following.flush() {
            Ok(sent) => {
                following.set_interest(more);
                if sent > 0 {
                    self.processes.reader_advanced(number, connection, &mut self.events.alarms);
                }
            }
            Err(_) => return self.close_connection(connection),
        }
        self.update_backpressure(number);
    }

    /// Continues sending to the followers, because there is more.
    pub(crate) fn pump_followers(&mut self, process: ProcessHandle) {
        let Some(process) = self.processes.get(process) else { return };
        for follower in process.followers.clone() {
            // A follower that is behind continues when its socket takes more.
            if self
                .connections
                .get(follower)
                .is_some_and(|following| following.unsent_bytes() < MAX_UNSENT_BYTES)
            {
                self.pump_follower(follower);
            }
        }
    }
}

impl ProcessTable {
    /// Sends new output directly to the followers that have everything before it, so that it need
    /// not be read back from the journal.
    pub(crate) fn send_new_output(
        &self,
        process: ProcessHandle,
        stream: StreamTag,
        offset: u64,
        bytes: &[u8],
        connections: &mut ConnectionTable,
    ) {
        let Some(process) = self.get(process) else { return };
        for follower in &process.followers {
            let Some(following) = connections.get_mut(*follower) else { continue };
            let ConnectionStage::Following { cursor, .. } = following.stage else { continue };
            if cursor.offset != offset || following.unsent_bytes() >= MAX_UNSENT_BYTES {
                continue;
            }
            let mut at = offset;
            for piece in bytes.chunks(MAX_RECORD_BYTES) {
                frame::encode_output(&mut following.out, stream, at, piece);
                at += piece.len() as u64;
            }
            following.stage =
                ConnectionStage::Following { process: process.number, cursor: JournalCursor::at(at) };
        }
    }
}
