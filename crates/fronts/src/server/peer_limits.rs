//! Limits on the connections of one peer address, and of all addresses together, until they have presented a key.
//!
//! The second limit leaves a part of all connections to those with a key and to trusted peers: a peer with many
//! addresses could otherwise take them all.
//!
//! Peers that are trusted not to abuse this are not counted: this machine, the operators' socket, and the
//! reverse proxies that the operator names. An IPv6 peer is counted by its /64, the smallest network that
//! one customer of a provider gets.

use std::collections::HashMap;
use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::str::FromStr;
use std::sync::{Arc, Mutex, PoisonError};

use crate::server::connection::ClientPeer;

/// An address or a network, such as `10.1.2.3` or `10.1.0.0/16`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrustedNetwork {
    first: IpAddr,
    bits: u8,
}

/// A text that is neither an address nor a network.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected an address such as `10.1.2.3` or a network such as `10.1.0.0/16`")]
pub struct TrustedNetworkError;

impl TrustedNetwork {
    pub(crate) fn contains(&self, address: IpAddr) -> bool {
        first_address(address, self.bits) == Some(self.first)
    }
}

/// Returns the address with all but its first `bits` bits set to zero; `None` if it is shorter.
fn first_address(address: IpAddr, bits: u8) -> Option<IpAddr> {
    match address {
        IpAddr::V4(v4) => {
            let kept = u32::MAX.checked_shl(32_u32.checked_sub(bits.into())?).unwrap_or(0);
            Some(IpAddr::V4((u32::from(v4) & kept).into()))
        }
        IpAddr::V6(v6) => {
            let kept = u128::MAX.checked_shl(128_u32.checked_sub(bits.into())?).unwrap_or(0);
            Some(IpAddr::V6((u128::from(v6) & kept).into()))
        }
    }
}

impl FromStr for TrustedNetwork {
    type Err = TrustedNetworkError;

    fn from_str(text: &str) -> Result<Self, TrustedNetworkError> {
        let (address, bits) = match text.split_once('/') {
            Some((address, bits)) => (address, Some(bits.parse().ok().ok_or(TrustedNetworkError)?)),
            None => (text, None),
        };
        let address: IpAddr = address.parse().ok().ok_or(TrustedNetworkError)?;
        let bits = bits.unwrap_or(if address.is_ipv4() { 32 } else { 128 });
        // Bits beyond the network would be ignored, which is rarely what was meant.
        match first_address(address, bits) {
            Some(first) if first == address => Ok(Self { first, bits }),
            _ => Err(TrustedNetworkError),
        }
    }
}

impl fmt::Display for TrustedNetwork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.first, self.bits)
    }
}

/// One of this many connections is kept from those without a key.
const KEYED_SHARE: usize = 4;

/// Counts the connections of each address that have not presented a key.
pub(crate) struct AddressLimits {
    trusted: Vec<TrustedNetwork>,
    per_address: usize,
    /// Of all addresses together.
    total: usize,
    counts: Mutex<AddressCounts>,
}

#[derive(Default)]
struct AddressCounts {
    all: usize,
    by_address: HashMap<IpAddr, usize>,
}

/// The place of a connection among those of its address; given back when this is dropped.
pub(crate) struct AddressSlot {
    limits: Arc<AddressLimits>,
    address: IpAddr,
}

/// Whether a new connection may stay.
pub(crate) enum PeerAdmission {
    /// The peer is not counted.
    Trusted,
    Counted(AddressSlot),
    Refused(PeerRefusal),
}

/// Why a connection is closed at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum PeerRefusal {
    #[error("their address has too many without a key")]
    Address,
    #[error("all addresses together have too many without a key")]
    AllAddresses,
}

impl AddressLimits {
    /// The limits for a listener with at most `connections` in all.
    pub(crate) fn new(connections: usize, per_address: usize, trusted: Vec<TrustedNetwork>) -> Arc<Self> {
        let total = connections - connections / KEYED_SHARE;
        Arc::new(Self { trusted, per_address, total, counts: Mutex::default() })
    }

    pub(crate) fn admit(self: &Arc<Self>, peer: ClientPeer) -> PeerAdmission {
        let ClientPeer::Network(peer) = peer else { return PeerAdmission::Trusted };
        let address = peer.ip().to_canonical();
        if address.is_loopback() || self.trusted.iter().any(|network| network.contains(address)) {
            return PeerAdmission::Trusted;
        }
        let address = counted_address(address);
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        if counts.by_address.get(&address).copied().unwrap_or(0) >= self.per_address {
            return PeerAdmission::Refused(PeerRefusal::Address);
        }
        if counts.all >= self.total {
            return PeerAdmission::Refused(PeerRefusal::AllAddresses);
        }
        counts.all += 1;
        *counts.by_address.entry(address).or_default() += 1;
        PeerAdmission::Counted(AddressSlot { limits: self.clone(), address })
    }
}

