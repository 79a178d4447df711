//! Network policies in the notation of this API, and what the routes that change them answer.

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use domain::{
    MAX_POLICY_RULES, NetworkPolicy, PolicyAction, PolicyEdit, PolicyError, PolicyRule, PolicyTarget,
};
use http::{Method, StatusCode};
use serde::{Deserialize, Serialize};
use service::{ErrorKind, Outcome, SandboxRef, ServiceError};

use super::OpenSandboxState;
use super::access::OwnedSandbox;
use super::problem::{Problem, with_hint};
use crate::kit::body::read_body;

/// The largest body of a request that changes a policy.
const MAX_BODY_BYTES: usize = 1 << 20;
/// How a policy is enforced, in the words of the reference: names and addresses.
const ENFORCEMENT: &str = "dns+nft";
const RESET_REASON: &str = "policy reset to default deny-all";
const NO_MATCH_REASON: &str = "no matching targets found";

/// A policy as clients write it. Unknown fields are ignored, as in the reference.
#[derive(Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct NetworkPolicyBody {
    pub(super) default_action: Option<String>,
    pub(super) egress: Option<Vec<RuleBody>>,
}

#[derive(Clone, Serialize, Deserialize)]
pub(super) struct RuleBody {
    action: String,
    target: String,
}

/// The answer to a request about the policy.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct PolicyStatusBody {
    status: &'static str,
    mode: &'static str,
    enforcement_mode: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'static str>,
    policy: PolicyBody,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct PolicyBody {
    default_action: &'static str,
    egress: Vec<RuleBody>,
}

/// Why a policy is not accepted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum PolicyBodyError {
    #[error("`defaultAction` must be `allow` or `deny`, not `{0}`")]
    DefaultAction(String),
    #[error("rule {number}: `action` must be `allow` or `deny`, not `{action}`")]
    Action { number: usize, action: String },
    #[error("rule {number}: {source}")]
    Target { number: usize, source: PolicyError },
    #[error(transparent)]
    Policy(PolicyError),
}

impl NetworkPolicyBody {
    pub(super) fn parse(&self) -> Result<NetworkPolicy, PolicyBodyError> {
        let default = match self.default_action.as_deref() {
            None | Some("") => PolicyAction::Deny,
            Some(name) => parse_action(name).ok_or_else(|| PolicyBodyError::DefaultAction(shorten(name)))?,
        };
        let rules = parse_rules(self.egress.as_deref().unwrap_or_default())?;
        NetworkPolicy::new(rules, default).map_err(PolicyBodyError::Policy)
    }
}

/// Checks the number of rules first, so that a longer list is refused for its length, whatever it contains.
fn parse_rules(rules: &[RuleBody]) -> Result<Vec<PolicyRule>, PolicyBodyError> {
    if rules.len() > MAX_POLICY_RULES {
        return Err(PolicyBodyError::Policy(PolicyError::TooManyRules(rules.len())));
    }
    rules.iter().enumerate().map(|(index, rule)| rule.parse(index + 1)).collect()
}

impl RuleBody {
    fn parse(&self, number: usize) -> Result<PolicyRule, PolicyBodyError> {
        let action = parse_action(&self.action);
        let action =
            action.ok_or_else(|| PolicyBodyError::Action { number, action: shorten(&self.action) })?;
        let target = self.target.trim().parse();
        let target = target.map_err(|source| PolicyBodyError::Target { number, source })?;
        Ok(PolicyRule { action, target })
    }

    fn from_rule(rule: &PolicyRule) -> Self {
        Self { action: action_name(rule.action).to_owned(), target: rule.target.to_string() }
    }
}

fn parse_action(name: &str) -> Option<PolicyAction> {
    [PolicyAction::Allow, PolicyAction::Deny]
        .into_iter()
        .find(|action| name.eq_ignore_ascii_case(action_name(*action)))
}

fn action_name(action: PolicyAction) -> &'static str {
    match action {
        PolicyAction::Allow => "allow",
        PolicyAction::Deny => "deny",
    }
}

