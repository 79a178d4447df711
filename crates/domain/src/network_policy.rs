//! The policy of a filtered network: which names and addresses a sandbox may reach.
//!
//! Rules are ordered and the first that matches decides; if none does, the default decides. A rule names a
//! domain name, all names below one, an address or a range of addresses, each with or without a port. A
//! connection is judged by the name that the client asked for together with the address that is really dialled, so a
//! rule by name and a rule by address can both match it. [`crate::policy_edit`] has the changes to a policy.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use crate::address::AddressPrefix;

/// The largest number of rules in one policy.
pub const MAX_POLICY_RULES: usize = 4096;
/// The longest name and the longest label that DNS can carry as text.
const MAX_NAME_LENGTH: usize = 253;
const MAX_LABEL_LENGTH: usize = 63;

/// Ordered rules, and what applies if none of them matches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetworkPolicy {
    rules: Vec<PolicyRule>,
    default: PolicyAction,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PolicyAction {
    Allow,
    Deny,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PolicyRule {
    pub action: PolicyAction,
    pub target: PolicyTarget,
}

/// A host with one port or all ports, written as `NAME`, `*.NAME`, `ADDRESS` or `ADDRESS/BITS`, each with or without
/// `:PORT`. An IPv6 address with a port is written in brackets.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PolicyTarget {
    pub host: TargetHost,
    pub port: Option<u16>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum TargetHost {
    /// This name alone.
    Name(DomainName),
    /// All names below this one, at any depth, but not the name itself.
    NamesBelow(DomainName),
    Addresses(AddressPrefix),
}

/// A host name in ASCII and lower case, without the final dot. Names in other scripts are written in punycode.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DomainName(String);

/// What a policy says, and the index of the rule that said it; `None` if it was the default.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PolicyDecision {
    pub action: PolicyAction,
    pub rule: Option<usize>,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PolicyError {
    #[error("a policy has at most {MAX_POLICY_RULES} rules, this one has {0}")]
    TooManyRules(usize),
    #[error("`{0}` is neither a name such as `example.org` or `*.example.org` nor an address or a range")]
    Target(String),
    #[error("`{target}` is not a valid target: {reason}")]
    Name { target: String, reason: DomainNameError },
    #[error("`{0}` has a port that is not a number from 1 to 65535")]
    Port(String),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DomainNameError {
    #[error("a name must not be empty")]
    Empty,
    #[error("a name has at most {MAX_NAME_LENGTH} characters")]
    TooLong,
    #[error("each part between dots has 1 to {MAX_LABEL_LENGTH} characters")]
    LabelLength,
    #[error("a name consists of letters, digits, `-` and `_`, in punycode if necessary")]
    Character,
    #[error("a part must not begin or end with `-`")]
    Hyphen,
    #[error("`*` is only possible as the whole first part, as in `*.example.org`")]
    Wildcard,
    #[error("the last part of a name is not a number")]
    Number,
}

impl NetworkPolicy {
    pub fn new(rules: Vec<PolicyRule>, default: PolicyAction) -> Result<Self, PolicyError> {
        if rules.len() > MAX_POLICY_RULES {
            return Err(PolicyError::TooManyRules(rules.len()));
        }
        Ok(Self { rules, default })
    }

    /// The policy that every destination passes.
    pub const fn allow_all() -> Self {
        Self { rules: Vec::new(), default: PolicyAction::Allow }
    }

    /// The policy that no destination passes.
    pub const fn deny_all() -> Self {
        Self { rules: Vec::new(), default: PolicyAction::Deny }
    }

    pub fn rules(&self) -> &[PolicyRule] {
        &self.rules
    }

    pub fn default_action(&self) -> PolicyAction {
        self.default
    }

    /// Judges a connection to `port` of `address`, for which the client asked by `name` if it used one.
    pub fn judge(&self, name: Option<&DomainName>, address: IpAddr, port: u16) -> PolicyDecision {
        self.first_match(|target| target.matches(name, Some(address), port))
    }

    /// Judges a connection by its name alone, before an address is chosen for it; `None` if a rule for addresses comes
    /// before the first rule for this name, so that only [`NetworkPolicy::judge`] can decide.
    pub fn judge_name(&self, name: &DomainName, port: u16) -> Option<PolicyDecision> {
        let may_match = |target: &PolicyTarget| {
            target.covers_port(port)
                && (matches!(target.host, TargetHost::Addresses(_)) || target.host.matches_name(name))
        };
        let index = self.rules.iter().position(|rule| may_match(&rule.target));
        match index.map(|index| (index, &self.rules[index])) {
            Some((_, PolicyRule { target: PolicyTarget { host: TargetHost::Addresses(_), .. }, .. })) => None,
            Some((index, rule)) => Some(PolicyDecision { action: rule.action, rule: Some(index) }),
            None => Some(PolicyDecision { action: self.default, rule: None }),
        }
    }

    /// Judges the query for a name: allowed if a connection to that name could be, at any port. A rule for addresses
    /// says nothing about names.
    pub fn judge_query(&self, name: &DomainName) -> PolicyDecision {
        let mut first_denied = None;
        for (index, rule) in self.rules.iter().enumerate() {
            if !rule.target.host.matches_name(name) {
                continue;
            }
            match (rule.action, rule.target.port) {
                (PolicyAction::Allow, _) => {
                    return PolicyDecision { action: PolicyAction::Allow, rule: Some(index) };
                }
                (PolicyAction::Deny, None) => {
                    let rule = Some(first_denied.unwrap_or(index));
                    return PolicyDecision { action: PolicyAction::Deny, rule };
                }
                // Other ports of the name may still be allowed.
                (PolicyAction::Deny, Some(_)) => first_denied = first_denied.or(Some(index)),
            }
        }
        match self.default {
            PolicyAction::Allow => PolicyDecision { action: PolicyAction::Allow, rule: None },
            PolicyAction::Deny => PolicyDecision { action: PolicyAction::Deny, rule: first_denied },
        }
    }

    fn first_match(&self, matches: impl Fn(&PolicyTarget) -> bool) -> PolicyDecision {
        match self.rules.iter().position(|rule| matches(&rule.target)) {
            Some(index) => PolicyDecision { action: self.rules[index].action, rule: Some(index) },
            None => PolicyDecision { action: self.default, rule: None },
        }
    }
}

impl PolicyTarget {
    pub fn matches(&self, name: Option<&DomainName>, address: Option<IpAddr>, port: u16) -> bool {
        let host = match &self.host {
            TargetHost::Addresses(prefix) => address.is_some_and(|address| prefix.contains(address)),
            host => name.is_some_and(|name| host.matches_name(name)),
        };
        host && self.covers_port(port)
    }

    fn covers_port(&self, port: u16) -> bool {
        self.port.is_none_or(|own| own == port)
    }
}

impl TargetHost {
    /// Whether this host stands for the name; never for addresses.
    pub fn matches_name(&self, name: &DomainName) -> bool {
        match self {
            Self::Name(own) => own == name,
            Self::NamesBelow(parent) => name.is_below(parent),
            Self::Addresses(_) => false,
        }
    }
}

impl DomainName {
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether this name is below `parent`, at any depth.
    pub fn is_below(&self, parent: &Self) -> bool {
        self.0.strip_suffix(&parent.0).is_some_and(|rest| rest.len() > 1 && rest.ends_with('.'))
    }
}

impl FromStr for DomainName {
    type Err = DomainNameError;

    fn from_str(text: &str) -> Result<Self, DomainNameError> {
        let text = text.strip_suffix('.').unwrap_or(text);
        if text.is_empty() {
            return Err(DomainNameError::Empty);
        }
        if text.len() > MAX_NAME_LENGTH {
            return Err(DomainNameError::TooLong);
        }
        for label in text.split('.') {
            check_label(label)?;
        }
        // What looks like a number could be read as an IPv4 address in one of its many forms.
        let last = text.rsplit('.').next().unwrap_or(text);
        let hexadecimal = last.strip_prefix("0x").or_else(|| last.strip_prefix("0X"));
        let is_number = last.bytes().all(|byte| byte.is_ascii_digit())
            || hexadecimal.is_some_and(|rest| rest.bytes().all(|byte| byte.is_ascii_hexdigit()));
        if is_number {
            return Err(DomainNameError::Number);
        }
        Ok(Self(text.to_ascii_lowercase()))
    }
}

fn check_label(label: &str) -> Result<(), DomainNameError> {
    if label.contains('*') {
        return Err(DomainNameError::Wildcard);
    }
    if label.is_empty() || label.len() > MAX_LABEL_LENGTH {
        return Err(DomainNameError::LabelLength);
    }
    if !label.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_') {
        return Err(DomainNameError::Character);
    }
    if label.starts_with('-') || label.ends_with('-') {
        return Err(DomainNameError::Hyphen);
    }
    Ok(())
}

impl FromStr for PolicyTarget {
    type Err = PolicyError;

    fn from_str(text: &str) -> Result<Self, PolicyError> {
        if let Ok(prefix) = text.parse() {
            return Ok(Self { host: TargetHost::Addresses(prefix), port: None });
        }
        let bracketed = text.strip_prefix('[').and_then(|rest| rest.split_once(']'));
        let (host, port) = match (bracketed, text.rsplit_once(':')) {
            (Some((host, "")), _) => (host, None),
            (Some((host, port)), _) => {
                (host, Some(port.strip_prefix(':').ok_or_else(|| PolicyError::Target(text.to_owned()))?))
            }
            // Without brackets the colons are part of an IPv6 address.
            (None, Some((host, _))) if host.contains(':') => {
                return Err(PolicyError::Target(text.to_owned()));
            }
            (None, Some((host, port))) => (host, Some(port)),
            (None, None) => (text, None),
        };
        let port = port
            .map(|port| parse_port(port).ok_or_else(|| PolicyError::Port(text.to_owned())))
            .transpose()?;
        if let Ok(prefix) = host.parse() {
            return Ok(Self { host: TargetHost::Addresses(prefix), port });
        }
        if bracketed.is_some() || host.contains('/') {
            return Err(PolicyError::Target(text.to_owned()));
        }
        let parse_name =
            |name: &str| name.parse().map_err(|reason| PolicyError::Name { target: text.to_owned(), reason });
        let host = match host.strip_prefix("*.") {
            Some(parent) => TargetHost::NamesBelow(parse_name(parent)?),
            None => TargetHost::Name(parse_name(host)?),
        };
        Ok(Self { host, port })
    }
}

fn parse_port(text: &str) -> Option<u16> {
    let digits = text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|port| digits && *port != 0)
}

