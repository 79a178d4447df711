//! Looks up sandboxes by the names that clients gave them.

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{FromRequestParts, Path, State};
use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::response::{IntoResponse, Response};
use domain::Key;
use serde_json::json;
use service::{NAMES, Outcome, Sandbox};

use super::Front;
use super::access::Caller;
use crate::answer;

/// The caller's key named in the path, and the sandbox it refers to.
pub(super) struct Named {
    key: Key,
    sandbox: Sandbox,
}

impl FromRequestParts<Front> for Named {
    type Rejection = Response;

    async fn from_request_parts(parts: &mut Parts, front: &Front) -> Result<Self, Response> {
        let Caller(owner) = Caller::from_request_parts(parts, front).await?;
        let name: Result<Path<String>, PathRejection> = Path::from_request_parts(parts, front).await;
        let name = name.map(|Path(name)| name).unwrap_or_default();
        let wrong = |error: domain::NotAKey| {
            answer::error(StatusCode::BAD_REQUEST, "INVALID_NAME", &error.to_string())
        };
        let key = Key::new(&owner, NAMES, &name).map_err(wrong)?;
        let nothing = || answer::error(StatusCode::NOT_FOUND, "NAME_NOT_FOUND", "no sandbox has this name");
        let sandbox = front.service.find(&key).ok_or_else(nothing)?;
        Ok(Self { key, sandbox })
    }
}

/// `GET /coracle/v1/names/{name}`: the sandbox that has this name.
pub(super) async fn find(Named { key, sandbox }: Named) -> Response {
    Json(json!({"name": key.name(), "id": sandbox.id.as_str(), "phase": sandbox.phase.name()}))
        .into_response()
}

/// `POST /coracle/v1/names/{name}/release`: allows the sandbox to be evicted. Idempotent.
pub(super) async fn release(State(front): State<Front>, Named { key, .. }: Named) -> Response {
    let released = front.service.release(&key) == Outcome::Done;
    Json(json!({"name": key.name(), "released": released})).into_response()
}
