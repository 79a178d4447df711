//! The operator's settings, parsed once for all connections.

use std::net::IpAddr;

use domain::{AddressPrefix, NetworkPolicy, NetworkTarget, PolicyAction, PolicyRule};
use egress_protocol::{EgressLimits, EgressSettings};

use crate::connection::proxy::{ProxyError, UpstreamProxy};

const DNS_PORT: u16 = 53;

/// What applies to all sandboxes.
#[derive(Clone, Debug)]
pub(crate) struct OperatorSettings {
    /// Empty for those of the host.
    pub(crate) resolvers: Vec<IpAddr>,
    pub(crate) resolver_port: u16,
    /// Reachable, even if `deny` forbids it.
    pub(crate) allow: Vec<NetworkTarget>,
    /// Never reachable; for IPv4 with the addresses by which a translator reaches it.
    pub(crate) deny: Vec<AddressPrefix>,
    /// The rules that precede the policy of every filtered sandbox. The default allows, which here means that no rule
    /// matched.
    pub(crate) lists: NetworkPolicy,
    pub(crate) limits: EgressLimits,
    pub(crate) proxy: Option<UpstreamProxy>,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum SettingsError {
    #[error("an allowed or denied address is not valid")]
    Address(#[from] domain::AddressError),
    #[error("a rule for all policies is not valid")]
    Rule(#[from] domain::PolicyError),
    #[error("the upstream proxy is not valid")]
    Proxy(#[from] ProxyError),
}

impl TryFrom<&EgressSettings> for OperatorSettings {
    type Error = SettingsError;

    fn try_from(settings: &EgressSettings) -> Result<Self, SettingsError> {
        let denied: Vec<AddressPrefix> =
            settings.deny.iter().map(|text| text.parse()).collect::<Result<_, _>>()?;
        let translated: Vec<AddressPrefix> = denied.iter().filter_map(AddressPrefix::nat64_prefix).collect();
        let rules = parse_rules(&settings.always_deny, PolicyAction::Deny)
            .chain(parse_rules(&settings.always_allow, PolicyAction::Allow));
        Ok(Self {
            resolvers: settings.resolvers.clone(),
            resolver_port: DNS_PORT,
            allow: settings.allow.iter().map(|text| text.parse()).collect::<Result<_, _>>()?,
            deny: [denied, translated].concat(),
            lists: NetworkPolicy::new(rules.collect::<Result<_, _>>()?, PolicyAction::Allow)?,
            limits: settings.limits,
            proxy: settings.upstream_proxy.as_deref().map(str::parse).transpose()?,
        })
    }
}

fn parse_rules(
    targets: &[String],
    action: PolicyAction,
) -> impl Iterator<Item = Result<PolicyRule, domain::PolicyError>> {
    targets.iter().map(move |target| Ok(PolicyRule { action, target: target.parse()? }))
}

impl OperatorSettings {
    /// Whether `network.allow` names this address with this port, or with any port if there is none.
    pub(crate) fn allows(&self, address: IpAddr, port: Option<u16>) -> bool {
        let covers = |target: &NetworkTarget| match (target.port, port) {
            (Some(own), Some(port)) => own == port,
            _ => true,
        };
        self.allow.iter().any(|target| target.prefix.contains(address) && covers(target))
    }

    /// Returns the range that makes this address unreachable.
    pub(crate) fn denying_prefix(&self, address: IpAddr) -> Option<AddressPrefix> {
        self.deny.iter().find(|prefix| prefix.contains(address)).copied()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Settings with few limits, for tests.
    pub(crate) fn sample(change: impl FnOnce(&mut EgressSettings)) -> OperatorSettings {
        let mut settings = EgressSettings::default();
        change(&mut settings);
        OperatorSettings::try_from(&settings).expect("valid settings")
    }

    #[test]
    fn denied_ranges_include_their_translated_forms() {
        let settings = sample(|settings| settings.deny = vec!["169.254.0.0/16".into(), "fc00::/7".into()]);
        let denies = |text: &str| settings.denying_prefix(text.parse().expect("an address")).is_some();
        assert!(denies("169.254.169.254"));
        assert!(denies("64:ff9b::a9fe:a9fe"));
        assert!(denies("fd00::1"));
        assert!(!denies("192.0.2.1"));
    }

    #[test]
    fn allowed_targets_cover_their_port_alone() {
        let settings = sample(|settings| settings.allow = vec!["10.0.0.1:5432".into(), "10.1.0.0/16".into()]);
        let allows = |text: &str, port| settings.allows(text.parse().expect("an address"), port);
        assert!(allows("10.0.0.1", Some(5432)));
        assert!(allows("10.0.0.1", None));
        assert!(!allows("10.0.0.1", Some(80)));
        assert!(allows("10.1.2.3", Some(80)));
    }

    #[test]
    fn wrong_settings_are_refused() {
        for change in [
            |settings: &mut EgressSettings| settings.deny = vec!["x".into()],
            |settings: &mut EgressSettings| settings.allow = vec!["10.0.0.1:0".into()],
            |settings: &mut EgressSettings| settings.always_deny = vec!["*".into()],
            |settings: &mut EgressSettings| settings.upstream_proxy = Some("ftp://x".into()),
        ] {
            let mut settings = EgressSettings::default();
            change(&mut settings);
            assert!(OperatorSettings::try_from(&settings).is_err(), "{settings:?}");
        }
    }
}
