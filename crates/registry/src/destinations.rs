//! Where a registry may send its client: for a token, and with a redirect.
//!
//! A registry is not trusted, and this client runs on a host whose loopback and private network it must
//! not explore. So another place than the registry itself is contacted only over TLS, and only at a public
//! address, unless the registry itself has a private one. Names are judged by the addresses that are then
//! used, so a name cannot change in between.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

use hickory_resolver::TokioResolver;
use reqwest::Url;
use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use reqwest::redirect::{Action, Attempt, Policy};

const MAX_REDIRECTS: usize = 10;

/// The rule for the destinations of one pull.
#[derive(Clone, Debug)]
pub(crate) struct DestinationRule {
    registry: Url,
    private: PrivateAddresses,
}

/// Whether private addresses may be contacted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PrivateAddresses {
    /// The registry has one itself, or a proxy decides.
    Allowed,
    Refused,
}

/// A kind of reference to another place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReferenceKind {
    /// The realm of a challenge; it gets the user's password.
    Token,
    /// A redirect, without the password. A registry without TLS may redirect to another place without TLS.
    Redirect,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum RefusedDestination {
    #[error("the registry refers to `{0}`, which is not https")]
    Insecure(String),
    #[error("the registry refers to `{0}`, which is a private address")]
    Private(String),
    #[error("the registry redirects too often")]
    TooManyRedirects,
}

impl DestinationRule {
    pub(crate) fn new(registry: Url, private: PrivateAddresses) -> Self {
        Self { registry, private }
    }

    /// Checks a place that the registry names. Names are checked when they are resolved.
    pub(crate) fn check(&self, url: &Url, kind: ReferenceKind) -> Result<(), RefusedDestination> {
        if url.origin() == self.registry.origin() {
            return Ok(());
        }
        let shown = url.host_str().unwrap_or_default().to_owned();
        let plain_registry = self.registry.scheme() == "http" && kind == ReferenceKind::Redirect;
        match url.scheme() {
            "https" => {}
            "http" if plain_registry => {}
            _ => return Err(RefusedDestination::Insecure(shown)),
        }
        match host_address(url) {
            Some(address) if self.refuses(address) => Err(RefusedDestination::Private(shown)),
            _ => Ok(()),
        }
    }

    fn refuses(&self, address: IpAddr) -> bool {
        self.private == PrivateAddresses::Refused && is_private(address)
    }

    /// Follows redirects that pass the check.
    pub(crate) fn redirect_policy(self) -> Policy {
        Policy::custom(move |attempt: Attempt<'_>| -> Action {
            if attempt.previous().len() > MAX_REDIRECTS {
                return attempt.error(RefusedDestination::TooManyRedirects);
            }
            match self.check(attempt.url(), ReferenceKind::Redirect) {
                Ok(()) => attempt.follow(),
                Err(refused) => attempt.error(refused),
            }
        })
    }
}

/// The address in a URL that names its host by one.
pub(crate) fn host_address(url: &Url) -> Option<IpAddr> {
    url.host_str()?.trim_start_matches('[').trim_end_matches(']').parse().ok()
}

/// Resolves names to addresses that the rule allows.
pub(crate) struct GuardedResolver {
    pub(crate) resolver: Arc<TokioResolver>,
    pub(crate) rule: DestinationRule,
}

impl Resolve for GuardedResolver {
    fn resolve(&self, name: Name) -> Resolving {
        let (resolver, rule) = (Arc::clone(&self.resolver), self.rule.clone());
        Box::pin(async move {
            let found = resolver.lookup_ip(name.as_str()).await?;
            let own = rule.registry.host_str() == Some(name.as_str());
            let allowed: Vec<SocketAddr> = found
                .iter()
                .filter(|address| own || !rule.refuses(*address))
                .map(|address| SocketAddr::new(address, 0))
                .collect();
            if allowed.is_empty() {
                return Err(RefusedDestination::Private(name.as_str().to_owned()).into());
            }
            Ok(Box::new(allowed.into_iter()) as Addrs)
        })
    }
}

