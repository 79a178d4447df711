//! Links, addresses, routes and neighbours of one net namespace. See rtnetlink(7).

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsRawFd, BorrowedFd};

use super::message::{NetlinkMessage, read_u32};
use super::{FLAG_CREATE, FLAG_EXCLUSIVE, NetlinkFamily, NetlinkSocket, parse_attributes};

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

const LINK_UP_FLAG: u32 = 1;
/// The length of the fixed part of messages about links.
const LINK_HEADER: usize = 16;
const ROUTE_HEADER: usize = 12;
const ADDRESS_HEADER: usize = 8;

/// The hardware address of a link.
pub type MacAddress = [u8; 6];

/// One end of a veth pair.
#[derive(Clone, Copy, Debug)]
pub struct VethEnd<'a> {
    pub name: &'a str,
    pub mac: MacAddress,
}

/// The state of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkInfo {
    pub index: u32,
    pub up: bool,
}

/// The addresses that a route is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RouteTarget {
    /// All addresses of one family.
    Everything {
        v6: bool,
    },
    Address(IpAddr),
}

/// An existing route.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RouteEntry {
    pub target: IpAddr,
    pub prefix: u8,
    /// The link it uses.
    pub link: Option<u32>,
}

/// What the kernel does with packets to an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RouteType {
    /// It sends them to another host.
    Unicast,
    /// It delivers them to this host.
    Local,
    /// Broadcast, multicast, or one that refuses them.
    Other(u8),
}

/// The routing configuration of the net namespace in which it was opened.
#[derive(Debug)]
pub struct RoutingSocket(NetlinkSocket);

impl RoutingSocket {
    pub fn open() -> io::Result<Self> {
        NetlinkSocket::open(NetlinkFamily::Route).map(Self)
    }

    /// Creates a veth pair, with the second end in the net namespace behind `place`.
    pub fn create_veth_pair(
        &mut self,
        own: VethEnd<'_>,
        other: VethEnd<'_>,
        place: BorrowedFd<'_>,
    ) -> io::Result<()> {
        let number = place.as_raw_fd().cast_unsigned();
        let message = NetlinkMessage::new(NEW_LINK, FLAG_CREATE | FLAG_EXCLUSIVE, &link_header(0, 0))
            .text(LINK_NAME, own.name)
            .attribute(LINK_ADDRESS, &own.mac)
            .nested(LINK_INFO, |info| {
                info.text(1, "veth").nested(2, |data| {
                    data.nested(1, |peer| {
                        peer.append_fixed(&link_header(0, 0))
                            .text(LINK_NAME, other.name)
                            .attribute(LINK_ADDRESS, &other.mac)
                            .native_endian(LINK_NAMESPACE, number)
                    })
                })
            });
        self.0.send_requests(vec![message])
    }

    /// Returns the link with this name, if there is one.
    pub fn find_link(&mut self, name: &str) -> io::Result<Option<LinkInfo>> {
        let mut found = None;
        let request = NetlinkMessage::new(GET_LINK, 0, &link_header(0, 0)).text(LINK_NAME, name);
        let looked = self.0.request_object(request, |body| {
            if let (Some(index), Some(flags)) = (read_u32(body, 4), read_u32(body, 8)) {
                found = Some(LinkInfo { index, up: flags & LINK_UP_FLAG != 0 });
            }
        });
        match looked {
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Ok(None),
            looked => looked.map(|()| found),
        }
    }

    /// Returns the names of all links with their indices.
    pub fn list_links(&mut self) -> io::Result<Vec<(u32, String)>> {
        let mut found = Vec::new();
        self.0.request_dump(NetlinkMessage::new(GET_LINK, 0, &link_header(0, 0)), |_, body| {
            if let (Some(index), Some(name)) = (read_u32(body, 4), link_name(body)) {
                found.push((index, name));
            }
        })?;
        Ok(found)
    }

    pub fn remove_link(&mut self, index: u32) -> io::Result<()> {
        self.0.send_requests(vec![NetlinkMessage::new(DELETE_LINK, 0, &link_header(index, 0))])
    }

    /// Prevents the kernel from assigning IPv6 addresses to a link automatically.
    pub fn disable_automatic_addresses(&mut self, index: u32) -> io::Result<()> {
        const MODE: u16 = 8;
        const NONE: u8 = 1;
        let message = NetlinkMessage::new(SET_LINK, 0, &link_header(index, 0))
            .nested(LINK_FAMILIES, |families| {
                families.nested(family_of_v6(), |own| own.attribute(MODE, &[NONE]))
            });
        self.0.send_requests(vec![message])
    }

    pub fn set_link_up(&mut self, index: u32) -> io::Result<()> {
        self.0.send_requests(vec![NetlinkMessage::new(SET_LINK, 0, &link_header(index, LINK_UP_FLAG))])
    }

