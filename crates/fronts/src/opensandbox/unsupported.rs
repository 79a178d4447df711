//! Features that this server does not support, each with the response that clients expect then.

use axum::Json;
use axum::extract::State;
use http::StatusCode;

use super::OpenSandboxState;
use super::access::{ApiKeyOwner, OwnedSandbox};
use super::egress::{self, PolicyBody};
use super::problem::Problem;

/// `/templates…`
pub(super) async fn refuse_templates(ApiKeyOwner(_): ApiKeyOwner) -> Problem {
    let message = "templates are not offered by this server";
    Problem::new(StatusCode::NOT_IMPLEMENTED, "FSB::API_NOT_SUPPORTED", message)
}

/// `GET /sandboxes/{id}/networkpolicy`: the policy in effect, as on the egress port.
pub(super) async fn get_network_policy(
    State(state): State<OpenSandboxState>,
    at: OwnedSandbox,
) -> Result<Json<PolicyBody>, Problem> {
    Ok(Json(at.find(&state)?.read_state(egress::policy_of)))
}

/// `PUT|PATCH|DELETE /sandboxes/{id}/networkpolicy`
pub(super) async fn refuse_policy_change(
    State(state): State<OpenSandboxState>,
    sandbox: OwnedSandbox,
) -> Problem {
    not_supported_yet(
        &state,
        &sandbox,
        "changing the network policy requires the egress filter, which is not available yet",
    )
}

fn not_supported_yet(state: &OpenSandboxState, sandbox: &OwnedSandbox, message: &str) -> Problem {
    match sandbox.find(state) {
        Ok(_) => Problem::new(StatusCode::NOT_IMPLEMENTED, "SANDBOX::API_NOT_SUPPORTED", message),
        Err(error) => error.into(),
    }
}