impl fmt::Display for DomainName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Display for TargetHost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(name) => name.fmt(f),
            Self::NamesBelow(parent) => write!(f, "*.{parent}"),
            Self::Addresses(prefix) if *prefix == prefix.address.into() => prefix.address.fmt(f),
            Self::Addresses(prefix) => prefix.fmt(f),
        }
    }
}

impl fmt::Display for PolicyTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.port, &self.host) {
            (None, host) => host.fmt(f),
            (Some(port), TargetHost::Addresses(prefix)) if prefix.address.is_ipv6() => {
                write!(f, "[{}]:{port}", self.host)
            }
            (Some(port), host) => write!(f, "{host}:{port}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(text: &str) -> PolicyTarget {
        text.parse().unwrap_or_else(|error| panic!("{error}"))
    }

    fn name(text: &str) -> DomainName {
        text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
    }

    fn policy(rules: &[(PolicyAction, &str)], default: PolicyAction) -> NetworkPolicy {
        let rules = rules.iter().map(|(action, text)| PolicyRule { action: *action, target: target(text) });
        NetworkPolicy::new(rules.collect(), default).expect("few rules")
    }

    fn address(text: &str) -> IpAddr {
        text.parse().expect("an address")
    }

    use PolicyAction::{Allow, Deny};

