//! The ranges from which sandboxes get their addresses.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use domain::AddressPrefix;
use linux::netlink::route::RoutingSocket;

use super::settings::{CANDIDATE_RANGES, NetworkSettings, parse_prefix};
use super::{NetworkError, guard};

/// The addresses of one server's sandboxes.
///
/// ```text
/// …1, …2, …3   the resolvers; the first is also the gateway. No machine has these addresses.
/// …16 and up   the sandboxes
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddressRange {
    pub v4: AddressPrefix,
    pub v6: AddressPrefix,
}

/// The number of the first sandbox address in a range.
const FIRST_SANDBOX_NUMBER: u32 = 16;
/// The largest number of addresses: the index is part of a link's name, with four hexadecimal digits.
const MAX_SANDBOX_ADDRESSES: u32 = 0xffff;

impl AddressRange {
    /// Returns the number of sandbox addresses.
    pub fn sandbox_count(&self) -> u32 {
        let all = 1u32.checked_shl(32 - u32::from(self.v4.bits)).unwrap_or(u32::MAX);
        // Some systems use the last address of a range for broadcasts.
        all.saturating_sub(FIRST_SANDBOX_NUMBER + 1).min(MAX_SANDBOX_ADDRESSES)
    }

    pub fn gateway_address(&self, v6: bool) -> IpAddr {
        self.resolver_address(v6, 0)
    }

    /// Returns the address at which a sandbox reaches a name server.
    pub fn resolver_address(&self, v6: bool, number: u32) -> IpAddr {
        self.nth_address(v6, number + 1)
    }

    pub fn sandbox_address(&self, v6: bool, index: u32) -> IpAddr {
        self.nth_address(v6, FIRST_SANDBOX_NUMBER + index)
    }

    fn nth_address(&self, v6: bool, number: u32) -> IpAddr {
        match if v6 { self.v6.address } else { self.v4.address } {
            IpAddr::V4(first) => Ipv4Addr::from(u32::from(first).wrapping_add(number)).into(),
            IpAddr::V6(first) => Ipv6Addr::from(u128::from(first).wrapping_add(number.into())).into(),
        }
    }
}

/// Returns the configured range, or the first of the default ranges that this host does not use.
pub fn choose_range(
    settings: &NetworkSettings,
    routing: &mut RoutingSocket,
) -> Result<AddressRange, NetworkError> {
    let links = routing.list_links().map_err(NetworkError::Links)?;
    let ours: Vec<u32> = links
        .iter()
        .filter(|(_, name)| name.starts_with(guard::LINK_PREFIX))
        .map(|(index, _)| *index)
        .collect();
    let routes = routing.list_routes().map_err(NetworkError::Links)?;
    let theirs: Vec<AddressPrefix> = routes
        .into_iter()
        .filter(|route| route.prefix > 0 && !route.link.is_some_and(|link| ours.contains(&link)))
        .map(|route| AddressPrefix { address: route.target, bits: route.prefix })
        .collect();
    let free = |range: &AddressPrefix| !theirs.iter().any(|other| other.overlaps(range));
    let v6 = settings.range6;
    if !free(&v6) {
        return Err(NetworkError::RangeTaken(v6.to_string()));
    }
    let choices = candidate_ranges(settings);
    match choices.iter().find(|range| free(range)) {
        Some(v4) => Ok(AddressRange { v4: *v4, v6 }),
        None => Err(NetworkError::RangeTaken(
            choices.iter().map(AddressPrefix::to_string).collect::<Vec<_>>().join(", "),
        )),
    }
}

/// Returns the IPv4 ranges that may be used, in order of preference.
pub fn candidate_ranges(settings: &NetworkSettings) -> Vec<AddressPrefix> {
    match settings.range {
        Some(range) => vec![range],
        None => CANDIDATE_RANGES.into_iter().map(parse_prefix).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sandbox_addresses_skip_gateway_resolvers_and_broadcast() {
        let range = AddressRange { v4: parse_prefix("198.19.0.0/16"), v6: parse_prefix("fd00::/64") };
        assert_eq!(range.gateway_address(false).to_string(), "198.19.0.1");
        assert_eq!(range.resolver_address(true, 2).to_string(), "fd00::3");
        assert_eq!(range.sandbox_address(false, 0).to_string(), "198.19.0.16");
        assert_eq!(range.sandbox_address(false, range.sandbox_count() - 1).to_string(), "198.19.255.254");
        let small = AddressRange { v4: parse_prefix("10.9.0.0/24"), ..range };
        assert_eq!(small.sandbox_address(false, small.sandbox_count() - 1).to_string(), "10.9.0.254");
    }
}
