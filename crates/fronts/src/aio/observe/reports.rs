//! Reports: the samples of a session, or of the last hour, as a gzip file.

use std::io::Write;
use std::time::SystemTime;

use axum::Json;
use axum::extract::{Path, State};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use domain::SandboxId;
use flate2::Compression;
use flate2::write::GzEncoder;
use http::{HeaderValue, StatusCode, header};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use service::UsageSample;

use super::SAMPLE_SECONDS;
use super::live::{DiskFigures, UsageFigures};
use super::registry::{ObserveReport, ObserveSession};
use super::sessions::check_key;
use crate::aio::AioState;
use crate::aio::body::AioJson;
use crate::aio::envelope::{ResponseEnvelope, data_response};
use crate::aio::problem::AioProblem;
use crate::aio::target::AioTarget;
use crate::kit::time::format_rfc3339;
use crate::server::request_log::unique_hex;

const DEFAULT_REASON: &str = "manual";
const MAX_REASON_CHARS: usize = 256;

#[derive(Deserialize)]
pub(super) struct ExportReport {
    idempotency_key: Option<String>,
    session_id: Option<String>,
    reason: Option<String>,
}

#[derive(Serialize)]
pub(super) struct ReportInfo {
    report_id: String,
    session_id: Option<String>,
    reason: String,
    created_at: String,
    /// Where the report can be downloaded, below the address of the API.
    path: String,
    size_bytes: usize,
}

impl ReportInfo {
    fn from_report(report: &ObserveReport) -> Self {
        Self {
            report_id: report.id.clone(),
            session_id: report.session.clone(),
            reason: report.reason.clone(),
            created_at: format_rfc3339(report.created),
            path: format!("/v1/sandbox/observe/reports/{}", report.id),
            size_bytes: report.content.len(),
        }
    }
}

/// `POST /v1/sandbox/observe/export`: without a session, the last one, or else the whole last hour.
pub(super) async fn export_report(
    State(state): State<AioState>,
    target: AioTarget,
    AioJson(body): AioJson<ExportReport>,
) -> Result<Json<ResponseEnvelope<ReportInfo>>, AioProblem> {
    let retry_key = check_key(body.idempotency_key)?;
    let reason = body.reason.unwrap_or_else(|| DEFAULT_REASON.to_owned());
    if reason.chars().count() > MAX_REASON_CHARS {
        return Err(AioProblem::invalid_field("reason", "a reason has at most 256 characters"));
    }
    let id = target.sandbox.id();
    let known = state
        .observe
        .with_known(id, |observed| observed.report_of_key(retry_key.as_deref()).map(ReportInfo::from_report));
    if let Some(report) = known {
        return Ok(data_response(report));
    }
    let session = state
        .observe
        .with_known(id, |observed| observed.session_to_report(body.session_id.as_deref()).cloned());
    if session.is_none() && body.session_id.is_some() {
        return Err(AioProblem::new(StatusCode::NOT_FOUND, "Session not found"));
    }
    let samples = target.sandbox.usage_samples();
    // It takes processor time, so it blocks neither other requests nor a lock.
    let built = tokio::task::spawn_blocking(move || build_report(&samples, session, retry_key, reason));
    let report = built.await.map_err(|error| internal_error(&error))??;
    let exists = |id: &SandboxId| state.service.sandbox_of(None, id).is_ok();
    Ok(data_response(state.observe.with_added(id, exists, |observed| {
        // A retry may have come while this one was built.
        if let Some(former) = observed.report_of_key(report.retry_key.as_deref()) {
            return ReportInfo::from_report(former);
        }
        let info = ReportInfo::from_report(&report);
        observed.add_report(report);
        info
    })))
}

fn build_report(
    samples: &[UsageSample],
    session: Option<ObserveSession>,
    retry_key: Option<String>,
    reason: String,
) -> Result<ObserveReport, AioProblem> {
    let (id, created) = (unique_hex(), SystemTime::now());
    let document = json!({
        "report_id": id,
        "session_id": session.as_ref().map(|session| &session.id),
        "reason": reason,
        "created_at": format_rfc3339(created),
        "interval_seconds": SAMPLE_SECONDS,
        "samples": samples_of_session(samples, session.as_ref()),
    });
    let content = compress(document.to_string().as_bytes())?;
    let session = session.map(|session| session.id);
    Ok(ObserveReport { id, session, retry_key, reason, created, content })
}