/// Whether an address is not one of the public Internet.
pub(crate) fn is_private(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => is_private_v4(address),
        IpAddr::V6(address) => is_private_v6(address),
    }
}

fn is_private_v4(address: Ipv4Addr) -> bool {
    let [a, b, c, _] = address.octets();
    address.is_loopback()
        || address.is_private()
        || address.is_link_local()
        || address.is_multicast()
        || address.is_documentation()
        || matches!((a, b, c), (0 | 240..=255, _, _) | (100, 64..=127, _) | (192, 0, 0) | (198, 18..=19, _))
}

fn is_private_v6(address: Ipv6Addr) -> bool {
    if let Some(inner) = address.to_ipv4_mapped() {
        return is_private_v4(inner);
    }
    match address.segments() {
        // Addresses that a gateway translates to IPv4, of RFC 6052 and RFC 3056.
        [0x64, 0xff9b, 0, 0, 0, 0, high, low] | [0x2002, high, low, ..] => {
            let [a, b] = high.to_be_bytes();
            let [c, d] = low.to_be_bytes();
            is_private_v4(Ipv4Addr::new(a, b, c, d))
        }
        // Only this range is assigned to the public Internet.
        [first, ..] => first & 0xe000 != 0x2000,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(registry: &str, private: PrivateAddresses) -> DestinationRule {
        DestinationRule::new(registry.parse().expect("a URL"), private)
    }

    #[test]
    fn token_is_fetched_from_the_registry_or_a_public_place_with_tls() {
        let public = rule("https://registry.example", PrivateAddresses::Refused);
        let internal = rule("https://registry.corp:5000", PrivateAddresses::Allowed);
        let plain = rule("http://127.0.0.1:5000", PrivateAddresses::Allowed);
        for (rule, url, allowed) in [
            (&public, "https://registry.example/token", true),
            (&public, "https://auth.example/token", true),
            (&public, "http://auth.example/token", false),
            (&public, "http://registry.example/token", false),
            (&public, "https://127.0.0.1/token", false),
            (&public, "https://[::1]/token", false),
            (&public, "https://169.254.169.254/latest", false),
            (&public, "https://10.0.0.1:8443/", false),
            (&public, "https://[::ffff:10.0.0.1]/", false),
            (&public, "file:///etc/shadow", false),
            (&internal, "https://10.0.0.7/jwt/auth", true),
            (&internal, "http://10.0.0.7/jwt/auth", false),
            (&plain, "http://127.0.0.1:5000/token", true),
            (&plain, "http://127.0.0.1:5001/token", false),
        ] {
            let url: Url = url.parse().expect("a URL");
            assert_eq!(rule.check(&url, ReferenceKind::Token).is_ok(), allowed, "{url} of {rule:?}");
        }
    }

    #[test]
    fn redirects_never_leave_tls() {
        let secure = rule("https://registry.example", PrivateAddresses::Refused);
        let plain = rule("http://registry.corp", PrivateAddresses::Allowed);
        let elsewhere: Url = "http://blobs.example/x".parse().expect("a URL");
        assert!(secure.check(&elsewhere, ReferenceKind::Redirect).is_err());
        assert!(plain.check(&elsewhere, ReferenceKind::Redirect).is_ok());
    }

    #[test]
    fn private_addresses_are_known() {
        for text in [
            "127.0.0.1",
            "10.1.2.3",
            "172.16.0.1",
            "192.168.1.1",
            "169.254.169.254",
            "100.64.0.1",
            "0.0.0.0",
            "255.255.255.255",
            "224.0.0.1",
            "::1",
            "::",
            "fe80::1",
            "fd00::1",
            "ff02::1",
            "::ffff:127.0.0.1",
            "64:ff9b::7f00:1",
            "2002:7f00:1::",
        ] {
            assert!(is_private(text.parse().expect("an address")), "{text}");
        }
        for text in ["1.1.1.1", "8.8.8.8", "172.32.0.1", "2606:4700::1111", "::ffff:1.1.1.1"] {
            assert!(!is_private(text.parse().expect("an address")), "{text}");
        }
    }
}
