//! The error format that all fronts share: a JSON object with `code` and `message`.

use axum::Json;
use axum::response::{IntoResponse, Response};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use serde::Serialize;

/// The Coracle header that carries a hint, so that bodies match those of the reference servers.
const HINT: HeaderName = HeaderName::from_static("coracle-hint");

/// The header of a create response that reports a substituted image.
const STAND_IN: HeaderName = HeaderName::from_static("coracle-image-stand-in");

#[derive(Serialize)]
struct Body<'a> {
    code: &'a str,
    message: &'a str,
}

/// Builds an error response. Clients fail on an empty body, so there is always a message.
pub(crate) fn error(status: StatusCode, code: &str, message: &str) -> Response {
    let message = if message.is_empty() { "internal error" } else { message };
    (status, Json(Body { code, message })).into_response()
}

/// Returns only the body of an [`error`].
pub(crate) fn words(code: &str, message: &str) -> String {
    serde_json::to_string(&Body { code, message }).expect("two strings always serialize")
}

/// Like [`error`], with the seconds after which the client may retry.
pub(crate) fn try_later(status: StatusCode, code: &str, message: &str, seconds: u64) -> Response {
    let mut response = error(status, code, message);
    response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
    response
}

/// Adds a hint on how to resolve the error, separate from the message.
pub(crate) fn add_hint(response: &mut Response, hint: Option<&str>) {
    if let Some(hint) = hint.and_then(|hint| HeaderValue::try_from(hint).ok()) {
        response.headers_mut().insert(HINT, hint);
    }
}

/// Builds the header that reports a substituted image. Image names come from clients, so characters
/// that a header cannot hold are replaced.
pub(crate) fn stand_in(sentence: Option<&str>) -> HeaderMap {
    let plain = |letter: char| if letter == ' ' || letter.is_ascii_graphic() { letter } else { '?' };
    let value = sentence.map(|sentence| sentence.chars().map(plain).collect::<String>());
    let value = value.and_then(|value| HeaderValue::try_from(value).ok());
    value.into_iter().map(|value| (STAND_IN, value)).collect()
}

pub(crate) async fn not_found() -> Response {
    error(StatusCode::NOT_FOUND, "NOT_FOUND", "path not found")
}

/// Like [`not_found`], for the operators' socket, which does not serve the other APIs.
pub(crate) async fn operators_only() -> Response {
    let message = "this socket serves only the operator API, below /coracle/v1";
    let hint = "look at and remove what owners have with --all-owners or --owner NAME; \
                all else goes to the server's HTTP address, with a key";
    let mut response = error(StatusCode::NOT_FOUND, "NOT_FOUND", message);
    add_hint(&mut response, Some(hint));
    response
}

pub(crate) async fn wrong_method() -> Response {
    error(StatusCode::METHOD_NOT_ALLOWED, "METHOD_NOT_ALLOWED", "this path does not support this method")
}
