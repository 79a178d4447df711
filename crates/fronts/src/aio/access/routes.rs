//! `/tickets` and `/auth`.

use std::collections::BTreeMap;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use http::{HeaderValue, header};
use serde::Serialize;

use super::{AUTH_PATH, AccessProof};
use crate::aio::AioState;
use crate::aio::problem::AioProblem;
use crate::aio::routes::AioRoute;
use crate::aio::target::AioTarget;

/// A ticket, without the envelope of other responses.
#[derive(Serialize)]
struct TicketResponse {
    ticket: String,
    /// In seconds.
    expires_in: u64,
}

pub(in crate::aio) fn routes() -> Vec<AioRoute> {
    vec![("/tickets", post(create_ticket)), (AUTH_PATH, get(check_credentials))]
}

async fn create_ticket(State(state): State<AioState>, target: AioTarget) -> Result<Response, AioProblem> {
    let ticket = state.access.issue_ticket(target.access)?;
    let expires_in = state.access.settings.ticket_ttl.as_secs();
    let mut response = Json(TicketResponse { ticket, expires_in }).into_response();
    response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    Ok(response)
}

/// Tells a proxy before the server that a request may pass. Requests that may not were refused before.
async fn check_credentials(target: AioTarget) -> Json<BTreeMap<&'static str, &'static str>> {
    let method = match target.access {
        AccessProof::NotNeeded => "none",
        AccessProof::Credential => "credential",
        AccessProof::Ticket => "ticket",
    };
    Json(BTreeMap::from([("status", "ok"), ("method", method)]))
}
