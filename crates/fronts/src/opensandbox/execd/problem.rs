//! Errors of the execution API, with the codes of its reference daemon.

use axum::extract::{FromRequest, Request};
use axum::response::{IntoResponse, Response};
use domain::ProcessId;
use http::StatusCode;
use serde::de::DeserializeOwned;
use service::{ErrorKind, FileFault, ServiceError};

use crate::kit::query::QueryParams;
use crate::opensandbox::OpenSandboxState;
use crate::opensandbox::access::read_body;
use crate::opensandbox::problem::{self, Problem};
use crate::server::concurrency::ConcurrencyError;

/// Like [`Problem`], with this API's codes.
#[derive(Debug)]
pub(in crate::opensandbox) struct ExecdProblem(pub(super) Problem);

impl ExecdProblem {
    pub(super) fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        Self(Problem::new(status, code, message))
    }

    pub(super) fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "INVALID_REQUEST_BODY", message)
    }

    pub(super) fn missing_query(name: &str) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "MISSING_QUERY", format!("query parameter `{name}` missing"))
    }

    pub(super) fn runtime_error(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "RUNTIME_ERROR", message)
    }

    pub(super) fn no_process(id: &str) -> Self {
        let id: String = id.chars().take(64).collect();
        Self::new(StatusCode::NOT_FOUND, "INVALID_REQUEST_BODY", format!("command `{id}` not found"))
    }

    pub(super) fn no_session(id: &str) -> Self {
        let id: String = id.chars().take(64).collect();
        Self::new(StatusCode::NOT_FOUND, "CONTEXT_NOT_FOUND", format!("session `{id}` not found"))
    }
}

impl IntoResponse for ExecdProblem {
    fn into_response(self) -> Response {
        self.0.into_response()
    }
}

/// Clients read undeclared statuses as raw text, so file errors other than "missing" and "wrong kind"
/// are 500, as in the reference.
impl From<ServiceError> for ExecdProblem {
    fn from(error: ServiceError) -> Self {
        let (status, code) = match error.kind() {
            ErrorKind::NotFound => (StatusCode::NOT_FOUND, "DOCKER::SANDBOX_NOT_FOUND"),
            ErrorKind::NoProcess => (StatusCode::NOT_FOUND, "INVALID_REQUEST_BODY"),
            ErrorKind::NoSession => (StatusCode::NOT_FOUND, "CONTEXT_NOT_FOUND"),
            ErrorKind::File(FileFault::NotFound) => (StatusCode::NOT_FOUND, "FILE_NOT_FOUND"),
            ErrorKind::File(FileFault::NotADirectory | FileFault::IsADirectory | FileFault::Invalid) => {
                (StatusCode::BAD_REQUEST, "INVALID_FILE")
            }
            ErrorKind::Invalid => (StatusCode::BAD_REQUEST, "INVALID_REQUEST_BODY"),
            ErrorKind::Conflict { .. } => (StatusCode::CONFLICT, "SERVICE_UNAVAILABLE"),
            ErrorKind::NoSnapshot => (StatusCode::NOT_FOUND, "INVALID_REQUEST_BODY"),
            ErrorKind::Snapshot | ErrorKind::Busy => (StatusCode::CONFLICT, "RUNTIME_ERROR"),
            ErrorKind::Exhausted { .. } => (StatusCode::TOO_MANY_REQUESTS, "SERVICE_UNAVAILABLE"),
            ErrorKind::Unsupported => (StatusCode::NOT_IMPLEMENTED, "NOT_SUPPORTED"),
            ErrorKind::File(_)
            | ErrorKind::NoPool
            | ErrorKind::Taken
            | ErrorKind::Refused
            | ErrorKind::Mount(_)
            | ErrorKind::Pull
            | ErrorKind::Hook
            | ErrorKind::Internal => (StatusCode::INTERNAL_SERVER_ERROR, "RUNTIME_ERROR"),
        };
        problem::log_internal_error(&error);
        let problem = Problem::new(status, code, problem::with_hint(&error, error_message(&error)));
        let hint = error.hint().map(str::to_owned);
        Self(Problem { hint, retry_after: problem::retry_after(&error), ..problem })
    }
}

/// Returns the message, which for a file error includes the reason.
fn error_message(error: &ServiceError) -> String {
    let why = match error.kind() {
        ErrorKind::File(FileFault::NotFound) => "it does not exist",
        ErrorKind::File(FileFault::AlreadyExists) => "it already exists",
        ErrorKind::File(FileFault::NotADirectory) => "it is not a directory",
        ErrorKind::File(FileFault::IsADirectory) => "it is a directory",
        ErrorKind::File(FileFault::Permission) => "permission denied",
        ErrorKind::File(FileFault::NoSpace) => "no space left",
        ErrorKind::File(FileFault::TooLarge) => "it is too large",
        _ => return error.to_string(),
    };
    format!("{error}: {why}")
}

impl From<ConcurrencyError> for ExecdProblem {
    fn from(error: ConcurrencyError) -> Self {
        Self(error.into())
    }
}

impl From<Problem> for ExecdProblem {
    fn from(problem: Problem) -> Self {
        Self(Problem { code: "INVALID_REQUEST_BODY", ..problem })
    }
}

/// A JSON body. An empty one counts as `{}`, since one client sends that if it sets no fields.
pub(super) struct JsonOrEmpty<T>(pub(super) T);

impl<T: DeserializeOwned> FromRequest<OpenSandboxState> for JsonOrEmpty<T> {
    type Rejection = ExecdProblem;

    async fn from_request(request: Request, state: &OpenSandboxState) -> Result<Self, ExecdProblem> {
        let bytes = read_body(request.into_body(), state.settings.json_body_limit).await?;
        let text: &[u8] = if bytes.trim_ascii().is_empty() { b"{}" } else { &bytes };
        let parsed = serde_json::from_slice(text);
        parsed.map(Self).map_err(|error| ExecdProblem::invalid(format!("invalid request body: {error}")))
    }
}

/// Returns a required query parameter.
pub(super) fn required_parameter<'a>(query: &'a QueryParams, name: &str) -> Result<&'a str, ExecdProblem> {
    query.first(name).filter(|value| !value.is_empty()).ok_or_else(|| ExecdProblem::missing_query(name))
}

/// Parses the id of a command. A malformed one is reported as not found.
pub(super) fn parse_process_id(text: &str) -> Result<ProcessId, ExecdProblem> {
    ProcessId::parse(text).ok().ok_or_else(|| ExecdProblem::no_process(text))
}
