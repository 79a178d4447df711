//! The judgement of the exact address that is about to be dialled.
//!
//! The operator's lists and the host's routes decide here, after every policy and whatever named the address. The
//! kernel connects to its own loopback for `::` and for mapped forms of 127.0.0.1, although the routes of these say
//! unicast; so the forms are unmapped and refused first.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use domain::AddressPrefix;
use linux::netlink::route::RouteType;

use crate::settings::OperatorSettings;

/// Why an address is not dialled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AddressRefusal {
    Unspecified,
    /// An address of the sandbox itself, or of the listener.
    OwnAddress,
    /// In the list of addresses that are never reachable.
    NeverReachable(AddressPrefix),
    /// Of this host.
    Host,
    NotUnicast,
    NoRoute,
    /// The kernel did not say where the route leads.
    UnknownRoute,
}

impl fmt::Display for AddressRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unspecified => f.write_str("unspecified address"),
            Self::OwnAddress => f.write_str("own address"),
            Self::NeverReachable(prefix) => write!(f, "never reachable: {prefix}"),
            Self::Host => f.write_str("address of the host"),
            Self::NotUnicast => f.write_str("not a unicast address"),
            Self::NoRoute => f.write_str("no route"),
            Self::UnknownRoute => f.write_str("unknown route"),
        }
    }
}

/// Judges an address as the last step before it is dialled, and before it is shown in an answer (`port` is `None`).
pub(crate) fn judge_address(
    settings: &OperatorSettings,
    own: &[IpAddr],
    address: IpAddr,
    port: Option<u16>,
    route_type: impl FnOnce(IpAddr) -> io::Result<Option<RouteType>>,
) -> Result<(), AddressRefusal> {
    let address = address.to_canonical();
    if address.is_unspecified() || is_ipv4_compatible(address) {
        return Err(AddressRefusal::Unspecified);
    }
    if own.iter().any(|own| own.to_canonical() == address) {
        return Err(AddressRefusal::OwnAddress);
    }
    if address.is_loopback() {
        return Err(AddressRefusal::Host);
    }
    let is_allowed = settings.allows(address, port);
    if let (Some(prefix), false) = (settings.denying_prefix(address), is_allowed) {
        return Err(AddressRefusal::NeverReachable(prefix));
    }
    match route_type(address) {
        Ok(Some(RouteType::Unicast)) => Ok(()),
        // As with a link: the operator may open a service at an address of this host other than its loopback.
        Ok(Some(RouteType::Local)) if is_allowed => Ok(()),
        Ok(Some(RouteType::Local)) => Err(AddressRefusal::Host),
        Ok(Some(RouteType::Other(_))) => Err(AddressRefusal::NotUnicast),
        Ok(None) => Err(AddressRefusal::NoRoute),
        Err(error) => {
            tracing::warn!(%error, "route of an address is unknown; it is not dialled");
            Err(AddressRefusal::UnknownRoute)
        }
    }
}

/// Whether a connection that was made leads to this host, whatever its route said before.
pub(crate) fn leads_to_this_host(source: SocketAddr, destination: SocketAddr) -> bool {
    let (source, destination) = (source.ip().to_canonical(), destination.ip().to_canonical());
    source == destination || source.is_loopback()
}