impl Drop for AddressSlot {
    fn drop(&mut self) {
        let mut counts = self.limits.counts.lock().unwrap_or_else(PoisonError::into_inner);
        counts.all -= 1;
        if let Some(count) = counts.by_address.get_mut(&self.address) {
            *count -= 1;
            if *count == 0 {
                counts.by_address.remove(&self.address);
            }
        }
    }
}

/// The address under which a peer is counted.
fn counted_address(address: IpAddr) -> IpAddr {
    const SUBNET: u128 = u128::MAX << 64;
    match address {
        IpAddr::V4(_) => address,
        IpAddr::V6(v6) => IpAddr::V6(Ipv6Addr::from(u128::from(v6) & SUBNET)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MANY: usize = 1000;

    fn peer(address: &str) -> ClientPeer {
        ClientPeer::Network((address.parse::<IpAddr>().unwrap(), 5).into())
    }

    #[test]
    fn an_address_gets_its_slots_back() {
        let limits = AddressLimits::new(MANY, 1, Vec::new());
        let PeerAdmission::Counted(slot) = limits.admit(peer("203.0.113.7")) else { panic!("not counted") };
        assert!(matches!(limits.admit(peer("203.0.113.7")), PeerAdmission::Refused(PeerRefusal::Address)));
        assert!(matches!(
            limits.admit(peer("::ffff:203.0.113.7")),
            PeerAdmission::Refused(PeerRefusal::Address)
        ));
        assert!(matches!(limits.admit(peer("203.0.113.8")), PeerAdmission::Counted(_)));
        drop(slot);
        assert!(matches!(limits.admit(peer("203.0.113.7")), PeerAdmission::Counted(_)));
        let counts = limits.counts.lock().unwrap();
        assert!(counts.by_address.is_empty() && counts.all == 0);
    }

    #[test]
    fn ipv6_peers_are_counted_by_their_network() {
        let limits = AddressLimits::new(MANY, 1, Vec::new());
        let _slot = limits.admit(peer("2001:db8:1:2::1"));
        assert!(matches!(
            limits.admit(peer("2001:db8:1:2:ffff::9")),
            PeerAdmission::Refused(PeerRefusal::Address)
        ));
        assert!(matches!(limits.admit(peer("2001:db8:1:3::1")), PeerAdmission::Counted(_)));
    }

    #[test]
    fn many_addresses_leave_connections_to_others() {
        let limits = AddressLimits::new(8, 2, Vec::new());
        let admit = |address: usize| limits.admit(peer(&format!("2001:db8:1:{address}::1")));
        let mut held: Vec<PeerAdmission> = (0..6).map(admit).collect();
        assert!(held.iter().all(|admission| matches!(admission, PeerAdmission::Counted(_))));
        assert!(matches!(admit(7), PeerAdmission::Refused(PeerRefusal::AllAddresses)));
        assert!(matches!(limits.admit(peer("127.0.0.1")), PeerAdmission::Trusted));
        held.pop();
        assert!(matches!(admit(7), PeerAdmission::Counted(_)));
    }

    #[test]
    fn trusted_peers_are_not_counted() {
        let trusted = ["10.1.0.0/16", "2001:db8::/32", "192.0.2.9"].map(|text| text.parse().unwrap());
        let limits = AddressLimits::new(MANY, 0, trusted.to_vec());
        for trusted in ["127.0.0.1", "::1", "::ffff:127.0.0.1", "10.1.255.3", "2001:db8:7::1", "192.0.2.9"] {
            assert!(matches!(limits.admit(peer(trusted)), PeerAdmission::Trusted), "{trusted}");
        }
        assert!(matches!(limits.admit(ClientPeer::Operator), PeerAdmission::Trusted));
        for other in ["10.2.0.1", "2001:db9::1", "192.0.2.8"] {
            assert!(
                matches!(limits.admit(peer(other)), PeerAdmission::Refused(PeerRefusal::Address)),
                "{other}"
            );
        }
    }

    #[test]
    fn networks_are_parsed_and_shown() {
        for (text, shown) in [("10.1.2.3", "10.1.2.3/32"), ("0.0.0.0/0", "0.0.0.0/0"), ("::1", "::1/128")] {
            assert_eq!(text.parse::<TrustedNetwork>().unwrap().to_string(), shown);
        }
        for wrong in ["", "proxy.example", "10.1.2.3/33", "10.1.2.3/16", "10.1.2.3/x", "10.1.2.3/", "::/129"]
        {
            assert_eq!(wrong.parse::<TrustedNetwork>(), Err(TrustedNetworkError), "{wrong}");
        }
    }
}
