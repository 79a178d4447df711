//! The connections that are open, by handle, and how replies are sent on them.
//!
//! This part knows nothing of processes. A connection that follows one is closed through
//! `Agent::close_connection`, which tells the process.

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;

use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use wire::{AgentReply, Fault};

use crate::context::AgentContext;
use crate::event_loop::connection::{ConnectionStage, IncomingConnection};
use crate::event_loop::event_sources::EventSources;
use crate::event_loop::handles::{ConnectionId, RunningHandle};
use crate::event_loop::poll::EventToken;

/// The maximum number of connections open at once.
const MAX_CONNECTIONS: usize = 512;

/// How many more connections are accepted only to answer that there are too many.
const MAX_REFUSED_CONNECTIONS: usize = 64;

#[derive(Debug)]
pub(crate) struct ConnectionTable {
    connections: HashMap<ConnectionId, IncomingConnection>,
    /// A spare descriptor, released for a moment when no other is left.
    spare_fd: Option<OwnedFd>,
}

/// The result of accepting one connection.
pub(crate) enum AcceptOutcome {
    Accepted(ConnectionId),
    /// There are so many connections that this one was closed at once.
    Dropped,
    NoneWaiting,
}

impl ConnectionTable {
    pub(crate) fn new(null: &OwnedFd) -> io::Result<Self> {
        let spare_fd = Some(rustix::io::fcntl_dupfd_cloexec(null, 3)?);
        Ok(Self { connections: HashMap::new(), spare_fd })
    }

    pub(crate) fn accept_next(&mut self, context: &AgentContext, events: &mut EventSources) -> AcceptOutcome {
        let fd = match context.accept_connection() {
            Ok(fd) => fd,
            Err(Errno::MFILE | Errno::NFILE) => {
                self.accept_with_spare_fd(context);
                return AcceptOutcome::NoneWaiting;
            }
            Err(_) => return AcceptOutcome::NoneWaiting,
        };
        let number = events.next_handle();
        let Ok(source) = events.poll.register_fd(fd, EventToken::Connection(number), EventFlags::IN) else {
            return AcceptOutcome::NoneWaiting;
        };
        if self.connections.len() >= MAX_CONNECTIONS + MAX_REFUSED_CONNECTIONS {
            return AcceptOutcome::Dropped;
        }
        self.connections.insert(number, IncomingConnection::new(source));
        AcceptOutcome::Accepted(number)
    }

    /// Handles running out of descriptors. The poll reports the connection again and again until it
    /// is accepted, so the spare descriptor is used to accept and close it.
    fn accept_with_spare_fd(&mut self, context: &AgentContext) {
        self.spare_fd = None;
        drop(context.accept_connection());
        self.spare_fd = rustix::io::fcntl_dupfd_cloexec(&context.null, 3).ok();
    }

    /// Whether there are too many connections to serve another request.
    pub(crate) fn is_crowded(&self) -> bool {
        self.connections.len() > MAX_CONNECTIONS
    }

    pub(crate) fn get(&self, number: ConnectionId) -> Option<&IncomingConnection> {
        self.connections.get(&number)
    }

    pub(crate) fn get_mut(&mut self, number: ConnectionId) -> Option<&mut IncomingConnection> {
        self.connections.get_mut(&number)
    }

    pub(crate) fn remove(&mut self, number: ConnectionId) -> Option<IncomingConnection> {
        self.connections.remove(&number)
    }

    /// Sends a message.
    pub(crate) fn send_reply(&mut self, number: ConnectionId, reply: &AgentReply) {
        if let Some(connection) = self.connections.get_mut(&number) {
            connection.queue_message(reply);
            self.flush(number);
        }
    }

    /// Sends the last message and closes the connection once it has been sent.
    pub(crate) fn send_final_reply(&mut self, number: ConnectionId, reply: &AgentReply) {
        if let Some(connection) = self.connections.get_mut(&number) {
            connection.queue_message(reply);
            connection.stage = ConnectionStage::Leaving;
            self.flush(number);
        }
    }

    pub(crate) fn refuse_request(&mut self, number: ConnectionId, fault: Fault) {
        self.send_final_reply(number, &AgentReply::Fault(fault));
    }

    /// Sends as much as the socket takes, and closes a connection that has nothing more to send. A
    /// connection that follows a process is flushed by `Agent::pump_follower` instead.
    pub(crate) fn flush(&mut self, number: ConnectionId) {
        let Some(connection) = self.connections.get_mut(&number) else { return };
        let gone = connection.flush().is_err();
        let done = connection.unsent_bytes() == 0 && matches!(connection.stage, ConnectionStage::Leaving);
        if gone || done {
            self.connections.remove(&number);
        } else {
            connection.set_interest(false);
        }
    }

    /// The connections that send input to a process, in the order in which they were opened.
    pub(crate) fn feeders_of(&self, running: RunningHandle) -> Vec<ConnectionId> {
        let feeds = |connection: &IncomingConnection| matches!(connection.stage, ConnectionStage::Feeding(fed) if fed == running);
        let mut feeders: Vec<ConnectionId> =
            self.connections.iter().filter(|(_, c)| feeds(c)).map(|(number, _)| *number).collect();
        feeders.sort_unstable();
        feeders
    }

    /// Closes the connections whose input a process has taken: to the server that is the reply.
    pub(crate) fn close_fed(&mut self, running: RunningHandle) {
        self.connections
            .retain(|_, connection| !matches!(connection.stage, ConnectionStage::Fed(fed) if fed == running));
    }
}
