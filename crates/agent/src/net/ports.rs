//! Tunnels: a connection becomes the byte stream of a port in the sandbox.
//!
//! ```text
//! server ══ near ══ [ 64 KiB ] ══► far ══ 127.0.0.1:port
//!                 ◄══ [ 64 KiB ] ══
//! ```
//! Each direction ends on its own: when one side has sent everything, the other side sees the end
//! and may still send its answer.

use std::collections::HashMap;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, Shutdown, SocketFlags, SocketType};
use wire::{AgentReply, Fault, FaultKind};

use crate::event_loop::alarms::Alarm;
use crate::event_loop::connection_table::ConnectionTable;
use crate::event_loop::event_sources::EventSources;
use crate::event_loop::handles::{ConnectionId, TunnelId};
use crate::event_loop::poll::{EventToken, RegisteredFd};
use crate::fault;

/// The size of the buffer in each direction.
const BUFFER_BYTES: usize = 64 << 10;

/// The maximum number of tunnels at once.
const MAX_TUNNELS: usize = 512;

/// How long a port may take to accept.
const DIAL_TIMEOUT: Duration = Duration::from_secs(10);

/// The tunnels, and the dials from which they begin.
#[derive(Debug, Default)]
pub(crate) struct TunnelTable {
    dials: HashMap<TunnelId, PendingDial>,
    tunnels: HashMap<TunnelId, LoopbackTunnel>,
}

/// A connection to a port that is being established.
#[derive(Debug)]
struct PendingDial {
    connection: ConnectionId,
    port: u16,
    family: IpFamily,
    far: RegisteredFd,
    times_out_at: Option<Instant>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum IpFamily {
    V4,
    V6,
}

/// The two sides and the bytes buffered between them.
#[derive(Debug)]
struct LoopbackTunnel {
    near: RegisteredFd,
    far: RegisteredFd,
    inward: TunnelFlow,
    outward: TunnelFlow,
}

/// One direction.
#[derive(Debug, Default)]
struct TunnelFlow {
    waiting: Vec<u8>,
    /// The sender has sent everything.
    ended: bool,
    /// The end was passed on to the receiver.
    end_sent: bool,
    /// The receiver accepts nothing more.
    refused: bool,
}

impl TunnelTable {
    /// Connects to a port on the sandbox's loopback.
    pub(crate) fn dial_port(
        &mut self,
        connection: ConnectionId,
        port: u16,
        events: &mut EventSources,
    ) -> Result<(), Fault> {
        if self.is_full() {
            return Err(fault::from_kind(FaultKind::Busy, "connect", "too many tunnels"));
        }
        self.dial_family(connection, port, IpFamily::V4, events)
    }

    fn dial_family(
        &mut self,
        connection: ConnectionId,
        port: u16,
        family: IpFamily,
        events: &mut EventSources,
    ) -> Result<(), Fault> {
        let number = events.next_handle();
        let subject = port.to_string();
        let failed = |errno| fault::from_errno(errno, "connect", &subject);
        let far = match connect_loopback(port, family) {
            Ok(far) => far,
            Err(_) if family == IpFamily::V4 => {
                return self.dial_family(connection, port, IpFamily::V6, events);
            }
            Err(errno) => return Err(failed(errno)),
        };
        // A connection on the loopback is completed at once or refused; both are reported as
        // events.
        let far = events.poll.register_fd(far, EventToken::Far(number), EventFlags::OUT);
        let far = far.map_err(|error| fault::from_io(&error, "connect", &subject))?;
        let times_out_at = events.alarms.set(DIAL_TIMEOUT, Alarm::Dial(number));
        self.dials.insert(number, PendingDial { connection, port, family, far, times_out_at });
        Ok(())
    }

    /// Handles an event on the far side of a dial or a tunnel.
    pub(crate) fn on_far(
        &mut self,
        number: TunnelId,
        flags: EventFlags,
        connections: &mut ConnectionTable,
        events: &mut EventSources,
        scratch: &mut [u8],
    ) {
        match self.dials.remove(&number) {
            Some(dial) => {
                events.alarms.stop(dial.times_out_at, Alarm::Dial(number));
                self.on_dialled(number, dial, connections, events, scratch);
            }
            None => self.pump(number, flags, TunnelSide::Far, scratch),
        }
    }

    pub(crate) fn on_near(&mut self, number: TunnelId, flags: EventFlags, scratch: &mut [u8]) {
        self.pump(number, flags, TunnelSide::Near, scratch);
    }

    fn on_dialled(
        &mut self,
        number: TunnelId,
        dial: PendingDial,
        connections: &mut ConnectionTable,
        events: &mut EventSources,
        scratch: &mut [u8],
    ) {
        let error = match rustix::net::sockopt::socket_error(dial.far.as_fd()) {
            Ok(Ok(())) => {
                self.open_tunnel(number, dial, connections, events);
                return self.pump(number, EventFlags::empty(), TunnelSide::Near, scratch);
            }
            Ok(Err(errno)) | Err(errno) => errno,
        };
        let again = match dial.family {
            IpFamily::V4 => self.dial_family(dial.connection, dial.port, IpFamily::V6, events),
            IpFamily::V6 => Err(fault::from_errno(error, "connect", &dial.port.to_string())),
        };
        if let Err(fault) = again {
            connections.refuse_request(dial.connection, fault);
        }
    }

    pub(crate) fn dial_timed_out(&mut self, number: TunnelId, connections: &mut ConnectionTable) {
        if let Some(dial) = self.dials.remove(&number) {
            let fault = fault::from_errno(Errno::TIMEDOUT, "connect", &dial.port.to_string());
            connections.refuse_request(dial.connection, fault);
        }
    }