    /// Adds an address to a link, with a network of that single address.
    pub fn add_address(&mut self, index: u32, address: IpAddr) -> io::Result<()> {
        const LOCAL: u16 = 2;
        const ADDRESS: u16 = 1;
        // On a link with two ends no other machine can have it, so duplicate detection is not
        // needed.
        const NO_DUPLICATE_CHECK: u8 = 2;
        let (family, bytes, bits) = address_parts(address);
        let flags = if address.is_ipv6() { NO_DUPLICATE_CHECK } else { 0 };
        let mut fixed = vec![family, bits, flags, 0];
        fixed.extend_from_slice(&index.to_ne_bytes());
        let message = NetlinkMessage::new(NEW_ADDRESS, FLAG_CREATE | FLAG_EXCLUSIVE, &fixed)
            .attribute(LOCAL, &bytes)
            .attribute(ADDRESS, &bytes);
        self.0.send_requests(vec![message])
    }

    /// Routes one address over a link.
    pub fn add_route(&mut self, index: u32, target: IpAddr) -> io::Result<()> {
        const SCOPE_LINK: u8 = 253;
        let (_, bytes, bits) = address_parts(target);
        let message = new_route_message(target.is_ipv6(), bits, SCOPE_LINK)
            .attribute(1, &bytes)
            .native_endian(4, index);
        self.0.send_requests(vec![message])
    }

    /// Routes everything else over a link, through `gateway`.
    pub fn add_default_route(&mut self, index: u32, gateway: IpAddr) -> io::Result<()> {
        const SCOPE_ALL: u8 = 0;
        let (_, bytes, _) = address_parts(gateway);
        let message =
            new_route_message(gateway.is_ipv6(), 0, SCOPE_ALL).native_endian(4, index).attribute(5, &bytes);
        self.0.send_requests(vec![message])
    }

    /// Makes the addresses of a range count as this machine's own, over the loopback link `index`; `source` is the address
    /// that programs then send from.
    pub fn add_local_route(&mut self, index: u32, target: RouteTarget, source: IpAddr) -> io::Result<()> {
        const SCOPE_HOST: u8 = 254;
        const LOCAL_TABLE: u8 = 255;
        const LOCAL: u8 = 2;
        let (_, source, _) = address_parts(source);
        let (v6, bits, bytes) = match target {
            RouteTarget::Everything { v6 } => (v6, 0, None),
            RouteTarget::Address(address) => {
                let (_, bytes, bits) = address_parts(address);
                (address.is_ipv6(), bits, Some(bytes))
            }
        };
        let mut header = route_header(v6, bits, SCOPE_HOST);
        (header[4], header[7]) = (LOCAL_TABLE, LOCAL);
        let message = NetlinkMessage::new(NEW_ROUTE, FLAG_CREATE | FLAG_EXCLUSIVE, &header);
        let message = match bytes {
            Some(bytes) => message.attribute(1, &bytes),
            None => message,
        };
        self.0.send_requests(vec![message.native_endian(4, index).attribute(7, &source)])
    }

    /// Whether packets of a family can leave this machine: there is a route to other machines that is not only for the
    /// addresses of one link.
    pub fn routes_family(&mut self, v6: bool) -> io::Result<bool> {
        const UNICAST: u8 = 1;
        let mut found = false;
        self.0.request_dump(NetlinkMessage::new(GET_ROUTE, 0, &route_header(v6, 0, 0)), |_, body| {
            let target = parse_attributes(body, ROUTE_HEADER).find(|(kind, _)| *kind == 1);
            let target = target.and_then(|(_, bytes)| parse_address(bytes));
            let is_one_link = match target {
                Some(IpAddr::V4(v4)) => v4.is_link_local() || v4.is_loopback(),
                Some(IpAddr::V6(v6)) => v6.is_unicast_link_local() || v6.is_loopback() || v6.is_multicast(),
                None => false,
            };
            found |= body.get(7) == Some(&UNICAST) && !is_one_link;
        })?;
        Ok(found)
    }

    /// Adds a permanent neighbour entry, so that its link address never has to be resolved.
    pub fn add_neighbour(&mut self, index: u32, address: IpAddr, mac: MacAddress) -> io::Result<()> {
        const PERMANENT: u16 = 0x80;
        let (family, bytes, _) = address_parts(address);
        let mut fixed = vec![family, 0, 0, 0];
        fixed.extend_from_slice(&index.to_ne_bytes());
        fixed.extend_from_slice(&PERMANENT.to_ne_bytes());
        fixed.extend_from_slice(&[0, 0]);
        let message =
            NetlinkMessage::new(NEW_NEIGHBOUR, FLAG_CREATE, &fixed).attribute(1, &bytes).attribute(2, &mac);
        self.0.send_requests(vec![message])
    }

