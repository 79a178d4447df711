//! Sandboxes by the names that clients gave them.

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use domain::Key;
use serde_json::json;
use service::{NAMES, Outcome};

use super::{Front, refuse};
use crate::answer;

/// `GET /coracle/v1/names/{name}`: which sandbox the name leads to.
pub(super) async fn find(
    State(front): State<Front>,
    name: Result<Path<String>, PathRejection>,
    headers: HeaderMap,
) -> Response {
    let key = match key(&front, &headers, name) {
        Ok(key) => key,
        Err(response) => return response,
    };
    match front.service.find(&key) {
        Some(sandbox) => {
            Json(json!({"name": key.name(), "id": sandbox.id.as_str(), "phase": sandbox.phase.name()}))
                .into_response()
        }
        None => not_found(),
    }
}

/// `POST /coracle/v1/names/{name}/release`: its place may be given to another. Doing so twice is
/// the same as once.
pub(super) async fn release(
    State(front): State<Front>,
    name: Result<Path<String>, PathRejection>,
    headers: HeaderMap,
) -> Response {
    let key = match key(&front, &headers, name) {
        Ok(key) => key,
        Err(response) => return response,
    };
    if front.service.find(&key).is_none() {
        return not_found();
    }
    let released = front.service.release(&key) == Outcome::Done;
    Json(json!({"name": key.name(), "released": released})).into_response()
}

#[expect(clippy::result_large_err, reason = "a refusal is the answer itself")]
fn key(
    front: &Front,
    headers: &HeaderMap,
    name: Result<Path<String>, PathRejection>,
) -> Result<Key, Response> {
    let owner = front.owner(headers).map_err(refuse)?;
    let name = name.map(|Path(name)| name).unwrap_or_default();
    Key::new(&owner, NAMES, &name)
        .map_err(|error| answer::error(StatusCode::BAD_REQUEST, "INVALID_NAME", &error.to_string()))
}

fn not_found() -> Response {
    answer::error(StatusCode::NOT_FOUND, "NAME_NOT_FOUND", "the name leads to no sandbox")
}
