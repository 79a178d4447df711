//! What an operator decides about the network of sandboxes.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use super::address::{Prefix, Target};

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkSettings {
    /// What a sandbox gets whose caller named nothing, so that this can be prepared ahead.
    pub default: Wish,
    /// Where the addresses of sandboxes come from; `None` takes one that is free.
    pub range: Option<Prefix>,
    pub range6: Prefix,
    /// Name servers to be asked instead of the host's own.
    pub resolvers: Vec<IpAddr>,
    /// Reachable although a rule below would forbid it.
    pub allow: Vec<Target>,
    /// Not reachable, beside what never is.
    pub deny: Vec<Prefix>,
}

/// What a caller wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Wish {
    Off,
    On,
    /// On where that is possible.
    Auto,
}

impl Default for NetworkSettings {
    fn default() -> Self {
        Self {
            default: Wish::Off,
            range: None,
            range6: parsed(RANGE6),
            resolvers: Vec::new(),
            allow: Vec::new(),
            deny: PRIVATE.into_iter().map(parsed).collect(),
        }
    }
}

/// The private addresses of IPv6 that sandboxes get: a prefix that nobody else should have.
const RANGE6: &str = "fd63:6f72:6163:6c65::/64";

/// Ranges for IPv4 in the order in which they are tried. The first belongs to neither homes nor
/// companies nor clouds: it is set aside for measuring devices.
pub(super) const RANGES: [&str; 4] = ["198.19.0.0/16", "10.214.0.0/16", "172.29.0.0/16", "10.87.0.0/16"];

/// Where the machines near this host are: what runs in a sandbox has no business there unless
/// the operator says so.
pub const PRIVATE: [&str; 6] =
    ["10.0.0.0/8", "100.64.0.0/10", "172.16.0.0/12", "192.168.0.0/16", "198.18.0.0/15", "fc00::/7"];

/// Never reachable, whatever is denied or not: this host's loopback, links and groups, and the
/// places where clouds tell machines their secrets. Addresses that carry one of IPv4 in a
/// tunnel are here too; what a translator makes of these and of denied ones is added by the guard.
pub(super) const NEVER: [&str; 19] = [
    "0.0.0.0/8",
    "127.0.0.0/8",
    "169.254.0.0/16",
    "192.0.0.0/24",
    "100.100.100.200/32",
    "168.63.129.16/32",
    "224.0.0.0/4",
    "240.0.0.0/4",
    "::/96",
    "::ffff:0:0/96",
    "64:ff9b:1::/48",
    "100::/64",
    "2001::/32",
    "2002::/16",
    "fd00:ec2::/32",
    "fd20:ce::/32",
    "fe80::/10",
    "fec0::/10",
    "ff00::/8",
];

pub(super) fn parsed(text: &str) -> Prefix {
    text.parse().expect("it was written here and is tested")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_list_can_be_read() {
        for text in RANGES.iter().chain(&PRIVATE).chain(&NEVER).chain([&RANGE6]) {
            assert_eq!(parsed(text).to_string().parse(), text.parse::<Prefix>(), "{text}");
        }
    }
}