/// `GET /v1/sandbox/observe/reports`
pub(super) async fn list_reports(
    State(state): State<AioState>,
    target: AioTarget,
) -> Json<ResponseEnvelope<Vec<ReportInfo>>> {
    data_response(state.observe.with_known(target.sandbox.id(), |observed| {
        observed.reports.iter().map(ReportInfo::from_report).collect()
    }))
}

/// `GET /v1/sandbox/observe/reports/{report_id}`
pub(super) async fn download_report(
    State(state): State<AioState>,
    target: AioTarget,
    Path(id): Path<String>,
) -> Result<Response, AioProblem> {
    let content = state.observe.with_known(target.sandbox.id(), |observed| {
        observed.reports.iter().find(|report| report.id == id).map(|report| report.content.clone())
    });
    let mut response = content.ok_or_else(no_report)?.into_response();
    let kind = HeaderValue::from_static("application/gzip");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    Ok(response)
}

/// `DELETE /v1/sandbox/observe/reports/{report_id}`
pub(super) async fn delete_report(
    State(state): State<AioState>,
    target: AioTarget,
    Path(id): Path<String>,
) -> Result<Json<ResponseEnvelope<ReportInfo>>, AioProblem> {
    let removed = state.observe.with_known(target.sandbox.id(), |observed| {
        let index = observed.reports.iter().position(|report| report.id == id)?;
        observed.reports.remove(index)
    });
    removed.map(|report| data_response(ReportInfo::from_report(&report))).ok_or_else(no_report)
}

fn no_report() -> AioProblem {
    AioProblem::new(StatusCode::NOT_FOUND, "Report not found")
}

/// The samples as JSON. The load of the first one is that since the sample before the session.
fn samples_of_session(samples: &[UsageSample], session: Option<&ObserveSession>) -> Vec<Value> {
    let is_inside = |sample: &UsageSample| {
        session.is_none_or(|session| {
            sample.time >= session.started && session.ends.is_none_or(|end| sample.time <= end)
        })
    };
    let formers = std::iter::once(None).chain(samples.iter().map(Some));
    let pairs = samples.iter().zip(formers).filter(|(sample, _)| is_inside(sample));
    let show = |(sample, former): (&UsageSample, Option<&UsageSample>)| {
        json!({
            "ts": format_rfc3339(sample.time),
            "cgroup": UsageFigures::new(*sample, former),
            "disk": DiskFigures::from_usage(&sample.usage).into_iter().collect::<Vec<_>>(),
        })
    };
    pairs.map(show).collect()
}

fn compress(document: &[u8]) -> Result<Bytes, AioProblem> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    let written = encoder.write_all(document).and_then(|()| encoder.finish());
    written.map(Bytes::from).map_err(|error| internal_error(&error))
}

fn internal_error(error: &dyn std::error::Error) -> AioProblem {
    tracing::error!(%error, "failed to build a report");
    AioProblem::new(StatusCode::INTERNAL_SERVER_ERROR, "internal error")
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::time::{Duration, UNIX_EPOCH};

    use service::SandboxUsage;

    use super::super::registry::ObserveMode;
    use super::*;

    #[test]
    fn report_has_the_samples_of_its_session() {
        let at = |seconds| UNIX_EPOCH + Duration::from_secs(seconds);
        let sample = |seconds| UsageSample {
            time: at(seconds),
            usage: SandboxUsage { cpu_micros: Some(seconds * 500_000), ..SandboxUsage::default() },
        };
        let samples = [10, 20, 30, 40].map(sample);
        assert_eq!(samples_of_session(&samples, None).len(), 4);
        let (id, mode) = ("s".to_owned(), ObserveMode::Capture);
        let session = ObserveSession { id, mode, retry_key: None, started: at(15), ends: Some(at(30)) };
        let shown = samples_of_session(&samples, Some(&session));
        assert_eq!(shown.len(), 2);
        assert_eq!(shown[0]["ts"], "1970-01-01T00:00:20Z");
        assert_eq!(shown[0]["cgroup"]["cpu_usage_pct"], 50.0);
    }

    #[test]
    fn content_is_gzip() {
        let content = compress(b"report").unwrap();
        let mut text = String::new();
        flate2::read::GzDecoder::new(&content[..]).read_to_string(&mut text).unwrap();
        assert_eq!(text, "report");
    }
}
