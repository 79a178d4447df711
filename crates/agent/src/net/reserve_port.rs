//! Reserved ports: the agent listens on them and closes every connection at once.
//!
//! Some clients check whether a port is open before they use something else. Nothing is ever read
//! from these connections, so nothing in the sandbox can reach the agent through them.

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};

use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use wire::{Fault, FaultKind};

use crate::event_loop::event_sources::EventSources;
use crate::event_loop::handles::ReservedPortId;
use crate::event_loop::poll::{EventToken, RegisteredFd};
use crate::fault;

/// The maximum number of reserved ports.
const MAX_RESERVED_PORTS: usize = 8;

/// How many connections may wait to be closed, and how many are closed in one turn of the event
/// loop.
const BACKLOG: i32 = 16;

/// Ports on which every connection is closed at once.
#[derive(Debug, Default)]
pub(crate) struct ReservedPorts {
    listeners: HashMap<ReservedPortId, RegisteredFd>,
}

impl ReservedPorts {
    /// Listens on a port of the sandbox's loopback, unless the port is in use already.
    pub(crate) fn reserve(&mut self, port: u16, events: &mut EventSources) -> Result<(), Fault> {
        if self.listeners.len() >= MAX_RESERVED_PORTS {
            return Err(fault::from_kind(FaultKind::Busy, "listen", "too many ports"));
        }
        let subject = port.to_string();
        let listener = match listen_on_loopback(port) {
            Ok(listener) => listener,
            Err(Errno::ADDRINUSE) => return Ok(()),
            Err(errno) => return Err(fault::from_errno(errno, "listen", &subject)),
        };
        let number = events.next_handle();
        let source = events.poll.register_fd(listener, EventToken::ReservedPort(number), EventFlags::IN);
        let source = source.map_err(|error| fault::from_io(&error, "listen", &subject))?;
        self.listeners.insert(number, source);
        Ok(())
    }

    /// Closes the connections that have arrived.
    pub(crate) fn close_waiting(&mut self, number: ReservedPortId) {
        for _ in 0..BACKLOG {
            let Some(listener) = self.listeners.get(&number) else { return };
            match rustix::net::accept_with(listener.as_fd(), SocketFlags::CLOEXEC) {
                Ok(caller) => drop(caller),
                Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => return,
                // The error would be reported again and again; the port matters less than the event
                // loop.
                Err(_) => drop(self.listeners.remove(&number)),
            }
        }
    }
}

fn listen_on_loopback(port: u16) -> rustix::io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::INET, SocketType::STREAM, flags, None)?;
    // Connections that were closed here must not block a program that wants the port later.
    rustix::net::sockopt::set_socket_reuseaddr(&socket, true)?;
    rustix::net::bind(&socket, &SocketAddr::from((Ipv4Addr::LOCALHOST, port)))?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket)
}
