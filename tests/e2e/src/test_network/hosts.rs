//! The hosts of the test internet and the records of their names.
//!
//! Most addresses are well-known public ones, which this machine never has itself. Records that lead back to the host of
//! the test, to its loopback or to a metadata service are what an attacker's name server would answer.

use std::net::IpAddr;

use super::{GATEWAY, GATEWAY_V6, HOST_ADDRESS};

/// A host of the test internet with its names; the first is the one by which it identifies itself.
#[derive(Debug, PartialEq, Eq)]
pub struct WorldHost {
    pub names: &'static [&'static str],
    pub v4: &'static str,
    pub v6: &'static str,
}

impl WorldHost {
    pub fn name(&self) -> &'static str {
        self.names[0]
    }
}

/// The host that policies of tests usually allow. It has a second name, as a shared server has.
pub const WEB: WorldHost = WorldHost {
    names: &["web.example", "shared.example", "*.web.example"],
    v4: "93.184.216.34",
    v6: "2606:2800:220:1::34",
};
/// The host that policies of tests usually deny.
pub const OTHER: WorldHost =
    WorldHost { names: &["other.example"], v4: "93.184.216.77", v6: "2606:2800:220:1::77" };
/// A package index, with names at several depths.
pub const PACKAGES: WorldHost = WorldHost {
    names: &["packages.example", "*.packages.example", "files.eu.packages.example"],
    v4: "93.184.217.10",
    v6: "2606:2800:220:2::10",
};
/// A server behind a chain of CNAMEs.
pub const EDGE: WorldHost = WorldHost {
    names: &["edge.cdn.example", "alias.example"],
    v4: "93.184.218.20",
    v6: "2606:2800:220:3::20",
};
/// A public resolver: DNS, DNS over HTTPS and DNS over TLS.
pub const RESOLVER: WorldHost =
    WorldHost { names: &["dns.example"], v4: "8.8.8.8", v6: "2001:4860:4860::8888" };
/// A server with an HTTP proxy (CONNECT on ports 80 and 3128) and a SOCKS5 proxy (port 1080).
pub const PROXY: WorldHost =
    WorldHost { names: &["proxy.example"], v4: "1.1.1.1", v6: "2606:4700:4700::1111" };
/// A server whose protocols begin with the server's words.
pub const SHELL: WorldHost =
    WorldHost { names: &["shell.example"], v4: "93.184.219.22", v6: "2606:2800:220:4::22" };
/// What one name leads to the next time it is asked for.
pub const SECOND: WorldHost =
    WorldHost { names: &["second.example"], v4: "93.184.219.99", v6: "2606:2800:220:4::99" };
/// The host of every name outside `example`: it has a certificate for whatever name it is asked for, so that suites of
/// others find the hosts that they name.
pub const ANY_HOST: WorldHost =
    WorldHost { names: &["any.example"], v4: "93.184.221.1", v6: "2606:2800:220:5::1" };

pub const WORLD_HOSTS: [&WorldHost; 9] =
    [&WEB, &OTHER, &PACKAGES, &EDGE, &RESOLVER, &PROXY, &SHELL, &SECOND, &ANY_HOST];

/// The names of a host with this address.
pub(super) fn names_at(address: IpAddr) -> &'static [&'static str] {
    let has = |host: &&&WorldHost| [host.v4, host.v6].iter().any(|own| own.parse() == Ok(address));
    WORLD_HOSTS.iter().find(has).map_or(&["gateway.example"], |host| host.names)
}

/// The types of records that the resolver knows.
pub mod record_type {
    pub const A: u16 = 1;
    pub const CNAME: u16 = 5;
    pub const TXT: u16 = 16;
    pub const AAAA: u16 = 28;
    pub const HTTPS: u16 = 65;
}

/// One record of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ZoneRecord {
    pub(super) owner: String,
    pub(super) ttl: u32,
    pub(super) data: RecordData,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum RecordData {
    Address(IpAddr),
    Alias(String),
    Text(&'static str),
    /// An HTTPS record with an `ech` parameter.
    EchKeys,
}

/// What the world's name servers know of a name.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ZoneAnswer {
    NoSuchName,
    Records(Vec<ZoneRecord>),
}

const TTL: u32 = 300;
const SHORT_TTL: u32 = 1;

