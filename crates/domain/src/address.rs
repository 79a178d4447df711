//! Ranges of addresses, and targets in them, as settings and policies name them.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::str::FromStr;

/// All addresses with the same leading bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AddressPrefix {
    pub address: IpAddr,
    pub bits: u8,
}

/// A prefix with one port or all ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NetworkTarget {
    pub prefix: AddressPrefix,
    pub port: Option<u16>,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    #[error("`{0}` is neither an address nor a range such as `10.0.0.0/8` or `fd00::/8`")]
    Prefix(String),
    #[error(
        "`{0}` is not an address or range with or without a port, such as `10.1.2.3:5432` or `[fd00::1]:443`"
    )]
    Target(String),
    #[error("`{0}` has bits set after its prefix")]
    Loose(String),
}

impl AddressPrefix {
    pub fn contains(&self, address: IpAddr) -> bool {
        self.address.is_ipv4() == address.is_ipv4()
            && Self { address, bits: self.bits }.first_address() == self.first_address()
    }

    /// Whether any address is in both.
    pub fn overlaps(&self, other: &Self) -> bool {
        let wider = self.bits.min(other.bits);
        Self { bits: wider, ..*self }.contains(other.address)
    }

    /// Returns the IPv6 addresses by which a translator (NAT64) reaches these IPv4 addresses.
    pub fn nat64_prefix(&self) -> Option<Self> {
        const NAT64_PREFIX: u128 = 0x0064_ff9b << 96;
        match self.address {
            IpAddr::V4(v4) => {
                let address = Ipv6Addr::from(NAT64_PREFIX | u128::from(u32::from(v4))).into();
                Some(Self { address, bits: 96 + self.bits })
            }
            IpAddr::V6(_) => None,
        }
    }

    /// Returns the first address as a number.
    fn first_address(&self) -> u128 {
        let kept = |number: u128, length: u32| {
            let loose = length - u32::from(self.bits).min(length);
            number.checked_shr(loose).map_or(0, |number| number.checked_shl(loose).unwrap_or(0))
        };
        match self.address {
            IpAddr::V4(v4) => kept(u32::from(v4).into(), 32),
            IpAddr::V6(v6) => kept(v6.into(), 128),
        }
    }
}

impl From<IpAddr> for AddressPrefix {
    fn from(address: IpAddr) -> Self {
        Self { address, bits: if address.is_ipv4() { 32 } else { 128 } }
    }
}

impl FromStr for AddressPrefix {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        let wrong = |_| AddressError::Prefix(text.to_owned());
        let Some((address, bits)) = text.split_once('/') else {
            return text.parse::<IpAddr>().map(Self::from).map_err(wrong);
        };
        let address: IpAddr = address.parse().map_err(wrong)?;
        let most = Self::from(address).bits;
        let bits = bits.parse().ok().filter(|bits| *bits <= most);
        let prefix = Self { address, bits: bits.ok_or_else(|| AddressError::Prefix(text.to_owned()))? };
        let whole = Self::from(address);
        if prefix.first_address() != whole.first_address() {
            return Err(AddressError::Loose(text.to_owned()));
        }
        Ok(prefix)
    }
}

impl fmt::Display for AddressPrefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.bits)
    }
}

impl fmt::Display for NetworkTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.port {
            None => write!(f, "{}", self.prefix),
            Some(port) if self.prefix.address.is_ipv6() => write!(f, "[{}]:{port}", self.prefix),
            Some(port) => write!(f, "{}:{port}", self.prefix),
        }
    }
}

impl FromStr for NetworkTarget {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        if let Ok(prefix) = text.parse() {
            return Ok(Self { prefix, port: None });
        }
        let wrong = || AddressError::Target(text.to_owned());
        let (prefix, port) = text.rsplit_once(':').ok_or_else(wrong)?;
        let inner = prefix.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
        let prefix: AddressPrefix = match inner {
            Some(inner) => inner.parse()?,
            // Without brackets the colon is part of an IPv6 address.
            None if prefix.contains(':') => return Err(wrong()),
            None => prefix.parse()?,
        };
        let port = port.parse().ok().filter(|port| *port != 0);
        Ok(Self { prefix, port: Some(port.ok_or_else(wrong)?) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prefix(text: &str) -> AddressPrefix {
        text.parse().unwrap_or_else(|error| panic!("{error}"))
    }

    #[test]
    fn targets_are_parsed_with_and_without_a_port() {
        for (text, inner, port) in [
            ("10.1.2.3", "10.1.2.3/32", None),
            ("10.1.2.3:5432", "10.1.2.3/32", Some(5432)),
            ("10.0.0.0/8", "10.0.0.0/8", None),
            ("10.0.0.0/8:80", "10.0.0.0/8", Some(80)),
            ("fd00::1", "fd00::1/128", None),
            ("[fd00::1]:443", "fd00::1/128", Some(443)),
            ("[fd00::/8]:443", "fd00::/8", Some(443)),
        ] {
            assert_eq!(text.parse(), Ok(NetworkTarget { prefix: prefix(inner), port }), "{text}");
        }
        for wrong in ["", "host:80", "10.1.2.3:0", "10.1.2.3:x", "10.1.2.3/33", "10.1.2.3/8", "fd00::1/129"] {
            assert!(wrong.parse::<NetworkTarget>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn prefixes_overlap_where_they_share_an_address() {
        assert!(prefix("10.0.0.0/8").overlaps(&prefix("10.2.0.0/16")));
        assert!(prefix("10.2.0.0/16").overlaps(&prefix("10.0.0.0/8")));
        assert!(prefix("0.0.0.0/0").overlaps(&prefix("10.2.0.0/16")));
        assert!(!prefix("10.3.0.0/16").overlaps(&prefix("10.2.0.0/16")));
        assert!(!prefix("::/0").overlaps(&prefix("10.2.0.0/16")));
    }

    #[test]
    fn only_ipv4_prefixes_are_translated() {
        assert_eq!(prefix("10.0.0.0/8").nat64_prefix(), Some(prefix("64:ff9b::a00:0/104")));
        assert_eq!(prefix("169.254.169.254").nat64_prefix(), Some(prefix("64:ff9b::a9fe:a9fe/128")));
        assert_eq!(prefix("fc00::/7").nat64_prefix(), None);
    }
}
