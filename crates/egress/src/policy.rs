//! What applies to a sandbox at one moment: its mode, its policy and the operator's lists.
//!
//! A view is taken for each decision. It carries the generation of the policy, and a connection is only opened if that is
//! still the current one; so a decision by an old policy never takes effect after a new one.

use std::net::IpAddr;
use std::sync::Arc;

use domain::{DomainName, NetworkPolicy, PolicyAction, PolicyDecision, TargetHost};
use egress_protocol::ServeMode;

use crate::settings::OperatorSettings;

const DOT_PORT: u16 = 853;
const TLS_PORT: u16 = 443;

/// The rules for a sandbox at one moment.
#[derive(Clone, Debug)]
pub(crate) struct PolicyView {
    pub(crate) mode: ServeMode,
    pub(crate) settings: Arc<OperatorSettings>,
    pub(crate) policy: Option<Arc<NetworkPolicy>>,
    pub(crate) own: Arc<[IpAddr]>,
    pub(crate) generation: u64,
}

/// A decision with its reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Judgement {
    pub(crate) action: PolicyAction,
    pub(crate) basis: DecisionBasis,
    /// The text of the rule, or the name of the list or limit.
    pub(crate) reason: String,
}

/// What a decision is based on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DecisionBasis {
    /// A rule by name.
    Name,
    /// A rule by address.
    Address,
    /// No rule matched.
    Default,
}

impl PolicyView {
    /// Judges a connection to `port` of `address`, for which the client asked by `name` if it used one.
    pub(crate) fn judge(&self, name: Option<&DomainName>, address: IpAddr, port: u16) -> Judgement {
        let address = address.to_canonical();
        if self.mode == ServeMode::Open {
            return Judgement::by_default(PolicyAction::Allow, "network on");
        }
        let listed = self.settings.lists.judge(name, address, port);
        if let Some(judgement) = judge_by_rule(&self.settings.lists, listed, "network.filter: ") {
            return judgement;
        }
        let Some(policy) = &self.policy else {
            return Judgement::by_default(PolicyAction::Deny, "no policy");
        };
        let decision = policy.judge(name, address, port);
        if let Some(judgement) = judge_by_rule(policy, decision, "") {
            return judgement;
        }
        let hides_names = port == DOT_PORT || name.is_some_and(is_encrypted_resolver);
        if decision.action == PolicyAction::Allow && hides_names && has_name_rules(policy) {
            return Judgement::by_default(PolicyAction::Deny, "encrypted DNS");
        }
        Judgement::by_default(decision.action, "default")
    }

    /// Judges the query for a name.
    pub(crate) fn judge_query(&self, name: &DomainName) -> Judgement {
        if self.mode == ServeMode::Open {
            return Judgement::by_default(PolicyAction::Allow, "network on");
        }
        let lists = &self.settings.lists;
        let listed = lists.judge_query(name);
        match judge_by_rule(lists, listed, "network.filter: ") {
            Some(judgement) => return judgement,
            // The default of the lists allows; a denial without a rule does not occur.
            None if listed.action == PolicyAction::Deny => {
                return Judgement::by_default(PolicyAction::Deny, "network.filter");
            }
            None => {}
        }
        let Some(policy) = &self.policy else {
            return Judgement::by_default(PolicyAction::Deny, "no policy");
        };
        let decision = policy.judge_query(name);
        if let Some(judgement) = judge_by_rule(policy, decision, "") {
            return judgement;
        }
        if decision.action == PolicyAction::Allow && is_encrypted_resolver(name) && has_name_rules(policy) {
            return Judgement::by_default(PolicyAction::Deny, "encrypted DNS");
        }
        Judgement::by_default(decision.action, "default")
    }

    /// Judges a connection without a name; `None` if a name could change the decision.
    pub(crate) fn judge_regardless_of_name(&self, address: IpAddr, port: u16) -> Option<Judgement> {
        let judgement = self.judge(None, address, port);
        if self.mode == ServeMode::Open {
            return Some(judgement);
        }
        let lists_decide = match names_matter(&self.settings.lists, address, port) {
            NameInfluence::Possible => return None,
            NameInfluence::None { decided } => decided,
        };
        let policy_settles = match &self.policy {
            None => true,
            // The default does not allow resolvers for encrypted DNS, which are known by their names.
            Some(policy) if port == TLS_PORT && has_name_rules(policy) => {
                matches!(names_matter(policy, address, port), NameInfluence::None { decided: true })
            }
            Some(policy) => matches!(names_matter(policy, address, port), NameInfluence::None { .. }),
        };
        (lists_decide || policy_settles).then_some(judgement)
    }