/// Looks up a name; `times` is how often it was asked for before.
pub(super) fn look_up(name: &str, kind: u16, times: usize) -> ZoneAnswer {
    let name = name.to_ascii_lowercase();
    if name == "absent.example" || name.ends_with(".absent.example") {
        return ZoneAnswer::NoSuchName;
    }
    let mut records = Vec::new();
    let mut owner = name;
    while let Some(alias) = alias_of(&owner) {
        records.push(ZoneRecord { owner, ttl: TTL, data: RecordData::Alias(alias.to_owned()) });
        owner = alias.to_owned();
    }
    let (ttl, addresses) = addresses_of(&owner, times);
    let record = |data| ZoneRecord { owner: owner.clone(), ttl, data };
    match kind {
        record_type::A | record_type::AAAA => {
            let wanted = |address: &IpAddr| address.is_ipv4() == (kind == record_type::A);
            let found = addresses.into_iter().filter(wanted);
            records.extend(found.map(|address| record(RecordData::Address(address))));
        }
        record_type::TXT => records.push(record(RecordData::Text("text of the test internet"))),
        record_type::HTTPS => records.push(record(RecordData::EchKeys)),
        _ => {}
    }
    ZoneAnswer::Records(records)
}

/// A chain whose length real content networks have.
fn alias_of(name: &str) -> Option<&'static str> {
    match name {
        "alias.example" => Some("alias.example.net.cdn.example"),
        "alias.example.net.cdn.example" => Some("pop1.cdn.example"),
        "pop1.cdn.example" => Some("edge.cdn.example"),
        // A name of an attacker that leads to one of somebody else.
        "lure.example" => Some("other.example"),
        _ => None,
    }
}

/// The addresses of a name without an alias, and how long they are valid.
fn addresses_of(name: &str, times: usize) -> (u32, Vec<IpAddr>) {
    let parsed = |texts: &[&str]| texts.iter().map(|text| super::parse_address(text)).collect();
    let later = |target: &'static str| {
        if times == 0 { parsed(&[WEB.v4]) } else { parsed(&[target]) }
    };
    let (ttl, addresses) = match name {
        "meta.example" => (TTL, parsed(&["169.254.169.254", "fd00:ec2::254"])),
        "local.example" => (TTL, parsed(&["127.0.0.1", "::1"])),
        "mapped.example" => (TTL, parsed(&["::ffff:127.0.0.1", "::ffff:169.254.169.254"])),
        "translated.example" => (TTL, parsed(&["64:ff9b::a9fe:a9fe", "64:ff9b::7f00:1"])),
        "nowhere.example" => (TTL, parsed(&["0.0.0.0", "::"])),
        "testhost.example" => (TTL, parsed(&[HOST_ADDRESS])),
        "private.example" => (TTL, parsed(&["10.1.2.3", "fd12::1"])),
        // Good and bad addresses in one answer.
        "mixed.example" => (TTL, parsed(&["169.254.169.254", WEB.v4, "127.0.0.1", WEB.v6, "::1"])),
        "rebind-local.example" => (SHORT_TTL, later("127.0.0.1")),
        "rebind-meta.example" => (SHORT_TTL, later("169.254.169.254")),
        "rebind-host.example" => (SHORT_TTL, later(HOST_ADDRESS)),
        "rebind-other.example" => (SHORT_TTL, later(OTHER.v4)),
        "brief.example" => (SHORT_TTL, parsed(&[if times.is_multiple_of(2) { WEB.v4 } else { SECOND.v4 }])),
        "many.example" => (TTL, many_addresses()),
        "four.example" => (TTL, parsed(&[WEB.v4])),
        "six.example" => (TTL, parsed(&[WEB.v6])),
        // Nobody has this address; connections to it get no answer.
        "silent.example" => (TTL, parsed(&["93.184.219.250"])),
        _ => match host_of(name) {
            Some(host) => (TTL, parsed(&[host.v4, host.v6])),
            None if name.ends_with(".example") => (60, parsed(&[GATEWAY, GATEWAY_V6])),
            None => (TTL, parsed(&[ANY_HOST.v4, ANY_HOST.v6])),
        },
    };
    (ttl, addresses)
}

fn host_of(name: &str) -> Option<&'static WorldHost> {
    let stands_for = |pattern: &&str| match pattern.strip_prefix('*') {
        Some(parent) => name.ends_with(parent),
        None => *pattern == name,
    };
    WORLD_HOSTS.into_iter().find(|host| host.names.iter().any(stands_for))
}

/// More addresses than fit into one datagram; only the host's own is in use.
fn many_addresses() -> Vec<IpAddr> {
    let unused = (0..60).map(|number| IpAddr::from([93, 184, 220, number]));
    unused.chain([super::parse_address(WEB.v4)]).collect()
}
