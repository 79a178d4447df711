//! Feeding a process: what was sent and not yet taken.

use std::os::fd::AsFd;

use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use wire::{Frame, Reply};

use crate::agent::Agent;
use crate::connection::Stage;
use crate::fault;
use crate::poll::Source;

/// How much may wait for a process that does not read. Then its feeders wait, too.
const MOST_WAITING: usize = 256 << 10;

/// What a terminal takes for the end of input.
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

    /// Writes what the process takes now. True while more is waiting.
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

impl Agent {
    /// A connection that feeds a body has sent something, or the body has taken something.
    pub(crate) fn feed(&mut self, connection: u64, number: u64) {
        loop {
            let Some(asking) = self.connections.get_mut(&connection) else { return };
            let Some(input) = self.bodies.get_mut(&number).and_then(|body| body.input.as_mut()) else {
                let gone = fault::from_errno(Errno::PIPE, "write", "the input of the process");
                self.refuse(connection, gone);
                return;
            };
            if input.full() {
                asking.pause_reading();
                return;
            }
            match asking.decoder.next_frame() {
                Ok(Some(Frame::Data(bytes))) => input.add(&bytes),
                Ok(Some(Frame::End)) => {
                    input.end();
                    asking.stage = Stage::Fed(number);
                    self.pump_input(number);
                    return;
                }
                Ok(None) => {
                    asking.go_on_reading();
                    if asking.finished_sending() {
                        self.close(connection);
                    }
                    return;
                }
                Ok(Some(Frame::Control(_) | Frame::Output { .. })) | Err(_) => {
                    self.refuse(connection, crate::requests::malformed());
                    return;
                }
            }
            self.pump_input(number);
        }
    }

    /// Writes on, and wakes those who wait for it.
    pub(crate) fn pump_input(&mut self, number: u64) {
        let Some(body) = self.bodies.get_mut(&number) else { return };
        let Some(input) = &mut body.input else { return };
        let emptied = match input.pump() {
            Ok(more) => !more,
            Err(_) => {
                body.input = None;
                true
            }
        };
        if emptied && body.input.as_ref().is_some_and(|input| input.close_when_empty) {
            body.input = None;
        }
        if emptied {
            self.release_feeders(number);
        }
    }

    pub(crate) fn on_input(&mut self, number: u64) {
        self.pump_input(number);
        let feeding = |stage: &Stage| matches!(stage, Stage::Feeding(body) if *body == number);
        let paused: Vec<u64> =
            self.connections.iter().filter(|(_, c)| feeding(&c.stage)).map(|(id, _)| *id).collect();
        for connection in paused {
            self.feed(connection, number);
        }
    }

    /// Ends the connections whose input has all been taken: to the server that is the answer.
    fn release_feeders(&mut self, number: u64) {
        let done: Vec<u64> = self
            .connections
            .iter()
            .filter(|(_, c)| matches!(c.stage, Stage::Fed(body) if body == number))
            .map(|(id, _)| *id)
            .collect();
        for connection in done {
            self.close(connection);
        }
    }

    /// Answers `Ok` and goes on with what comes behind the request.
    pub(crate) fn begin_feeding(&mut self, connection: u64, number: u64) {
        self.send(connection, &Reply::Ok);
        if let Some(asking) = self.connections.get_mut(&connection) {
            asking.stage = Stage::Feeding(number);
        }
        self.feed(connection, number);
    }
}
