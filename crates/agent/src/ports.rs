//! Tunnels: a connection becomes the byte stream of a port in the sandbox.
//!
//! ```text
//! server ══ near ══ [ 64 KiB ] ══► far ══ 127.0.0.1:port
//!                 ◄══ [ 64 KiB ] ══
//! ```
//! Each direction ends on its own: when one side has sent everything, the other side sees the end
//! and may still send its answer.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, Shutdown, SocketFlags, SocketType};
use wire::{Fault, FaultKind, Reply};

use crate::agent::{Agent, Alarm};
use crate::fault;
use crate::poll::{Source, Token};

/// The size of the buffer in each direction.
const BUFFER: usize = 64 << 10;

/// The maximum number of tunnels at once.
const MOST_TUNNELS: usize = 512;

/// How long a port may take to accept.
const DIAL_PATIENCE: Duration = Duration::from_secs(10);

/// A connection to a port that is being established.
#[derive(Debug)]
pub(crate) struct Dial {
    connection: u64,
    port: u16,
    family: Family,
    far: Source,
    patience: Option<Instant>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Family {
    V4,
    V6,
}

/// The two sides and the bytes buffered between them.
#[derive(Debug)]
pub(crate) struct Tunnel {
    near: Source,
    far: Source,
    inward: Flow,
    outward: Flow,
}

/// One direction.
#[derive(Debug, Default)]
struct Flow {
    waiting: Vec<u8>,
    /// The sender has sent everything.
    ended: bool,
    /// The end was passed on to the receiver.
    told: bool,
    /// The receiver accepts nothing more.
    refused: bool,
}

impl Agent {
    /// Connects to a port on the sandbox's loopback.
    pub(crate) fn dial(&mut self, connection: u64, port: u16) -> Result<(), Fault> {
        if self.tunnels.len() + self.dials.len() >= MOST_TUNNELS {
            return Err(fault::plain(FaultKind::Busy, "connect", "too many tunnels"));
        }
        self.dial_family(connection, port, Family::V4)
    }

    fn dial_family(&mut self, connection: u64, port: u16, family: Family) -> Result<(), Fault> {
        let number = self.next_number();
        let subject = port.to_string();
        let failed = |errno| fault::from_errno(errno, "connect", &subject);
        let far = match connect(port, family) {
            Ok(far) => far,
            Err(_) if family == Family::V4 => return self.dial_family(connection, port, Family::V6),
            Err(errno) => return Err(failed(errno)),
        };
        // A connection on the loopback is completed at once or refused; both are reported as
        // events.
        let far = self.poll.watch(far, Token::Far(number), EventFlags::OUT);
        let far = far.map_err(|error| fault::from_io(&error, "connect", &subject))?;
        let patience = self.set_alarm(DIAL_PATIENCE, Alarm::Dial(number));
        self.dials.insert(number, Dial { connection, port, family, far, patience });
        Ok(())
    }

    /// Handles an event on the far side of a dial or a tunnel.
    pub(crate) fn on_far(&mut self, number: u64, flags: EventFlags) {
        match self.dials.remove(&number) {
            Some(dial) => {
                self.stop_alarm(dial.patience, Alarm::Dial(number));
                self.on_dialled(number, dial);
            }
            None => self.turn_tunnel(number, flags, Side::Far),
        }
    }

    pub(crate) fn on_near(&mut self, number: u64, flags: EventFlags) {
        self.turn_tunnel(number, flags, Side::Near);
    }

    fn on_dialled(&mut self, number: u64, dial: Dial) {
        let error = match rustix::net::sockopt::socket_error(dial.far.as_fd()) {
            Ok(Ok(())) => return self.open_tunnel(number, dial),
            Ok(Err(errno)) | Err(errno) => errno,
        };
        let again = match dial.family {
            Family::V4 => self.dial_family(dial.connection, dial.port, Family::V6),
            Family::V6 => Err(fault::from_errno(error, "connect", &dial.port.to_string())),
        };
        if let Err(fault) = again {
            self.refuse(dial.connection, fault);
        }
    }

    pub(crate) fn dial_timed_out(&mut self, number: u64) {
        if let Some(dial) = self.dials.remove(&number) {
            let fault = fault::from_errno(Errno::TIMEDOUT, "connect", &dial.port.to_string());
            self.refuse(dial.connection, fault);
        }
    }

    /// Replies `Ok`; from then on the connection carries no frames.
    fn open_tunnel(&mut self, number: u64, dial: Dial) {
        let Some(mut asking) = self.connections.remove(&dial.connection) else { return };
        asking.say(&Reply::Ok);
        let outward = Flow { waiting: asking.take_unsent(), ..Flow::default() };
        let (near, decoder) = asking.into_parts();
        let inward = Flow { waiting: decoder.into_rest().into(), ..Flow::default() };
        let Ok(near) = near.into_fd() else { return };
        let Ok(near) = self.poll.watch(near, Token::Near(number), EventFlags::IN) else { return };
        self.tunnels.insert(number, Tunnel { near, far: dial.far, inward, outward });
        self.turn_tunnel(number, EventFlags::empty(), Side::Near);
    }

