//! Resource usage: samples of one sandbox, and hourly sums of each owner.

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::{StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use service::{HourlyUsage, UsageSample};

use super::OperatorState;
use super::access::VisibleOwners;
use super::sandboxes::{parse_sandbox_id, sandbox_error_response, sandbox_not_found, usage_amounts};
use crate::kit::error_format;
use crate::kit::time::format_rfc3339;

/// How many hours are returned if the query does not say.
const DEFAULT_HOURS: u64 = 24;

/// `GET /coracle/v1/sandboxes/{id}/usage`: the samples of the last hour, oldest first.
pub(super) async fn list_samples(
    State(state): State<OperatorState>,
    VisibleOwners(whose): VisibleOwners,
    id: Result<Path<String>, PathRejection>,
) -> Response {
    let Some(id) = parse_sandbox_id(id) else { return sandbox_not_found() };
    let shown = |sample: &UsageSample| json!({ "time": format_rfc3339(sample.time), "usage": usage_amounts(sample.usage) });
    match state.service.sandbox_of(whose.as_ref(), &id) {
        Ok(sandbox) => {
            let samples: Vec<Value> = sandbox.usage_samples().iter().map(shown).collect();
            Json(json!({ "samples": samples })).into_response()
        }
        Err(error) => sandbox_error_response(&error),
    }
}

/// `GET /coracle/v1/usage`: the last `?hours=`, newest first. The operator sees all owners, other
/// callers only themselves.
pub(super) async fn list_hours(
    State(state): State<OperatorState>,
    VisibleOwners(whose): VisibleOwners,
    uri: Uri,
) -> Response {
    let Some(count) = parse_hours(uri.query().unwrap_or_default()) else {
        let message = "`hours` must be a number of at least 1";
        return error_format::build_error(StatusCode::BAD_REQUEST, "INVALID_HOURS", message);
    };
    let hours: Vec<Value> = state.service.hourly_usage(whose.as_ref(), count).iter().map(hour_body).collect();
    Json(json!({ "hours": hours })).into_response()
}

fn parse_hours(query: &str) -> Option<u64> {
    let mut pairs = form_urlencoded::parse(query.as_bytes());
    match pairs.find(|(name, _)| name == "hours") {
        Some((_, value)) => value.parse().ok().filter(|count| *count > 0),
        None => Some(DEFAULT_HOURS),
    }
}

fn hour_body(hour: &HourlyUsage) -> Value {
    json!({
        "start": format_rfc3339(hour.start()),
        "owner": hour.owner.as_str(),
        "created": hour.used.created,
        "aliveMillis": hour.used.alive_millis,
        "cpuMicros": hour.used.cpu_micros,
        "memoryByteSeconds": hour.used.memory_byte_seconds,
        "networkBytesSent": hour.used.network_sent,
        "networkBytesReceived": hour.used.network_received,
    })
}
