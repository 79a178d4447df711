//! A netlink client for links, routes and packet filters. See netlink(7).
//!
//! A socket permanently belongs to the net namespace in which it was opened; so configuring another
//! namespace needs one visit there. Everything is synchronous: a request returns when the kernel
//! has completed it. `route` handles links, addresses and routes, `nftables` packet
//! filters, `conntrack` tracked connections, and `watch` change notifications.

pub mod conntrack;
mod message;
pub mod nftables;
pub mod route;
pub mod watch;

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink, socket_with};

use message::{NetlinkMessage, parse_attributes, parse_messages};

/// The kernel replies at once; after this time no reply will come.
const REPLY_TIMEOUT: Duration = Duration::from_secs(10);
/// The kernel splits dumps into parts no longer than this.
const MAX_PACKET_BYTES: usize = 64 << 10;

const MESSAGE_ERROR: u16 = 2;
const MESSAGE_DONE: u16 = 3;

/// Flags of a request.
const FLAG_REQUEST: u16 = 1;
const FLAG_MULTIPART: u16 = 2;
const FLAG_ACKNOWLEDGE: u16 = 4;
const FLAG_DUMP: u16 = 0x300;
const FLAG_EXCLUSIVE: u16 = 0x200;
const FLAG_CREATE: u16 = 0x400;

/// A connection to one family of the kernel's netlink interfaces.
#[derive(Debug)]
struct NetlinkSocket {
    fd: OwnedFd,
    sequence: u32,
    buffer: Vec<u8>,
}

/// The netlink family.
#[derive(Clone, Copy, Debug)]
enum NetlinkFamily {
    Route,
    Netfilter,
}

impl NetlinkSocket {
    fn open(family: NetlinkFamily) -> io::Result<Self> {
        let protocol = match family {
            NetlinkFamily::Route => None,
            NetlinkFamily::Netfilter => Some(netlink::NETFILTER),
        };
        let fd = socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, protocol)?;
        set_socket_timeout(&fd, Timeout::Recv, Some(REPLY_TIMEOUT))?;
        Ok(Self { fd, sequence: 0, buffer: vec![0; MAX_PACKET_BYTES] })
    }

    /// Executes all requests in one system call and returns the first error.
    fn send_requests(&mut self, requests: Vec<NetlinkMessage>) -> io::Result<()> {
        let first = self.sequence + 1;
        let mut bytes = Vec::new();
        for request in requests {
            self.sequence += 1;
            bytes.extend(request.finish(FLAG_REQUEST | FLAG_ACKNOWLEDGE, self.sequence));
        }
        self.send(&bytes)?;
        let mut outcome = Ok(());
        let mut owed = self.sequence + 1 - first;
        while owed > 0 {
            let (sequence, answer) = self.receive_acknowledgement()?;
            if sequence >= first {
                owed -= 1;
                outcome = outcome.and(answer);
            }
        }
        outcome
    }

    /// Sends messages of which only the last is acknowledged: a transaction that is applied
    /// completely or not at all.
    fn send_transaction(&mut self, parts: Vec<(NetlinkMessage, u16)>) -> io::Result<()> {
        let first = self.sequence + 1;
        let mut bytes = Vec::new();
        let mut last = first;
        for (part, flags) in parts {
            self.sequence += 1;
            if flags & FLAG_ACKNOWLEDGE != 0 {
                last = self.sequence;
            }
            bytes.extend(part.finish(FLAG_REQUEST | flags, self.sequence));
        }
        self.send(&bytes)?;
        loop {
            let (sequence, answer) = self.receive_acknowledgement()?;
            if sequence < first {
                continue;
            }
            answer?;
            if sequence == last {
                return Ok(());
            }
        }
    }

    /// Requests a list and calls `show` with the type and body of each entry.
    fn request_dump(&mut self, request: NetlinkMessage, mut show: impl FnMut(u16, &[u8])) -> io::Result<()> {
        self.sequence += 1;
        let sequence = self.sequence;
        self.send(&request.finish(FLAG_REQUEST | FLAG_DUMP, sequence))?;
        loop {
            let length = self.receive()?;
            for part in parse_messages(&self.buffer[..length]).filter(|part| part.sequence == sequence) {
                match part.kind {
                    MESSAGE_ERROR => return part.outcome(),
                    MESSAGE_DONE => return Ok(()),
                    kind => show(kind, part.body),
                }
            }
        }
    }

    /// Requests one object and calls `show` with its body.
    fn request_object(&mut self, request: NetlinkMessage, mut show: impl FnMut(&[u8])) -> io::Result<()> {
        self.sequence += 1;
        let sequence = self.sequence;
        self.send(&request.finish(FLAG_REQUEST, sequence))?;
        loop {
            let length = self.receive()?;
            for part in parse_messages(&self.buffer[..length]).filter(|part| part.sequence == sequence) {
                if part.kind == MESSAGE_ERROR {
                    return part.outcome();
                }
                show(part.body);
                if part.flags & FLAG_MULTIPART == 0 {
                    return Ok(());
                }
            }
        }
    }

    fn receive_acknowledgement(&mut self) -> io::Result<(u32, io::Result<()>)> {
        loop {
            let length = self.receive()?;
            // The kernel sends each acknowledgement as a separate packet.
            let found = parse_messages(&self.buffer[..length]).find(|part| part.kind == MESSAGE_ERROR);
            if let Some(part) = found {
                return Ok((part.sequence, part.outcome()));
            }
        }
    }

    fn send(&self, bytes: &[u8]) -> io::Result<()> {
        let sent = rustix::net::send(&self.fd, bytes, SendFlags::empty())?;
        if sent == bytes.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
    }

    fn receive(&mut self) -> io::Result<usize> {
        let flags = RecvFlags::empty();
        let (read, _) =
            rustix::io::retry_on_intr(|| rustix::net::recv(&self.fd, &mut self.buffer[..], flags))?;
        if read == 0 { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(read) }
    }
}