    fn turn_tunnel(&mut self, number: u64, flags: EventFlags, side: Side) {
        let Some(tunnel) = self.tunnels.get_mut(&number) else { return };
        if !tunnel.turn(flags, side, &mut self.scratch) {
            self.tunnels.remove(&number);
        }
    }
}

/// Which side of a tunnel an event came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Near,
    Far,
}

impl Tunnel {
    /// Moves as many bytes as possible. Returns false when nothing more can ever come.
    fn turn(&mut self, flags: EventFlags, side: Side, scratch: &mut [u8]) -> bool {
        if flags.intersects(EventFlags::HUP | EventFlags::ERR) {
            self.hang_up(side);
        }
        loop {
            if self.inward.step(&self.near, &self.far, scratch).is_err() {
                self.inward.refuse();
            }
            if self.outward.step(&self.far, &self.near, scratch).is_err() {
                self.outward.give_up();
            }
            if self.inward.told && self.outward.told {
                return false;
            }
            // A side that hung up produces no more events, so all its remaining bytes are read now.
            let left = |side: &Source, flow: &Flow| side.is_muted() && flow.hungry();
            if !left(&self.near, &self.inward) && !left(&self.far, &self.outward) {
                break;
            }
        }
        self.near.want(interest(&self.inward, &self.outward));
        self.far.want(interest(&self.outward, &self.inward));
        true
    }

    /// A side is closed in both directions: it accepts nothing more, but may have left bytes to
    /// read.
    fn hang_up(&mut self, side: Side) {
        match side {
            Side::Near => {
                self.near.mute();
                self.outward.give_up();
            }
            Side::Far => {
                self.far.mute();
                self.inward.refuse();
            }
        }
    }
}

impl Flow {
    fn hungry(&self) -> bool {
        self.waiting.is_empty() && !self.ended
    }

    /// Ends the flow at once, because the receiver is gone.
    fn give_up(&mut self) {
        *self = Self { ended: true, told: true, ..Self::default() };
    }

    /// The receiver accepts nothing more. Further bytes are dropped until the sender stops: a
    /// service may answer without reading the request, and a client whose writes fail would not
    /// read that answer.
    fn refuse(&mut self) {
        self.waiting.clear();
        self.refused = true;
    }

    /// Moves as many bytes as possible; fails if the receiver is gone.
    fn step(&mut self, from: &Source, to: &Source, scratch: &mut [u8]) -> rustix::io::Result<()> {
        self.send(to)?;
        if self.hungry() {
            match rustix::net::recv(from.as_fd(), &mut scratch[..BUFFER], RecvFlags::empty()) {
                Ok((1.., _)) if self.refused => {}
                Ok((count @ 1.., _)) => self.waiting.extend_from_slice(&scratch[..count]),
                Err(Errno::AGAIN | Errno::INTR) => self.ended = from.is_muted(),
                Ok((0, _)) | Err(_) => self.ended = true,
            }
            self.send(to)?;
        }
        if self.ended && self.waiting.is_empty() && !self.told {
            self.told = true;
            // The receiver may be gone already.
            rustix::net::shutdown(to.as_fd(), Shutdown::Write).ok();
        }
        Ok(())
    }

    fn send(&mut self, to: &Source) -> rustix::io::Result<()> {
        while !self.waiting.is_empty() {
            match rustix::net::send(to.as_fd(), &self.waiting, SendFlags::NOSIGNAL) {
                Ok(count) => drop(self.waiting.drain(..count)),
                Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno),
            }
        }
        Ok(())
    }
}

/// A side is read while its own flow has space, and written while the other flow has bytes.
fn interest(own: &Flow, other: &Flow) -> EventFlags {
    let mut interest = EventFlags::empty();
    if own.hungry() {
        interest |= EventFlags::IN;
    }
    if !other.waiting.is_empty() {
        interest |= EventFlags::OUT;
    }
    interest
}

fn connect(port: u16, family: Family) -> rustix::io::Result<OwnedFd> {
    let (domain, address) = match family {
        Family::V4 => (AddressFamily::INET, SocketAddr::from((Ipv4Addr::LOCALHOST, port))),
        Family::V6 => (AddressFamily::INET6, SocketAddr::from((Ipv6Addr::LOCALHOST, port))),
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(domain, SocketType::STREAM, flags, None)?;
    match rustix::net::connect(&socket, &address) {
        Ok(()) | Err(Errno::INPROGRESS) => Ok(socket),
        Err(errno) => Err(errno),
    }
}
