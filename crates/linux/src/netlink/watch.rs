//! Notifications of changes in the net namespace in which a watch was opened.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use rustix::io::Errno;
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{RecvFlags, bind, recv};

use super::message::parse_messages;
use super::{NetlinkFamily, NetlinkSocket, route};

/// The number of packets read at once. The rest is read when the descriptor is polled again.
const MAX_PACKETS_PER_READ: usize = 256;

/// Watches links; its descriptor is readable when there are notifications.
#[derive(Debug)]
pub struct LinkWatch(NetlinkSocket);

/// Watches packet filters; its descriptor is readable when there are notifications.
#[derive(Debug)]
pub struct FilterWatch(NetlinkSocket);

impl LinkWatch {
    pub fn open() -> io::Result<Self> {
        const LINKS: u32 = 1;
        open_subscribed(NetlinkFamily::Route, LINKS).map(Self)
    }

    /// Returns the names of removed links. Some are missing if too many were removed at once.
    pub fn removed_links(&mut self) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        read_packets(&mut self.0, |packet| {
            let removed = parse_messages(packet).filter(|part| part.kind == route::DELETE_LINK);
            names.extend(removed.filter_map(|part| route::link_name(part.body)));
        })?;
        Ok(names)
    }
}

impl FilterWatch {
    pub fn open() -> io::Result<Self> {
        const TABLES: u32 = 1 << 6;
        open_subscribed(NetlinkFamily::Netfilter, TABLES).map(Self)
    }

    /// Whether something may have changed; the caller then has to check what.
    pub fn has_changed(&mut self) -> io::Result<bool> {
        let mut changed = false;
        let lost = read_packets(&mut self.0, |_| changed = true)?;
        Ok(changed || lost)
    }
}

impl AsFd for LinkWatch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.fd.as_fd()
    }
}

impl AsFd for FilterWatch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.fd.as_fd()
    }
}

fn open_subscribed(family: NetlinkFamily, groups: u32) -> io::Result<NetlinkSocket> {
    let socket = NetlinkSocket::open(family)?;
    bind(&socket.fd, &SocketAddrNetlink::new(0, groups))?;
    Ok(socket)
}

/// Calls `show` with each received packet; returns `true` if packets were lost.
fn read_packets(socket: &mut NetlinkSocket, mut show: impl FnMut(&[u8])) -> io::Result<bool> {
    let mut lost = false;
    for _ in 0..MAX_PACKETS_PER_READ {
        match recv(&socket.fd, &mut socket.buffer[..], RecvFlags::DONTWAIT) {
            Ok((length, _)) => show(&socket.buffer[..length]),
            Err(Errno::AGAIN) => break,
            // Packets that did not fit were dropped; the rest can still be read.
            Err(Errno::NOBUFS) => lost = true,
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(lost)
}