    #[test]
    fn targets_are_printed_as_they_are_parsed() {
        for text in [
            "example.org",
            "*.example.org",
            "example.org:443",
            "*.example.org:8443",
            "192.0.2.7",
            "192.0.2.0/24",
            "192.0.2.7:80",
            "192.0.2.0/24:80",
            "2001:db8::1",
            "2001:db8::/32",
            "[2001:db8::1]:443",
            "[2001:db8::/32]:443",
            "_dmarc.example.org",
            "xn--bcher-kva.example",
            "localhost",
        ] {
            assert_eq!(target(text).to_string(), text);
        }
        assert_eq!(target("EXAMPLE.Org.").to_string(), "example.org");
        assert_eq!(target("[2001:db8::1]").to_string(), "2001:db8::1");
    }

    #[test]
    fn wrong_targets_are_refused() {
        let long_label = format!("{}.org", "a".repeat(64));
        let long_name = format!("{}org", "abcdefg.".repeat(32));
        for text in [
            "",
            ".",
            "..",
            "a..b",
            "*",
            "*.",
            "a.*.b",
            "*a.org",
            "**.org",
            "-a.org",
            "a-.org",
            "a b.org",
            "bücher.de",
            "a.org:0",
            "a.org:65536",
            "a.org:x",
            "a.org:+80",
            "a.org:",
            "1.2.3",
            "0x7f000001",
            "2130706433",
            "127.1",
            "10.0.0.1/8",
            "10.0.0.0/33",
            "2001:db8::1:443:x",
            "[a.org]:443",
            "a.org/24",
            "https://a.org",
            &long_label,
            &long_name,
        ] {
            assert!(text.parse::<PolicyTarget>().is_err(), "{text}");
        }
    }

