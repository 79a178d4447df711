//! The network policy of a sandbox, and the log of what it tried to reach.

use std::collections::BTreeMap;

use anyhow::Result;
use domain::{NetworkPolicy, PolicyAction, PolicyRule, PolicyTarget, SandboxId};
use http::Method;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::http as web;
use super::lifecycle::ServerClient;
use super::operator::EventFeed;

/// How many records are read at once.
const LOG_PAGE: usize = 1000;

/// A policy as the server describes it. Unknown fields are kept for `--json`.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct PolicyStatus {
    pub mode: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    pub policy: PolicyInfo,
    #[serde(flatten)]
    pub rest: BTreeMap<String, Value>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct PolicyInfo {
    pub default_action: String,
    pub egress: Vec<RuleInfo>,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct RuleInfo {
    pub action: String,
    pub target: String,
}

/// Records of the log, and the number after which the next page begins.
#[derive(Deserialize)]
pub(crate) struct NetworkLogPage {
    pub records: Vec<Value>,
    #[serde(default)]
    pub dropped: u64,
    pub next: u64,
}

impl ServerClient {
    pub(crate) async fn network_policy(&self, id: &SandboxId) -> Result<PolicyStatus> {
        web::read_json(self.0.get(&policy_path(id)).await?).await
    }

    pub(crate) async fn replace_policy(
        &self,
        id: &SandboxId,
        policy: &NetworkPolicy,
    ) -> Result<PolicyStatus> {
        self.change_policy(Method::PUT, id, &policy_body(policy)).await
    }

    /// Puts rules for these targets before all others.
    pub(crate) async fn add_policy_rules(
        &self,
        id: &SandboxId,
        action: PolicyAction,
        targets: &[PolicyTarget],
    ) -> Result<PolicyStatus> {
        let rules = targets.iter().map(|target| rule_body(action, target)).collect();
        self.change_policy(Method::PATCH, id, &rules).await
    }

    pub(crate) async fn remove_policy_rules(
        &self,
        id: &SandboxId,
        targets: &[PolicyTarget],
    ) -> Result<PolicyStatus> {
        let targets = targets.iter().map(ToString::to_string).collect();
        self.change_policy(Method::DELETE, id, &targets).await
    }

    async fn change_policy(&self, method: Method, id: &SandboxId, body: &Value) -> Result<PolicyStatus> {
        let body = web::full_body(body.to_string());
        web::read_json(self.0.send(method, &policy_path(id), Some("application/json"), body).await?).await
    }

    /// The next records of the log; a page without records is the end.
    pub(crate) async fn network_log(
        &self,
        id: &SandboxId,
        after: u64,
        denied: bool,
    ) -> Result<NetworkLogPage> {
        let path = format!("/sandboxes/{id}/network?after={after}&limit={LOG_PAGE}&denied={denied}");
        web::read_json(self.operator_api().get(&path).await?).await
    }

    /// The log from a record on, with the records to come.
    pub(crate) async fn follow_network_log(
        &self,
        id: &SandboxId,
        after: u64,
        denied: bool,
    ) -> Result<EventFeed> {
        let path = format!("/sandboxes/{id}/network?after={after}&denied={denied}&follow=true");
        Ok(EventFeed::from_response(self.operator_api().get(&path).await?))
    }
}

fn policy_path(id: &SandboxId) -> String {
    format!("/sandboxes/{id}/networkpolicy")
}

/// A policy as the API writes it.
pub(crate) fn policy_body(policy: &NetworkPolicy) -> Value {
    let rule = |rule: &PolicyRule| rule_body(rule.action, &rule.target);
    let rules: Vec<Value> = policy.rules().iter().map(rule).collect();
    json!({ "defaultAction": action_name(policy.default_action()), "egress": rules })
}

fn rule_body(action: PolicyAction, target: &PolicyTarget) -> Value {
    json!({ "action": action_name(action), "target": target.to_string() })
}

fn action_name(action: PolicyAction) -> &'static str {
    match action {
        PolicyAction::Allow => "allow",
        PolicyAction::Deny => "deny",
    }
}
