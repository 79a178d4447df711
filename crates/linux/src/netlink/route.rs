//! Links, addresses, routes and neighbours of one net namespace. See rtnetlink(7).

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsRawFd, BorrowedFd};

use super::message::{Message, read_u32};
use super::{CREATE, EXCLUSIVE, Family, Socket, attributes};

const NEW_LINK: u16 = 16;
pub(super) const DELETE_LINK: u16 = 17;
const GET_LINK: u16 = 18;
const SET_LINK: u16 = 19;
const NEW_ADDRESS: u16 = 20;
const GET_ADDRESS: u16 = 22;
const NEW_ROUTE: u16 = 24;
const GET_ROUTE: u16 = 26;
const NEW_NEIGHBOUR: u16 = 28;

/// Attributes of a link.
const LINK_ADDRESS: u16 = 1;
const LINK_NAME: u16 = 3;
const LINK_INFO: u16 = 18;
const LINK_FAMILIES: u16 = 26;
const LINK_NAMESPACE: u16 = 28;

const UP: u32 = 1;
/// The length of the fixed part of messages about links.
const LINK_HEADER: usize = 16;
const ROUTE_HEADER: usize = 12;
const ADDRESS_HEADER: usize = 8;

/// The hardware address of a link.
pub type Mac = [u8; 6];

/// One end of a veth pair.
#[derive(Clone, Copy, Debug)]
pub struct End<'a> {
    pub name: &'a str,
    pub mac: Mac,
}

/// The state of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Link {
    pub index: u32,
    pub up: bool,
}

/// An existing route.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    pub target: IpAddr,
    pub prefix: u8,
    /// The link it uses.
    pub link: Option<u32>,
}

/// The routing configuration of the net namespace in which it was opened.
#[derive(Debug)]
pub struct Routing(Socket);

impl Routing {
    pub fn open() -> io::Result<Self> {
        Socket::open(Family::Route).map(Self)
    }

    /// Creates a veth pair, with the second end in the net namespace behind `place`.
    pub fn make_pair(&mut self, own: End<'_>, other: End<'_>, place: BorrowedFd<'_>) -> io::Result<()> {
        let number = place.as_raw_fd().cast_unsigned();
        let message = Message::new(NEW_LINK, CREATE | EXCLUSIVE, &link(0, 0))
            .text(LINK_NAME, own.name)
            .attribute(LINK_ADDRESS, &own.mac)
            .nested(LINK_INFO, |info| {
                info.text(1, "veth").nested(2, |data| {
                    data.nested(1, |peer| {
                        peer.fixed(&link(0, 0))
                            .text(LINK_NAME, other.name)
                            .attribute(LINK_ADDRESS, &other.mac)
                            .number(LINK_NAMESPACE, number)
                    })
                })
            });
        self.0.request(vec![message])
    }

    /// Returns the link with this name, if there is one.
    pub fn find(&mut self, name: &str) -> io::Result<Option<Link>> {
        let mut found = None;
        let request = Message::new(GET_LINK, 0, &link(0, 0)).text(LINK_NAME, name);
        let looked = self.0.look(request, |body| {
            if let (Some(index), Some(flags)) = (read_u32(body, 4), read_u32(body, 8)) {
                found = Some(Link { index, up: flags & UP != 0 });
            }
        });
        match looked {
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Ok(None),
            looked => looked.map(|()| found),
        }
    }

    /// Returns the names of all links with their indices.
    pub fn links(&mut self) -> io::Result<Vec<(u32, String)>> {
        let mut found = Vec::new();
        self.0.dump(Message::new(GET_LINK, 0, &link(0, 0)), |_, body| {
            if let (Some(index), Some(name)) = (read_u32(body, 4), link_name(body)) {
                found.push((index, name));
            }
        })?;
        Ok(found)
    }

    pub fn remove(&mut self, index: u32) -> io::Result<()> {
        self.0.request(vec![Message::new(DELETE_LINK, 0, &link(index, 0))])
    }

    /// Prevents the kernel from assigning IPv6 addresses to a link automatically.
    pub fn forbid_own_addresses(&mut self, index: u32) -> io::Result<()> {
        const MODE: u16 = 8;
        const NONE: u8 = 1;
        let message = Message::new(SET_LINK, 0, &link(index, 0)).nested(LINK_FAMILIES, |families| {
            families.nested(family_of_v6(), |own| own.attribute(MODE, &[NONE]))
        });
        self.0.request(vec![message])
    }

    pub fn set_up(&mut self, index: u32) -> io::Result<()> {
        self.0.request(vec![Message::new(SET_LINK, 0, &link(index, UP))])
    }

    /// Adds an address to a link, with a network of that single address.
    pub fn add_address(&mut self, index: u32, address: IpAddr) -> io::Result<()> {
        const LOCAL: u16 = 2;
        const ADDRESS: u16 = 1;
        // On a link with two ends no other machine can have it, so duplicate detection is not
        // needed.
        const NO_DUPLICATE_CHECK: u8 = 2;
        let (family, bytes, bits) = parts(address);
        let flags = if address.is_ipv6() { NO_DUPLICATE_CHECK } else { 0 };
        let mut fixed = vec![family, bits, flags, 0];
        fixed.extend_from_slice(&index.to_ne_bytes());
        let message = Message::new(NEW_ADDRESS, CREATE | EXCLUSIVE, &fixed)
            .attribute(LOCAL, &bytes)
            .attribute(ADDRESS, &bytes);
        self.0.request(vec![message])
    }

