//! Ports that are only kept: somebody listens and hangs up at once.
//!
//! Some clients look whether a port is open before they use something else. Nothing is ever read
//! from whoever connects, so nothing inside gets to the agent this way.

use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};

use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use wire::{Fault, FaultKind};

use crate::agent::Agent;
use crate::fault;
use crate::poll::Token;

/// How many ports are kept.
const MOST_PORTS: usize = 8;

/// How many wait to be hung up on, and how many are in one turn of the loop.
const BACKLOG: i32 = 16;

impl Agent {
    /// Listens on a port of the sandbox's own loopback, unless somebody does already.
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

    /// Hangs up on those who have come.
    pub(crate) fn hang_up(&mut self, number: u64) {
        for _ in 0..BACKLOG {
            let Some(listener) = self.occupied.get(&number) else { return };
            match rustix::net::accept_with(listener.as_fd(), SocketFlags::CLOEXEC) {
                Ok(caller) => drop(caller),
                Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => return,
                // It would be reported again and again; the port matters less than the loop.
                Err(_) => drop(self.occupied.remove(&number)),
            }
        }
    }
}

fn listen(port: u16) -> rustix::io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::INET, SocketType::STREAM, flags, None)?;
    // Connections that we have hung up on must not keep the port from whoever wants it later.
    rustix::net::sockopt::set_socket_reuseaddr(&socket, true)?;
    rustix::net::bind(&socket, &SocketAddr::from((Ipv4Addr::LOCALHOST, port)))?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket)
}
