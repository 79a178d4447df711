//! The namespace of a sandbox without a link, whose connections are carried by a process outside.
//!
//! ```text
//!  program ─► any address ─► lo ─► divert ─► input ─► socket that was opened here and is held outside
//!             own addresses and 127.0.0.0/8 ─────────► sockets of programs inside
//! ```
//!
//! Every address counts as local, so each packet comes back over the loopback, where the table gives TCP and DNS to the
//! two sockets of [`TransparentSockets`] and rejects the rest. There is no other link and no forwarding: what the table
//! does not divert reaches nobody. Without the sockets, packets to other addresses are rejected too, so that no program
//! inside can take their place. Connections are not tracked.

use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use domain::AddressPrefix;
use linux::netlink::nftables::{ChainHook, FilterRule, FilterTable, PortProtocol};
use linux::netlink::route::{RouteTarget, RoutingSocket};
use linux::transparent::TransparentSockets;

use super::address::{self, AddressRange};
use super::guard::{self, DNS_PORT, INNER_TABLE, TCP, UDP};
use super::settings::NetworkSettings;

/// The mark of packets that were given to one of the sockets. No program inside may set marks.
const DIVERTED: u32 = 0x00c0_7ac1;

/// The settings of a net namespace, with values by which the kernel sends every error.
pub const ERROR_LIMITS: [(&str, &str); 2] =
    [("net/ipv4/icmp_ratemask", "0"), ("net/ipv6/icmp/ratelimit", "0")];

/// The addresses inside a sandbox. All sandboxes may have the same, since none of them is connected to another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FilteredLayout {
    /// The sandbox's own addresses: one of IPv4, and one of IPv6 if this host has routes for it.
    pub own: Vec<IpAddr>,
    /// The address of the name server.
    resolver: IpAddr,
    /// Whether this host has routes for IPv4. If not, connections to IPv4 addresses fail at once inside too.
    routes_v4: bool,
}

/// A layout and the sockets that serve it.
#[derive(Debug)]
pub struct FilteredNetwork {
    pub layout: FilteredLayout,
    pub sockets: TransparentSockets,
}

impl FilteredLayout {
    /// Chooses addresses by the routes of the net namespace of this thread, which must be the host's.
    pub fn choose(settings: &NetworkSettings) -> io::Result<Self> {
        let mut routing = RoutingSocket::open()?;
        let range = match address::choose_range(settings, &mut routing) {
            Ok(range) => range,
            // Programs inside cannot reach one or two machines by these addresses, but nobody else notices.
            Err(_taken) => AddressRange { v4: address::candidate_ranges(settings)[0], v6: settings.range6 },
        };
        let mut own = vec![range.sandbox_address(false, 0)];
        if routing.routes_family(true)? {
            own.push(range.sandbox_address(true, 0));
        }
        let routes_v4 = routing.routes_family(false)?;
        Ok(Self { own, resolver: range.resolver_address(false, 0), routes_v4 })
    }

    /// Returns the resolv.conf of a sandbox.
    pub fn resolv_conf(&self) -> String {
        format!("nameserver {}\n", self.resolver)
    }

    /// Describes the address families that sandboxes get.
    pub fn describe_families(&self) -> &'static str {
        match (self.routes_v4, self.own.len() > 1) {
            (true, true) => "IPv4 and IPv6",
            (false, true) => "IPv6",
            (_, false) => "IPv4",
        }
    }

    /// Configures the net namespace of this thread, which has no link but its loopback, and opens its sockets.
    pub fn set_up(self, settings: &NetworkSettings) -> io::Result<FilteredNetwork> {
        let sockets = open_sockets(settings, &self.own)?;
        let mut routing = RoutingSocket::open()?;
        let loopback = routing.find_link("lo")?.ok_or(io::ErrorKind::NotFound)?.index;
        for own in &self.own {
            keep_existing(routing.add_address(loopback, *own))?;
        }
        for own in &self.own {
            let target = match own {
                IpAddr::V4(_) if !self.routes_v4 => RouteTarget::Address(self.resolver),
                own => RouteTarget::Everything { v6: own.is_ipv6() },
            };
            keep_existing(routing.add_local_route(loopback, target, *own))?;
        }
        Ok(FilteredNetwork { layout: self, sockets })
    }
}

