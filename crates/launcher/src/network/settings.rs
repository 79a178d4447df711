//! The operator's settings for the network of sandboxes.

use std::net::IpAddr;

use domain::{AddressPrefix, NetworkPolicy, NetworkTarget, PolicyError, PolicyTarget};
use egress_protocol::{ActionMessage, PolicyMessage, RuleMessage};
use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkSettings {
    /// The network of a sandbox whose caller did not specify one, so that it can be prepared in advance.
    pub default: NetworkMode,
    /// The range of sandbox addresses; `None` selects one that is free.
    #[serde(with = "optional_text")]
    pub range: Option<AddressPrefix>,
    #[serde(with = "text")]
    pub range6: AddressPrefix,
    /// Name servers that sandboxes use instead of the host's.
    pub resolvers: Vec<IpAddr>,
    /// Reachable, even if a rule below forbids it.
    #[serde(with = "texts")]
    pub allow: Vec<NetworkTarget>,
    /// Not reachable, in addition to the addresses that are never reachable.
    #[serde(with = "texts")]
    pub deny: Vec<AddressPrefix>,
    #[serde(default)]
    pub filter: FilterSettings,
    /// A proxy through which egress makes all connections.
    #[serde(default)]
    pub upstream_proxy: Option<String>,
    /// Whether `auto` means `off` where sandboxes cannot have a link, as in earlier versions. In a configuration: unless
    /// the state directory says that it was made by a later one.
    #[serde(default)]
    pub auto_needs_link: bool,
}

/// The operator's settings for filtered sandboxes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FilterSettings {
    /// These precede the policy of every filtered sandbox, in this order.
    #[serde(with = "texts")]
    pub always_deny: Vec<PolicyTarget>,
    #[serde(with = "texts")]
    pub always_allow: Vec<PolicyTarget>,
    /// The largest number of open connections of one sandbox, if it is not the usual one.
    pub connections: Option<u32>,
    /// The policy of a filtered sandbox whose client names none; what no rule allows is denied.
    pub rules: Vec<RuleMessage>,
}

/// Addresses as the text that settings contain: the types of `domain` are not serialisable.
mod text {
    use std::fmt::Display;
    use std::str::FromStr;

    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(value: &impl Display, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(value)
    }

    pub(super) fn deserialize<'de, D, T>(deserializer: D) -> Result<T, D::Error>
    where
        D: Deserializer<'de>,
        T: FromStr<Err: Display>,
    {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}

mod optional_text {
    use std::fmt::Display;
    use std::str::FromStr;

    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(super) fn serialize<S: Serializer>(
        value: &Option<impl Display>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        value.as_ref().map(ToString::to_string).serialize(serializer)
    }

    pub(super) fn deserialize<'de, D, T>(deserializer: D) -> Result<Option<T>, D::Error>
    where
        D: Deserializer<'de>,
        T: FromStr<Err: Display>,
    {
        let text = Option::<String>::deserialize(deserializer)?;
        text.map(|text| text.parse().map_err(D::Error::custom)).transpose()
    }
}

mod texts {
    use std::fmt::Display;
    use std::str::FromStr;

    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(
        values: &[impl Display],
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(values.iter().map(ToString::to_string))
    }

    pub(super) fn deserialize<'de, D, T>(deserializer: D) -> Result<Vec<T>, D::Error>
    where
        D: Deserializer<'de>,
        T: FromStr<Err: Display>,
    {
        let texts = Vec::<String>::deserialize(deserializer)?;
        texts.iter().map(|text| text.parse().map_err(D::Error::custom)).collect()
    }
}

/// The network that a caller asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NetworkMode {
    Off,
    On,
    /// On if that is possible, otherwise off.
    Auto,
    /// What a policy allows, by name and address.
    Filtered,
}

impl NetworkSettings {
    /// The port of the proxy through which egress makes all connections.
    pub(super) fn upstream_proxy_port(&self) -> Option<u16> {
        self.upstream_proxy.as_deref()?.trim_end_matches('/').rsplit_once(':')?.1.parse().ok()
    }
}

impl FilterSettings {
    /// The policy of a filtered sandbox whose client names none.
    pub fn default_policy(&self) -> Result<NetworkPolicy, PolicyError> {
        let message = PolicyMessage { rules: self.rules.clone(), default: ActionMessage::Deny };
        (&message).try_into()
    }
}

impl Default for NetworkSettings {
    fn default() -> Self {
        Self {
            default: NetworkMode::Off,
            range: None,
            range6: parse_prefix(DEFAULT_RANGE6),
            resolvers: Vec::new(),
            allow: Vec::new(),
            deny: PRIVATE_NETWORKS.into_iter().map(parse_prefix).collect(),
            filter: FilterSettings::default(),
            upstream_proxy: None,
            auto_needs_link: false,
        }
    }
}

/// The private IPv6 addresses of sandboxes: a prefix that is unlikely to be used elsewhere.
const DEFAULT_RANGE6: &str = "fd63:6f72:6163:6c65::/64";

/// Ranges for IPv4 in the order in which they are tried. The first is reserved for benchmarking
/// devices, so home, company and cloud networks do not use it.
pub(super) const CANDIDATE_RANGES: [&str; 4] =
    ["198.19.0.0/16", "10.214.0.0/16", "172.29.0.0/16", "10.87.0.0/16"];

/// Private networks, which contain the machines near this host. Sandboxes cannot reach them unless the
/// operator allows it.
pub const PRIVATE_NETWORKS: [&str; 6] =
    ["10.0.0.0/8", "100.64.0.0/10", "172.16.0.0/12", "192.168.0.0/16", "198.18.0.0/15", "fc00::/7"];

/// Never reachable, whatever the settings deny: this host's loopback, link-local and multicast
/// addresses, and the metadata services of clouds, which hold secrets. IPv6 addresses that tunnel IPv4
/// are included; the guard adds the translated forms of these and of denied addresses.
pub const ALWAYS_DENIED: [&str; 19] = [
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

pub(super) fn parse_prefix(text: &str) -> AddressPrefix {
    text.parse().expect("a test parses all constants")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_constant_ranges_can_be_parsed() {
        for text in
            CANDIDATE_RANGES.iter().chain(&PRIVATE_NETWORKS).chain(&ALWAYS_DENIED).chain([&DEFAULT_RANGE6])
        {
            assert_eq!(parse_prefix(text).to_string().parse(), text.parse::<AddressPrefix>(), "{text}");
        }
    }
}
