//! The packet filter table: which packets a sandbox may send where, in the order that packets pass it.
//!
//! ```text
//!  arrival   only own source address ─► known connections ─► connection limits ─► resolver ─► allowed
//!            ─► not this host, no multicast ─► not forbidden, denied or another sandbox
//!  resolver  redirect to the host's name server    source  masquerade as the host
//!  input     resolver and allowed targets          forward no sandbox; replies only
//! ```
//!
//! All decisions about destinations are made at arrival, where the address is still the one that the
//! sandbox wrote. Other programs may redirect packets later, and a port that they publish on this host
//! must not bypass the guard. A refused packet is rejected and not dropped, because the sender would
//! otherwise wait for a reply.

use std::fs;
use std::net::IpAddr;

use domain::{AddressPrefix, NetworkTarget};
use linux::netlink::nftables::{ChainHook, ConntrackState, FilterRule, FilterTable, SourceLimit};

use super::address::AddressRange;
use super::settings::{ALWAYS_DENIED, NetworkSettings, parse_prefix};

pub(super) const TCP: u8 = 6;
pub(super) const UDP: u8 = 17;
const ICMP_PROTOCOLS: [u8; 2] = [1, 58];
pub(super) const DNS_PORT: u16 = 53;

/// The largest number of concurrent connections of one sandbox.
const MAX_CONNECTIONS: u32 = 4096;
/// The number of shares into which all sandboxes are divided; a power of two.
const SHARE_COUNT: u8 = 8;
const NEW_CONNECTION_LIMIT: SourceLimit = SourceLimit::NewEachSecond { rate: 500, burst: 4000 };

/// The name of the table inside the namespace of a sandbox.
pub(super) const INNER_TABLE: &str = "coracle";

/// The prefix of the names of all links of all servers.
pub const LINK_PREFIX: &str = "cora";

/// Builds the table of one server on the host, for links whose names begin with `links`.
pub fn build_host_table(
    name: &str,
    links: &str,
    settings: &NetworkSettings,
    range: &AddressRange,
    upstreams: &[IpAddr],
) -> FilterTable {
    let mut table = FilterTable::new(name);
    let ours = || FilterRule::new().from_link(links);
    table.add_chain("guard");
    table.add_base_chain("arrival", ChainHook::Arrival);
    table.add_rule("arrival", &ours().go_to("guard"));
    table.add_rule("guard", &FilterRule::new().has_foreign_source().drop());
    table.add_rule("guard", &FilterRule::new().connection_state(ConntrackState::Known).accept());
    table.add_rule("guard", &FilterRule::new().connection_state(ConntrackState::Invalid).drop());
    add_connection_limits(&mut table);
    for (number, upstream) in (0..).zip(upstreams) {
        let resolver = range.resolver_address(upstream.is_ipv6(), number);
        for rule in rules_for_target(
            &NetworkTarget { prefix: resolver.into(), port: Some(DNS_PORT) },
            &FilterRule::new(),
        ) {
            table.add_rule("guard", &rule.accept());
        }
    }
    let own = [range.v4, range.v6];
    add_destination_rules(&mut table, "guard", settings, &own);

    table.add_base_chain("resolver", ChainHook::ChangeDestination);
    table.add_base_chain("input", ChainHook::Input);
    table.add_rule("input", &ours().connection_state(ConntrackState::Known).accept());
    for (number, upstream) in (0..).zip(upstreams) {
        let resolver = range.resolver_address(upstream.is_ipv6(), number);
        for rule in
            rules_for_target(&NetworkTarget { prefix: resolver.into(), port: Some(DNS_PORT) }, &ours())
        {
            table.add_rule("resolver", &rule.redirect(*upstream));
        }
        // The host may be its own name server, at an address that is not reserved for that.
        for rule in rules_for_target(
            &NetworkTarget { prefix: (*upstream).into(), port: Some(DNS_PORT) },
            &ours().was_redirected(),
        ) {
            table.add_rule("input", &rule.accept());
        }
    }
    for rule in settings.allow.iter().flat_map(|target| rules_for_target(target, &ours())) {
        table.add_rule("input", &rule.accept());
    }
    table.add_rule("input", &ours().drop());

    table.add_base_chain("forward", ChainHook::Forward);
    table.add_rule("forward", &ours().to_link(LINK_PREFIX).drop());
    table.add_rule(
        "forward",
        &FilterRule::new().to_link(links).connection_state(ConntrackState::Known).accept(),
    );
    table.add_rule("forward", &FilterRule::new().to_link(links).drop());

    // The host sends only replies and errors to a sandbox: the server talks to the agent over its
    // socket.
    table.add_base_chain("output", ChainHook::Output);
    table.add_rule(
        "output",
        &FilterRule::new().to_link(links).connection_state(ConntrackState::Known).accept(),
    );
    for protocol in ICMP_PROTOCOLS {
        table.add_rule("output", &FilterRule::new().to_link(links).protocol(protocol).accept());
    }
    table.add_rule("output", &FilterRule::new().to_link(links).drop());

    table.add_base_chain("source", ChainHook::ChangeSource);
    table.add_rule("source", &ours().masquerade());
    table
}