/// Opens new sockets in the net namespace of this thread, and replaces its table by one for them.
pub fn open_sockets(settings: &NetworkSettings, own: &[IpAddr]) -> io::Result<TransparentSockets> {
    let sockets = TransparentSockets::open()?;
    build_table(settings, own, [sockets.tcp_port, sockets.udp_port]).install()?;
    Ok(sockets)
}

/// Builds the table for a sandbox with these own addresses, and sockets at these ports for TCP and UDP.
fn build_table(settings: &NetworkSettings, own: &[IpAddr], [tcp, udp]: [u16; 2]) -> FilterTable {
    let rule = FilterRule::new;
    let inside = inside_prefixes(own);
    let mut table = FilterTable::new(INNER_TABLE);

    table.add_base_chain("divert", ChainHook::Arrival);
    for AddressPrefix { address, bits } in &inside {
        table.add_rule("divert", &rule().destination_in(*address, *bits).accept());
    }
    let diverted = |rule: FilterRule, port| rule.divert_to_port(port).set_mark(DIVERTED).accept();
    table.add_rule("divert", &diverted(rule().protocol(TCP), tcp));
    table.add_rule("divert", &diverted(rule().protocol(UDP).destination_port(DNS_PORT), udp));

    // The sockets are bound to all addresses, so programs inside could connect to them directly.
    table.add_chain("inside");
    let to_port = |protocol, port| rule().protocol(protocol).destination_port(port);
    table.add_rule("inside", &to_port(TCP, tcp).refuse_port(PortProtocol::Tcp));
    table.add_rule("inside", &to_port(UDP, udp).refuse_port(PortProtocol::Udp));
    table.add_rule("inside", &rule().accept());

    table.add_base_chain("input", ChainHook::Input);
    for AddressPrefix { address, bits } in &inside {
        table.add_rule("input", &rule().destination_in(*address, *bits).go_to("inside"));
    }
    table.add_rule("input", &rule().belongs_to_tcp_connection().accept());
    table.add_rule("input", &rule().protocol(UDP).has_mark(DIVERTED).accept());
    table.add_rule("input", &rule().protocol(UDP).refuse_port(PortProtocol::Udp));
    let carried = || rule().protocol(TCP).has_mark(DIVERTED);
    // Queries are answered by the process outside, whichever server they are addressed to.
    table.add_rule("input", &carried().destination_port(DNS_PORT).accept());
    for target in &settings.allow {
        let AddressPrefix { address, bits } = target.prefix;
        let allowed = carried().destination_in(address, bits);
        let allowed = target.port.iter().fold(allowed, |rule, port| rule.destination_port(*port));
        table.add_rule("input", &allowed.accept());
    }
    for AddressPrefix { address, bits } in guard::forbidden_prefixes(settings) {
        table.add_rule("input", &rule().destination_in(address, bits).reject());
    }
    table.add_rule("input", &carried().accept());
    table.add_rule("input", &rule().reject());

    // A reply to a query must come from the port that the query was sent to.
    table.add_base_chain("output", ChainHook::Output);
    table.add_rule("output", &rule().protocol(UDP).source_port(udp).set_udp_source_port(DNS_PORT));
    table
}

/// The addresses that belong to the sandbox itself.
fn inside_prefixes(own: &[IpAddr]) -> Vec<AddressPrefix> {
    let loopback = AddressPrefix { address: Ipv4Addr::new(127, 0, 0, 0).into(), bits: 8 };
    let loopback6 = IpAddr::from(Ipv6Addr::LOCALHOST);
    let own = own.iter().map(|address| AddressPrefix::from(*address));
    [loopback, loopback6.into()].into_iter().chain(own).collect()
}

/// Lifts the limits on messages of ICMP that the kernel sends in the net namespace of this thread: rejected connections
/// would otherwise be answered only so many times each second, and the others would wait.
pub fn lift_error_limits() -> io::Result<()> {
    ERROR_LIMITS.iter().try_for_each(|(setting, value)| fs::write(format!("/proc/sys/{setting}"), value))
}

/// Takes what is there already, from an earlier attempt, for success.
fn keep_existing(added: io::Result<()>) -> io::Result<()> {
    match added {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        added => added,
    }
}
