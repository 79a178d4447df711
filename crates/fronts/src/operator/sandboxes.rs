//! Reports on sandboxes: their spec, what is really enforced, and their usage.

use std::collections::BTreeMap;

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::{StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use domain::{ExitReason, Phase, SandboxId};
use jiff::Timestamp;
use serde::Serialize;
use serde_json::json;
use service::{
    ErrorKind, HookReport, OperatorActionKind, OperatorObjectKind, Sandbox, SandboxUsage, ServiceError,
};

use super::OperatorState;
use super::access::{SelectedOwners, VisibleOwners};
use super::network::ReportedPolicy;
use crate::kit::error_format;
use crate::kit::time::format_rfc3339;

/// `GET /coracle/v1/sandboxes`: every sandbox that the caller may see, newest first, with its current usage unless
/// `usage=false`. `operator` says whether the caller is the operator of a server with keys.
pub(super) async fn list_sandboxes(
    State(state): State<OperatorState>,
    selected: SelectedOwners,
    uri: Uri,
) -> Response {
    selected.record_list(&state.service, OperatorObjectKind::Sandbox);
    let whose = selected.owner();
    let reports: Vec<SandboxReport> = if wants_usage(&uri) {
        let found = state.service.list_with_usage(whose).await;
        found.iter().map(|(sandbox, usage)| SandboxReport::from_sandbox(sandbox, *usage)).collect()
    } else {
        let found = state.service.list_without_usage(whose);
        found.iter().map(|sandbox| SandboxReport::from_sandbox(sandbox, None)).collect()
    };
    // Without keys there is only one owner, so the list need not show owners.
    let operator = selected.is_operator() && !state.service.has_no_keys();
    Json(json!({ "sandboxes": reports, "operator": operator })).into_response()
}

fn wants_usage(uri: &Uri) -> bool {
    let query = uri.query().unwrap_or_default();
    !form_urlencoded::parse(query.as_bytes()).any(|(name, value)| name == "usage" && value == "false")
}

/// `GET /coracle/v1/sandboxes/{id}`
pub(super) async fn inspect_sandbox(
    State(state): State<OperatorState>,
    VisibleOwners(whose): VisibleOwners,
    id: Result<Path<String>, PathRejection>,
) -> Response {
    let Some(id) = parse_sandbox_id(id) else { return sandbox_not_found() };
    let sandbox = match state.service.sandbox_of(whose.as_ref(), &id) {
        Ok(sandbox) => sandbox,
        Err(error) => return sandbox_error_response(&error),
    };
    let usage = sandbox.current_usage().await.ok();
    if whose.is_none() {
        let (kind, thing) = (OperatorActionKind::Inspected, OperatorObjectKind::Sandbox);
        state.service.record_view(sandbox.owner(), kind, thing, id.as_str());
    }
    // The report is still useful without hooks if the agent does not respond.
    let hooks = sandbox.list_hooks().await.unwrap_or_default();
    let hooks = hooks.iter().map(HookDetails::from_report).collect();
    let report = SandboxReport::from_sandbox(&sandbox.current_state(), usage);
    let policy = sandbox.network().policy();
    let policy =
        Some(ReportedPolicy::of_policy(&policy)).filter(|_| sandbox.read_state(Sandbox::is_filtered));
    Json(SandboxReport { hooks, policy, ..report }).into_response()
}

/// `DELETE /coracle/v1/sandboxes/{id}`: responds once the sandbox is gone. The operator may remove any
/// sandbox, which is recorded; other callers only their own.
pub(super) async fn remove_sandbox(
    State(state): State<OperatorState>,
    VisibleOwners(whose): VisibleOwners,
    id: Result<Path<String>, PathRejection>,
) -> Response {
    let Some(id) = parse_sandbox_id(id) else { return sandbox_not_found() };
    let removed = match &whose {
        Some(owner) => match state.service.sandbox(owner, &id) {
            Ok(sandbox) => sandbox.destroy().await,
            Err(error) => Err(error),
        },
        None => state.service.remove_any_sandbox(&id).await,
    };
    match removed {
        Ok(_) => StatusCode::NO_CONTENT.into_response(),
        Err(error) => sandbox_error_response(&error),
    }
}

/// Parses the sandbox id in a path; `None` if it is malformed.
pub(super) fn parse_sandbox_id(id: Result<Path<String>, PathRejection>) -> Option<SandboxId> {
    SandboxId::parse(&id.ok()?.0).ok()
}

pub(super) fn sandbox_not_found() -> Response {
    error_format::build_error(StatusCode::NOT_FOUND, "SANDBOX_NOT_FOUND", "sandbox not found")
}

pub(super) fn sandbox_error_response(error: &ServiceError) -> Response {
    match error.kind() {
        ErrorKind::NotFound => sandbox_not_found(),
        _ => error_format::build_error(StatusCode::INTERNAL_SERVER_ERROR, "INTERNAL", &error.to_string()),
    }
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct SandboxReport {
    id: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    owner: String,
    origin: String,
    phase: &'static str,
    /// Why it died, in the phase `failed`.
    #[serde(skip_serializing_if = "Option::is_none")]
    cause: Option<&'static str>,
    /// How its main process ended, in the phase `exited`.
    #[serde(skip_serializing_if = "Option::is_none")]
    exit: Option<String>,
    phase_since: String,
    image: ReportedImage,
    #[serde(skip_serializing_if = "Option::is_none")]
    snapshot: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pool: Option<String>,
    labels: BTreeMap<String, String>,
    created_at: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    expires_at: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    idle_timeout_seconds: Option<u64>,
    /// What becomes of it when it has died and is wanted again: `restart` or `replace`.
    on_death: &'static str,
    in_force: BTreeMap<String, String>,
    weaker: Vec<String>,
    usage: BTreeMap<&'static str, u64>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    hooks: Vec<HookDetails>,
    /// What a filtered sandbox may reach; lists of sandboxes leave it out.
    #[serde(skip_serializing_if = "Option::is_none")]
    policy: Option<ReportedPolicy>,
}

/// A periodic hook and its last run.
#[derive(Serialize)]
struct HookDetails {
    name: String,
    schedule: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    last: Option<HookRunDetails>,
}

#[derive(Serialize)]
struct HookRunDetails {
    began: String,
    /// How the run ended; absent while it runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    exit: Option<String>,
    /// The end of its output.
    tail: String,
}

impl HookDetails {
    fn from_report(report: &HookReport) -> Self {
        let began = |time| Timestamp::try_from(time).unwrap_or(Timestamp::UNIX_EPOCH).to_string();
        let last = report.last.as_ref().map(|run| HookRunDetails {
            began: began(run.began),
            exit: run.exit.map(exit_text),
            tail: run.tail.clone(),
        });
        Self { name: report.name.clone(), schedule: report.schedule.clone(), last }
    }
}

fn exit_text(exit: ExitReason) -> String {
    match exit {
        ExitReason::Code(code) => format!("code {code}"),
        ExitReason::Signal(signal) => format!("signal {signal}"),
        ExitReason::Oom => "out of memory".to_owned(),
        ExitReason::Deadline => "timeout".to_owned(),
        ExitReason::Lost => "unseen".to_owned(),
    }
}

#[derive(Serialize)]
struct ReportedImage {
    requested: String,
    used: String,
    /// Explains the difference, if there is one.
    #[serde(rename = "standIn", skip_serializing_if = "Option::is_none")]
    stand_in: Option<String>,
}

impl SandboxReport {
    fn from_sandbox(sandbox: &Sandbox, usage: Option<SandboxUsage>) -> Self {
        Self {
            id: sandbox.id.to_string(),
            name: sandbox.name.clone(),
            owner: sandbox.owner.as_str().to_owned(),
            origin: sandbox.origin.clone(),
            phase: sandbox.phase.name(),
            cause: match sandbox.phase {
                Phase::Failed(cause) => Some(cause.name()),
                _ => None,
            },
            exit: match sandbox.phase {
                Phase::Exited(exit) => Some(exit_text(exit)),
                _ => None,
            },
            phase_since: format_rfc3339(sandbox.phase_since),
            snapshot: sandbox.spec.snapshot.as_ref().map(ToString::to_string),
            pool: sandbox.pool.clone(),
            labels: sandbox.labels.clone(),
            created_at: format_rfc3339(sandbox.created),
            expires_at: sandbox.expires.map(format_rfc3339),
            idle_timeout_seconds: sandbox.idle_timeout.map(|timeout| timeout.as_secs()),
            on_death: sandbox.spec.on_death().name(),
            image: ReportedImage {
                requested: sandbox.spec.image.clone(),
                used: sandbox.in_force.image.clone(),
                stand_in: sandbox.in_force.stand_in.clone(),
            },
            in_force: sandbox
                .in_force
                .measures
                .iter()
                .map(|measure| (measure.name(), measure.words()))
                .collect(),
            weaker: sandbox.in_force.degraded.clone(),
            usage: usage.map(usage_amounts).unwrap_or_default(),
            hooks: Vec::new(),
            policy: None,
        }
    }
}

/// Returns the measured amounts by name; unmeasured ones are left out.
pub(super) fn usage_amounts(usage: SandboxUsage) -> BTreeMap<&'static str, u64> {
    let all = [
        ("memoryBytes", usage.memory.map(|bytes| bytes.0)),
        ("memoryLimitBytes", usage.memory_limit.map(|bytes| bytes.0)),
        ("cpuMicros", usage.cpu_micros),
        ("cpuLimitMillis", usage.cpu_limit.map(u64::from)),
        ("pids", usage.pids),
        ("pidsLimit", usage.pids_limit.map(u64::from)),
        ("diskBytes", usage.disk.map(|bytes| bytes.0)),
        ("diskLimitBytes", usage.disk_limit.map(|bytes| bytes.0)),
        ("oomKills", usage.oom_kills),
    ];
    all.into_iter().filter_map(|(name, amount)| Some((name, amount?))).collect()
}