    /// Whether the mode asks for a policy that has not arrived.
    pub(crate) fn lacks_policy(&self) -> bool {
        self.mode == ServeMode::Filtered && self.policy.is_none()
    }
}

impl Judgement {
    fn by_default(action: PolicyAction, reason: &str) -> Self {
        Self { action, basis: DecisionBasis::Default, reason: reason.to_owned() }
    }

    /// A denial by something that is not a rule, such as a limit.
    pub(crate) fn refused(reason: &str) -> Self {
        Self::by_default(PolicyAction::Deny, reason)
    }

    pub(crate) fn is_allowed(&self) -> bool {
        self.action == PolicyAction::Allow
    }
}

/// Returns the judgement of a rule; `None` if none matched.
fn judge_by_rule(policy: &NetworkPolicy, decision: PolicyDecision, list: &str) -> Option<Judgement> {
    let rule = policy.rules().get(decision.rule?)?;
    let basis = match rule.target.host {
        TargetHost::Addresses(_) => DecisionBasis::Address,
        TargetHost::Name(_) | TargetHost::NamesBelow(_) => DecisionBasis::Name,
    };
    Some(Judgement { action: decision.action, basis, reason: format!("{list}{}", rule.target) })
}

/// Whether a name can change what rules decide about an address.
enum NameInfluence {
    Possible,
    None {
        /// Whether a rule by address decides.
        decided: bool,
    },
}

fn names_matter(policy: &NetworkPolicy, address: IpAddr, port: u16) -> NameInfluence {
    let address = address.to_canonical();
    for rule in policy.rules() {
        let target = &rule.target;
        match target.host {
            TargetHost::Addresses(_) if target.matches(None, Some(address), port) => {
                return NameInfluence::None { decided: true };
            }
            TargetHost::Addresses(_) => {}
            TargetHost::Name(_) | TargetHost::NamesBelow(_) if target.port.is_none_or(|own| own == port) => {
                return NameInfluence::Possible;
            }
            TargetHost::Name(_) | TargetHost::NamesBelow(_) => {}
        }
    }
    NameInfluence::None { decided: false }
}

fn has_name_rules(policy: &NetworkPolicy) -> bool {
    policy.rules().iter().any(|rule| !matches!(rule.target.host, TargetHost::Addresses(_)))
}