    /// Replies `Ok`; from then on the connection carries no frames.
    fn open_tunnel(
        &mut self,
        number: TunnelId,
        dial: PendingDial,
        connections: &mut ConnectionTable,
        events: &EventSources,
    ) {
        let Some(mut asking) = connections.remove(dial.connection) else { return };
        asking.queue_message(&AgentReply::Ok);
        let outward = TunnelFlow { waiting: asking.take_unsent(), ..TunnelFlow::default() };
        let (near, decoder) = asking.into_parts();
        let inward = TunnelFlow { waiting: decoder.into_rest().into(), ..TunnelFlow::default() };
        let Ok(near) = near.into_fd() else { return };
        let Ok(near) = events.poll.register_fd(near, EventToken::Near(number), EventFlags::IN) else {
            return;
        };
        self.tunnels.insert(number, LoopbackTunnel { near, far: dial.far, inward, outward });
    }

    fn is_full(&self) -> bool {
        self.tunnels.len() + self.dials.len() >= MAX_TUNNELS
    }

    /// Moves as many bytes as possible, and removes a tunnel through which none can come any more.
    fn pump(&mut self, number: TunnelId, flags: EventFlags, side: TunnelSide, scratch: &mut [u8]) {
        let Some(tunnel) = self.tunnels.get_mut(&number) else { return };
        if !tunnel.move_bytes(flags, side, scratch) {
            self.tunnels.remove(&number);
        }
    }
}

/// Which side of a tunnel an event came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TunnelSide {
    Near,
    Far,
}

impl LoopbackTunnel {
    /// Moves as many bytes as possible. Returns false when nothing more can ever come.
    fn move_bytes(&mut self, flags: EventFlags, side: TunnelSide, scratch: &mut [u8]) -> bool {
        if flags.intersects(EventFlags::HUP | EventFlags::ERR) {
            self.close_side(side);
        }
        loop {
            if self.inward.move_pending(&self.near, &self.far, scratch).is_err() {
                self.inward.discard_further();
            }
            if self.outward.move_pending(&self.far, &self.near, scratch).is_err() {
                self.outward.abort();
            }
            if self.inward.end_sent && self.outward.end_sent {
                return false;
            }
            // A side that hung up produces no more events, so all its remaining bytes are read now.
            let left = |side: &RegisteredFd, flow: &TunnelFlow| side.is_deregistered() && flow.wants_input();
            if !left(&self.near, &self.inward) && !left(&self.far, &self.outward) {
                break;
            }
        }
        self.near.set_interest(event_interest(&self.inward, &self.outward));
        self.far.set_interest(event_interest(&self.outward, &self.inward));
        true
    }

    /// A side is closed in both directions: it accepts nothing more, but may have left bytes to
    /// read.
    fn close_side(&mut self, side: TunnelSide) {
        match side {
            TunnelSide::Near => {
                self.near.deregister();
                self.outward.abort();
            }
            TunnelSide::Far => {
                self.far.deregister();
                self.inward.discard_further();
            }
        }
    }
}

impl TunnelFlow {
    fn wants_input(&self) -> bool {
        self.waiting.is_empty() && !self.ended
    }

    /// Ends the flow at once, because the receiver is gone.
    fn abort(&mut self) {
        *self = Self { ended: true, end_sent: true, ..Self::default() };
    }

    /// The receiver accepts nothing more. Further bytes are dropped until the sender stops: a
    /// service may answer without reading the request, and a client whose writes fail would not
    /// read that answer.
    fn discard_further(&mut self) {
        self.waiting.clear();
        self.refused = true;
    }

    /// Moves as many bytes as possible; fails if the receiver is gone.
    fn move_pending(
        &mut self,
        from: &RegisteredFd,
        to: &RegisteredFd,
        scratch: &mut [u8],
    ) -> rustix::io::Result<()> {
        self.send_waiting(to)?;
        if self.wants_input() {
            match rustix::net::recv(from.as_fd(), &mut scratch[..BUFFER_BYTES], RecvFlags::empty()) {
                Ok((1.., _)) if self.refused => {}
                Ok((count @ 1.., _)) => self.waiting.extend_from_slice(&scratch[..count]),
                Err(Errno::AGAIN | Errno::INTR) => self.ended = from.is_deregistered(),
                Ok((0, _)) | Err(_) => self.ended = true,
            }
            self.send_waiting(to)?;
        }
        if self.ended && self.waiting.is_empty() && !self.end_sent {
            self.end_sent = true;
            // The receiver may be gone already.
            rustix::net::shutdown(to.as_fd(), Shutdown::Write).ok();
        }
        Ok(())
    }

    fn send_waiting(&mut self, to: &RegisteredFd) -> rustix::io::Result<()> {
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
fn event_interest(own: &TunnelFlow, other: &TunnelFlow) -> EventFlags {
    let mut interest = EventFlags::empty();
    if own.wants_input() {
        interest |= EventFlags::IN;
    }
    if !other.waiting.is_empty() {
        interest |= EventFlags::OUT;
    }
    interest
}

fn connect_loopback(port: u16, family: IpFamily) -> rustix::io::Result<OwnedFd> {
    let (domain, address) = match family {
        IpFamily::V4 => (AddressFamily::INET, SocketAddr::from((Ipv4Addr::LOCALHOST, port))),
        IpFamily::V6 => (AddressFamily::INET6, SocketAddr::from((Ipv6Addr::LOCALHOST, port))),
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(domain, SocketType::STREAM, flags, None)?;
    match rustix::net::connect(&socket, &address) {
        Ok(()) | Err(Errno::INPROGRESS) => Ok(socket),
        Err(errno) => Err(errno),
    }
}