/// The beginning of a text that a client sent, for a message.
fn shorten(text: &str) -> String {
    text.chars().take(64).collect()
}

impl PolicyStatusBody {
    pub(super) fn of_policy(policy: &NetworkPolicy) -> Self {
        Self {
            status: "ok",
            mode: policy.mode().name(),
            enforcement_mode: ENFORCEMENT,
            reason: None,
            policy: PolicyBody {
                default_action: action_name(policy.default_action()),
                egress: policy.rules().iter().map(RuleBody::from_rule).collect(),
            },
        }
    }
}

/// A request about a policy that failed. The lifecycle API answers it as JSON and the egress API as text.
pub(super) struct PolicyRequestError {
    pub(super) status: StatusCode,
    pub(super) code: &'static str,
    pub(super) message: String,
}

impl PolicyRequestError {
    fn invalid(message: impl Into<String>) -> Self {
        let code = "SANDBOX::INVALID_PARAMETER";
        Self { status: StatusCode::BAD_REQUEST, code, message: message.into() }
    }

    pub(super) fn into_text(self) -> Response {
        (self.status, self.message).into_response()
    }
}

impl From<PolicyRequestError> for Problem {
    fn from(error: PolicyRequestError) -> Self {
        Self::new(error.status, error.code, error.message)
    }
}

impl From<PolicyBodyError> for PolicyRequestError {
    fn from(error: PolicyBodyError) -> Self {
        let refused = Self::invalid(format!("invalid policy: {error}"));
        match error {
            PolicyBodyError::Policy(PolicyError::TooManyRules(_)) => {
                Self { status: StatusCode::PAYLOAD_TOO_LARGE, ..refused }
            }
            _ => refused,
        }
    }
}

impl From<ServiceError> for PolicyRequestError {
    fn from(error: ServiceError) -> Self {
        if let ServiceError::Policy(error) = error {
            return PolicyBodyError::Policy(error).into();
        }
        let unsupported = error.kind() == ErrorKind::Unsupported;
        let message = with_hint(&error, error.to_string());
        let Problem { status, code, .. } = error.into();
        let status = if unsupported { StatusCode::NOT_IMPLEMENTED } else { status };
        Self { status, code, message }
    }
}

/// Answers a request about the policy of a sandbox, whose change is in force when this returns.
pub(super) async fn handle_policy_request(
    sandbox: &SandboxRef,
    method: &Method,
    body: Body,
) -> Result<Json<PolicyStatusBody>, PolicyRequestError> {
    if matches!(*method, Method::GET | Method::HEAD) {
        return Ok(Json(PolicyStatusBody::of_policy(&sandbox.network().policy())));
    }
    let body = read_body(body, MAX_BODY_BYTES).await.map_err(|error| {
        let Problem { status, code, message, .. } = error.into();
        PolicyRequestError { status, code, message }
    })?;
    let (edit, reason) = parse_edit(method, body.trim_ascii())?;
    let removes = matches!(edit, PolicyEdit::Remove(_));
    let changed = sandbox.network().edit_policy(edit).await?;
    let unmatched = (removes && changed.outcome == Outcome::Unchanged).then_some(NO_MATCH_REASON);
    let status = PolicyStatusBody::of_policy(&changed.policy);
    Ok(Json(PolicyStatusBody { reason: reason.or(unmatched), ..status }))
}

/// `GET|PUT|PATCH|DELETE /sandboxes/{id}/networkpolicy`: the policy, as on the egress port.
pub(super) async fn network_policy(
    State(state): State<OpenSandboxState>,
    at: OwnedSandbox,
    method: Method,
    body: Body,
) -> Result<Json<PolicyStatusBody>, Problem> {
    Ok(handle_policy_request(&at.find(&state)?, &method, body).await?)
}