/// Whether this is a well-known resolver for DNS over HTTPS, by which a client could learn addresses of denied names.
/// It must be named by a rule; the default does not allow it if there are rules by name.
fn is_encrypted_resolver(name: &DomainName) -> bool {
    const RESOLVERS: &[&str] = &[
        "chrome.cloudflare-dns.com",
        "cloudflare-dns.com",
        "dns.adguard-dns.com",
        "dns.adguard.com",
        "dns.cloudflare.com",
        "dns.google",
        "dns.google.com",
        "dns.nextdns.io",
        "dns.quad9.net",
        "dns9.quad9.net",
        "dns10.quad9.net",
        "dns11.quad9.net",
        "doh.cleanbrowsing.org",
        "doh.dns.sb",
        "doh.opendns.com",
        "dns.opendns.com",
        "mozilla.cloudflare-dns.com",
        "one.one.one.one",
        "security.cloudflare-dns.com",
        "family.cloudflare-dns.com",
    ];
    RESOLVERS.contains(&name.as_str())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::settings::tests::sample;
    use domain::PolicyRule;
    use egress_protocol::EgressSettings;

    /// A policy from lines such as `allow example.org:443`, with `default allow` or else the default deny.
    pub(crate) fn parse_policy(text: &str) -> NetworkPolicy {
        let mut default = PolicyAction::Deny;
        let mut rules = Vec::new();
        for line in text.split(',').map(str::trim).filter(|line| !line.is_empty()) {
            let (action, target) = line.split_once(' ').expect("an action and a target");
            let action = if action == "allow" { PolicyAction::Allow } else { PolicyAction::Deny };
            match target {
                "default" => default = action,
                target => rules.push(PolicyRule { action, target: target.parse().expect("a target") }),
            }
        }
        NetworkPolicy::new(rules, default).expect("few rules")
    }

    pub(crate) fn view(policy: &str, change: impl FnOnce(&mut EgressSettings)) -> PolicyView {
        PolicyView {
            mode: ServeMode::Filtered,
            settings: Arc::new(sample(change)),
            policy: Some(Arc::new(parse_policy(policy))),
            own: Arc::new([]),
            generation: 0,
        }
    }

    fn name(text: &str) -> DomainName {
        text.parse().expect("a name")
    }

    fn address(text: &str) -> IpAddr {
        text.parse().expect("an address")
    }

    #[test]
    fn operators_lists_precede_the_policy() {
        let view = view("allow bad.org, deny good.org, deny 192.0.2.1", |settings| {
            settings.always_deny = vec!["bad.org".into()];
            settings.always_allow = vec!["good.org".into(), "192.0.2.1".into()];
        });
        let judge = |text: Option<&str>, at: &str| {
            let judgement = view.judge(text.map(name).as_ref(), address(at), 443);
            (judgement.is_allowed(), judgement.reason)
        };
        assert_eq!(judge(Some("bad.org"), "192.0.2.9"), (false, "network.filter: bad.org".into()));
        assert_eq!(judge(Some("good.org"), "192.0.2.9"), (true, "network.filter: good.org".into()));
        assert_eq!(judge(None, "192.0.2.1"), (true, "network.filter: 192.0.2.1".into()));
        assert_eq!(judge(None, "::ffff:192.0.2.1"), (true, "network.filter: 192.0.2.1".into()));
        assert_eq!(judge(None, "192.0.2.2"), (false, "default".into()));
        assert!(!view.judge_query(&name("bad.org")).is_allowed());
        assert!(view.judge_query(&name("good.org")).is_allowed());
        assert!(!view.judge_query(&name("other.org")).is_allowed());
    }

    #[test]
    fn without_a_policy_nothing_passes_unless_the_mode_is_open() {
        let mut view = PolicyView { policy: None, ..view("", |_| {}) };
        assert!(view.lacks_policy());
        assert_eq!(view.judge(None, address("192.0.2.1"), 80).reason, "no policy");
        assert!(!view.judge_query(&name("a.org")).is_allowed());
        view.mode = ServeMode::Open;
        assert!(view.judge(None, address("192.0.2.1"), 80).is_allowed());
        assert!(view.judge_query(&name("a.org")).is_allowed());
    }

    #[test]
    fn names_matter_only_before_the_rule_that_decides() {
        let decided = |policy: &str, port| {
            view(policy, |_| {})
                .judge_regardless_of_name(address("192.0.2.1"), port)
                .map(|judgement| judgement.is_allowed())
        };
        assert_eq!(decided("allow 192.0.2.0/24, deny a.org", 80), Some(true));
        assert_eq!(decided("deny a.org, allow 192.0.2.0/24", 80), None);
        assert_eq!(decided("deny a.org:443, allow 192.0.2.0/24", 80), Some(true));
        assert_eq!(decided("allow a.org", 80), None);
        assert_eq!(decided("allow default", 80), Some(true));
        assert_eq!(decided("deny 198.51.100.0/24", 80), Some(false));
        let listed = |settings: &mut EgressSettings| settings.always_deny = vec!["a.org".into()];
        assert_eq!(view("allow default", listed).judge_regardless_of_name(address("192.0.2.1"), 80), None);
        let listed = |settings: &mut EgressSettings| settings.always_allow = vec!["192.0.2.1".into()];
        let found = view("allow a.org", listed).judge_regardless_of_name(address("192.0.2.1"), 80);
        assert!(found.is_some_and(|judgement| judgement.is_allowed()));
    }

    #[test]
    fn encrypted_resolvers_must_be_named_where_names_are_filtered() {
        let allowed = |policy: &str, text: &str, port| {
            view(policy, |_| {}).judge(Some(&name(text)), address("192.0.2.1"), port).is_allowed()
        };
        assert!(allowed("allow default", "dns.google", 443));
        assert!(!allowed("deny a.org, allow default", "dns.google", 443));
        assert!(allowed("deny a.org, allow dns.google, allow default", "dns.google", 443));
        assert!(!allowed("deny a.org, allow default", "b.org", 853));
        assert!(allowed("deny a.org, allow b.org, allow default", "b.org", 853));
        let view = view("deny a.org, allow default", |_| {});
        assert!(!view.judge_query(&name("dns.google")).is_allowed());
        assert!(view.judge_query(&name("b.org")).is_allowed());
    }
}
