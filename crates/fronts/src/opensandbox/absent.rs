//! Features that this server does not support, each with the response that clients expect then.

use axum::Json;
use axum::extract::State;
use http::StatusCode;

use super::Front;
use super::access::{Addressed, Caller};
use super::egress::{self, PolicyBody};
use super::problem::Problem;

/// `/templates…`
pub(super) async fn templates(Caller(_): Caller) -> Problem {
    let message = "templates are not offered by this server";
    Problem::new(StatusCode::NOT_IMPLEMENTED, "FSB::API_NOT_SUPPORTED", message)
}

/// `GET /sandboxes/{id}/networkpolicy`: the policy in effect, as on the egress port.
pub(super) async fn policy(State(front): State<Front>, at: Addressed) -> Result<Json<PolicyBody>, Problem> {
    let sandbox = front.service.get(&at.owner, &at.id)?;
    Ok(Json(egress::policy_of(&sandbox)))
}

/// `PUT|PATCH|DELETE /sandboxes/{id}/networkpolicy`
pub(super) async fn change_policy(State(front): State<Front>, at: Addressed) -> Problem {
    not_yet(&front, &at, "changing the network policy requires the egress filter, which is not available yet")
}

fn not_yet(front: &Front, at: &Addressed, message: &str) -> Problem {
    match front.service.get(&at.owner, &at.id) {
        Ok(_) => Problem::new(StatusCode::NOT_IMPLEMENTED, "SANDBOX::API_NOT_SUPPORTED", message),
        Err(error) => error.into(),
    }
}
