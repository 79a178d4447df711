//! The settings of the section `[gateway]`: how ports of sandboxes are addressed in addition to the
//! paths of the API, and how addresses are signed.

use std::fmt;

use anyhow::{Result, anyhow, bail};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};

use super::raw::RawGateway;
use crate::output::WithHint;

/// Shorter secrets could be guessed by anyone who has seen a signature.
const MIN_SECRET_BYTES: usize = 16;

/// The effective settings. They are passed to the server as they are.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct GatewaySettings {
    pub mode: GatewayMode,
    /// Whether services of sandboxes need no token there.
    pub public: bool,
    /// The first one signs.
    pub keys: Vec<RouteKey>,
    pub short_signatures: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum GatewayMode {
    #[default]
    Off,
    Wildcard(String),
    Header,
}

/// A key of signed routes. Its secret is never printed.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RouteKey {
    pub name: char,
    pub secret: Vec<u8>,
}

impl fmt::Debug for RouteKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}=***", self.name)
    }
}

/// Turns the written settings into effective ones.
pub(super) fn check_gateway(raw: RawGateway) -> Result<GatewaySettings> {
    let mode = match (raw.mode.as_deref(), raw.domain) {
        (None | Some("off"), None) => GatewayMode::Off,
        (Some("header"), None) => GatewayMode::Header,
        (Some("wildcard"), Some(domain)) => GatewayMode::Wildcard(check_domain(domain)?),
        (Some("wildcard"), None) => {
            return Err(anyhow!("`gateway.mode` is `wildcard`, and there is no `gateway.domain`"))
                .with_hint("name the domain whose subdomains all lead here, such as `boxes.example.org`");
        }
        (Some("uri"), _) => {
            return Err(anyhow!(
                "`gateway.mode` is `uri`, which would take the place of the API's own paths"
            ))
            .with_hint(
                "choose `wildcard` or `header`; paths below /v1/sandboxes/ID/proxy work without a gateway",
            );
        }
        (None | Some("off" | "header"), Some(_)) => {
            return Err(anyhow!("`gateway.domain` means nothing unless `gateway.mode` is `wildcard`"))
                .with_hint("set both, or neither");
        }
        (Some(other), _) => bail!("`gateway.mode` is `{other}`, none of `off`, `wildcard` and `header`"),
    };
    let written = raw.keys.unwrap_or_default();
    let keys: Vec<RouteKey> = written.iter().map(|text| parse_route_key(text)).collect::<Result<_>>()?;
    for (place, key) in keys.iter().enumerate() {
        if keys[..place].iter().any(|other| other.name == key.name) {
            bail!("`gateway.keys` has two keys called `{}`", key.name);
        }
    }
    let short_signatures = raw.short_signatures.unwrap_or(false);
    if short_signatures && keys.is_empty() {
        return Err(anyhow!("`gateway.short_signatures` needs `gateway.keys`"))
            .with_hint("name the keys that whoever else checks these signatures has too");
    }
    Ok(GatewaySettings { mode, public: raw.public.unwrap_or(false), keys, short_signatures })
}

fn check_domain(text: String) -> Result<String> {
    let (name, port) = text.split_once(':').unwrap_or((&text, "80"));
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b'-' | b'.');
    let labels = name.split('.').all(|label| !label.is_empty() && label.len() <= 63);
    let is_port = port.parse::<u16>().is_ok_and(|port| port > 0);
    if !labels || !name.bytes().all(plain) || !is_port {
        return Err(anyhow!("`gateway.domain` is `{text}`, not `domain[:port]` in lower case"))
            .with_hint("write it without scheme and `*.`, and with a port if clients need one");
    }
    Ok(text)
}

/// Reads `NAME=SECRET`. Errors do not contain the secret.
fn parse_route_key(text: &str) -> Result<RouteKey> {
    let (name, secret) = text.split_once('=').unwrap_or((text, ""));
    let name = match name.trim().chars().collect::<Vec<_>>()[..] {
        [name] if name.is_ascii_lowercase() || name.is_ascii_digit() => name,
        _ => {
            return Err(anyhow!("a key of `gateway.keys` has no name of one digit or lower-case letter"))
                .with_hint("write `a=SECRET`, the secret in base64");
        }
    };
    let secret = STANDARD.decode(secret.trim()).ok().filter(|secret| secret.len() >= MIN_SECRET_BYTES);
    let secret = secret
        .ok_or_else(|| {
            anyhow!("the secret of the key `{name}` is not {MIN_SECRET_BYTES} bytes or more in base64")
        })
        .with_hint("`openssl rand -base64 32` makes a good one")?;
    Ok(RouteKey { name, secret })
}

