//! Looks up sandboxes by the names that clients gave them.

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{FromRequestParts, Path, State};
use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::response::{IntoResponse, Response};
use domain::SandboxKey;
use serde_json::json;
use service::{NAME_KEY_SPACE, Outcome, Sandbox};

use super::OperatorState;
use super::access::RequestOwner;
use crate::kit::error_format;

/// The caller's key named in the path, and the sandbox it refers to.
pub(super) struct NamedSandbox {
    key: SandboxKey,
    sandbox: Sandbox,
}

impl FromRequestParts<OperatorState> for NamedSandbox {
    type Rejection = Response;

    async fn from_request_parts(parts: &mut Parts, state: &OperatorState) -> Result<Self, Response> {
        let RequestOwner(owner) = RequestOwner::from_request_parts(parts, state).await?;
        let name: Result<Path<String>, PathRejection> = Path::from_request_parts(parts, state).await;
        let name = name.map(|Path(name)| name).unwrap_or_default();
        let wrong = |error: domain::SandboxKeyError| {
            error_format::build_error(StatusCode::BAD_REQUEST, "INVALID_NAME", &error.to_string())
        };
        let key = SandboxKey::new(&owner, NAME_KEY_SPACE, &name).map_err(wrong)?;
        let nothing =
            || error_format::build_error(StatusCode::NOT_FOUND, "NAME_NOT_FOUND", "no sandbox has this name");
        let sandbox = state.service.find_by_key(&key).ok_or_else(nothing)?;
        Ok(Self { key, sandbox })
    }
}

/// `GET /coracle/v1/names/{name}`: the sandbox that has this name.
pub(super) async fn find_by_name(NamedSandbox { key, sandbox }: NamedSandbox) -> Response {
    Json(json!({"name": key.name(), "id": sandbox.id.as_str(), "phase": sandbox.phase.name()}))
        .into_response()
}

/// `POST /coracle/v1/names/{name}/release`: allows the sandbox to be evicted. Idempotent.
pub(super) async fn release_name(
    State(state): State<OperatorState>,
    NamedSandbox { key, .. }: NamedSandbox,
) -> Response {
    let released = state.service.release_key(&key) == Outcome::Done;
    Json(json!({"name": key.name(), "released": released})).into_response()
}
