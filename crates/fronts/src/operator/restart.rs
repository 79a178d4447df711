//! Restarts a dead sandbox.

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use domain::Owner;
use serde_json::json;
use service::{ErrorKind, ServiceError};

use super::OperatorState;
use super::access::RequestOwner;
use super::sandboxes::{parse_sandbox_id, sandbox_not_found};
use crate::kit::error_format;

/// `POST /coracle/v1/sandboxes/{id}/restart`: responds once the sandbox runs. A running sandbox is
/// left alone, and the response then has no `restarted`.
pub(super) async fn restart_sandbox(
    State(state): State<OperatorState>,
    RequestOwner(owner): RequestOwner,
    id: Result<Path<String>, PathRejection>,
) -> Response {
    let Some(id) = parse_sandbox_id(id) else { return sandbox_not_found() };
    let restarted = match state.service.sandbox(&owner, &id) {
        Ok(sandbox) => sandbox.restart().await,
        Err(error) => Err(error),
    };
    match restarted {
        Ok(resumed) => {
            let mut body = json!({ "id": id.as_str() });
            if let Some(revival) = resumed.revival {
                body["restarted"] = json!(revival.how.name());
                body["cause"] = json!(revival.cause.name());
            }
            Json(body).into_response()
        }
        Err(error) => restart_error_response(&error, &owner),
    }
}

fn restart_error_response(error: &ServiceError, owner: &Owner) -> Response {
    let (status, code) = match error.kind() {
        ErrorKind::NotFound => return sandbox_not_found(),
        ErrorKind::Conflict { .. } | ErrorKind::Busy => (StatusCode::CONFLICT, "NOT_RESTARTABLE"),
        ErrorKind::Exhausted { .. } => (StatusCode::TOO_MANY_REQUESTS, "EXHAUSTED"),
        ErrorKind::Unsupported | ErrorKind::Invalid | ErrorKind::Mount(_) | ErrorKind::Hook => {
            (StatusCode::BAD_REQUEST, "NOT_RESTARTED")
        }
        _ => (StatusCode::INTERNAL_SERVER_ERROR, "INTERNAL"),
    };
    let mut response = error_format::build_error(status, code, &error.message_for(owner));
    error_format::add_hint(&mut response, error.hint());
    response
}
