//! Connections that the kernel tracks for packet filters and NAT.

use std::io;
use std::net::IpAddr;

use super::message::{Message, attributes};
use super::{Family, Socket};

const SUBSYSTEM: u16 = 1;
const GET: u16 = (SUBSYSTEM << 8) | 1;
const DELETE: u16 = (SUBSYSTEM << 8) | 2;

/// The attribute with the original direction of a connection.
const ORIGINAL: u16 = 1;
/// Attributes within it.
const ADDRESSES: u16 = 1;
const FILTER: u16 = 25;

/// The maximum number of requests sent together; the acknowledgements of more would not fit.
const AT_ONCE: usize = 64;

/// Removes the tracked connections that these sources opened.
pub fn forget(sources: &[IpAddr]) -> io::Result<()> {
    let mut socket = Socket::open(Family::Netfilter)?;
    let (v4, v6): (Vec<IpAddr>, Vec<IpAddr>) = sources.iter().partition(|source| source.is_ipv4());
    let forgotten = v4.iter().try_for_each(|source| socket.request(vec![all_of(*source)]));
    match forgotten {
        // Before Linux 6.11 a request could remove only one connection.
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => one_by_one(&mut socket, &v4)?,
        done => done?,
    }
    // The kernel's filter for IPv6 sources is inverted and would match all other sources.
    one_by_one(&mut socket, &v6)
}

/// A request to remove all connections that an IPv4 source opened.
fn all_of(source: IpAddr) -> Message {
    const FLAGS: u16 = 1;
    const BY_SOURCE: u32 = 1;
    let (header, kind, octets) = family(source);
    Message::new(DELETE, 0, &header)
        .nested(ORIGINAL, |inner| inner.nested(ADDRESSES, |ip| ip.attribute(kind, &octets)))
        .nested(FILTER, |filter| filter.number(FLAGS, BY_SOURCE))
}

/// Removes connections of sources, all of one family, one at a time.
fn one_by_one(socket: &mut Socket, sources: &[IpAddr]) -> io::Result<()> {
    let Some(first) = sources.first() else { return Ok(()) };
    let (header, _, _) = family(*first);
    for some in opened_by(socket, sources)?.chunks(AT_ONCE) {
        let request = |original: &Vec<u8>| {
            Message::new(DELETE, 0, &header).nested(ORIGINAL, |inner| inner.fixed(original))
        };
        match socket.request(some.iter().map(request).collect()) {
            // The connection ended by itself meanwhile.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            done => done?,
        }
    }
    Ok(())
}

/// Returns the identifying tuple of each connection that one of the sources, all of one family,
/// opened.
fn opened_by(socket: &mut Socket, sources: &[IpAddr]) -> io::Result<Vec<Vec<u8>>> {
    let Some(first) = sources.first() else { return Ok(Vec::new()) };
    let (header, kind, _) = family(*first);
    let wanted: Vec<Vec<u8>> = sources.iter().map(|source| family(*source).2).collect();
    let mut found = Vec::new();
    socket.dump(Message::new(GET, 0, &header), |_, body| {
        let original = within(body, 4, ORIGINAL);
        let from = original.and_then(|value| within(value, 0, ADDRESSES)).and_then(|ip| within(ip, 0, kind));
        if let (Some(original), Some(from)) = (original, from)
            && wanted.iter().any(|wanted| wanted == from)
        {
            found.push(original.to_vec());
        }
    })?;
    Ok(found)
}

/// Returns the value of the attribute `wanted`.
fn within(bytes: &[u8], fixed: usize, wanted: u16) -> Option<&[u8]> {
    attributes(bytes, fixed).find(|(kind, _)| *kind == wanted).map(|(_, value)| value)
}

/// Returns the fixed part of a request, the attribute for a source address, and the address. The
/// kernel checks the family only in requests with a non-zero version.
fn family(source: IpAddr) -> ([u8; 4], u16, Vec<u8>) {
    let header = |family| [u8::try_from(family).expect("families are small numbers"), 1, 0, 0];
    match source {
        IpAddr::V4(v4) => (header(libc::AF_INET), 1, v4.octets().to_vec()),
        IpAddr::V6(v6) => (header(libc::AF_INET6), 3, v6.octets().to_vec()),
    }
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use super::super::filter::{Hook, Rule, State, Table};
    use super::*;
    use crate::namespaces::{self, Namespaces};

    type Way = fn(&[IpAddr]) -> io::Result<()>;

    fn connections_of(source: &str) -> io::Result<usize> {
        let source = source.parse().map_err(io::Error::other)?;
        Ok(opened_by(&mut Socket::open(Family::Netfilter)?, &[source])?.len())
    }

    fn forgets_of_one_source_alone(forget: Way) -> io::Result<()> {
        namespaces::unshare(Namespaces::NET)?;
        namespaces::raise_loopback()?;
        let mut table = Table::new("tracks");
        table.base_chain("output", Hook::Output);
        table.rule("output", &Rule::new().state(State::Known).accept());
        table.install()?;
        for source in ["127.0.0.2", "127.0.0.3"] {
            for port in 1..200 {
                UdpSocket::bind((source, 0))?.send_to(b"?", ("127.0.0.1", port))?;
            }
        }
        UdpSocket::bind(("::1", 0))?.send_to(b"?", ("::1", 9))?;
        let before = connections_of("127.0.0.3")?;
        assert!(before > 0 && connections_of("127.0.0.2")? > 0 && connections_of("::1")? > 0);
        forget(&["127.0.0.2".parse().map_err(io::Error::other)?])?;
        assert_eq!((connections_of("127.0.0.2")?, connections_of("127.0.0.3")?), (0, before));
        assert!(connections_of("::1")? > 0);
        forget(&["::1".parse().map_err(io::Error::other)?])?;
        assert_eq!((connections_of("::1")?, connections_of("127.0.0.3")?), (0, before));
        Ok(())
    }

    #[test]
    fn only_connections_of_one_source_are_removed() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let ways: [Way; 2] = [forget, |sources| one_by_one(&mut Socket::open(Family::Netfilter)?, sources)];
        for way in ways {
            // A separate thread gets its own net namespace.
            let done = std::thread::spawn(move || forgets_of_one_source_alone(way)).join();
            done.expect("the thread does not panic").expect("the test succeeds");
        }
    }
}
