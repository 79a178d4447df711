//! Followers: connections to which a process's output is sent.
//!
//! A follower reads the journal at its own pace. Only a bounded piece of it is in memory, so a
//! slow one costs nobody anything: not the process, not the other followers.

use std::os::fd::AsFd;

use wire::{Reply, frame};

use crate::agent::Agent;
use crate::connection::Stage;
use crate::journal::{Cursor, Piece};

/// How much is encoded ahead for one follower.
const AHEAD: usize = 256 << 10;

impl Agent {
    /// From now on the connection gets the process's output, and its end.
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
        if process.followers.is_empty() {
            process.journal.rest();
        }
        let number = process.number;
        self.balance(number);
    }

    /// Moves a follower on as far as its socket takes it.
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
            Ok(()) => following.set_interest(more),
            Err(_) => return self.close(connection),
        }
        self.balance(number);
    }

    /// Tells the followers that there is more.
    pub(crate) fn pump_followers(&mut self, process: u64) {
        let Some(process) = self.processes.get(&process) else { return };
        for follower in process.followers.clone() {
            // One that is behind goes on when its socket takes more.
            if self.connections.get(&follower).is_some_and(|following| following.unsent() < AHEAD) {
                self.pump(follower);
            }
        }
    }
}
