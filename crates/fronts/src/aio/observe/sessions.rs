//! Sessions: stretches of time that a client wants a report about.

use std::time::{Duration, SystemTime};

use axum::Json;
use axum::extract::State;
use domain::SandboxId;
use http::StatusCode;
use serde::{Deserialize, Serialize};

use super::SAMPLE_SECONDS;
use super::registry::{ObserveMode, ObserveSession};
use crate::aio::AioState;
use crate::aio::body::AioJson;
use crate::aio::envelope::{ResponseEnvelope, data_response};
use crate::aio::problem::AioProblem;
use crate::aio::target::AioTarget;
use crate::kit::time::format_rfc3339;
use crate::server::request_log::unique_hex;

/// Samples are kept for an hour.
const MAX_DURATION: Duration = Duration::from_secs(60 * 60);
pub(super) const MAX_KEY_CHARS: usize = 128;
/// Sampling has no directory inside the sandbox; clients require the field.
const NO_DIRECTORY: &str = "";

#[derive(Serialize)]
pub(super) struct ObserveStatus {
    mode: &'static str,
    running: bool,
    session_id: Option<String>,
    started_at: Option<String>,
    ends_at: Option<String>,
    interval_seconds: f64,
    last_sample_at: Option<String>,
    runtime_dir: Option<String>,
    report_count: usize,
}

#[derive(Deserialize)]
pub(super) struct StartSession {
    mode: Option<String>,
    idempotency_key: Option<String>,
    duration_seconds: Option<i64>,
    interval_seconds: Option<f64>,
    include_processes: Option<bool>,
}

#[derive(Serialize)]
pub(super) struct StartedSession {
    session_id: String,
    mode: &'static str,
    started_at: String,
    ends_at: Option<String>,
    interval_seconds: f64,
    runtime_dir: &'static str,
}

#[derive(Deserialize)]
pub(super) struct StopSession {
    session_id: Option<String>,
}

#[derive(Serialize)]
pub(super) struct StoppedSession {
    session_id: String,
    stopped: bool,
    /// Whether there are samples that a report would contain.
    report_ready: bool,
}

impl StartedSession {
    fn from_session(session: &ObserveSession) -> Self {
        Self {
            session_id: session.id.clone(),
            mode: session.mode.name(),
            started_at: format_rfc3339(session.started),
            ends_at: session.ends.map(format_rfc3339),
            interval_seconds: SAMPLE_SECONDS,
            runtime_dir: NO_DIRECTORY,
        }
    }
}

/// `GET /v1/sandbox/observe/status`
pub(super) async fn get_status(
    State(state): State<AioState>,
    target: AioTarget,
) -> Json<ResponseEnvelope<ObserveStatus>> {
    let last = target.sandbox.usage_samples().last().map(|sample| format_rfc3339(sample.time));
    let status = state.observe.with_known(target.sandbox.id(), |observed| {
        let report_count = observed.reports.len();
        let session = observed.active_session(SystemTime::now()).cloned();
        ObserveStatus {
            mode: session.as_ref().map_or(ObserveMode::Guardrail, |session| session.mode).name(),
            running: true,
            session_id: session.as_ref().map(|session| session.id.clone()),
            started_at: session.as_ref().map(|session| format_rfc3339(session.started)),
            ends_at: session.as_ref().and_then(|session| session.ends).map(format_rfc3339),
            interval_seconds: SAMPLE_SECONDS,
            last_sample_at: last,
            runtime_dir: None,
            report_count,
        }
    });
    data_response(status)
}

/// `POST /v1/sandbox/observe/start`
pub(super) async fn start_session(
    State(state): State<AioState>,
    target: AioTarget,
    AioJson(body): AioJson<StartSession>,
) -> Result<Json<ResponseEnvelope<StartedSession>>, AioProblem> {
    let started = SystemTime::now();
    let session = parse_session(body, started)?;
    let exists = |id: &SandboxId| state.service.sandbox_of(None, id).is_ok();
    let added = state.observe.with_added(target.sandbox.id(), exists, |observed| {
        if let Some(active) = observed.active_session(started) {
            let is_retry = active.retry_key.is_some() && active.retry_key == session.retry_key;
            return if is_retry { Ok(active.clone()) } else { Err(active.id.clone()) };
        }
        observed.add_session(session.clone());
        Ok(session)
    });
    let session = added.map_err(|active| {
        AioProblem::new(StatusCode::CONFLICT, format!("session `{active}` is still observing"))
    })?;
    Ok(data_response(StartedSession::from_session(&session)))
}

/// `POST /v1/sandbox/observe/stop`
pub(super) async fn stop_session(
    State(state): State<AioState>,
    target: AioTarget,
    AioJson(body): AioJson<StopSession>,
) -> Result<Json<ResponseEnvelope<StoppedSession>>, AioProblem> {
    let now = SystemTime::now();
    let stopped = state.observe.with_known(target.sandbox.id(), |observed| {
        let is_meant =
            |active: &&mut ObserveSession| body.session_id.as_ref().is_none_or(|id| *id == active.id);
        let active = observed.active_session(now).filter(is_meant)?;
        active.ends = Some(now);
        Some(active.clone())
    });
    let session = stopped.ok_or_else(|| AioProblem::new(StatusCode::NOT_FOUND, "no such active session"))?;
    let samples = target.sandbox.usage_samples();
    let report_ready = samples.iter().any(|sample| sample.time >= session.started && sample.time <= now);
    Ok(data_response(StoppedSession { session_id: session.id, stopped: true, report_ready }))
}

fn parse_session(body: StartSession, started: SystemTime) -> Result<ObserveSession, AioProblem> {
    let mode = match body.mode.as_deref() {
        None | Some("capture") => ObserveMode::Capture,
        Some("guardrail") => ObserveMode::Guardrail,
        Some(_) => return Err(AioProblem::invalid_field("mode", "a mode is `guardrail` or `capture`")),
    };
    let duration = match body.duration_seconds {
        None => MAX_DURATION,
        Some(seconds) => {
            let duration = u64::try_from(seconds).ok().map(Duration::from_secs);
            duration.filter(|duration| !duration.is_zero() && *duration <= MAX_DURATION).ok_or_else(|| {
                AioProblem::invalid_field("duration_seconds", "a duration has 1 to 3600 seconds")
            })?
        }
    };
    // A longer interval is served with more samples than were asked for.
    if body.interval_seconds.is_some_and(|interval| interval.is_nan() || interval < SAMPLE_SECONDS) {
        let message = format!("samples are taken every {SAMPLE_SECONDS} seconds, not more often");
        return Err(AioProblem::invalid_field("interval_seconds", message));
    }
    if body.include_processes == Some(true) {
        return Err(AioProblem::invalid_field("include_processes", "processes are not sampled"));
    }
    Ok(ObserveSession {
        id: unique_hex(),
        mode,
        retry_key: check_key(body.idempotency_key)?,
        started,
        ends: started.checked_add(duration),
    })
}

pub(super) fn check_key(key: Option<String>) -> Result<Option<String>, AioProblem> {
    match key {
        Some(key) if key.chars().count() > MAX_KEY_CHARS => {
            Err(AioProblem::invalid_field("idempotency_key", "a key has at most 128 characters"))
        }
        key => Ok(key),
    }
}
