//! The table of packet filters: what a sandbox may send where, in the order of a packet's way.
//!
//! ```text
//!  arrival   by its own address only ─► known connections ─► not too many ─► resolver ─► allowed
//!            ─► not this host, no group ─► nothing that never is, or is denied, or is a sandbox
//!  resolver  to the host's name server          source  looks like the host's own
//!  input     resolver and what was allowed      forward no sandbox; back only what was asked for
//! ```
//!
//! All decisions about destinations fall at arrival, where the address is still the one that the
//! sandbox wrote: others may redirect packets later, and a port that they publish on this host
//! must not become a way around the guard. A refusal is told to the sender, who would otherwise
//! wait for an answer.

use std::fs;
use std::net::IpAddr;

use linux::netlink::filter::{Bound, Hook, Rule, State, Table};

use super::address::{Prefix, Range, Target};
use super::settings::{NEVER, NetworkSettings, parsed};

const TCP: u8 = 6;
const UDP: u8 = 17;
const ICMP: [u8; 2] = [1, 58];
const DNS: u16 = 53;

/// Connections of one sandbox at once.
const CONNECTIONS: u32 = 4096;
/// Into how many shares all sandboxes are divided: a power of two.
const SHARES: u8 = 8;
const NEW_CONNECTIONS: Bound = Bound::NewEachSecond { rate: 500, burst: 4000 };

/// The start of the names of all links of all servers.
pub const ANY_LINK: &str = "cora";

/// The table of one server on the host, for links whose names begin with `links`.
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
        // The host may be its own name server, at an address that others reach too.
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

    // The host itself has nothing to say to a sandbox but answers and errors: what it wants of
    // one goes to the agent.
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

/// The host keeps track of every connection, in a table that all of its own connections need too.
/// So each sandbox has its part of it and no more, and all together have a quarter.
///
/// The kernel counts by walking a list. One list of a quarter would take too long, so sandboxes
/// are put into shares by the ends of their addresses, and each share is counted for itself.
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

/// How many connections this host keeps track of.
fn most_tracked() -> u32 {
    /// What the kernel takes on small machines.
    const FEW: u32 = 65_536;
    let text = fs::read_to_string("/proc/sys/net/netfilter/nf_conntrack_max");
    text.ok().and_then(|text| text.trim().parse().ok()).unwrap_or(FEW)
}

/// The table inside a sandbox's own namespace: the only one where the host cannot be asked to
/// filter, and a second one behind the host's, which others can remove there by mistake. `own` is
/// refused beside the lists; `resolvers` are asked for names.
///
/// No connection is tracked for it. Nobody opens one to a sandbox, so the lists decide alone, and
/// the kernel keeps nothing for what a sandbox does on its loopback. Of TCP they judge how a
/// connection begins; without that beginning, which nothing inside can leave out, the rest of it
/// is answered by nobody. So bulk data does not pass the whole list packet by packet.
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

/// Lets through what the operator allows, and refuses what never is reachable, is denied, or is
/// in `own`.
fn forbid(table: &mut Table, chain: &str, settings: &NetworkSettings, own: &[Prefix]) {
    for rule in settings.allow.iter().flat_map(|target| to(target, &Rule::new())) {
        table.rule(chain, &rule.accept());
    }
    let never = NEVER.into_iter().map(parsed);
    // Groups and broadcasts get no answer, as everywhere; the lists do.
    let forbidden = never.chain(own.iter().copied()).chain(settings.deny.iter().copied());
    // Where the network translates addresses, each of IPv4 has a second name.
    for prefix in forbidden.flat_map(|prefix| [Some(prefix), prefix.translated()]).flatten() {
        table.rule(chain, &Rule::new().destination(prefix.address, prefix.bits).reject());
    }
    table.rule(chain, &Rule::new().destination_is_not_elsewhere().reject());
}

/// What matches packets to a target: one rule, or one for each protocol that has ports.
fn to(target: &Target, base: &Rule) -> Vec<Rule> {
    let Target { prefix, port } = *target;
    let rule = base.clone().destination(prefix.address, prefix.bits);
    match port {
        None => vec![rule],
        Some(port) => [TCP, UDP].map(|protocol| rule.clone().protocol(protocol).port(port)).into(),
    }
}
