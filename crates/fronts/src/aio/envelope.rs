//! The form of nearly all responses: `{success, message, data, hint}`.

use axum::Json;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde_json::json;

use crate::kit::error_format::ErrorFormat;

/// The message of a success that has nothing else to say.
pub(super) const DEFAULT_MESSAGE: &str = "Operation successful";

/// The format of errors that shared layers report for this front.
pub(super) static ENVELOPE_ERRORS: ErrorFormat = ErrorFormat {
    content_type: "application/json",
    body: |_, _, message| {
        json!({"success": false, "message": message, "data": null, "hint": null}).to_string()
    },
};

#[derive(Clone, Debug, Serialize)]
pub(super) struct ResponseEnvelope<T> {
    pub(super) success: bool,
    pub(super) message: String,
    pub(super) data: Option<T>,
    pub(super) hint: Option<String>,
}

impl<T> ResponseEnvelope<T> {
    pub(super) fn success(message: impl Into<String>, data: T) -> Self {
        Self { success: true, message: message.into(), data: Some(data), hint: None }
    }

    /// An operation that was carried out and reports a failure in its data.
    pub(super) fn failure(message: impl Into<String>, data: T) -> Self {
        Self { success: false, message: message.into(), data: Some(data), hint: None }
    }
}

impl<T: Serialize> IntoResponse for ResponseEnvelope<T> {
    fn into_response(self) -> Response {
        Json(self).into_response()
    }
}

/// A success with this message.
pub(super) fn success_response<T: Serialize>(
    message: impl Into<String>,
    data: T,
) -> Json<ResponseEnvelope<T>> {
    Json(ResponseEnvelope::success(message, data))
}

/// A success without a particular message.
pub(super) fn data_response<T: Serialize>(data: T) -> Json<ResponseEnvelope<T>> {
    success_response(DEFAULT_MESSAGE, data)
}