    /// Returns the routes of this namespace, in all tables.
    pub fn list_routes(&mut self) -> io::Result<Vec<RouteEntry>> {
        let mut found = Vec::new();
        for v6 in [false, true] {
            self.0.request_dump(NetlinkMessage::new(GET_ROUTE, 0, &route_header(v6, 0, 0)), |_, body| {
                let mut target = None;
                let mut link = None;
                for (kind, value) in parse_attributes(body, ROUTE_HEADER) {
                    match kind {
                        1 => target = parse_address(value),
                        4 => link = read_u32(value, 0),
                        _ => {}
                    }
                }
                if let (Some(target), Some(prefix)) = (target, body.get(1)) {
                    found.push(RouteEntry { target, prefix: *prefix, link });
                }
            })?;
        }
        Ok(found)
    }

    /// Returns the type of the route to an address; `None` if there is no route, or one that refuses packets.
    pub fn route_type(&mut self, target: IpAddr) -> io::Result<Option<RouteType>> {
        const TYPE_OFFSET: usize = 7;
        const UNICAST: u8 = 1;
        const LOCAL: u8 = 2;
        let (family, bytes, bits) = address_parts(target);
        let mut fixed = [0; ROUTE_HEADER];
        (fixed[0], fixed[1]) = (family, bits);
        let mut found = None;
        let answer =
            self.0.request_object(NetlinkMessage::new(GET_ROUTE, 0, &fixed).attribute(1, &bytes), |body| {
                found = body.get(TYPE_OFFSET).map(|kind| match *kind {
                    UNICAST => RouteType::Unicast,
                    LOCAL => RouteType::Local,
                    kind => RouteType::Other(kind),
                });
            });
        match answer.map_err(|error| (error.raw_os_error(), error)) {
            Ok(()) => Ok(found),
            // Without a route, or with one of the types unreachable, prohibit and blackhole.
            Err((Some(libc::ENETUNREACH | libc::EHOSTUNREACH | libc::EACCES | libc::EINVAL), _)) => Ok(None),
            Err((_, error)) => Err(error),
        }
    }

    /// Returns the addresses of this namespace.
    pub fn list_addresses(&mut self) -> io::Result<Vec<IpAddr>> {
        let mut found = Vec::new();
        self.0.request_dump(NetlinkMessage::new(GET_ADDRESS, 0, &[0; ADDRESS_HEADER]), |_, body| {
            let values = parse_attributes(body, ADDRESS_HEADER);
            found.extend(
                values
                    .filter(|(kind, _)| matches!(kind, 1 | 2))
                    .filter_map(|(_, value)| parse_address(value)),
            );
        })?;
        found.sort_unstable();
        found.dedup();
        Ok(found)
    }
}

/// Returns the name in a message about a link.
pub(super) fn link_name(body: &[u8]) -> Option<String> {
    let (_, name) = parse_attributes(body, LINK_HEADER).find(|(kind, _)| *kind == LINK_NAME)?;
    Some(String::from_utf8_lossy(name.strip_suffix(&[0]).unwrap_or(name)).into_owned())
}

/// Returns the fixed part of a message about a link; `flags` are those to set.
fn link_header(index: u32, flags: u32) -> Vec<u8> {
    let mut fixed = vec![0; 4];
    for number in [index, flags, flags] {
        fixed.extend_from_slice(&number.to_ne_bytes());
    }
    fixed
}

fn new_route_message(v6: bool, bits: u8, scope: u8) -> NetlinkMessage {
    NetlinkMessage::new(NEW_ROUTE, FLAG_CREATE | FLAG_EXCLUSIVE, &route_header(v6, bits, scope))
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
fn address_parts(address: IpAddr) -> (u8, Vec<u8>, u8) {
    let family = |number: libc::c_int| u8::try_from(number).expect("families are small numbers");
    match address {
        IpAddr::V4(v4) => (family(libc::AF_INET), v4.octets().to_vec(), 32),
        IpAddr::V6(v6) => (family(libc::AF_INET6), v6.octets().to_vec(), 128),
    }
}

fn parse_address(bytes: &[u8]) -> Option<IpAddr> {
    match bytes.len() {
        4 => <[u8; 4]>::try_from(bytes).ok().map(|octets| Ipv4Addr::from(octets).into()),
        16 => <[u8; 16]>::try_from(bytes).ok().map(|octets| Ipv6Addr::from(octets).into()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_and_unspecified_addresses_are_local() {
        let mut routes = RoutingSocket::open().expect("a netlink socket");
        for (text, expected) in [
            ("127.0.0.1", Some(RouteType::Local)),
            ("127.9.9.9", Some(RouteType::Local)),
            ("0.0.0.0", Some(RouteType::Local)),
            ("127.255.255.255", Some(RouteType::Other(3))),
        ] {
            let address = text.parse().expect("an address");
            assert_eq!(routes.route_type(address).expect("the kernel answers"), expected, "{text}");
        }
        if std::net::UdpSocket::bind(("::1", 0)).is_ok() {
            let found = routes.route_type(Ipv6Addr::LOCALHOST.into()).expect("the kernel answers");
            assert_eq!(found, Some(RouteType::Local));
        }
    }
}
