//! How errors look to a client. Each front has one [`ErrorFormat`] in its row of the registry, and the
//! shared layers refuse requests in it.

use axum::response::{IntoResponse, Response};
use http::{HeaderName, HeaderValue, StatusCode, header};
use serde::Serialize;

/// The Coracle header that carries a hint, so that bodies match those of the reference servers.
const HINT_HEADER: HeaderName = HeaderName::from_static("coracle-hint");

/// A format of error responses.
pub(crate) struct ErrorFormat {
    pub(crate) content_type: &'static str,
    /// Builds the body from the status, an error code and a message.
    pub(crate) body: fn(StatusCode, &str, &str) -> String,
}

/// The format of a JSON object with `code` and `message`.
pub(crate) static CODE_AND_MESSAGE: ErrorFormat = ErrorFormat {
    content_type: "application/json",
    body: |_, code, message| {
        serde_json::to_string(&ErrorBody { code, message }).expect("two strings always serialize")
    },
};

#[derive(Serialize)]
struct ErrorBody<'a> {
    code: &'a str,
    message: &'a str,
}

impl ErrorFormat {
    /// Builds an error response. Clients fail on an empty body, so there is always a message.
    pub(crate) fn build_error(&self, status: StatusCode, code: &str, message: &str) -> Response {
        let message = if message.is_empty() { "internal error" } else { message };
        let kind = [(header::CONTENT_TYPE, self.content_type)];
        (status, kind, (self.body)(status, code, message)).into_response()
    }

    /// Like [`ErrorFormat::build_error`], with the seconds after which the client may retry.
    pub(crate) fn build_retry_error(
        &self,
        status: StatusCode,
        code: &str,
        message: &str,
        seconds: u64,
    ) -> Response {
        let mut response = self.build_error(status, code, message);
        response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        response
    }

    pub(crate) fn path_not_found(&self) -> Response {
        self.build_error(StatusCode::NOT_FOUND, "NOT_FOUND", "path not found")
    }

    pub(crate) fn method_not_allowed(&self) -> Response {
        let message = "this path does not support this method";
        self.build_error(StatusCode::METHOD_NOT_ALLOWED, "METHOD_NOT_ALLOWED", message)
    }
}

/// Builds an error response in the format [`CODE_AND_MESSAGE`].
pub(crate) fn build_error(status: StatusCode, code: &str, message: &str) -> Response {
    CODE_AND_MESSAGE.build_error(status, code, message)
}

/// Adds a hint on how to resolve the error, separate from the message.
pub(crate) fn add_hint(response: &mut Response, hint: Option<&str>) {
    if let Some(hint) = hint.and_then(|hint| HeaderValue::try_from(hint).ok()) {
        response.headers_mut().insert(HINT_HEADER, hint);
    }
}