/// Whether this is one of the deprecated forms `::a.b.c.d`, which hide an IPv4 address.
fn is_ipv4_compatible(address: IpAddr) -> bool {
    matches!(address, IpAddr::V6(v6) if v6.octets()[..12] == [0; 12] && v6 != Ipv6Addr::LOCALHOST)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::tests::sample;

    fn judge(text: &str, port: Option<u16>) -> Result<(), AddressRefusal> {
        let settings = sample(|settings| {
            settings.deny = ["10.0.0.0/8", "169.254.0.0/16", "fc00::/7"].map(str::to_owned).to_vec();
            settings.allow = ["10.9.9.9:5432", "127.0.0.1", "198.51.100.1:8080", "[fd00::5]:443"]
                .map(str::to_owned)
                .to_vec();
        });
        let own = ["198.18.0.1".parse().expect("an address"), "fd77::1".parse().expect("an address")];
        let route = |address: IpAddr| match address.to_string().as_str() {
            "198.51.100.1" => Ok(Some(RouteType::Local)),
            "224.0.0.1" => Ok(Some(RouteType::Other(5))),
            "203.0.113.9" => Ok(None),
            "203.0.113.8" => Err(io::Error::other("no answer")),
            _ => Ok(Some(RouteType::Unicast)),
        };
        judge_address(&settings, &own, text.parse().expect("an address"), port, route)
    }

    fn never(text: &str) -> Result<(), AddressRefusal> {
        Err(AddressRefusal::NeverReachable(text.parse().expect("a prefix")))
    }

    #[test]
    fn exact_address_decides() {
        use AddressRefusal::{Host, NoRoute, NotUnicast, OwnAddress, UnknownRoute, Unspecified};
        for (address, expected) in [
            ("192.0.2.1", Ok(())),
            ("::ffff:192.0.2.1", Ok(())),
            ("2001:db8::1", Ok(())),
            ("0.0.0.0", Err(Unspecified)),
            ("::", Err(Unspecified)),
            ("::ffff:0.0.0.0", Err(Unspecified)),
            ("::127.0.0.1", Err(Unspecified)),
            ("127.0.0.1", Err(Host)),
            ("127.9.9.9", Err(Host)),
            ("::1", Err(Host)),
            ("::ffff:127.0.0.1", Err(Host)),
            ("198.51.100.1", Err(Host)),
            ("::ffff:198.51.100.1", Err(Host)),
            ("198.18.0.1", Err(OwnAddress)),
            ("::ffff:198.18.0.1", Err(OwnAddress)),
            ("fd77::1", Err(OwnAddress)),
            ("10.1.2.3", never("10.0.0.0/8")),
            ("::ffff:10.1.2.3", never("10.0.0.0/8")),
            ("64:ff9b::a01:203", never("64:ff9b::a00:0/104")),
            ("169.254.169.254", never("169.254.0.0/16")),
            ("64:ff9b::a9fe:a9fe", never("64:ff9b::a9fe:0/112")),
            ("fd00::1", never("fc00::/7")),
            ("224.0.0.1", Err(NotUnicast)),
            ("203.0.113.9", Err(NoRoute)),
            ("203.0.113.8", Err(UnknownRoute)),
        ] {
            assert_eq!(judge(address, Some(80)), expected, "{address}");
        }
    }

    #[test]
    fn allowed_target_opens_its_port_alone() {
        assert_eq!(judge("10.9.9.9", Some(5432)), Ok(()));
        assert_eq!(judge("10.9.9.9", None), Ok(()));
        assert_eq!(judge("198.51.100.1", Some(8080)), Ok(()), "an address of the host");
        assert_eq!(judge("127.0.0.1", Some(80)), Err(AddressRefusal::Host));
        assert_eq!(judge("10.9.9.9", Some(80)), never("10.0.0.0/8"));
        assert_eq!(judge("fd00::5", Some(443)), Ok(()));
        assert_eq!(judge("fd00::5", Some(80)), never("fc00::/7"));
    }

    #[test]
    fn connection_to_this_host_is_recognised_afterwards() {
        let leads = |source: &str, destination: &str| {
            leads_to_this_host(source.parse().expect("valid"), destination.parse().expect("valid"))
        };
        assert!(leads("192.0.2.1:5000", "192.0.2.1:80"));
        assert!(leads("[::ffff:192.0.2.1]:5000", "192.0.2.1:80"));
        assert!(leads("127.0.0.1:5000", "192.0.2.1:80"));
        assert!(leads("[::1]:5000", "[2001:db8::1]:80"));
        assert!(!leads("192.0.2.2:5000", "192.0.2.1:80"));
    }
}
