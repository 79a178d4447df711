//! The settings of the section `[gateway]`: how ports of sandboxes are addressed in addition to the
//! paths of the API. How addresses are signed is decided by the front that signs them.

use anyhow::{Result, anyhow, bail};
use serde::{Deserialize, Serialize};

use super::raw::RawGateway;
use crate::output::WithHint;

/// The effective settings. They are passed to the server as they are.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct GatewaySettings {
    pub mode: GatewayMode,
    /// Whether services of sandboxes need no token there.
    pub public: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum GatewayMode {
    #[default]
    Off,
    Wildcard(String),
    Header,
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
    Ok(GatewaySettings { mode, public: raw.public.unwrap_or(false) })
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
        fronts::GatewaySettings {
            mode: match &self.mode {
                GatewayMode::Off => fronts::GatewayMode::Off,
                GatewayMode::Wildcard(domain) => fronts::GatewayMode::Wildcard { domain: domain.clone() },
                GatewayMode::Header => fronts::GatewayMode::Header,
            },
            api_ports,
            public: self.public,
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
    fn the_domain_may_have_a_port() {
        let gateway = read("mode = \"wildcard\"\ndomain = \"boxes.example:8080\"").expect("it is right");
        assert_eq!(gateway.mode, GatewayMode::Wildcard("boxes.example:8080".to_owned()));
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
        ] {
            let error = read(text).expect_err(text).to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
