//! Reserved ports: the agent listens on them and closes every connection at once.
//!
//! Some clients check whether a port is open before they use something else. Nothing is ever read
//! from these connections, so nothing in the sandbox can reach the agent through them.

use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};

use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use wire::{Fault, FaultKind};

use crate::agent::Agent;
use crate::fault;
use crate::poll::Token;

/// The maximum number of reserved ports.
const MOST_PORTS: usize = 8;

/// How many connections may wait to be closed, and how many are closed in one turn of the event
/// loop.
const BACKLOG: i32 = 16;

impl Agent {
    /// Listens on a port of the sandbox's loopback, unless the port is in use already.
    pub(crate) fn occupy(&mut self, port: u16) -> Result<(), Fault> {
        if self.occupied.len() >= MOST_PORTS {
            return Err(fault::plain(FaultKind::Busy, "listen", "too many ports"));
        }
        let subject = port.to_string();
        let listener = match listen(port) {
            Ok(listener) => listener,
            Err(Errno::ADDRINUSE) => return Ok(()),
            Err(errno) => return Err(fault::from_errno(errno, "listen", &subject)),
        };
        let number = self.next_number();
        let source = self.poll.watch(listener, Token::Occupied(number), EventFlags::IN);
        let source = source.map_err(|error| fault::from_io(&error, "listen", &subject))?;
        self.occupied.insert(number, source);
        Ok(())
    }

    /// Closes the connections that have arrived.
    pub(crate) fn hang_up(&mut self, number: u64) {
        for _ in 0..BACKLOG {
            let Some(listener) = self.occupied.get(&number) else { return };
            match rustix::net::accept_with(listener.as_fd(), SocketFlags::CLOEXEC) {
                Ok(caller) => drop(caller),
                Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => return,
                // The error would be reported again and again; the port matters less than the event
                // loop.
                Err(_) => drop(self.occupied.remove(&number)),
            }
        }
    }
}

fn listen(port: u16) -> rustix::io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::INET, SocketType::STREAM, flags, None)?;
    // Connections that were closed here must not block a program that wants the port later.
    rustix::net::sockopt::set_socket_reuseaddr(&socket, true)?;
    rustix::net::bind(&socket, &SocketAddr::from((Ipv4Addr::LOCALHOST, port)))?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket)
}
