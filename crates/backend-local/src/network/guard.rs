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

use linux::netlink::filter::{Bound, Hook, Rule, State, Table};

use super::address::{Prefix, Range, Target};
use super::settings::{NEVER, NetworkSettings, parsed};

const TCP: u8 = 6;
const UDP: u8 = 17;
const ICMP: [u8; 2] = [1, 58];
const DNS: u16 = 53;

/// The largest number of concurrent connections of one sandbox.
const CONNECTIONS: u32 = 4096;
/// The number of shares into which all sandboxes are divided; a power of two.
const SHARES: u8 = 8;
const NEW_CONNECTIONS: Bound = Bound::NewEachSecond { rate: 500, burst: 4000 };

/// The prefix of the names of all links of all servers.
pub const ANY_LINK: &str = "cora";

/// Builds the table of one server on the host, for links whose names begin with `links`.
pub fn for_host(
    name: &str,
    links: &str,
    settings: &NetworkSettings,
    range: &Range,
    upstreams: &[IpAddr],
) -> Table {
    let mut table = Table::new(name);
    let ours = || Rule::new().from_link(links);
    table.chain("guard");
    table.base_chain("arrival", Hook::Arrival);
    table.rule("arrival", &ours().go_to("guard"));
    table.rule("guard", &Rule::new().has_foreign_source().drop());
    table.rule("guard", &Rule::new().state(State::Known).accept());
    table.rule("guard", &Rule::new().state(State::Invalid).drop());
    bound_sources(&mut table);
    for (number, upstream) in (0..).zip(upstreams) {
        let resolver = range.resolver(upstream.is_ipv6(), number);
        for rule in to(&Target { prefix: resolver.into(), port: Some(DNS) }, &Rule::new()) {
            table.rule("guard", &rule.accept());
        }
    }
    let own = [range.v4, range.v6];
    forbid(&mut table, "guard", settings, &own);

    table.base_chain("resolver", Hook::ChangeDestination);
    table.base_chain("input", Hook::Input);
    table.rule("input", &ours().state(State::Known).accept());
    for (number, upstream) in (0..).zip(upstreams) {
        let resolver = range.resolver(upstream.is_ipv6(), number);
        for rule in to(&Target { prefix: resolver.into(), port: Some(DNS) }, &ours()) {
            table.rule("resolver", &rule.redirect(*upstream));
        }
        // The host may be its own name server, at an address that is not reserved for that.
        for rule in to(&Target { prefix: (*upstream).into(), port: Some(DNS) }, &ours().was_redirected()) {
            table.rule("input", &rule.accept());
        }
    }
    for rule in settings.allow.iter().flat_map(|target| to(target, &ours())) {
        table.rule("input", &rule.accept());
    }
    table.rule("input", &ours().drop());

    table.base_chain("forward", Hook::Forward);
    table.rule("forward", &ours().to_link(ANY_LINK).drop());
    table.rule("forward", &Rule::new().to_link(links).state(State::Known).accept());
    table.rule("forward", &Rule::new().to_link(links).drop());

    // The host sends only replies and errors to a sandbox: the server talks to the agent over its
    // socket.
    table.base_chain("output", Hook::Output);
    table.rule("output", &Rule::new().to_link(links).state(State::Known).accept());
    for protocol in ICMP {
        table.rule("output", &Rule::new().to_link(links).protocol(protocol).accept());
    }
    table.rule("output", &Rule::new().to_link(links).drop());

    table.base_chain("source", Hook::ChangeSource);
    table.rule("source", &ours().masquerade());
    table
}

/// Limits the tracked connections. The host tracks every connection in a table that its own
/// connections need too. So each sandbox may use only a part of it, and all sandboxes together a
/// quarter.
///
/// The kernel counts by walking a list. One list for the whole quarter would take too long, so
/// sandboxes are divided into shares by the last bits of their addresses, and each share is counted
/// separately.
fn bound_sources(table: &mut Table) {
    let bounds = [("open", Bound::Connections(CONNECTIONS)), ("new", NEW_CONNECTIONS)];
    for (word, bound) in bounds {
        for (family, v6) in [("4", false), ("6", true)] {
            let set = format!("{word}{family}");
            table.sources(&set, v6);
            table.rule("guard", &Rule::new().source_exceeds(&set, v6, bound).drop());
        }
    }
    table.shares("share");
    let bound = Bound::Connections(most_tracked() / 4 / u32::from(SHARES));
    for v6 in [false, true] {
        table.rule("guard", &Rule::new().share_exceeds("share", v6, SHARES - 1, bound).drop());
    }
}

/// Returns the largest number of connections that this host tracks.
fn most_tracked() -> u32 {
    /// The kernel's default on small machines.
    const FEW: u32 = 65_536;
    let text = fs::read_to_string("/proc/sys/net/netfilter/nf_conntrack_max");
    text.ok().and_then(|text| text.trim().parse().ok()).unwrap_or(FEW)
}

/// Builds the table inside a sandbox's own namespace. It is the only one if the host cannot filter,
/// and otherwise a second one behind the host's, which other programs can remove by mistake. `own` is
/// refused in addition to the lists; `resolvers` are the name servers.
///
/// It does not track connections. No connection is opened to a sandbox, so the lists are sufficient,
/// and the kernel keeps no state for traffic on the sandbox's loopback. For TCP only the first packet
/// of a connection is checked. Code inside cannot skip that packet, and without it the peer does not
/// reply to the rest. So bulk data does not pass the whole list packet by packet.
pub fn for_sandbox(settings: &NetworkSettings, own: &[Prefix], resolvers: &[IpAddr]) -> Table {
    let mut table = Table::new("coracle");
    table.base_chain("output", Hook::Output);
    table.rule("output", &Rule::new().to_link("lo\0").accept());
    table.rule("output", &Rule::new().goes_on().accept());
    for resolver in resolvers {
        for rule in to(&Target { prefix: (*resolver).into(), port: Some(DNS) }, &Rule::new()) {
            table.rule("output", &rule.accept());
        }
    }
    forbid(&mut table, "output", settings, own);
    table
}

/// Accepts the targets that the operator allows, and rejects those that are never reachable, denied,
/// or in `own`.
fn forbid(table: &mut Table, chain: &str, settings: &NetworkSettings, own: &[Prefix]) {
    for rule in settings.allow.iter().flat_map(|target| to(target, &Rule::new())) {
        table.rule(chain, &rule.accept());
    }
    let never = NEVER.into_iter().map(parsed);
    // Multicast and broadcast packets get no reply, as usual; packets that match the lists do.
    let forbidden = never.chain(own.iter().copied()).chain(settings.deny.iter().copied());
    // If the network translates addresses, each IPv4 address also has an IPv6 form.
    for prefix in forbidden.flat_map(|prefix| [Some(prefix), prefix.translated()]).flatten() {
        table.rule(chain, &Rule::new().destination(prefix.address, prefix.bits).reject());
    }
    table.rule(chain, &Rule::new().destination_is_not_elsewhere().reject());
}

/// Returns the rules that match packets to a target: one, or one for each protocol that has ports.
fn to(target: &Target, base: &Rule) -> Vec<Rule> {
    let Target { prefix, port } = *target;
    let rule = base.clone().destination(prefix.address, prefix.bits);
    match port {
        None => vec![rule],
        Some(port) => [TCP, UDP].map(|protocol| rule.clone().protocol(protocol).port(port)).into(),
    }
}
