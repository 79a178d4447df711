//! The shape of an error that every front shares: a JSON object with `code` and `message`.

use axum::Json;
use axum::response::{IntoResponse, Response};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use serde::Serialize;

/// The header of our own in which a hint travels, so that bodies are exactly those of the references.
const HINT: HeaderName = HeaderName::from_static("coracle-hint");

/// The header that says, on the answer to a create, that another image stands in for the one that was named.
const STAND_IN: HeaderName = HeaderName::from_static("coracle-image-stand-in");

#[derive(Serialize)]
struct Body<'a> {
    code: &'a str,
    message: &'a str,
}

/// An error that says what went wrong. Clients fail on an empty body, so none is ever sent.
pub(crate) fn error(status: StatusCode, code: &str, message: &str) -> Response {
    let message = if message.is_empty() { "no more is known" } else { message };
    (status, Json(Body { code, message })).into_response()
}

/// The body of an [`error`] alone.
pub(crate) fn words(code: &str, message: &str) -> String {
    serde_json::to_string(&Body { code, message }).expect("two texts are always JSON")
}

/// As [`error`], with the seconds after which trying again makes sense.
pub(crate) fn try_later(status: StatusCode, code: &str, message: &str, seconds: u64) -> Response {
    let mut response = error(status, code, message);
    response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
    response
}

/// Says apart from the message what somebody could do about it.
pub(crate) fn add_hint(response: &mut Response, hint: Option<&str>) {
    if let Some(hint) = hint.and_then(|hint| HeaderValue::try_from(hint).ok()) {
        response.headers_mut().insert(HINT, hint);
    }
}

/// The header for an image that stands in for another. Names of images come from clients, so what
/// a header cannot hold is replaced.
pub(crate) fn stand_in(sentence: Option<&str>) -> HeaderMap {
    let plain = |letter: char| if letter == ' ' || letter.is_ascii_graphic() { letter } else { '?' };
    let value = sentence.map(|sentence| sentence.chars().map(plain).collect::<String>());
    let value = value.and_then(|value| HeaderValue::try_from(value).ok());
    value.into_iter().map(|value| (STAND_IN, value)).collect()
}

pub(crate) async fn not_found() -> Response {
    error(StatusCode::NOT_FOUND, "NOT_FOUND", "there is nothing at this path")
}

/// As [`not_found`], where somebody may look for more than there is.
pub(crate) async fn operators_only() -> Response {
    let message = "this socket answers only what operators ask, below /coracle/v1";
    let hint = "look at and remove what owners have with --all-owners or --owner NAME; \
                all else goes to the server's HTTP address, with a key";
    let mut response = error(StatusCode::NOT_FOUND, "NOT_FOUND", message);
    add_hint(&mut response, Some(hint));
    response
}

pub(crate) async fn wrong_method() -> Response {
    error(StatusCode::METHOD_NOT_ALLOWED, "METHOD_NOT_ALLOWED", "this path does not know this method")
}
