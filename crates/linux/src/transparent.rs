//! Sockets that receive packets to any address: the transparent proxy sockets of tcp(7) and ip(7), to which the rule
//! `tproxy` of a packet filter gives connections and datagrams.
//!
//! Both belong to the net namespace in which they were opened, whoever holds them. Opening one takes CAP_NET_ADMIN over
//! that namespace; accepting, receiving and replying do not. They serve IPv4 too, as addresses of the form
//! `::ffff:a.b.c.d`.

use std::io;
use std::net::{Ipv6Addr, SocketAddrV6};
use std::os::fd::AsFd;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use rustix::net::sockopt;
use rustix::net::{AddressFamily, SocketFlags, SocketType};

use crate::check_int;

/// The sockets that a proxy outside of a namespace needs to carry its connections, and the ports that are taken for them.
#[derive(Debug)]
pub struct TransparentSockets {
    /// Listens. The address of an accepted socket is the one that the client connected to.
    pub tcp: OwnedFd,
    pub tcp_port: u16,
    /// Received datagrams come with the address that they were sent to.
    pub udp: OwnedFd,
    pub udp_port: u16,
}

/// How many ports are tried before a namespace counts as full.
const MAX_PORT_ATTEMPTS: u32 = 64;
/// Ports outside of the usual range for outgoing connections, below it: the kernel never takes one of these by itself.
const PORT_RANGE: std::ops::Range<u16> = 20_000..32_000;
/// The queue of connections that nobody has accepted. They wait here while a proxy is started again.
const LISTEN_BACKLOG: i32 = 1024;
/// The kernel doubles the value. Accepted sockets inherit it, which bounds the memory of a connection whose ends do not
/// read.
const TCP_BUFFER_BYTES: usize = 128 << 10;

impl TransparentSockets {
    /// Opens both in the net namespace of this thread, each at a random port that is free there.
    pub fn open() -> io::Result<Self> {
        let (tcp, tcp_port) = bind_free_port(open_stream)?;
        rustix::net::listen(&tcp, LISTEN_BACKLOG)?;
        let (udp, udp_port) = bind_free_port(open_datagram)?;
        Ok(Self { tcp, tcp_port, udp, udp_port })
    }
}

fn open_stream() -> io::Result<OwnedFd> {
    let socket = open_socket(SocketType::STREAM)?;
    sockopt::set_socket_send_buffer_size(&socket, TCP_BUFFER_BYTES)?;
    sockopt::set_socket_recv_buffer_size(&socket, TCP_BUFFER_BYTES)?;
    Ok(socket)
}

/// No other socket may share the port of this one: it would get queries instead of it. So SO_REUSEADDR is not set.
fn open_datagram() -> io::Result<OwnedFd> {
    let socket = open_socket(SocketType::DGRAM)?;
    set_flag(socket.as_fd(), libc::IPPROTO_IPV6, libc::IPV6_RECVPKTINFO)?;
    Ok(socket)
}

fn open_socket(kind: SocketType) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::INET6, kind, flags, None)?;
    sockopt::set_ipv6_v6only(&socket, false)?;
    set_flag(socket.as_fd(), libc::IPPROTO_IPV6, libc::IPV6_TRANSPARENT)?;
    set_flag(socket.as_fd(), libc::IPPROTO_IP, libc::IP_TRANSPARENT)?;
    Ok(socket)
}

/// Binds a new socket to a random port that no other socket of the namespace has.
fn bind_free_port(open: fn() -> io::Result<OwnedFd>) -> io::Result<(OwnedFd, u16)> {
    for _ in 0..MAX_PORT_ATTEMPTS {
        let socket = open()?;
        let port = random_port()?;
        match rustix::net::bind(&socket, &SocketAddrV6::new(Ipv6Addr::UNSPECIFIED, port, 0, 0)) {
            Err(rustix::io::Errno::ADDRINUSE) => {}
            bound => return bound.map(|()| (socket, port)).map_err(Into::into),
        }
    }
    Err(io::Error::new(io::ErrorKind::AddrInUse, "no free port was found in the net namespace"))
}

fn random_port() -> io::Result<u16> {
    let mut bytes = [0; 2];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
    Ok(PORT_RANGE.start + u16::from_ne_bytes(bytes) % (PORT_RANGE.end - PORT_RANGE.start))
}

fn set_flag(socket: BorrowedFd<'_>, level: libc::c_int, option: libc::c_int) -> io::Result<()> {
    let on: libc::c_int = 1;
    let length = libc::socklen_t::try_from(size_of_val(&on)).expect("the size of an int is small");
    // SAFETY: each option that this is called with is one int; the kernel reads it, with the length given, from a
    // variable that outlives the call.
    check_int(unsafe { libc::setsockopt(socket.as_raw_fd(), level, option, (&raw const on).cast(), length) })
        .map(drop)
}