impl GatewaySettings {
    /// Whether the gateway's domain is `localhost` or below it. Browsers resolve such names to
    /// loopback by themselves; most other programs ask the host's resolver, which may not.
    pub(crate) fn is_below_localhost(&self) -> bool {
        let GatewayMode::Wildcard(domain) = &self.mode else { return false };
        let name = domain.split(':').next().unwrap_or_default();
        name == "localhost" || name.ends_with(".localhost")
    }

    /// The settings as the HTTP fronts need them.
    pub(crate) fn to_front_settings(&self, api_ports: fronts::ApiPorts) -> fronts::GatewaySettings {
        let key = |key: &RouteKey| fronts::RouteKey { name: key.name, secret: key.secret.clone() };
        fronts::GatewaySettings {
            mode: match &self.mode {
                GatewayMode::Off => fronts::GatewayMode::Off,
                GatewayMode::Wildcard(domain) => fronts::GatewayMode::Wildcard { domain: domain.clone() },
                GatewayMode::Header => fronts::GatewayMode::Header,
            },
            api_ports,
            public: self.public,
            keys: self.keys.iter().map(key).collect(),
            short: if self.short_signatures {
                fronts::ShortSignatures::Accepted
            } else {
                fronts::ShortSignatures::Refused
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<GatewaySettings> {
        check_gateway(toml::from_str(text).expect("the types are right"))
    }

    #[test]
    fn empty_section_means_no_gateway() {
        assert_eq!(read("").expect("it is right"), GatewaySettings::default());
    }

    #[test]
    fn the_first_key_is_the_one_that_signs() {
        let gateway = read(
            "mode = \"wildcard\"\ndomain = \"boxes.example:8080\"\n\
             keys = [\"b=MDEyMzQ1Njc4OWFiY2RlZg==\", \"a=QUJDREVGR0hJSktMTU5PUA==\"]",
        );
        let gateway = gateway.expect("it is right");
        assert_eq!(gateway.mode, GatewayMode::Wildcard("boxes.example:8080".to_owned()));
        assert_eq!(
            (gateway.keys[0].name, gateway.keys[0].secret.as_slice()),
            ('b', &b"0123456789abcdef"[..])
        );
        assert!(!format!("{gateway:?}").contains("48"), "a secret is printed: {gateway:?}");
    }

    #[test]
    fn domains_of_localhost_are_recognised() {
        for (domain, expected) in [
            ("localhost:8080", true),
            ("boxes.localhost", true),
            ("notlocalhost:80", false),
            ("a.org", false),
        ] {
            let gateway = GatewaySettings {
                mode: GatewayMode::Wildcard(domain.to_owned()),
                ..GatewaySettings::default()
            };
            assert_eq!(gateway.is_below_localhost(), expected, "{domain}");
        }
        assert!(!GatewaySettings::default().is_below_localhost());
    }

    #[test]
    fn invalid_settings_are_refused_by_name() {
        for (text, expected) in [
            ("mode = \"uri\"", "`gateway.mode` is `uri`"),
            ("mode = \"x\"", "`gateway.mode` is `x`"),
            ("mode = \"wildcard\"", "no `gateway.domain`"),
            ("domain = \"a.b\"", "`gateway.domain` means nothing"),
            ("mode = \"wildcard\"\ndomain = \"http://a\"", "`gateway.domain` is"),
            ("mode = \"wildcard\"\ndomain = \"*.a\"", "`gateway.domain` is"),
            ("mode = \"wildcard\"\ndomain = \"a:0\"", "`gateway.domain` is"),
            ("keys = [\"ab=MDEyMzQ1Njc4OWFiY2RlZg==\"]", "no name of one digit"),
            ("keys = [\"a=c2hvcnQ=\"]", "the secret of the key `a`"),
            (
                "keys = [\"a=MDEyMzQ1Njc4OWFiY2RlZg==\", \"a=MDEyMzQ1Njc4OWFiY2RlZg==\"]",
                "two keys called `a`",
            ),
            ("short_signatures = true", "needs `gateway.keys`"),
        ] {
            let error = read(text).expect_err(text).to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
