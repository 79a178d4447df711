//! Followers: connections that receive a process's output.
//!
//! A follower reads the journal at its own pace. Only a bounded part is in memory, so a slow
//! follower delays neither the process nor the other followers.

use std::os::fd::AsFd;

use wire::{Reply, StreamTag, frame};

use crate::agent::Agent;
use crate::connection::Stage;
use crate::journal::{Cursor, Piece, RECORD};

/// How much is encoded in advance for one follower.
const AHEAD: usize = 256 << 10;

impl Agent {
    /// Sends the process's output, and then its end, to the connection from now on.
    pub(crate) fn follow(&mut self, connection: u64, process: u64, from: u64) {
        let Some(following) = self.connections.get_mut(&connection) else { return };
        following.stage = Stage::Following { process, cursor: Cursor::at(from) };
        if let Some(process) = self.processes.get_mut(&process) {
            process.followers.push(connection);
        }
        self.pump(connection);
    }

    pub(crate) fn unfollow(&mut self, process: u64, connection: u64) {
        let Some(process) = self.processes.get_mut(&process) else { return };
        process.followers.retain(|follower| *follower != connection);
        if process.backpressure.reader == Some(connection) {
            process.backpressure.reader = None;
            process.journal.pin(None);
        }
        if process.followers.is_empty() {
            process.journal.rest();
        }
        let number = process.number;
        self.balance(number);
    }

    /// Sends as much to a follower as its socket takes.
    pub(crate) fn pump(&mut self, connection: u64) {
        let Some(following) = self.connections.get_mut(&connection) else { return };
        let Stage::Following { process, cursor } = &mut following.stage else { return };
        let Some(process) = self.processes.get_mut(process) else {
            self.close(connection);
            return;
        };
        let mut cursor_now = *cursor;
        let mut more = true;
        while following.unsent() < AHEAD {
            match process.journal.read(self.place.journals.as_fd(), &mut cursor_now, &mut self.page) {
                Piece::Output { stream, offset, length } => {
                    frame::encode_output(&mut following.out, stream, offset, &self.page[..length]);
                }
                Piece::Gap { from, to } => following.say(&Reply::Gap { from, to }),
                Piece::Nothing => {
                    more = false;
                    break;
                }
            }
        }
        following.stage = Stage::Following { process: process.number, cursor: cursor_now };
        if !more && let Some(ended) = &process.ended {
            following.say(&Reply::Ended(ended.clone()));
            let number = process.number;
            following.stage = Stage::Leaving;
            self.unfollow(number, connection);
            self.push(connection);
            return;
        }
        let number = process.number;
        match following.flush() {
            Ok(sent) => {
                following.set_interest(more);
                if sent > 0 {
                    self.reader_advanced(number, connection);
                }
            }
            Err(_) => return self.close(connection),
        }
        self.balance(number);
    }

    /// Sends new output directly to the followers that have everything before it, so that it need
    /// not be read back from the journal.
    pub(crate) fn pass_on(&mut self, process: u64, stream: StreamTag, offset: u64, bytes: &[u8]) {
        let Some(process) = self.processes.get(&process) else { return };
        for follower in &process.followers {
            let Some(following) = self.connections.get_mut(follower) else { continue };
            let Stage::Following { cursor, .. } = following.stage else { continue };
            if cursor.offset != offset || following.unsent() >= AHEAD {
                continue;
            }
            let mut at = offset;
            for piece in bytes.chunks(RECORD) {
                frame::encode_output(&mut following.out, stream, at, piece);
                at += piece.len() as u64;
            }
            following.stage = Stage::Following { process: process.number, cursor: Cursor::at(at) };
        }
    }

    /// Continues sending to the followers, because there is more.
    pub(crate) fn pump_followers(&mut self, process: u64) {
        let Some(process) = self.processes.get(&process) else { return };
        for follower in process.followers.clone() {
            // A follower that is behind continues when its socket takes more.
            if self.connections.get(&follower).is_some_and(|following| following.unsent() < AHEAD) {
                self.pump(follower);
            }
        }
    }
}
