//! The egress API of a sandbox, on its port 18080: its network policy. Errors are plain text, as this API requires.

use axum::extract::Request;
use axum::response::{IntoResponse, Response};
use http::{Method, StatusCode};
use service::SandboxRef;

use super::policy::handle_policy_request;

/// Answers a request for the egress port.
pub(super) async fn answer_egress(sandbox: &SandboxRef, path: &str, request: Request) -> Response {
    let method = request.method().clone();
    match (&method, path) {
        (_, "/policy") => match handle_policy_request(sandbox, &method, request.into_body()).await {
            Ok(status) => status.into_response(),
            Err(error) => error.into_text(),
        },
        (&Method::GET | &Method::HEAD, "/healthz") => text_response(StatusCode::OK, "ok"),
        _ => text_response(StatusCode::NOT_FOUND, "path not found"),
    }
}

fn text_response(status: StatusCode, message: &'static str) -> Response {
    (status, message).into_response()
}
