//! The settings of the section `[network]`.

use std::net::IpAddr;
use std::str::FromStr;

use anyhow::{Result, anyhow, bail};
use domain::{AddressPrefix, PolicyTarget};
use egress_protocol::{ActionMessage, RuleMessage};
use launcher::network::{FilterSettings, NetworkMode, NetworkSettings};

use super::invalid_setting;
use super::pools::to_domain_network;
use super::raw::{RawFilter, RawNetwork};
use crate::output::WithHint;

/// Smaller ranges hold too few addresses to be useful; ranges of more than a million addresses are most
/// likely a mistake.
const ALLOWED_RANGE_BITS: std::ops::RangeInclusive<u8> = 12..=26;

/// Turns the written settings into effective ones.
pub(super) fn check_network(raw: RawNetwork) -> Result<NetworkSettings> {
    let usual = NetworkSettings::default();
    let is_default_open = raw.default.is_none();
    let settings = NetworkSettings {
        default: match raw.default.as_deref() {
            None | Some("auto") => NetworkMode::Auto,
            Some("on") => NetworkMode::On,
            Some("off") => NetworkMode::Off,
            Some("filtered") => NetworkMode::Filtered,
            Some(other) => {
                bail!("`network.default` is `{other}`, none of `auto`, `on`, `filtered` and `off`")
            }
        },
        range: raw.range.map(|text| parse_setting("range", &text)).transpose()?,
        range6: raw.range6.map_or(Ok(usual.range6), |text| parse_setting("range6", &text))?,
        resolvers: parse_list("resolvers", raw.resolvers)?.unwrap_or_default(),
        allow: parse_list("allow", raw.allow)?.unwrap_or_default(),
        deny: parse_list("deny", raw.deny)?.unwrap_or(usual.deny),
        filter: check_filter(raw.filter)?,
        upstream_proxy: raw.upstream_proxy.map(check_proxy).transpose()?,
        auto_needs_link: is_default_open,
    };
    check_ranges(&settings)?;
    check_loopback(&settings)?;
    Ok(settings)
}

/// The widest network that a client may ask for. Sandboxes whose client names none must be within it.
pub(super) fn check_most(raw: Option<&str>, default: NetworkMode) -> Result<NetworkMode> {
    let most = match raw {
        None | Some("on") => NetworkMode::On,
        Some("filtered") => NetworkMode::Filtered,
        Some("off") => NetworkMode::Off,
        Some(other) => bail!("`network.most` is `{other}`, none of `off`, `filtered` and `on`"),
    };
    if !to_domain_network(default).is_within(to_domain_network(most)) {
        return Err(anyhow!("`network.default` is wider than `network.most`"))
            .with_hint("the order is `off`, `filtered`, `on`");
    }
    Ok(most)
}

fn check_filter(raw: RawFilter) -> Result<FilterSettings> {
    if let Some(connections @ 0) = raw.connections {
        return Err(anyhow!("`network.filter.connections` is {connections}, so nothing could be reached"))
            .with_hint("use network `off` for that");
    }
    let rules = raw.rules.unwrap_or_default();
    let filter = FilterSettings {
        always_deny: parse_list("filter.always_deny", raw.always_deny)?.unwrap_or_default(),
        always_allow: parse_list("filter.always_allow", raw.always_allow)?.unwrap_or_default(),
        connections: raw.connections,
        rules: rules.iter().map(|text| parse_rule(text)).collect::<Result<_>>()?,
    };
    filter.default_policy().map_err(|error| anyhow!("`network.filter.rules`: {error}"))?;
    Ok(filter)
}

/// Reads `allow TARGET` or `deny TARGET`.
fn parse_rule(text: &str) -> Result<RuleMessage> {
    let (word, target) = text.trim().split_once(' ').unwrap_or((text, ""));
    let action = match word {
        "allow" => ActionMessage::Allow,
        "deny" => ActionMessage::Deny,
        _ => {
            let error = "it begins with neither `allow` nor `deny`";
            return Err(invalid_setting("network.filter.rules", text, error))
                .with_hint("such as `allow *.example.org:443`");
        }
    };
    let target: PolicyTarget = parse_setting("filter.rules", target.trim())?;
    Ok(RuleMessage { action, target: target.to_string() })
}

/// Checks the form of a proxy; egress parses it, and its password must not appear in an error.
fn check_proxy(text: String) -> Result<String> {
    let rest = ["http://", "socks5://", "socks5h://"].iter().find_map(|scheme| text.strip_prefix(scheme));
    let host = rest.map(|rest| rest.rsplit_once('@').map_or(rest, |(_, host)| host).trim_end_matches('/'));
    let port = host.and_then(|host| host.rsplit_once(':')?.1.parse::<u16>().ok());
    if port.is_some_and(|port| port > 0) {
        return Ok(text);
    }
    Err(anyhow!("`network.upstream_proxy` is not the address of a proxy")).with_hint(
        "write `http://HOST:PORT` or `socks5://HOST:PORT`, with `USER:PASSWORD@` before HOST if needed",
    )
}

fn check_ranges(settings: &NetworkSettings) -> Result<()> {
    if let Some(range) = settings.range
        && !(range.address.is_ipv4() && ALLOWED_RANGE_BITS.contains(&range.bits))
    {
        return Err(anyhow!("`network.range` is `{range}`, not a range of IPv4 from /12 to /26"))
            .with_hint("a private one, such as `10.214.0.0/16`");
    }
    let range6: AddressPrefix = settings.range6;
    if !range6.address.is_ipv6() || range6.bits > 96 {
        return Err(anyhow!("`network.range6` is `{range6}`, not a range of IPv6 of /96 or wider"))
            .with_hint("a private one that begins with `fd`, and /64");
    }
    Ok(())
}

