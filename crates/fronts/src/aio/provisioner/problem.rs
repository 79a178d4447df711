//! Errors of the provisioner API, in the form of FastAPI: `{"detail": …}`.

use axum::Json;
use axum::response::{IntoResponse, Response};
use http::{HeaderValue, StatusCode, header};
use serde_json::json;
use service::{ErrorKind, MountFault, ServiceError};

use crate::aio::problem::AioProblem;
use crate::kit::body::BodyError;
use crate::kit::error_format::ErrorFormat;
use crate::server::concurrency::ConcurrencyError;

/// The format of errors that shared layers report for this front.
pub(super) static DETAIL_ERRORS: ErrorFormat = ErrorFormat {
    content_type: "application/json",
    body: |_, _, message| json!({ "detail": message }).to_string(),
};

/// Tells DeerFlow to ask again for the capabilities, since it relied on one that is absent.
const CAPABILITY_REFRESH_HEADER: &str = "x-deerflow-capability-refresh";

/// An error response.
#[derive(Debug)]
pub(super) enum ProvisionerProblem {
    /// The key is missing or wrong, or the server has none.
    Unauthorized,
    Detail {
        status: StatusCode,
        detail: String,
        retry_after: Option<u64>,
    },
    /// A part of the request failed validation.
    Validation(Box<AioProblem>),
    /// The request needs a Lark broker, which this server has not.
    NoLarkBroker,
}

impl ProvisionerProblem {
    pub(super) fn new(status: StatusCode, detail: impl Into<String>) -> Self {
        Self::Detail { status, detail: detail.into(), retry_after: None }
    }

    pub(super) fn bad_request(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, detail)
    }

    /// A sandbox could not be removed completely. Its driver retries that.
    pub(super) fn partial_cleanup(error: &ServiceError) -> Self {
        tracing::error!(error = %error.message_with_causes(), "failed to remove a sandbox; its driver retries");
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, format!("Partial cleanup: {error}"))
    }

    pub(super) fn conflict(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::CONFLICT, detail)
    }

    #[cfg(test)]
    pub(super) fn status(&self) -> StatusCode {
        match self {
            Self::Unauthorized => StatusCode::UNAUTHORIZED,
            Self::Detail { status, .. } => *status,
            Self::Validation(problem) => problem.status,
            Self::NoLarkBroker => StatusCode::SERVICE_UNAVAILABLE,
        }
    }

    pub(super) fn no_sandbox(id: &str) -> Self {
        let id: String = id.chars().take(64).collect();
        Self::new(StatusCode::NOT_FOUND, format!("Sandbox '{id}' not found"))
    }
}

impl IntoResponse for ProvisionerProblem {
    fn into_response(self) -> Response {
        match self {
            Self::Unauthorized => (StatusCode::UNAUTHORIZED, "Unauthorized").into_response(),
            Self::Validation(problem) => problem.into_response(),
            Self::NoLarkBroker => {
                let detail = json!({ "detail": "The Lark CLI broker is not available on this server" });
                let refresh = [(CAPABILITY_REFRESH_HEADER, "lark-broker")];
                (StatusCode::SERVICE_UNAVAILABLE, refresh, Json(detail)).into_response()
            }
            Self::Detail { status, detail, retry_after } => {
                let mut response = (status, Json(json!({ "detail": detail }))).into_response();
                if let Some(seconds) = retry_after {
                    response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
                }
                response
            }
        }
    }
}

impl From<ServiceError> for ProvisionerProblem {
    fn from(error: ServiceError) -> Self {
        let (status, retry_after) = match error.kind() {
            ErrorKind::NotFound => (StatusCode::NOT_FOUND, None),
            ErrorKind::Mount(MountFault::NotMade | MountFault::Failed) => {
                (StatusCode::INTERNAL_SERVER_ERROR, None)
            }
            ErrorKind::Invalid | ErrorKind::Unsupported | ErrorKind::Mount(_) => {
                (StatusCode::BAD_REQUEST, None)
            }
            ErrorKind::Conflict { .. } | ErrorKind::Busy | ErrorKind::Taken => (StatusCode::CONFLICT, None),
            // The server is full.
            ErrorKind::Exhausted { retry_after } => {
                (StatusCode::SERVICE_UNAVAILABLE, Some(retry_after.as_secs().max(1)))
            }
            _ => (StatusCode::INTERNAL_SERVER_ERROR, None),
        };
        if status == StatusCode::INTERNAL_SERVER_ERROR {
            tracing::error!(error = %error.message_with_causes(), "provisioner request failed");
        }
        let detail = match error.hint() {
            Some(hint) => format!("{error}; hint: {hint}"),
            None => error.to_string(),
        };
        Self::Detail { status, detail, retry_after }
    }
}

impl From<AioProblem> for ProvisionerProblem {
    fn from(problem: AioProblem) -> Self {
        match problem.validation.is_empty() {
            true => Self::new(problem.status, problem.message),
            false => Self::Validation(Box::new(problem)),
        }
    }
}

impl From<BodyError> for ProvisionerProblem {
    fn from(error: BodyError) -> Self {
        AioProblem::from(error).into()
    }
}

impl From<ConcurrencyError> for ProvisionerProblem {
    fn from(error: ConcurrencyError) -> Self {
        let retry_after = Some(ConcurrencyError::RETRY_AFTER);
        Self::Detail { status: ConcurrencyError::STATUS, detail: error.message(), retry_after }
    }
}
