//! Resource usage: samples of one sandbox, and hourly sums of each owner.

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::{StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use service::{Hour, Sample};

use super::access::Scope;
use super::sandboxes::{amounts, id_of, not_found, refuse};
use super::{Front, time};
use crate::answer;

/// How many hours are returned if the query does not say.
const USUAL_HOURS: u64 = 24;

/// `GET /coracle/v1/sandboxes/{id}/usage`: the samples of the last hour, oldest first.
pub(super) async fn samples(
    State(front): State<Front>,
    Scope(whose): Scope,
    id: Result<Path<String>, PathRejection>,
) -> Response {
    let Some(id) = id_of(id) else { return not_found() };
    let shown = |sample: &Sample| json!({ "time": time(sample.time), "usage": amounts(sample.usage) });
    match front.service.samples(whose.as_ref(), &id) {
        Ok(samples) => {
            let samples: Vec<Value> = samples.iter().map(shown).collect();
            Json(json!({ "samples": samples })).into_response()
        }
        Err(error) => refuse(&error),
    }
}

/// `GET /coracle/v1/usage`: the last `?hours=`, newest first. The operator sees all owners, other
/// callers only themselves.
pub(super) async fn hours(State(front): State<Front>, Scope(whose): Scope, uri: Uri) -> Response {
    let Some(count) = hours_of(uri.query().unwrap_or_default()) else {
        let message = "`hours` must be a number of at least 1";
        return answer::error(StatusCode::BAD_REQUEST, "INVALID_HOURS", message);
    };
    let hours: Vec<Value> = front.service.hours(whose.as_ref(), count).iter().map(shown).collect();
    Json(json!({ "hours": hours })).into_response()
}

fn hours_of(query: &str) -> Option<u64> {
    let mut pairs = form_urlencoded::parse(query.as_bytes());
    match pairs.find(|(name, _)| name == "hours") {
        Some((_, value)) => value.parse().ok().filter(|count| *count > 0),
        None => Some(USUAL_HOURS),
    }
}

fn shown(hour: &Hour) -> Value {
    json!({
        "start": time(hour.start()),
        "owner": hour.owner.as_str(),
        "created": hour.used.created,
        "aliveMillis": hour.used.alive_millis,
        "cpuMicros": hour.used.cpu_micros,
        "memoryByteSeconds": hour.used.memory_byte_seconds,
    })
}
