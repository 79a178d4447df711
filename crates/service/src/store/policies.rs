//! Network policies, as part of JSON columns.

use std::sync::Arc;

use domain::{NetworkPolicy, PolicyAction, PolicyRule};
use serde::{Deserialize, Serialize};

const ALLOW: &str = "allow";
const DENY: &str = "deny";

/// A policy. Each rule is its action and its target, as in `allow example.org:443`.
#[derive(Serialize, Deserialize)]
pub(super) struct PolicyJson {
    default: String,
    #[serde(default)]
    rules: Vec<String>,
}

impl PolicyJson {
    pub(super) fn from_domain(policy: &NetworkPolicy) -> Self {
        let rule = |rule: &PolicyRule| format!("{} {}", action_name(rule.action), rule.target);
        Self {
            default: action_name(policy.default_action()).to_owned(),
            rules: policy.rules().iter().map(rule).collect(),
        }
    }

    /// A policy that this version cannot read, in whole or in part, allows nothing.
    pub(super) fn into_domain(self) -> Arc<NetworkPolicy> {
        let policy = self.parse();
        if policy.is_none() {
            tracing::error!(
                "failed to read a stored network policy; its sandbox reaches nothing until it gets another"
            );
        }
        Arc::new(policy.unwrap_or_else(NetworkPolicy::deny_all))
    }

    fn parse(&self) -> Option<NetworkPolicy> {
        let rule = |text: &String| {
            let (action, target) = text.split_once(' ')?;
            Some(PolicyRule { action: parse_action(action)?, target: target.parse().ok()? })
        };
        let rules = self.rules.iter().map(rule).collect::<Option<_>>()?;
        NetworkPolicy::new(rules, parse_action(&self.default)?).ok()
    }
}

fn action_name(action: PolicyAction) -> &'static str {
    match action {
        PolicyAction::Allow => ALLOW,
        PolicyAction::Deny => DENY,
    }
}

fn parse_action(name: &str) -> Option<PolicyAction> {
    match name {
        ALLOW => Some(PolicyAction::Allow),
        DENY => Some(PolicyAction::Deny),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(json: &str, readable: bool) {
        let stored: PolicyJson = serde_json::from_str(json).expect("a stored policy");
        let policy = stored.into_domain();
        assert_eq!(*policy != NetworkPolicy::deny_all(), readable, "{json}");
        if readable {
            let again = serde_json::to_string(&PolicyJson::from_domain(&policy)).expect("it is JSON");
            assert_eq!(again, json);
        }
    }

    #[test]
    fn policy_that_cannot_be_read_allows_nothing() {
        check(r#"{"default":"allow","rules":[]}"#, true);
        check(r#"{"default":"deny","rules":["allow *.example.org:443","deny [2001:db8::/32]:22"]}"#, true);
        for json in [
            r#"{"default":"perhaps","rules":["allow example.org"]}"#,
            r#"{"default":"allow","rules":["deny example.org/path"]}"#,
            r#"{"default":"allow","rules":["log example.org"]}"#,
            r#"{"default":"allow","rules":["example.org"]}"#,
        ] {
            check(json, false);
        }
    }
}
