//! The commands, sessions and contexts of a sandbox, and signals to them.
//!
//! Lists and output are visible to the owner and to the operator. Only the owner may send signals.

use axum::Json;
use axum::body::Bytes;
use axum::extract::rejection::{BytesRejection, PathRejection};
use axum::extract::{Path, State};
use axum::http::{Extensions, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use domain::{ExitReason, JournalOffset, Owner, ProcessId, SandboxId, signal};
use serde::{Deserialize, Serialize};
use serde_json::json;
use service::{
    ErrorKind, OperatorActionKind, OperatorObjectKind, ProcessTree, SandboxRef, ServiceError, SignalTarget,
    TreeFilter, TreeKind, TreeUsage,
};

use super::access::{RequestOwner, VisibleOwners};
use super::sandboxes::{parse_sandbox_id, sandbox_not_found};
use super::{FRONT, OperatorState};
use crate::kit::time::format_rfc3339;
use crate::kit::{error_format, output_records};
use crate::server::concurrency;

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ProcessTreeBody {
    id: String,
    kind: &'static str,
    state: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    session: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tag: Option<String>,
    text: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    started_at: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ended_at: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    exit_code: Option<i32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cpu_millis: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    memory_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    processes: Option<u32>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SignalBody {
    /// A name such as `TERM`, or a number.
    #[serde(default)]
    signal: Option<String>,
}

/// `GET /coracle/v1/sandboxes/{id}/processes`: running processes, oldest first; with `ended=true` also
/// commands that have ended and are still remembered.
pub(super) async fn list_processes(
    State(state): State<OperatorState>,
    VisibleOwners(whose): VisibleOwners,
    id: Result<Path<String>, PathRejection>,
    uri: Uri,
) -> Response {
    let Some(id) = parse_sandbox_id(id) else { return sandbox_not_found() };
    let query = uri.query().unwrap_or_default();
    let all =
        form_urlencoded::parse(query.as_bytes()).any(|(name, value)| name == "ended" && value == "true");
    let filter = if all { TreeFilter::All } else { TreeFilter::Living };
    let sandbox = match state.service.sandbox_of(whose.as_ref(), &id) {
        Ok(sandbox) => sandbox,
        Err(error) => return process_error_response(&error),
    };
    match sandbox.processes().process_trees(filter).await {
        Ok(trees) => {
            record_access(&state, whose.as_ref(), &sandbox, OperatorActionKind::Inspected);
            let shown: Vec<ProcessTreeBody> = trees.into_iter().map(ProcessTreeBody::from_tree).collect();
            Json(json!({ "processes": shown })).into_response()
        }
        Err(error) => process_error_response(&error),
    }
}

/// `GET /coracle/v1/sandboxes/{id}/processes/{process}/logs`: the output of a command from the byte
/// `cursor` on, as records with offsets; with `follow=true` until it ends.
pub(super) async fn get_process_logs(
    State(state): State<OperatorState>,
    VisibleOwners(whose): VisibleOwners,
    at: Result<Path<(String, String)>, PathRejection>,
    uri: Uri,
    extensions: Extensions,
) -> Response {
    let Some((id, process)) = parse_process_path(at) else { return sandbox_not_found() };
    let Some((cursor, follow)) = parse_cursor(uri.query().unwrap_or_default()) else {
        let message = "`cursor` must be a number and `follow` true or false";
        return error_format::build_error(StatusCode::BAD_REQUEST, "INVALID_CURSOR", message);
    };
    let sandbox = match state.service.sandbox_of(whose.as_ref(), &id) {
        Ok(sandbox) => sandbox,
        Err(error) => return process_error_response(&error),
    };
    let status = match sandbox.processes().process_status(&process).await {
        Ok(status) => status,
        Err(error) => return process_error_response(&error),
    };
    record_access(&state, whose.as_ref(), &sandbox, OperatorActionKind::ReadLogs);
    let from = cursor.min(status.written);
    if follow && let Err(error) = concurrency::begin_stream(&extensions) {
        return error.build_response(FRONT.error_format);
    }
    match sandbox.processes().follow_output(&process, JournalOffset(from)).await {
        Ok(following) => {
            let to = (!follow).then_some(status.written);
            output_records::records_response(following, from, to, status.ended.map(|end| end.exit))
        }
        Err(error) => process_error_response(&error),
    }
}

/// Parses the start offset, and whether to follow the output.
fn parse_cursor(query: &str) -> Option<(u64, bool)> {
    let (mut cursor, mut follow) = (0, false);
    for (name, value) in form_urlencoded::parse(query.as_bytes()) {
        match &*name {
            "cursor" => cursor = value.parse().ok()?,
            "follow" => follow = value.parse().ok()?,
            _ => {}
        }
    }
    Some((cursor, follow))
}

/// Records that the operator, whose scope is every owner, looked at this sandbox.
fn record_access(
    state: &OperatorState,
    whose: Option<&Owner>,
    sandbox: &SandboxRef,
    kind: OperatorActionKind,
) {
    if whose.is_none() {
        let (owner, id) = (sandbox.owner(), sandbox.id().as_str());
        state.service.record_view(owner, kind, OperatorObjectKind::Sandbox, id);
    }
}

/// `POST /coracle/v1/sandboxes/{id}/processes/{process}/signal`: signals everything that a command,
/// session or context has started; SIGTERM if the body names no signal.
pub(super) async fn signal_process(
    State(state): State<OperatorState>,
    RequestOwner(owner): RequestOwner,
    at: Result<Path<(String, String)>, PathRejection>,
    body: Result<Bytes, BytesRejection>,
) -> Response {
    let Some((id, process)) = parse_process_path(at) else { return sandbox_not_found() };
    let Some(signal) = body.ok().as_deref().and_then(parse_signal) else {
        let names: Vec<&str> = signal::SIGNAL_NAMES.iter().map(|(name, _)| *name).collect();
        let names = names.join(", ");
        let message = format!(
            "the body must be `{{\"signal\": \"TERM\"}}` with a number from 1 to 31 or one of {names}"
        );
        return error_format::build_error(StatusCode::BAD_REQUEST, "INVALID_SIGNAL", &message);
    };
    let signalled = match state.service.sandbox(&owner, &id) {
        Ok(sandbox) => sandbox.processes().signal_process(&process, signal, SignalTarget::Tree).await,
        Err(error) => Err(error),
    };
    match signalled {
        Ok(()) => StatusCode::NO_CONTENT.into_response(),
        Err(error) => process_error_response(&error),
    }
}

/// Parses the sandbox and process ids in a path; `None` if either is malformed.
pub(super) fn parse_process_path(
    at: Result<Path<(String, String)>, PathRejection>,
) -> Option<(SandboxId, ProcessId)> {
    let Path((id, process)) = at.ok()?;
    Some((SandboxId::parse(&id).ok()?, ProcessId::parse(&process).ok()?))
}

pub(super) fn process_error_response(error: &ServiceError) -> Response {
    let (status, code) = match error.kind() {
        ErrorKind::NotFound => return sandbox_not_found(),
        ErrorKind::NoProcess | ErrorKind::NoSession => (StatusCode::NOT_FOUND, "PROCESS_NOT_FOUND"),
        ErrorKind::Invalid => (StatusCode::BAD_REQUEST, "INVALID_SIGNAL"),
        ErrorKind::Conflict { .. } => (StatusCode::CONFLICT, "SANDBOX_NOT_RUNNING"),
        ErrorKind::Busy => (StatusCode::CONFLICT, "PROCESS_BUSY"),
        _ => (StatusCode::INTERNAL_SERVER_ERROR, "INTERNAL"),
    };
    let mut response = error_format::build_error(status, code, &error.to_string());
    error_format::add_hint(&mut response, error.hint());
    response
}

/// Parses the signal number; `None` if the body names an unknown signal.
fn parse_signal(body: &[u8]) -> Option<i32> {
    if body.is_empty() {
        return Some(signal::SIGTERM);
    }
    let body: SignalBody = serde_json::from_slice(body).ok()?;
    body.signal.as_deref().map_or(Some(signal::SIGTERM), signal::parse_signal)
}

impl ProcessTreeBody {
    fn from_tree(tree: ProcessTree) -> Self {
        let ended = tree.ended;
        let millis = |time: std::time::Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        let used = ended.map(|ended| (millis(ended.user + ended.system), ended.max_rss.0));
        let living = tree.usage.map(|TreeUsage { cpu, memory, .. }| (millis(cpu), memory.0));
        Self {
            kind: match tree.kind {
                TreeKind::Command => "command",
                TreeKind::Run => "run",
                TreeKind::Session => "session",
                TreeKind::Context => "context",
            },
            state: match (&tree.ended, tree.kind) {
                (Some(_), _) if tree.left => "left processes",
                (Some(_), _) => "ended",
                (None, TreeKind::Command | TreeKind::Run) => "running",
                (None, TreeKind::Session | TreeKind::Context) if tree.busy => "busy",
                (None, TreeKind::Session | TreeKind::Context) => "idle",
            },
            id: tree.id.to_string(),
            session: tree.session.map(|session| session.to_string()),
            tag: tree.tag,
            text: tree.text,
            started_at: tree.started.map(format_rfc3339),
            ended_at: ended.map(|ended| format_rfc3339(ended.ended)),
            exit_code: ended.and_then(|ended| match ended.exit {
                ExitReason::Code(code) => Some(code),
                ExitReason::Signal(_) | ExitReason::Oom | ExitReason::Deadline | ExitReason::Lost => None,
            }),
            cpu_millis: living.or(used).map(|(cpu, _)| cpu),
            memory_bytes: living.or(used).map(|(_, memory)| memory),
            processes: tree.usage.map(|usage| usage.processes),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_are_parsed_by_name_or_number() {
        for (text, number) in [("TERM", 15), ("term", 15), ("SIGKILL", 9), ("9", 9), ("usr1", 10)] {
            assert_eq!(signal::parse_signal(text), Some(number), "{text}");
        }
        for wrong in ["", "0", "32", "-9", "TERMINATE", "SIG"] {
            assert_eq!(signal::parse_signal(wrong), None, "{wrong}");
        }
        assert_eq!(parse_signal(b""), Some(signal::SIGTERM));
        assert_eq!(parse_signal(b"{}"), Some(signal::SIGTERM));
        assert_eq!(parse_signal(br#"{"signal":"INT"}"#), Some(2));
        assert_eq!(parse_signal(br#"{"sig":"INT"}"#), None);
    }
}