/// Packets cannot be sent from a link to the loopback address, so such settings could not work.
fn check_loopback(settings: &NetworkSettings) -> Result<()> {
    let resolvers = settings.resolvers.iter().map(|address| ("resolvers", *address));
    let allowed = settings.allow.iter().map(|target| ("allow", target.prefix.address));
    let mut named: Vec<(&str, IpAddr)> = resolvers.chain(allowed).collect();
    named.retain(|(_, address)| address.is_loopback());
    let Some((setting, address)) = named.first() else { return Ok(()) };
    Err(anyhow!("`network.{setting}` names `{address}`, and no sandbox can reach a loopback"))
        .with_hint("let the service listen on another address of this host too, and name that one")
}

fn parse_setting<T: FromStr<Err: std::fmt::Display>>(setting: &str, text: &str) -> Result<T> {
    text.parse().map_err(|error| invalid_setting(&format!("network.{setting}"), text, error))
}

fn parse_list<T: FromStr<Err: std::fmt::Display>>(
    setting: &str,
    texts: Option<Vec<String>>,
) -> Result<Option<Vec<T>>> {
    texts.map(|texts| texts.iter().map(|text| parse_setting(setting, text)).collect()).transpose()
}

#[cfg(test)]
mod tests {
    use domain::NetworkTarget;

    use super::*;

    fn read(text: &str) -> Result<NetworkSettings> {
        check_network(toml::from_str(text).expect("the types are right"))
    }

    #[test]
    fn empty_section_means_auto_without_private_networks() {
        let settings = read("").expect("it is right");
        assert_eq!(settings.default, NetworkMode::Auto);
        assert!(settings.deny.contains(&"10.0.0.0/8".parse().expect("a range")));
        assert_eq!((settings.allow.len(), settings.range), (0, None));
    }

    #[test]
    fn written_settings_take_effect() {
        let settings = read(
            "default = \"off\"\nrange = \"10.9.0.0/16\"\nallow = [\"10.1.2.3:5432\"]\nresolvers = [\"9.9.9.9\"]\ndeny = []",
        );
        let settings = settings.expect("it is right");
        assert_eq!((settings.default, settings.deny.len()), (NetworkMode::Off, 0));
        assert_eq!(settings.allow, ["10.1.2.3:5432".parse::<NetworkTarget>().expect("a target")]);
    }

    #[test]
    fn default_network_is_within_the_widest_one() {
        let check = |most, default| check_most(most, default).ok();
        assert_eq!(check(None, NetworkMode::On), Some(NetworkMode::On));
        assert_eq!(check(Some("filtered"), NetworkMode::Auto), Some(NetworkMode::Filtered));
        assert_eq!(check(Some("off"), NetworkMode::Off), Some(NetworkMode::Off));
        for (most, default) in
            [("off", NetworkMode::Filtered), ("filtered", NetworkMode::On), ("auto", NetworkMode::Off)]
        {
            assert_eq!(check(Some(most), default), None, "{most}");
        }
    }

    #[test]
    fn invalid_settings_are_refused_by_name() {
        for (text, setting) in [
            ("default = \"open\"", "network.default"),
            ("range = \"10.0.0.0/8\"", "network.range"),
            ("range = \"fd00::/64\"", "network.range"),
            ("range6 = \"10.0.0.0/16\"", "network.range6"),
            ("resolvers = [\"localhost\"]", "network.resolvers"),
            ("resolvers = [\"127.0.0.53\"]", "network.resolvers"),
            ("allow = [\"127.0.0.1:80\"]", "network.allow"),
            ("deny = [\"x\"]", "network.deny"),
            ("upstream_proxy = \"ftp://user:secret@proxy:21\"", "network.upstream_proxy"),
            ("upstream_proxy = \"http://proxy\"", "network.upstream_proxy"),
            ("filter.always_deny = [\"a.*.b\"]", "network.filter.always_deny"),
            ("filter.always_allow = [\"a.b:0\"]", "network.filter.always_allow"),
            ("filter.rules = [\"example.org\"]", "network.filter.rules"),
            ("filter.rules = [\"allow\"]", "network.filter.rules"),
            ("filter.connections = 0", "network.filter.connections"),
        ] {
            let error = read(text).expect_err(text).to_string();
            assert!(error.contains(&format!("`{setting}`")), "{text}: {error}");
        }
    }

    #[test]
    fn filter_is_read_with_its_policy() {
        let text = "default = \"filtered\"\nupstream_proxy = \"socks5://u:p@[::1]:1080\"\n[filter]\n\
                    always_deny = [\"*.bad.example\"]\nconnections = 7\n\
                    rules = [\"allow *.example.org:443\", \"deny 192.0.2.0/24\"]";
        let settings = read(text).expect("it is right");
        assert_eq!((settings.default, settings.auto_needs_link), (NetworkMode::Filtered, false));
        assert_eq!(settings.filter.always_deny[0].to_string(), "*.bad.example");
        assert_eq!(settings.filter.connections, Some(7));
        let policy = settings.filter.default_policy().expect("it was checked");
        assert_eq!(policy.default_action(), domain::PolicyAction::Deny);
        let rules: Vec<String> =
            policy.rules().iter().map(|rule| format!("{:?} {}", rule.action, rule.target)).collect();
        assert_eq!(rules, ["Allow *.example.org:443", "Deny 192.0.2.0/24"]);
        assert!(read("").expect("it is right").auto_needs_link, "unless the state directory is newer");
    }
}
