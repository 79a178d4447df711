//! Errors of the lifecycle API, with the codes of its reference server.

use axum::response::{IntoResponse, Response};
use domain::Owner;
use http::StatusCode;
use service::{ErrorKind, ServiceError};

use super::volumes;
use crate::auth::AuthError;
use crate::kit::error_format::{self, CODE_AND_MESSAGE};
use crate::server::concurrency::ConcurrencyError;

/// An error response: `{code, message}` and a status.
#[derive(Debug)]
pub(super) struct Problem {
    pub(super) status: StatusCode,
    pub(super) code: &'static str,
    /// The error message, followed by the hint for clients that show only this field.
    pub(super) message: String,
    /// How to resolve the error, for clients that show hints separately.
    pub(super) hint: Option<String>,
    /// Seconds after which the client may retry.
    pub(super) retry_after: Option<u64>,
    /// Some of the APIs on ports answer certain causes in a form of their own.
    pub(super) cause: ProblemCause,
}

/// The cause of a problem, as far as the form of the response depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ProblemCause {
    /// The key is missing or wrong.
    ApiKey,
    Other,
}

impl Problem {
    pub(super) fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        let (message, cause) = (message.into(), ProblemCause::Other);
        Self { status, code, message, hint: None, retry_after: None, cause }
    }

    pub(super) fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "SANDBOX::INVALID_PARAMETER", message)
    }

    pub(super) fn unsupported(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "SANDBOX::API_NOT_SUPPORTED", message)
    }

    pub(super) fn no_sandbox(id: &str) -> Self {
        let id: String = id.chars().take(64).collect();
        let message = format!("Sandbox {id} was not found");
        Self::new(StatusCode::NOT_FOUND, "DOCKER::SANDBOX_NOT_FOUND", message)
    }

    pub(super) fn no_snapshot(id: &str) -> Self {
        let id: String = id.chars().take(64).collect();
        let message = format!("Snapshot {id} was not found");
        Self::new(StatusCode::NOT_FOUND, "SNAPSHOT::NOT_FOUND", message)
    }

    pub(super) fn conflict(code: &'static str, message: impl Into<String>) -> Self {
        Self::new(StatusCode::CONFLICT, code, message)
    }

    /// Replaces the code, if the status is `status`.
    pub(super) fn with_code_for(self, status: StatusCode, code: &'static str) -> Self {
        if self.status == status { Self { code, ..self } } else { self }
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let mut response = match self.retry_after {
            Some(seconds) => {
                CODE_AND_MESSAGE.build_retry_error(self.status, self.code, &self.message, seconds)
            }
            None => error_format::build_error(self.status, self.code, &self.message),
        };
        error_format::add_hint(&mut response, self.hint.as_deref());
        response
    }
}

impl From<AuthError> for Problem {
    fn from(refusal: AuthError) -> Self {
        let by_key = |code, message: &str| Self {
            cause: ProblemCause::ApiKey,
            ..Self::new(StatusCode::UNAUTHORIZED, code, message)
        };
        match refusal {
            AuthError::NoKey => by_key("MISSING_API_KEY", "the header OPEN-SANDBOX-API-KEY is missing"),
            AuthError::WrongKey => by_key("INVALID_API_KEY", "unknown API key"),
            AuthError::Page => {
                let message = "a server without an API key refuses requests from web pages";
                Self::new(StatusCode::FORBIDDEN, "FORBIDDEN", message)
            }
        }
    }
}

impl From<ConcurrencyError> for Problem {
    fn from(error: ConcurrencyError) -> Self {
        let problem = Self::new(ConcurrencyError::STATUS, ConcurrencyError::CODE, error.message());
        Self { retry_after: Some(ConcurrencyError::RETRY_AFTER), ..problem }
    }
}

