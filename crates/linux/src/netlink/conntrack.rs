//! Connections that the kernel tracks for packet filters and NAT.

use std::io;
use std::net::IpAddr;

use super::message::{NetlinkMessage, parse_attributes};
use super::{NetlinkFamily, NetlinkSocket};

const SUBSYSTEM: u16 = 1;
const GET_CONNECTION: u16 = (SUBSYSTEM << 8) | 1;
const DELETE_CONNECTION: u16 = (SUBSYSTEM << 8) | 2;

/// The attribute with the original direction of a connection.
const ORIGINAL: u16 = 1;
/// Attributes within it.
const ADDRESSES: u16 = 1;
const FILTER: u16 = 25;

/// The maximum number of requests sent together; the acknowledgements of more would not fit.
const MAX_REQUESTS_PER_BATCH: usize = 64;

/// Removes the tracked connections that these sources opened.
pub fn remove_connections(sources: &[IpAddr]) -> io::Result<()> {
    let mut socket = NetlinkSocket::open(NetlinkFamily::Netfilter)?;
    let (v4, v6): (Vec<IpAddr>, Vec<IpAddr>) = sources.iter().partition(|source| source.is_ipv4());
    let forgotten =
        v4.iter().try_for_each(|source| socket.send_requests(vec![delete_by_source_request(*source)]));
    match forgotten {
        // Before Linux 6.11 a request could remove only one connection.
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => remove_one_by_one(&mut socket, &v4)?,
        done => done?,
    }
    // The kernel's filter for IPv6 sources is inverted and would match all other sources.
    remove_one_by_one(&mut socket, &v6)
}

/// A request to remove all connections that an IPv4 source opened.
fn delete_by_source_request(source: IpAddr) -> NetlinkMessage {
    const FLAGS: u16 = 1;
    const BY_SOURCE: u32 = 1;
    let (header, kind, octets) = source_parts(source);
    NetlinkMessage::new(DELETE_CONNECTION, 0, &header)
        .nested(ORIGINAL, |inner| inner.nested(ADDRESSES, |ip| ip.attribute(kind, &octets)))
        .nested(FILTER, |filter| filter.native_endian(FLAGS, BY_SOURCE))
}

/// Removes connections of sources, all of one family, one at a time.
fn remove_one_by_one(socket: &mut NetlinkSocket, sources: &[IpAddr]) -> io::Result<()> {
    let Some(first) = sources.first() else { return Ok(()) };
    let (header, _, _) = source_parts(*first);
    for some in connections_opened_by(socket, sources)?.chunks(MAX_REQUESTS_PER_BATCH) {
        let request = |original: &Vec<u8>| {
            NetlinkMessage::new(DELETE_CONNECTION, 0, &header)
                .nested(ORIGINAL, |inner| inner.append_fixed(original))
        };
        match socket.send_requests(some.iter().map(request).collect()) {
            // The connection ended by itself meanwhile.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            done => done?,
        }
    }
    Ok(())
}

/// Returns the identifying tuple of each connection that one of the sources, all of one family,
/// opened.
fn connections_opened_by(socket: &mut NetlinkSocket, sources: &[IpAddr]) -> io::Result<Vec<Vec<u8>>> {
    let Some(first) = sources.first() else { return Ok(Vec::new()) };
    let (header, kind, _) = source_parts(*first);
    let wanted: Vec<Vec<u8>> = sources.iter().map(|source| source_parts(*source).2).collect();
    let mut found = Vec::new();
    socket.request_dump(NetlinkMessage::new(GET_CONNECTION, 0, &header), |_, body| {
        let original = find_attribute(body, 4, ORIGINAL);
        let from = original
            .and_then(|value| find_attribute(value, 0, ADDRESSES))
            .and_then(|ip| find_attribute(ip, 0, kind));
        if let (Some(original), Some(from)) = (original, from)
            && wanted.iter().any(|wanted| wanted == from)
        {
            found.push(original.to_vec());
        }
    })?;
    Ok(found)
}

/// Returns the value of the attribute `wanted`.
fn find_attribute(bytes: &[u8], fixed: usize, wanted: u16) -> Option<&[u8]> {
    parse_attributes(bytes, fixed).find(|(kind, _)| *kind == wanted).map(|(_, value)| value)
}

/// Returns the fixed part of a request, the attribute for a source address, and the address. The
/// kernel checks the family only in requests with a non-zero version.
fn source_parts(source: IpAddr) -> ([u8; 4], u16, Vec<u8>) {
    let header = |family| [u8::try_from(family).expect("families are small numbers"), 1, 0, 0];
    match source {
        IpAddr::V4(v4) => (header(libc::AF_INET), 1, v4.octets().to_vec()),
        IpAddr::V6(v6) => (header(libc::AF_INET6), 3, v6.octets().to_vec()),
    }
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use super::super::nftables::{ChainHook, ConntrackState, FilterRule, FilterTable};
    use super::*;
    use crate::namespaces::{self, NamespaceSet};

    type RemoveFn = fn(&[IpAddr]) -> io::Result<()>;

    fn connections_of(source: &str) -> io::Result<usize> {
        let source = source.parse().map_err(io::Error::other)?;
        Ok(connections_opened_by(&mut NetlinkSocket::open(NetlinkFamily::Netfilter)?, &[source])?.len())
    }

    fn check_removal_of_one_source(forget: RemoveFn) -> io::Result<()> {
        namespaces::unshare_namespaces(NamespaceSet::NET)?;
        namespaces::set_loopback_up()?;
        let mut table = FilterTable::new("tracks");
        table.add_base_chain("output", ChainHook::Output);
        table.add_rule("output", &FilterRule::new().connection_state(ConntrackState::Known).accept());
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
        if !testkit::needs_root() {
            return;
        }
        let ways: [RemoveFn; 2] = [remove_connections, |sources| {
            remove_one_by_one(&mut NetlinkSocket::open(NetlinkFamily::Netfilter)?, sources)
        }];
        for way in ways {
            // A separate thread gets its own net namespace.
            let done = std::thread::spawn(move || check_removal_of_one_source(way)).join();
            done.expect("the thread does not panic").expect("the test succeeds");
        }
    }
}