/// Returns the change that a request asks for, and a remark for its answer.
fn parse_edit(
    method: &Method,
    body: &[u8],
) -> Result<(PolicyEdit, Option<&'static str>), PolicyRequestError> {
    let malformed =
        |error: serde_json::Error| PolicyRequestError::invalid(format!("invalid request body: {error}"));
    match *method {
        Method::PUT | Method::POST if body.is_empty() => {
            Ok((PolicyEdit::Replace(NetworkPolicy::deny_all()), Some(RESET_REASON)))
        }
        Method::PUT | Method::POST => {
            let policy: NetworkPolicyBody = serde_json::from_slice(body).map_err(malformed)?;
            Ok((PolicyEdit::Replace(policy.parse()?), None))
        }
        Method::PATCH => {
            let rules: Vec<RuleBody> = serde_json::from_slice(body).map_err(malformed)?;
            if rules.is_empty() {
                return Err(PolicyRequestError::invalid("a patch needs at least one rule"));
            }
            Ok((PolicyEdit::Merge(parse_rules(&rules)?), None))
        }
        Method::DELETE => {
            let targets: Vec<String> = serde_json::from_slice(body).map_err(malformed)?;
            if targets.is_empty() {
                return Err(PolicyRequestError::invalid("name at least one target to remove"));
            }
            // What is no target is in no rule either.
            let parse = |text: &String| text.trim().parse::<PolicyTarget>().ok();
            Ok((PolicyEdit::Remove(targets.iter().filter_map(parse).collect()), None))
        }
        _ => Err(PolicyRequestError {
            status: StatusCode::METHOD_NOT_ALLOWED,
            code: "SANDBOX::INVALID_PARAMETER",
            message: "method not allowed".to_owned(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn parse(body: Value) -> Result<NetworkPolicy, PolicyBodyError> {
        serde_json::from_value::<NetworkPolicyBody>(body).expect("the types are right").parse()
    }

    #[test]
    fn policy_is_written_as_it_is_read() {
        let body = json!({"defaultAction": "deny", "egress": [
            {"action": "allow", "target": " Index.Example. "}, {"action": "DENY", "target": "*.example.org"},
            {"action": "allow", "target": "10.0.0.0/8"}, {"action": "allow", "target": "a.org:443"},
        ]});
        let status = serde_json::to_value(PolicyStatusBody::of_policy(&parse(body).unwrap())).unwrap();
        assert_eq!(
            status,
            json!({"status": "ok", "mode": "enforcing", "enforcementMode": "dns+nft", "policy": {
                "defaultAction": "deny", "egress": [
                    {"action": "allow", "target": "index.example"}, {"action": "deny", "target": "*.example.org"},
                    {"action": "allow", "target": "10.0.0.0/8"}, {"action": "allow", "target": "a.org:443"},
                ],
            }})
        );
        assert_eq!(parse(json!({})), Ok(NetworkPolicy::deny_all()));
        assert_eq!(parse(json!({"defaultAction": null, "egress": null})), Ok(NetworkPolicy::deny_all()));
        assert_eq!(parse(json!({"defaultAction": "allow"})), Ok(NetworkPolicy::allow_all()));
    }

    #[test]
    fn invalid_policies_are_refused_whole() {
        let rules = |rules: Value| json!({ "egress": rules });
        for (body, message) in [
            (json!({"defaultAction": "maybe"}), "`defaultAction` must be `allow` or `deny`, not `maybe`"),
            (rules(json!([{"action": "", "target": "a.org"}])), "rule 1: `action` must be"),
            (
                rules(
                    json!([{"action": "allow", "target": "a.org"}, {"action": "allow", "target": "a.*.org"}]),
                ),
                "rule 2: ",
            ),
            (rules(json!([{"action": "allow", "target": "a.org:0"}])), "port"),
            (rules(json!([{"action": "allow", "target": ""}])), "must not be empty"),
            (
                rules(json!(vec![json!({"action": "allow", "target": "?"}); MAX_POLICY_RULES + 1])),
                "at most 4096",
            ),
        ] {
            let error = parse(body).expect_err(message);
            assert!(error.to_string().contains(message), "{error}");
        }
    }
}