impl From<ServiceError> for Problem {
    fn from(error: ServiceError) -> Self {
        let (status, code) = match error.kind() {
            ErrorKind::NotFound => (StatusCode::NOT_FOUND, "DOCKER::SANDBOX_NOT_FOUND"),
            ErrorKind::Invalid | ErrorKind::File(_) => {
                (StatusCode::BAD_REQUEST, "SANDBOX::INVALID_PARAMETER")
            }
            ErrorKind::Unsupported => (StatusCode::BAD_REQUEST, "SANDBOX::API_NOT_SUPPORTED"),
            ErrorKind::Conflict { .. } | ErrorKind::Busy => {
                (StatusCode::CONFLICT, "DOCKER::SANDBOX_NOT_RUNNING")
            }
            ErrorKind::Exhausted { .. } => {
                (StatusCode::TOO_MANY_REQUESTS, "KUBERNETES::POOL_CAPACITY_EXHAUSTED")
            }
            ErrorKind::NoPool => (StatusCode::NOT_FOUND, "KUBERNETES::POOL_NOT_FOUND"),
            ErrorKind::Taken => (StatusCode::CONFLICT, "KUBERNETES::POOL_ALREADY_EXISTS"),
            ErrorKind::NoSnapshot => (StatusCode::NOT_FOUND, "SNAPSHOT::NOT_FOUND"),
            ErrorKind::Snapshot => (StatusCode::CONFLICT, snapshot_code(&error)),
            // The client's own command failed, which is not a server error.
            ErrorKind::Hook => (StatusCode::BAD_REQUEST, "DOCKER::SANDBOX_START_FAILED"),
            ErrorKind::Pull => (StatusCode::INTERNAL_SERVER_ERROR, "DOCKER::SANDBOX_IMAGE_PULL_FAILED"),
            ErrorKind::Refused => (StatusCode::BAD_GATEWAY, "BACKEND_CONNECTION_FAILED"),
            ErrorKind::NoProcess | ErrorKind::NoSession | ErrorKind::Mount(_) | ErrorKind::Internal => {
                (StatusCode::INTERNAL_SERVER_ERROR, "SANDBOX::INTERNAL_ERROR")
            }
        };
        let (status, code) = volumes::volume_error_status(&error).unwrap_or((status, code));
        log_internal_error(&error);
        let problem = Self::new(status, code, with_hint(&error, error.to_string()));
        let hint = error.hint().map(str::to_owned);
        Self { hint, retry_after: retry_after(&error), ..problem }
    }
}

/// The code of an error of the kind [`ErrorKind::Snapshot`].
fn snapshot_code(error: &ServiceError) -> &'static str {
    match error {
        ServiceError::NotASource { .. } => "SNAPSHOT::INVALID_SOURCE_STATE",
        ServiceError::SnapshotInProgress(_) => "SNAPSHOT::RUNTIME_CREATE_CONFLICT",
        ServiceError::SnapshotNotReady { .. } => "SNAPSHOT::NOT_READY",
        ServiceError::SnapshotInUse(_) => "SNAPSHOT::DELETE_CONFLICT",
        ServiceError::SnapshotTooLarge { .. } => "SNAPSHOT::INVALID_RESTORE_CONFIG",
        _ => "SNAPSHOT::INVALID_STATE",
    }
}

/// Logs internal errors in full; the client gets only the message.
pub(super) fn log_internal_error(error: &ServiceError) {
    if error.kind() == ErrorKind::Internal {
        tracing::error!(error = %error.message_with_causes(), "request failed");
    }
}

/// The problem for one owner, with this message and the hint that applies to that owner.
pub(super) fn problem_for_owner(owner: &Owner, error: ServiceError, message: String) -> Problem {
    let hint = error.hint_for(owner).map(str::to_owned);
    let message = add_hint(message, hint.as_deref());
    Problem { message, hint, ..Problem::from(error) }
}

/// Appends the error's hint to a message.
pub(super) fn with_hint(error: &ServiceError, message: String) -> String {
    add_hint(message, error.hint())
}

fn add_hint(message: String, hint: Option<&str>) -> String {
    match hint {
        Some(hint) => format!("{message}; hint: {hint}"),
        None => message,
    }
}

pub(super) fn retry_after(error: &ServiceError) -> Option<u64> {
    match error.kind() {
        ErrorKind::Exhausted { retry_after } => Some(retry_after.as_secs().max(1)),
        _ => None,
    }
}
