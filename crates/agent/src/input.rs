//! The input of a process: bytes that were sent and not yet written.

use std::os::fd::AsFd;

use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use wire::{Frame, Reply};

use crate::agent::Agent;
use crate::connection::{Connection, Stage};
use crate::fault;
use crate::poll::Source;

/// How much is buffered for a process that does not read. Beyond that, its feeders wait too.
const MOST_WAITING: usize = 256 << 10;

/// The character that a terminal takes for the end of input.
const END_OF_TRANSMISSION: u8 = 4;

/// The writing end of a process's input.
#[derive(Debug)]
pub(crate) struct Input {
    source: Source,
    waiting: Vec<u8>,
    close_when_empty: bool,
    terminal: bool,
}

impl Input {
    pub(crate) fn pipe(source: Source) -> Self {
        Self { source, waiting: Vec::new(), close_when_empty: false, terminal: false }
    }

    pub(crate) fn terminal(source: Source) -> Self {
        Self { source, waiting: Vec::new(), close_when_empty: false, terminal: true }
    }

    pub(crate) fn add(&mut self, bytes: &[u8]) {
        self.waiting.extend_from_slice(bytes);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    fn full(&self) -> bool {
        self.waiting.len() >= MOST_WAITING
    }

    fn end(&mut self) {
        if self.terminal {
            self.waiting.push(END_OF_TRANSMISSION);
        } else {
            self.close_when_empty = true;
        }
    }

    /// Writes as much as the process takes now. Returns true while more is waiting.
    pub(crate) fn pump(&mut self) -> rustix::io::Result<bool> {
        while !self.waiting.is_empty() {
            match rustix::io::write(self.source.as_fd(), &self.waiting) {
                Ok(count) => drop(self.waiting.drain(..count)),
                Err(Errno::AGAIN) => break,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno),
            }
        }
        let more = !self.waiting.is_empty();
        self.source.want(if more { EventFlags::OUT } else { EventFlags::empty() });
        Ok(more)
    }
}

/// The state of a feeder after its frames were handled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fed {
    /// The process has to read something first.
    Stuck,
    /// Everything that arrived was accepted.
    Waiting,
    /// The connection no longer feeds input.
    Over,
}

impl Agent {
    /// Replies `Ok` and handles the input that follows the request.
    pub(crate) fn begin_feeding(&mut self, connection: u64, body: u64) {
        self.send(connection, &Reply::Ok);
        if let Some(asking) = self.connections.get_mut(&connection) {
            asking.stage = Stage::Feeding(body);
        }
        self.feed(body);
    }

    /// Accepts input from the feeders of a body in the order of their connections, so that the rest
    /// of one feeder's input precedes the input of the next.
    pub(crate) fn feed(&mut self, body: u64) {
        loop {
            let is_stuck =
                self.feeders(body).into_iter().any(|feeder| self.feed_from(feeder, body) == Fed::Stuck);
            self.pump_input(body);
            // A feeder waits only while the process has input to take, because only then an event
            // follows. The process may have taken all of it, or closed it, since the feeder stopped.
            if !is_stuck || self.has_waiting_input(body) {
                return;
            }
        }
    }

    fn has_waiting_input(&self, body: u64) -> bool {
        let input = self.bodies.get(&body).and_then(|body| body.input.as_ref());
        input.is_some_and(|input| !input.is_empty())
    }

    fn feeders(&self, body: u64) -> Vec<u64> {
        let feeding =
            |connection: &Connection| matches!(connection.stage, Stage::Feeding(fed) if fed == body);
        let mut feeders: Vec<u64> =
            self.connections.iter().filter(|(_, c)| feeding(c)).map(|(number, _)| *number).collect();
        feeders.sort_unstable();
        feeders
    }

    fn feed_from(&mut self, connection: u64, body: u64) -> Fed {
        loop {
            let Some(asking) = self.connections.get_mut(&connection) else { return Fed::Over };
            let Some(input) = self.bodies.get_mut(&body).and_then(|body| body.input.as_mut()) else {
                self.refuse(connection, fault::from_errno(Errno::PIPE, "write", "the input of the process"));
                return Fed::Over;
            };
            if input.full() {
                asking.pause_reading();
                return Fed::Stuck;
            }
            match asking.decoder.next_frame() {
                Ok(Some(Frame::Data(bytes))) => {
                    input.add(&bytes);
                    self.pump_input(body);
                }
                Ok(Some(Frame::End)) => {
                    input.end();
                    asking.stage = Stage::Fed(body);
                    return Fed::Over;
                }
                Ok(None) if asking.finished_sending() => {
                    self.close(connection);
                    return Fed::Over;
                }
                Ok(None) if asking.receive_more(&mut self.scratch) => {}
                Ok(None) => {
                    asking.go_on_reading();
                    return Fed::Waiting;
                }
                Ok(Some(Frame::Control(_) | Frame::Output { .. })) | Err(_) => {
                    self.refuse(connection, crate::requests::malformed());
                    return Fed::Over;
                }
            }
        }
    }

    /// Writes more input. When all of it is written, the connections that have sent `End` are
    /// closed: to the server that is the reply.
    fn pump_input(&mut self, number: u64) {
        let Some(body) = self.bodies.get_mut(&number) else { return };
        let Some(input) = &mut body.input else { return };
        let emptied = match input.pump() {
            Ok(more) => !more,
            Err(_) => {
                body.input = None;
                true
            }
        };
        if !emptied {
            return;
        }
        if body.input.as_ref().is_some_and(|input| input.close_when_empty) {
            body.input = None;
        }
        let done = |connection: &Connection| matches!(connection.stage, Stage::Fed(fed) if fed == number);
        let done: Vec<u64> =
            self.connections.iter().filter(|(_, c)| done(c)).map(|(connection, _)| *connection).collect();
        for connection in done {
            self.close(connection);
        }
    }

    /// The process has read some input.
    pub(crate) fn on_input(&mut self, body: u64) {
        self.pump_input(body);
        self.feed(body);
    }
}