    #[test]
    fn first_matching_rule_decides() {
        let policy = policy(
            &[
                (Deny, "bad.example.org"),
                (Allow, "*.example.org:443"),
                (Allow, "192.0.2.0/24"),
                (Deny, "192.0.2.1"),
            ],
            Deny,
        );
        let judge =
            |host: Option<&str>, at: &str, port| policy.judge(host.map(name).as_ref(), address(at), port);
        let decision = |action, rule| PolicyDecision { action, rule };
        assert_eq!(judge(Some("bad.example.org"), "192.0.2.9", 443), decision(Deny, Some(0)));
        assert_eq!(judge(Some("a.b.example.org"), "198.51.100.1", 443), decision(Allow, Some(1)));
        assert_eq!(judge(Some("a.example.org"), "198.51.100.1", 80), decision(Deny, None));
        assert_eq!(judge(Some("example.org"), "198.51.100.1", 443), decision(Deny, None));
        assert_eq!(judge(Some("notexample.org"), "198.51.100.1", 443), decision(Deny, None));
        assert_eq!(judge(None, "192.0.2.1", 22), decision(Allow, Some(2)));
        assert_eq!(judge(None, "198.51.100.1", 22), decision(Deny, None));
    }

    #[test]
    fn name_alone_is_judged_unless_an_address_rule_comes_first() {
        let policy = policy(&[(Allow, "a.org:443"), (Deny, "192.0.2.0/24:80"), (Allow, "b.org")], Deny);
        let allowed = |rule| Some(PolicyDecision { action: Allow, rule: Some(rule) });
        assert_eq!(policy.judge_name(&name("a.org"), 443), allowed(0));
        assert_eq!(policy.judge_name(&name("a.org"), 22), Some(PolicyDecision { action: Deny, rule: None }));
        assert_eq!(policy.judge_name(&name("b.org"), 443), allowed(2));
        assert_eq!(policy.judge_name(&name("b.org"), 80), None);
    }

    #[test]
    fn query_is_allowed_if_any_port_may_be_reached() {
        let policy =
            policy(&[(Deny, "a.org:80"), (Allow, "a.org:443"), (Deny, "b.org"), (Deny, "c.org:1")], Deny);
        assert_eq!(policy.judge_query(&name("a.org")), PolicyDecision { action: Allow, rule: Some(1) });
        assert_eq!(policy.judge_query(&name("b.org")), PolicyDecision { action: Deny, rule: Some(2) });
        assert_eq!(policy.judge_query(&name("c.org")), PolicyDecision { action: Deny, rule: Some(3) });
        let open = NetworkPolicy::allow_all();
        assert_eq!(open.judge_query(&name("a.org")), PolicyDecision { action: Allow, rule: None });
    }

    #[test]
    fn number_of_rules_is_bounded() {
        let rule = PolicyRule { action: Allow, target: target("a.org") };
        assert!(NetworkPolicy::new(vec![rule.clone(); MAX_POLICY_RULES], Deny).is_ok());
        let many = vec![rule; MAX_POLICY_RULES + 1];
        assert_eq!(NetworkPolicy::new(many, Deny), Err(PolicyError::TooManyRules(MAX_POLICY_RULES + 1)));
    }
}
