//! Restarts a dead sandbox.

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use domain::Owner;
use serde_json::json;
use service::{ErrorKind, ServiceError};

use super::Front;
use super::access::Caller;
use super::sandboxes::{id_of, not_found};
use crate::answer;

/// `POST /coracle/v1/sandboxes/{id}/restart`: responds once the sandbox runs. A running sandbox is
/// left alone, and the response then has no `restarted`.
pub(super) async fn restart(
    State(front): State<Front>,
    Caller(owner): Caller,
    id: Result<Path<String>, PathRejection>,
) -> Response {
    let Some(id) = id_of(id) else { return not_found() };
    match front.service.restart(&owner, &id).await {
        Ok(resumed) => {
            let mut body = json!({ "id": id.as_str() });
            if let Some(revival) = resumed.revival {
                body["restarted"] = json!(revival.how.name());
                body["cause"] = json!(revival.cause.name());
            }
            Json(body).into_response()
        }
        Err(error) => refuse(&error, &owner),
    }
}

fn refuse(error: &ServiceError, owner: &Owner) -> Response {
    let (status, code) = match error.kind() {
        ErrorKind::NotFound => return not_found(),
        ErrorKind::Conflict { .. } | ErrorKind::Busy => (StatusCode::CONFLICT, "NOT_RESTARTABLE"),
        ErrorKind::Exhausted { .. } => (StatusCode::TOO_MANY_REQUESTS, "EXHAUSTED"),
        ErrorKind::Unsupported | ErrorKind::Invalid | ErrorKind::Mount(_) | ErrorKind::Hook => {
            (StatusCode::BAD_REQUEST, "NOT_RESTARTED")
        }
        _ => (StatusCode::INTERNAL_SERVER_ERROR, "INTERNAL"),
    };
    let mut response = answer::error(status, code, &error.told_to(owner));
    answer::add_hint(&mut response, error.hint());
    response
}
