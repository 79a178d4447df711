//! Errors of the sandbox API: the envelope, and FastAPI's form for requests that fail validation.

use axum::Json;
use axum::response::{IntoResponse, Response};
use domain::Phase;
use http::{HeaderValue, StatusCode, header};
use serde::Serialize;
use serde_json::{Value, json};
use service::{ErrorKind, ServiceError};

use super::envelope::ResponseEnvelope;
use crate::kit::body::BodyError;
use crate::kit::error_format;
use crate::server::concurrency::ConcurrencyError;

/// An error response.
#[derive(Debug)]
pub(super) struct AioProblem {
    pub(super) status: StatusCode,
    pub(super) message: String,
    /// The details, if the operation has any to report.
    pub(super) data: Option<Box<Value>>,
    /// How to resolve the error.
    pub(super) hint: Option<String>,
    /// Seconds after which the client may retry.
    pub(super) retry_after: Option<u64>,
    /// The parts of the request that failed validation; clients parse these instead of the envelope.
    pub(super) validation: Vec<ValidationError>,
    /// Whether only a session is missing, and not its sandbox.
    pub(super) lacks_session: bool,
}

/// A part of a request that failed validation, in the form of FastAPI.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct ValidationError {
    /// `body`, `query` or `path`, and the names below it.
    pub(super) loc: Vec<String>,
    pub(super) msg: String,
    #[serde(rename = "type")]
    pub(super) kind: &'static str,
}

impl AioProblem {
    pub(super) fn new(status: StatusCode, message: impl Into<String>) -> Self {
        let message = message.into();
        let validation = Vec::new();
        Self { status, message, data: None, hint: None, retry_after: None, validation, lacks_session: false }
    }

    pub(super) fn bad_request(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }

    /// An unknown path, sandbox or address. All of these look the same.
    pub(super) fn not_found() -> Self {
        Self::new(StatusCode::NOT_FOUND, "Not Found")
    }

    pub(super) fn no_session() -> Self {
        // Clients match this text.
        Self { lacks_session: true, ..Self::new(StatusCode::NOT_FOUND, "Session not found") }
    }

    /// A field of the body that has a wrong value.
    pub(super) fn invalid_field(field: &str, message: impl Into<String>) -> Self {
        Self::invalid(["body", field], message, "value_error")
    }

    pub(super) fn missing_field(field: &str) -> Self {
        Self::invalid(["body", field], "Field required", "missing")
    }

    pub(super) fn invalid_query(name: &str, message: impl Into<String>) -> Self {
        Self::invalid(["query", name], message, "value_error")
    }

    pub(super) fn missing_query(name: &str) -> Self {
        Self::invalid(["query", name], "Field required", "missing")
    }

    pub(super) fn invalid<const N: usize>(
        loc: [&str; N],
        message: impl Into<String>,
        kind: &'static str,
    ) -> Self {
        let (loc, msg) = (loc.map(str::to_owned).to_vec(), message.into());
        let validation = vec![ValidationError { loc, msg, kind }];
        Self { validation, ..Self::new(StatusCode::UNPROCESSABLE_ENTITY, "invalid request") }
    }
}

impl IntoResponse for AioProblem {
    fn into_response(self) -> Response {
        let mut response = if self.validation.is_empty() {
            let body = ResponseEnvelope::<Box<Value>> {
                success: false,
                message: self.message,
                data: self.data,
                hint: self.hint.clone(),
            };
            (self.status, Json(body)).into_response()
        } else {
            (self.status, Json(json!({ "detail": self.validation }))).into_response()
        };
        if self.status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if let Some(seconds) = self.retry_after {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        error_format::add_hint(&mut response, self.hint.as_deref());
        response
    }
}

impl From<ServiceError> for AioProblem {
    fn from(error: ServiceError) -> Self {
        let status = match error.kind() {
            // The address leads to no sandbox any more.
            ErrorKind::NotFound | ErrorKind::Conflict { phase: Phase::Stopping | Phase::Stopped } => {
                return Self::not_found();
            }
            ErrorKind::NoSession => return Self::no_session(),
            ErrorKind::NoProcess | ErrorKind::NoSnapshot | ErrorKind::NoPool => StatusCode::NOT_FOUND,
            ErrorKind::Invalid | ErrorKind::File(_) | ErrorKind::Hook => StatusCode::BAD_REQUEST,
            ErrorKind::Conflict { .. } | ErrorKind::Snapshot | ErrorKind::Busy | ErrorKind::Taken => {
                StatusCode::CONFLICT
            }
            ErrorKind::Exhausted { .. } => StatusCode::TOO_MANY_REQUESTS,
            ErrorKind::Unsupported => StatusCode::NOT_IMPLEMENTED,
            ErrorKind::Refused => StatusCode::BAD_GATEWAY,
            ErrorKind::Mount(_) | ErrorKind::Pull | ErrorKind::Internal => StatusCode::INTERNAL_SERVER_ERROR,
        };
        if status == StatusCode::INTERNAL_SERVER_ERROR {
            tracing::error!(error = %error.message_with_causes(), "request failed");
        }
        let retry_after = match error.kind() {
            ErrorKind::Exhausted { retry_after } => Some(retry_after.as_secs().max(1)),
            _ => None,
        };
        let hint = error.hint().map(str::to_owned);
        Self { hint, retry_after, ..Self::new(status, error.to_string()) }
    }
}

impl From<ConcurrencyError> for AioProblem {
    fn from(error: ConcurrencyError) -> Self {
        let retry_after = Some(ConcurrencyError::RETRY_AFTER);
        Self { retry_after, ..Self::new(ConcurrencyError::STATUS, error.message()) }
    }
}

impl From<BodyError> for AioProblem {
    fn from(error: BodyError) -> Self {
        let status = match error {
            BodyError::TooLong(_) => StatusCode::PAYLOAD_TOO_LARGE,
            BodyError::Timeout => StatusCode::REQUEST_TIMEOUT,
            BodyError::EndedEarly => StatusCode::BAD_REQUEST,
        };
        Self::new(status, error.to_string())
    }
}