/// Limits the tracked connections. The host tracks every connection in a table that its own
/// connections need too. So each sandbox may use only a part of it, and all sandboxes together a
/// quarter.
///
/// The kernel counts by walking a list. One list for the whole quarter would take too long, so
/// sandboxes are divided into shares by the last bits of their addresses, and each share is counted
/// separately.
fn add_connection_limits(table: &mut FilterTable) {
    let bounds = [("open", SourceLimit::Connections(MAX_CONNECTIONS)), ("new", NEW_CONNECTION_LIMIT)];
    for (word, bound) in bounds {
        for (family, v6) in [("4", false), ("6", true)] {
            let set = format!("{word}{family}");
            table.add_source_set(&set, v6);
            table.add_rule("guard", &FilterRule::new().source_exceeds(&set, v6, bound).drop());
        }
    }
    table.add_share_set("share");
    let bound = SourceLimit::Connections(max_tracked_connections() / 4 / u32::from(SHARE_COUNT));
    for v6 in [false, true] {
        table.add_rule("guard", &FilterRule::new().share_exceeds("share", v6, SHARE_COUNT - 1, bound).drop());
    }
}

/// Returns the largest number of connections that this host tracks.
fn max_tracked_connections() -> u32 {
    /// The kernel's default on small machines.
    const DEFAULT_MAX_TRACKED: u32 = 65_536;
    let text = fs::read_to_string("/proc/sys/net/netfilter/nf_conntrack_max");
    text.ok().and_then(|text| text.trim().parse().ok()).unwrap_or(DEFAULT_MAX_TRACKED)
}

/// Builds the table inside a sandbox's own namespace. It is the only one if the host cannot filter,
/// and otherwise a second one behind the host's, which other programs can remove by mistake. `own` is
/// refused in addition to the lists; `resolvers` are the name servers.
///
/// It does not track connections. No connection is opened to a sandbox, so the lists are sufficient,
/// and the kernel keeps no state for traffic on the sandbox's loopback. For TCP only the first packet
/// of a connection is checked. Code inside cannot skip that packet, and without it the peer does not
/// reply to the rest. So bulk data does not pass the whole list packet by packet.
pub fn build_sandbox_table(
    settings: &NetworkSettings,
    own: &[AddressPrefix],
    resolvers: &[IpAddr],
) -> FilterTable {
    let mut table = FilterTable::new(INNER_TABLE);
    table.add_base_chain("output", ChainHook::Output);
    table.add_rule("output", &FilterRule::new().to_link("lo\0").accept());
    table.add_rule("output", &FilterRule::new().belongs_to_tcp_connection().accept());
    for resolver in resolvers {
        for rule in rules_for_target(
            &NetworkTarget { prefix: (*resolver).into(), port: Some(DNS_PORT) },
            &FilterRule::new(),
        ) {
            table.add_rule("output", &rule.accept());
        }
    }
    add_destination_rules(&mut table, "output", settings, own);
    table
}

/// Builds the table that refuses the same addresses to egress, which judges every connection before: `uid` is its own.
/// Queries go to any server, because the host's servers may change at any time.
pub fn build_egress_table(name: &str, uid: u32, settings: &NetworkSettings) -> FilterTable {
    let mut table = FilterTable::new(name);
    table.add_chain("egress");
    table.add_base_chain("output", ChainHook::Output);
    table.add_rule("output", &FilterRule::new().sender_is(uid).go_to("egress"));
    table.add_rule("egress", &FilterRule::new().belongs_to_tcp_connection().accept());
    let proxy = settings.upstream_proxy_port();
    for port in proxy.into_iter().chain([DNS_PORT]) {
        for protocol in [TCP, UDP] {
            table.add_rule("egress", &FilterRule::new().protocol(protocol).destination_port(port).accept());
        }
    }
    add_destination_rules(&mut table, "egress", settings, &[]);
    table
}

/// Accepts the targets that the operator allows, and rejects those that are never reachable, denied,
/// or in `own`.
fn add_destination_rules(
    table: &mut FilterTable,
    chain: &str,
    settings: &NetworkSettings,
    own: &[AddressPrefix],
) {
    for rule in settings.allow.iter().flat_map(|target| rules_for_target(target, &FilterRule::new())) {
        table.add_rule(chain, &rule.accept());
    }
    // Multicast and broadcast packets get no reply, as usual; packets that match the lists do.
    let own = own.iter().copied().flat_map(with_translated_form);
    for prefix in own.chain(forbidden_prefixes(settings)) {
        table.add_rule(chain, &FilterRule::new().destination_in(prefix.address, prefix.bits).reject());
    }
    table.add_rule(chain, &FilterRule::new().destination_is_not_elsewhere().reject());
}

/// The addresses that are never reachable, and those that the operator denies.
pub(super) fn forbidden_prefixes(settings: &NetworkSettings) -> impl Iterator<Item = AddressPrefix> {
    let never = ALWAYS_DENIED.into_iter().map(parse_prefix);
    never.chain(settings.deny.iter().copied()).flat_map(with_translated_form)
}

/// If the network translates addresses, each IPv4 address also has an IPv6 form.
fn with_translated_form(prefix: AddressPrefix) -> impl Iterator<Item = AddressPrefix> {
    [Some(prefix), prefix.nat64_prefix()].into_iter().flatten()
}

/// Returns the rules that match packets to a target: one, or one for each protocol that has ports.
fn rules_for_target(target: &NetworkTarget, base: &FilterRule) -> Vec<FilterRule> {
    let NetworkTarget { prefix, port } = *target;
    let rule = base.clone().destination_in(prefix.address, prefix.bits);
    match port {
        None => vec![rule],
        Some(port) => {
            [TCP, UDP].map(|protocol| rule.clone().protocol(protocol).destination_port(port)).into()
        }
    }
}
