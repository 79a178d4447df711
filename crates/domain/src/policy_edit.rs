//! Changes to a network policy, and the notations in which clients and operators write one.
//!
//! Everything here is pure: the caller stores and applies the result.

use std::collections::HashSet;

use crate::address::AddressPrefix;
use crate::network_policy::{NetworkPolicy, PolicyAction, PolicyError, PolicyRule, PolicyTarget, TargetHost};

/// A change to a policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PolicyEdit {
    /// Replaces the whole policy.
    Replace(NetworkPolicy),
    /// Puts these rules first, in place of the rules for the same targets.
    Merge(Vec<PolicyRule>),
    /// Removes the rules for these targets. Targets without a rule are ignored.
    Remove(Vec<PolicyTarget>),
}

/// What a policy amounts to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PolicyMode {
    AllowAll,
    DenyAll,
    /// It has rules.
    Enforcing,
}

impl PolicyEdit {
    /// Returns the policy that results from this change to `current`.
    pub fn apply(&self, current: &NetworkPolicy) -> Result<NetworkPolicy, PolicyError> {
        match self {
            Self::Replace(policy) => Ok(policy.clone()),
            Self::Merge(rules) => current.merge(rules),
            Self::Remove(targets) => Ok(current.without_targets(targets)),
        }
    }
}

impl PolicyMode {
    /// The name used in APIs.
    pub fn name(self) -> &'static str {
        match self {
            Self::AllowAll => "allow_all",
            Self::DenyAll => "deny_all",
            Self::Enforcing => "enforcing",
        }
    }
}

impl NetworkPolicy {
    /// Puts `rules` before the present ones. Of several rules for one target the first is kept, so an incoming rule
    /// replaces a present one.
    pub fn merge(&self, rules: &[PolicyRule]) -> Result<Self, PolicyError> {
        let mut seen = HashSet::new();
        let all = rules.iter().chain(self.rules());
        let merged = all.filter(|rule| seen.insert(&rule.target)).cloned().collect();
        Self::new(merged, self.default_action())
    }

    /// Removes the rules for these targets.
    pub fn without_targets(&self, targets: &[PolicyTarget]) -> Self {
        let targets: HashSet<&PolicyTarget> = targets.iter().collect();
        let kept = self.rules().iter().filter(|rule| !targets.contains(&rule.target)).cloned().collect();
        Self::new(kept, self.default_action()).expect("there are not more rules than before")
    }

    pub fn mode(&self) -> PolicyMode {
        match (self.rules(), self.default_action()) {
            ([], PolicyAction::Allow) => PolicyMode::AllowAll,
            ([], PolicyAction::Deny) => PolicyMode::DenyAll,
            _ => PolicyMode::Enforcing,
        }
    }

    /// The policy that two lists of a command line or a configuration mean. What is denied stays denied even if a
    /// wider target is allowed. Everything else is denied, unless only denied targets are listed: such a list would have
    /// no effect then.
    pub fn from_lists(allow: &[PolicyTarget], deny: &[PolicyTarget]) -> Result<Self, PolicyError> {
        let only_denies = allow.is_empty() && !deny.is_empty();
        let default = if only_denies { PolicyAction::Allow } else { PolicyAction::Deny };
        let denied = deny.iter().map(|target| rule(PolicyAction::Deny, target));
        Self::new(
            denied.chain(allow.iter().map(|target| rule(PolicyAction::Allow, target))).collect(),
            default,
        )
    }

    /// The policy that the network object of E2B means: what is allowed wins over what is denied, and the rest is
    /// allowed. Denying all addresses (`0.0.0.0/0` or `::/0`) denies the rest, as does `internet_access: false`.
    pub fn from_allow_over_deny(
        allow: &[PolicyTarget],
        deny: &[PolicyTarget],
        internet_access: bool,
    ) -> Result<Self, PolicyError> {
        let allowed = allow.iter().map(|target| rule(PolicyAction::Allow, target));
        if !internet_access || deny.iter().any(covers_everything) {
            return Self::new(allowed.collect(), PolicyAction::Deny);
        }
        let denied = deny.iter().map(|target| rule(PolicyAction::Deny, target));
        Self::new(allowed.chain(denied).collect(), PolicyAction::Allow)
    }
}

fn rule(action: PolicyAction, target: &PolicyTarget) -> PolicyRule {
    PolicyRule { action, target: target.clone() }
}

