//! The egress API of a sandbox, limited to what is true without an egress filter.
//!
//! Errors are plain text, as this API requires.

use axum::Json;
use axum::response::{IntoResponse, Response};
use domain::NetworkAccess;
use http::{Method, StatusCode};
use serde::Serialize;
use service::Sandbox;

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct PolicyBody {
    status: &'static str,
    mode: &'static str,
    policy: EgressRules,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct EgressRules {
    default_action: &'static str,
    egress: Vec<serde_json::Value>,
}

/// Returns the network policy in effect for a sandbox.
pub(super) fn policy_of(sandbox: &Sandbox) -> PolicyBody {
    let (mode, default_action) =
        if can_reach_network(sandbox) { ("allow_all", "allow") } else { ("deny_all", "deny") };
    PolicyBody { status: "ok", mode, policy: EgressRules { default_action, egress: Vec::new() } }
}

/// Whether a sandbox can really reach other machines. The spec alone does not say: it may leave the
/// network open, or the network may have been added later.
fn can_reach_network(sandbox: &Sandbox) -> bool {
    match sandbox.in_force.network() {
        Some(state) => state.is_on(),
        None => sandbox.spec.network == NetworkAccess::On,
    }
}

/// Answers a request for the egress port.
pub(super) fn answer_egress(sandbox: &Sandbox, method: &Method, path: &str) -> Response {
    match (method, path) {
        (&Method::GET | &Method::HEAD, "/policy") => Json(policy_of(sandbox)).into_response(),
        (_, "/policy") => text_response(
            StatusCode::NOT_IMPLEMENTED,
            "changing the policy requires the egress filter, which is not available yet",
        ),
        (&Method::GET | &Method::HEAD, "/healthz") => text_response(StatusCode::OK, "ok"),
        _ => text_response(StatusCode::NOT_FOUND, "path not found"),
    }
}

pub(super) fn text_response(status: StatusCode, message: &'static str) -> Response {
    (status, message).into_response()
}
