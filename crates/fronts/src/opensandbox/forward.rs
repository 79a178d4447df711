//! Forwards requests to ports, with the errors of this API.

use axum::extract::Request;
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use service::SandboxRef;

use super::OpenSandboxState;
use super::problem::Problem;
use crate::ports::forward::{self, ForwardError};
use crate::ports::target::{AddressForm, PortTarget};
use crate::server::concurrency;

pub(super) async fn forward_request(
    state: &OpenSandboxState,
    sandbox: &SandboxRef,
    target: &PortTarget,
    request: Request,
) -> Response {
    if let Err(error) = concurrency::begin_stream(request.extensions()) {
        return Problem::from(error).into_response();
    }
    let timeout = state.settings.answer_timeout;
    let answer = forward::forward_request(&state.service, timeout, sandbox, target, request).await;
    answer.unwrap_or_else(|error| forward_problem(error, target.form).into_response())
}

fn forward_problem(error: ForwardError, form: AddressForm) -> Problem {
    let message = error.to_string();
    match error {
        ForwardError::Connect => Problem::new(StatusCode::METHOD_NOT_ALLOWED, "METHOD_NOT_ALLOWED", message),
        ForwardError::InvalidPath => Problem::invalid(message),
        ForwardError::Unreachable(error) => unreachable_port(error.into(), form),
        ForwardError::BadResponse(_) => {
            Problem::new(StatusCode::BAD_GATEWAY, "BACKEND_RESPONSE_FAILED", message)
        }
        ForwardError::Timeout(_) => Problem::new(StatusCode::GATEWAY_TIMEOUT, "BACKEND_TIMEOUT", message),
    }
}

/// Through a gateway, a sandbox that does not run is reported as unavailable; the API reports why.
fn unreachable_port(problem: Problem, form: AddressForm) -> Problem {
    match (form, problem.status) {
        (AddressForm::Gateway, StatusCode::CONFLICT) => {
            Problem { status: StatusCode::SERVICE_UNAVAILABLE, ..problem }
        }
        _ => problem,
    }
}