/// Whether a target stands for all addresses of a family at all ports. A client that names one family means both.
fn covers_everything(target: &PolicyTarget) -> bool {
    target.port.is_none() && matches!(target.host, TargetHost::Addresses(AddressPrefix { bits: 0, .. }))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Parses a policy such as `+a.org -b.org` with `+*` or `-*` at its end for the default.
    fn policy(text: &str) -> NetworkPolicy {
        let mut rules = rules(text);
        let default = match text.split_whitespace().last() {
            Some("+*") => PolicyAction::Allow,
            _ => PolicyAction::Deny,
        };
        rules.truncate(crate::MAX_POLICY_RULES);
        NetworkPolicy::new(rules, default).expect("few rules")
    }

    fn rules(text: &str) -> Vec<PolicyRule> {
        let words = text.split_whitespace().filter(|word| !word.ends_with('*'));
        let parse = |word: &str| {
            let (sign, target) = word.split_at(1);
            let action = if sign == "+" { PolicyAction::Allow } else { PolicyAction::Deny };
            PolicyRule { action, target: target.parse().expect("a target") }
        };
        words.map(parse).collect()
    }

    fn targets(text: &str) -> Vec<PolicyTarget> {
        text.split_whitespace().map(|word| word.parse().expect("a target")).collect()
    }

    #[test]
    fn merged_rules_come_first_and_replace_rules_for_the_same_target() {
        for (present, incoming, expected) in [
            ("-*", "+a.org", "+a.org -*"),
            ("+a.org -*", "-A.org.", "-a.org -*"),
            ("+a.org +b.org +*", "-b.org +c.org", "-b.org +c.org +a.org +*"),
            ("+a.org -*", "+b.org -b.org", "+b.org +a.org -*"),
            ("+a.org -*", "-a.org:443", "-a.org:443 +a.org -*"),
            ("+10.0.0.1 -*", "-10.0.0.1/32", "-10.0.0.1 -*"),
            ("+*.a.org -*", "-a.org", "-a.org +*.a.org -*"),
            ("+a.org -*", "", "+a.org -*"),
        ] {
            let merged = PolicyEdit::Merge(rules(incoming)).apply(&policy(present));
            assert_eq!(merged, Ok(policy(expected)), "{incoming} into {present}");
        }
    }

    #[test]
    fn merge_that_exceeds_the_number_of_rules_is_refused() {
        let names = (0..crate::MAX_POLICY_RULES).map(|number| format!("+n{number}.org "));
        let full = policy(&names.collect::<String>());
        assert!(full.merge(&rules("-n0.org")).is_ok());
        let refused = PolicyError::TooManyRules(crate::MAX_POLICY_RULES + 1);
        assert_eq!(full.merge(&rules("+other.org")), Err(refused));
    }

    #[test]
    fn rules_are_removed_by_target_whatever_their_action() {
        for (present, removed, expected) in [
            ("+a.org -b.org +*", "A.ORG b.org", "+*"),
            ("+a.org +a.org:80 -*", "a.org", "+a.org:80 -*"),
            ("+a.org -*", "c.org", "+a.org -*"),
            ("+10.0.0.0/8 -*", "10.0.0.0/8", "-*"),
        ] {
            let left = PolicyEdit::Remove(targets(removed)).apply(&policy(present));
            assert_eq!(left, Ok(policy(expected)), "{removed} from {present}");
        }
    }

    #[test]
    fn mode_says_whether_there_are_rules() {
        for (text, name) in
            [("+*", "allow_all"), ("-*", "deny_all"), ("+a.org -*", "enforcing"), ("-a.org +*", "enforcing")]
        {
            assert_eq!(policy(text).mode().name(), name, "{text}");
        }
    }

    #[test]
    fn lists_deny_first_and_then_allow() {
        for (allow, deny, expected) in [
            ("", "", "-*"),
            ("*.a.org b.org:443", "", "+*.a.org +b.org:443 -*"),
            ("*.a.org", "x.a.org", "-x.a.org +*.a.org -*"),
            ("", "x.org 10.0.0.0/8", "-x.org -10.0.0.0/8 +*"),
        ] {
            let read = NetworkPolicy::from_lists(&targets(allow), &targets(deny));
            assert_eq!(read, Ok(policy(expected)), "allow {allow}, deny {deny}");
        }
    }

    #[test]
    fn allowed_targets_win_over_denied_ones_in_the_other_notation() {
        for (allow, deny, internet, expected) in [
            ("", "", true, "+*"),
            ("", "", false, "-*"),
            ("a.org", "", false, "+a.org -*"),
            ("*.a.org 192.0.2.1", "0.0.0.0/0", true, "+*.a.org +192.0.2.1 -*"),
            ("a.org", "::/0 192.0.2.0/24", true, "+a.org -*"),
            ("192.0.2.7", "192.0.2.0/24", true, "+192.0.2.7 -192.0.2.0/24 +*"),
        ] {
            let read = NetworkPolicy::from_allow_over_deny(&targets(allow), &targets(deny), internet);
            assert_eq!(read, Ok(policy(expected)), "allow {allow}, deny {deny}, internet {internet}");
        }
    }
}
