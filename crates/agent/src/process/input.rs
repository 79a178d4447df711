//! The input of a process: bytes that were sent and not yet written.

use std::os::fd::AsFd;

use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use wire::{AgentReply, Frame};

use crate::event_loop::agent::Agent;
use crate::event_loop::connection::ConnectionStage;
use crate::event_loop::connection_table::ConnectionTable;
use crate::event_loop::handles::{ConnectionId, RunningHandle};
use crate::event_loop::poll::RegisteredFd;
use crate::event_loop::requests;
use crate::fault;
use crate::process::child_table::ChildTable;

/// How much is buffered for a process that does not read. Beyond that, its feeders wait too.
const MAX_BUFFERED_BYTES: usize = 256 << 10;

/// The character that a terminal takes for the end of input.
const END_OF_TRANSMISSION: u8 = 4;

/// The writing end of a process's input.
#[derive(Debug)]
pub(crate) struct InputWriter {
    source: RegisteredFd,
    waiting: Vec<u8>,
    close_when_empty: bool,
    terminal: bool,
}

impl InputWriter {
    pub(crate) fn for_pipe(source: RegisteredFd) -> Self {
        Self { source, waiting: Vec::new(), close_when_empty: false, terminal: false }
    }

    pub(crate) fn for_terminal(source: RegisteredFd) -> Self {
        Self { source, waiting: Vec::new(), close_when_empty: false, terminal: true }
    }

    pub(crate) fn queue_bytes(&mut self, bytes: &[u8]) {
        self.waiting.extend_from_slice(bytes);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    fn is_full(&self) -> bool {
        self.waiting.len() >= MAX_BUFFERED_BYTES
    }

    fn end(&mut self) {
        if self.terminal {
            self.waiting.push(END_OF_TRANSMISSION);
        } else {
            self.close_when_empty = true;
        }
    }

    /// Writes as much as the process takes now. Returns true while more is waiting.
    pub(crate) fn write_queued(&mut self) -> rustix::io::Result<bool> {
        while !self.waiting.is_empty() {
            match rustix::io::write(self.source.as_fd(), &self.waiting) {
                Ok(count) => drop(self.waiting.drain(..count)),
                Err(Errno::AGAIN) => break,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno),
            }
        }
        let more = !self.waiting.is_empty();
        self.source.set_interest(if more { EventFlags::OUT } else { EventFlags::empty() });
        Ok(more)
    }
}

/// The state of a feeder after its frames were handled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FeederState {
    /// The process has to read something first.
    Stuck,
    /// Everything that arrived was accepted.
    Waiting,
    /// The connection no longer feeds input.
    Over,
}

impl Agent {
    /// Replies `Ok` and handles the input that follows the request.
    pub(crate) fn begin_feeding(&mut self, connection: ConnectionId, running: RunningHandle) {
        self.connections.send_reply(connection, &AgentReply::Ok);
        if let Some(asking) = self.connections.get_mut(connection) {
            asking.stage = ConnectionStage::Feeding(running);
        }
        self.feed_input(running);
    }

    /// Input has arrived, or the process has read some.
    pub(crate) fn feed_input(&mut self, running: RunningHandle) {
        self.children.feed_input(running, &mut self.connections, &mut self.buffers.scratch);
    }
}

impl ChildTable {
    /// Accepts input from the feeders of a process in the order of their connections, so that the
    /// rest of one feeder's input precedes the input of the next.
    fn feed_input(&mut self, running: RunningHandle, connections: &mut ConnectionTable, scratch: &mut [u8]) {
        self.write_input(running, connections);
        loop {
            let is_stuck = connections
                .feeders_of(running)
                .into_iter()
                .any(|feeder| self.feed_from(feeder, running, connections, scratch) == FeederState::Stuck);
            self.write_input(running, connections);
            // A feeder waits only while the process has input to take, because only then an event
            // follows. The process may have taken all of it, or closed it, since the feeder stopped.
            if !is_stuck || self.has_waiting_input(running) {
                return;
            }
        }
    }

    fn has_waiting_input(&self, running: RunningHandle) -> bool {
        let input = self.get(running).and_then(|running| running.input.as_ref());
        input.is_some_and(|input| !input.is_empty())
    }

    fn feed_from(
        &mut self,
        connection: ConnectionId,
        running: RunningHandle,
        connections: &mut ConnectionTable,
        scratch: &mut [u8],
    ) -> FeederState {
        loop {
            let Some(asking) = connections.get_mut(connection) else { return FeederState::Over };
            let Some(input) = self.get_mut(running).and_then(|running| running.input.as_mut()) else {
                let fault = fault::from_errno(Errno::PIPE, "write", "the input of the process");
                connections.refuse_request(connection, fault);
                return FeederState::Over;
            };
            if input.is_full() {
                asking.pause_reading();
                return FeederState::Stuck;
            }
            match asking.decoder.next_frame() {
                Ok(Some(Frame::Data(bytes))) => {
                    input.queue_bytes(&bytes);
                    self.write_input(running, connections);
                }
                Ok(Some(Frame::End)) => {
                    input.end();
                    asking.stage = ConnectionStage::Fed(running);
                    return FeederState::Over;
                }
                Ok(None) if asking.finished_sending() => {
                    connections.remove(connection);
                    return FeederState::Over;
                }
                Ok(None) if asking.receive_more(scratch) => {}
                Ok(None) => {
                    asking.resume_reading();
                    return FeederState::Waiting;
                }
                Ok(Some(Frame::Control(_) | Frame::Output { .. })) | Err(_) => {
                    connections.refuse_request(connection, requests::malformed_fault());
                    return FeederState::Over;
                }
            }
        }
    }

    /// Writes more input. When all of it is written, the connections that have sent `End` are
    /// closed.
    fn write_input(&mut self, number: RunningHandle, connections: &mut ConnectionTable) {
        let Some(running) = self.get_mut(number) else { return };
        let Some(input) = &mut running.input else { return };
        let emptied = match input.write_queued() {
            Ok(more) => !more,
            Err(_) => {
                running.input = None;
                true
            }
        };
        if !emptied {
            return;
        }
        if running.input.as_ref().is_some_and(|input| input.close_when_empty) {
            running.input = None;
        }
        connections.close_fed(number);
    }
}
