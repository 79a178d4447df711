//! Datagrams with the address that they were sent to, on a socket that receives those of many addresses. See ipv6(7).
//!
//! The socket is an IPv6 socket for both families with IPV6_RECVPKTINFO set; IPv4 addresses appear in their mapped form.
//! A reply is sent from the address that the query was sent to, which the socket must be allowed to use
//! (IPV6_TRANSPARENT).

use std::io;
use std::mem;
use std::net::{Ipv6Addr, SocketAddrV6};
use std::os::fd::{AsRawFd, BorrowedFd};

/// Space for one control message with an `in6_pktinfo`, aligned as control messages must be.
#[repr(C, align(8))]
struct ControlSpace([u8; 64]);

/// A received datagram; its bytes are at the start of the buffer that was given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReceivedDatagram {
    pub length: usize,
    pub source: SocketAddrV6,
    pub destination: Ipv6Addr,
    /// Whether the datagram was longer than the buffer.
    pub is_truncated: bool,
}

/// Receives one datagram without waiting. It is an error if the kernel does not say where it was sent to.
pub fn receive_datagram(socket: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<ReceivedDatagram> {
    let mut control = ControlSpace([0; 64]);
    let mut source = empty_address();
    let mut part = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    let mut header = message_header(&mut source, &mut part, &mut control, mem::size_of::<ControlSpace>());
    let flags = libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC;
    // SAFETY: the header points to the address, the buffer and the control space above, which live until the call
    // returns, and states the size of each.
    let received = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut header, flags) };
    let Ok(length) = usize::try_from(received) else { return Err(io::Error::last_os_error()) };
    let destination = find_destination(&header)
        .ok_or_else(|| io::Error::other("a datagram came without the address it was sent to"))?;
    Ok(ReceivedDatagram {
        length: length.min(buffer.len()),
        source: SocketAddrV6::new(
            Ipv6Addr::from(source.sin6_addr.s6_addr),
            u16::from_be(source.sin6_port),
            source.sin6_flowinfo,
            source.sin6_scope_id,
        ),
        destination,
        is_truncated: header.msg_flags & libc::MSG_TRUNC != 0,
    })
}

/// Sends a datagram from the address `source` without waiting.
pub fn send_datagram(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    source: Ipv6Addr,
    target: SocketAddrV6,
) -> io::Result<()> {
    let mut control = ControlSpace([0; 64]);
    let mut address = empty_address();
    address.sin6_port = target.port().to_be();
    address.sin6_addr.s6_addr = target.ip().octets();
    address.sin6_scope_id = target.scope_id();
    let mut part = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let info = libc::in6_pktinfo {
        ipi6_addr: libc::in6_addr { s6_addr: source.octets() },
        // The route to the receiver decides.
        ipi6_ifindex: 0,
    };
    let length = u32::try_from(mem::size_of_val(&info)).map_err(io::Error::other)?;
    // SAFETY: CMSG_SPACE and CMSG_LEN only compute sizes.
    let (space, with_header) = unsafe { (libc::CMSG_SPACE(length), libc::CMSG_LEN(length)) };
    let space = usize::try_from(space).map_err(io::Error::other)?;
    let with_header = usize::try_from(with_header).map_err(io::Error::other)?;
    let header = message_header(&mut address, &mut part, &mut control, space);
    // SAFETY: the header's control space is aligned and larger than CMSG_SPACE of one `in6_pktinfo`, so the first
    // control message lies within it, with room for the data that is written.
    unsafe {
        let first = libc::CMSG_FIRSTHDR(&raw const header);
        (*first).cmsg_level = libc::IPPROTO_IPV6;
        (*first).cmsg_type = libc::IPV6_PKTINFO;
        (*first).cmsg_len = field_length(with_header);
        libc::CMSG_DATA(first).cast::<libc::in6_pktinfo>().write_unaligned(info);
    }
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: as for recvmsg above; the kernel only reads what the header points to.
    let sent = unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const header, flags) };
    if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn empty_address() -> libc::sockaddr_in6 {
    libc::sockaddr_in6 {
        sin6_family: libc::sa_family_t::try_from(libc::AF_INET6).expect("families are small numbers"),
        sin6_port: 0,
        sin6_flowinfo: 0,
        sin6_addr: libc::in6_addr { s6_addr: [0; 16] },
        sin6_scope_id: 0,
    }
}