    /// Routes one address over a link.
    pub fn add_route(&mut self, index: u32, target: IpAddr) -> io::Result<()> {
        const SCOPE_LINK: u8 = 253;
        let (_, bytes, bits) = parts(target);
        let message = route(target.is_ipv6(), bits, SCOPE_LINK).attribute(1, &bytes).number(4, index);
        self.0.request(vec![message])
    }

    /// Routes everything else over a link, through `gateway`.
    pub fn add_default_route(&mut self, index: u32, gateway: IpAddr) -> io::Result<()> {
        const SCOPE_ALL: u8 = 0;
        let (_, bytes, _) = parts(gateway);
        let message = route(gateway.is_ipv6(), 0, SCOPE_ALL).number(4, index).attribute(5, &bytes);
        self.0.request(vec![message])
    }

    /// Adds a permanent neighbour entry, so that its link address never has to be resolved.
    pub fn add_neighbour(&mut self, index: u32, address: IpAddr, mac: Mac) -> io::Result<()> {
        const PERMANENT: u16 = 0x80;
        let (family, bytes, _) = parts(address);
        let mut fixed = vec![family, 0, 0, 0];
        fixed.extend_from_slice(&index.to_ne_bytes());
        fixed.extend_from_slice(&PERMANENT.to_ne_bytes());
        fixed.extend_from_slice(&[0, 0]);
        let message = Message::new(NEW_NEIGHBOUR, CREATE, &fixed).attribute(1, &bytes).attribute(2, &mac);
        self.0.request(vec![message])
    }

    /// Returns the routes of this namespace, in all tables.
    pub fn routes(&mut self) -> io::Result<Vec<Route>> {
        let mut found = Vec::new();
        for v6 in [false, true] {
            self.0.dump(Message::new(GET_ROUTE, 0, &route_header(v6, 0, 0)), |_, body| {
                let mut target = None;
                let mut link = None;
                for (kind, value) in attributes(body, ROUTE_HEADER) {
                    match kind {
                        1 => target = address(value),
                        4 => link = read_u32(value, 0),
                        _ => {}
                    }
                }
                if let (Some(target), Some(prefix)) = (target, body.get(1)) {
                    found.push(Route { target, prefix: *prefix, link });
                }
            })?;
        }
        Ok(found)
    }

    /// Returns the addresses of this namespace.
    pub fn addresses(&mut self) -> io::Result<Vec<IpAddr>> {
        let mut found = Vec::new();
        self.0.dump(Message::new(GET_ADDRESS, 0, &[0; ADDRESS_HEADER]), |_, body| {
            let values = attributes(body, ADDRESS_HEADER);
            found.extend(
                values.filter(|(kind, _)| matches!(kind, 1 | 2)).filter_map(|(_, value)| address(value)),
            );
        })?;
        found.sort_unstable();
        found.dedup();
        Ok(found)
    }
}

/// Returns the name in a message about a link.
pub(super) fn link_name(body: &[u8]) -> Option<String> {
    let (_, name) = attributes(body, LINK_HEADER).find(|(kind, _)| *kind == LINK_NAME)?;
    Some(String::from_utf8_lossy(name.strip_suffix(&[0]).unwrap_or(name)).into_owned())
}

/// Returns the fixed part of a message about a link; `flags` are those to set.
fn link(index: u32, flags: u32) -> Vec<u8> {
    let mut fixed = vec![0; 4];
    for number in [index, flags, flags] {
        fixed.extend_from_slice(&number.to_ne_bytes());
    }
    fixed
}

fn route(v6: bool, bits: u8, scope: u8) -> Message {
    Message::new(NEW_ROUTE, CREATE | EXCLUSIVE, &route_header(v6, bits, scope))
}

fn route_header(v6: bool, bits: u8, scope: u8) -> [u8; ROUTE_HEADER] {
    const MAIN: u8 = 254;
    const STATIC: u8 = 4;
    const UNICAST: u8 = 1;
    let family = if v6 { libc::AF_INET6 } else { libc::AF_INET };
    let family = u8::try_from(family).expect("families are small numbers");
    [family, bits, 0, 0, MAIN, STATIC, scope, UNICAST, 0, 0, 0, 0]
}

fn family_of_v6() -> u16 {
    u16::try_from(libc::AF_INET6).expect("families are small numbers")
}

/// Returns the family, the bytes and the number of bits of an address.
fn parts(address: IpAddr) -> (u8, Vec<u8>, u8) {
    let family = |number: libc::c_int| u8::try_from(number).expect("families are small numbers");
    match address {
        IpAddr::V4(v4) => (family(libc::AF_INET), v4.octets().to_vec(), 32),
        IpAddr::V6(v6) => (family(libc::AF_INET6), v6.octets().to_vec(), 128),
    }
}

fn address(bytes: &[u8]) -> Option<IpAddr> {
    match bytes.len() {
        4 => <[u8; 4]>::try_from(bytes).ok().map(|octets| Ipv4Addr::from(octets).into()),
        16 => <[u8; 16]>::try_from(bytes).ok().map(|octets| Ipv6Addr::from(octets).into()),
        _ => None,
    }
}
