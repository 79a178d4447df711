//! The egress API of a sandbox, as far as it can be told truthfully while the network is off.
//!
//! Errors here are plain text: that is this API's rule.

use axum::Json;
use axum::response::{IntoResponse, Response};
use domain::Network;
use http::{Method, StatusCode};
use serde::Serialize;
use service::Sandbox;

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct PolicyBody {
    status: &'static str,
    mode: &'static str,
    policy: Policy,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Policy {
    default_action: &'static str,
    egress: Vec<serde_json::Value>,
}

/// What a sandbox may reach.
pub(super) fn policy_of(sandbox: &Sandbox) -> PolicyBody {
    let (mode, default_action) = match sandbox.spec.network {
        Network::Off | Network::Filtered => ("deny_all", "deny"),
        Network::On => ("allow_all", "allow"),
    };
    PolicyBody { status: "ok", mode, policy: Policy { default_action, egress: Vec::new() } }
}

/// Answers a request for the egress port.
pub(super) fn answer(sandbox: &Sandbox, method: &Method, path: &str) -> Response {
    match (method, path) {
        (&Method::GET | &Method::HEAD, "/policy") => Json(policy_of(sandbox)).into_response(),
        (_, "/policy") => {
            plain(StatusCode::NOT_IMPLEMENTED, "changing the policy comes with the network issue")
        }
        (&Method::GET | &Method::HEAD, "/healthz") => plain(StatusCode::OK, "ok"),
        (_, path) if path == "/credential-vault" || path.starts_with("/credential-vault/") => {
            plain(StatusCode::NOT_IMPLEMENTED, "the credential vault is not offered by this server yet")
        }
        _ => plain(StatusCode::NOT_FOUND, "there is nothing at this path"),
    }
}

pub(super) fn plain(status: StatusCode, message: &'static str) -> Response {
    (status, message).into_response()
}