fn message_header(
    address: &mut libc::sockaddr_in6,
    part: &mut libc::iovec,
    control: &mut ControlSpace,
    control_length: usize,
) -> libc::msghdr {
    // SAFETY: all bits zero are a valid `msghdr`: null pointers and lengths of zero. Its padding differs between C
    // libraries, so it cannot be written out.
    let mut header: libc::msghdr = unsafe { mem::zeroed() };
    header.msg_name = std::ptr::from_mut(address).cast();
    header.msg_namelen = field_length(mem::size_of::<libc::sockaddr_in6>());
    header.msg_iov = part;
    header.msg_iovlen = 1;
    header.msg_control = control.0.as_mut_ptr().cast();
    header.msg_controllen = field_length(control_length);
    header
}

/// Converts a length to the type of its field, which differs between C libraries.
fn field_length<T: TryFrom<usize>>(length: usize) -> T {
    T::try_from(length).ok().expect("the structures are small")
}

fn find_destination(header: &libc::msghdr) -> Option<Ipv6Addr> {
    // SAFETY: the header was filled by recvmsg, so its control messages lie within the control space.
    let mut next = unsafe { libc::CMSG_FIRSTHDR(header) };
    while !next.is_null() {
        // SAFETY: CMSG_FIRSTHDR and CMSG_NXTHDR return null or a control message within the space.
        let found = unsafe { *next };
        if found.cmsg_level == libc::IPPROTO_IPV6 && found.cmsg_type == libc::IPV6_PKTINFO {
            // SAFETY: the kernel writes a whole `in6_pktinfo` behind a header of this type, and recvmsg leaves out
            // control messages that do not fit.
            let info = unsafe { libc::CMSG_DATA(next).cast::<libc::in6_pktinfo>().read_unaligned() };
            return Some(Ipv6Addr::from(info.ipi6_addr.s6_addr));
        }
        // SAFETY: as above.
        next = unsafe { libc::CMSG_NXTHDR(header, next) };
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::sockopt;
    use std::net::UdpSocket;
    use std::os::fd::AsFd;

    /// A socket for both families that tells where datagrams were sent to.
    fn service_socket() -> UdpSocket {
        let socket =
            rustix::net::socket(rustix::net::AddressFamily::INET6, rustix::net::SocketType::DGRAM, None)
                .expect("a socket");
        sockopt::set_ipv6_v6only(&socket, false).expect("an option of IPv6 sockets");
        set_receive_destination(socket.as_fd()).expect("an option of IPv6 sockets");
        rustix::net::bind(&socket, &SocketAddrV6::new(Ipv6Addr::UNSPECIFIED, 0, 0, 0)).expect("a free port");
        UdpSocket::from(socket)
    }

    fn set_receive_destination(socket: BorrowedFd<'_>) -> io::Result<()> {
        let on: libc::c_int = 1;
        let length = field_length(mem::size_of_val(&on));
        // SAFETY: the option takes an int, to which the pointer points.
        crate::check_int(unsafe {
            libc::setsockopt(
                socket.as_raw_fd(),
                libc::IPPROTO_IPV6,
                libc::IPV6_RECVPKTINFO,
                (&raw const on).cast(),
                length,
            )
        })
        .map(drop)
    }

    fn exchange(client: &str, server: &str) {
        let service = service_socket();
        let port = service.local_addr().expect("it is bound").port();
        let client = UdpSocket::bind((client, 0)).expect("a free port");
        client.send_to(b"question", (server, port)).expect("it is sent");
        rustix::event::poll(&mut [rustix::event::PollFd::new(&service, rustix::event::PollFlags::IN)], None)
            .expect("it arrives");
        let mut buffer = [0; 4];
        let received = receive_datagram(service.as_fd(), &mut buffer).expect("it waits");
        assert_eq!((received.length, &buffer, received.is_truncated), (4, b"ques", true));
        let destination = received.destination.to_canonical();
        assert_eq!(destination.to_string(), server);
        assert_eq!(received.source.port(), client.local_addr().expect("it is bound").port());
        send_datagram(service.as_fd(), b"answer", received.destination, received.source).expect("it is sent");
        let mut buffer = [0; 16];
        let (length, source) = client.recv_from(&mut buffer).expect("an answer");
        assert_eq!((&buffer[..length], source.ip().to_string().as_str()), (&b"answer"[..], server));
    }

    #[test]
    fn answers_come_from_the_address_that_was_asked() {
        exchange("127.0.0.1", "127.0.0.77");
        if UdpSocket::bind(("::1", 0)).is_ok() {
            exchange("::1", "::1");
        }
    }
}
