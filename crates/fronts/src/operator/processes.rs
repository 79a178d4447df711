//! The commands, sessions and contexts of a sandbox, and signals to them.
//!
//! Lists and output are visible to the owner and to the operator. Only the owner may send signals.

use axum::Json;
use axum::body::Bytes;
use axum::extract::rejection::{BytesRejection, PathRejection};
use axum::extract::{Path, State};
use axum::http::{StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use domain::{Exit, Owner, Position, ProcessId, SandboxId, signal};
use serde::{Deserialize, Serialize};
use serde_json::json;
use service::{
    ActKind, ErrorKind, ProcessTree, Reach, ServiceError, ThingKind, TreeFilter, TreeKind, TreeUsage,
};

use super::access::{Caller, Scope};
use super::sandboxes::{id_of, not_found};
use super::{Front, time};
use crate::{answer, records};

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Shown {
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
pub(super) async fn list(
    State(front): State<Front>,
    Scope(whose): Scope,
    id: Result<Path<String>, PathRejection>,
    uri: Uri,
) -> Response {
    let Some(id) = id_of(id) else { return not_found() };
    let query = uri.query().unwrap_or_default();
    let all =
        form_urlencoded::parse(query.as_bytes()).any(|(name, value)| name == "ended" && value == "true");
    let filter = if all { TreeFilter::All } else { TreeFilter::Living };
    match front.service.process_trees(whose.as_ref(), &id, filter).await {
        Ok(trees) => {
            record(&front, whose.as_ref(), &id, ActKind::Inspected);
            let shown: Vec<Shown> = trees.into_iter().map(Shown::of).collect();
            Json(json!({ "processes": shown })).into_response()
        }
        Err(error) => refuse(&error),
    }
}

/// `GET /coracle/v1/sandboxes/{id}/processes/{process}/logs`: the output of a command from the byte
/// `cursor` on, as records with offsets; with `follow=true` until it ends.
pub(super) async fn logs(
    State(front): State<Front>,
    Scope(whose): Scope,
    at: Result<Path<(String, String)>, PathRejection>,
    uri: Uri,
) -> Response {
    let Some((id, process)) = process_of(at) else { return not_found() };
    let Some((cursor, follow)) = parse_place(uri.query().unwrap_or_default()) else {
        let message = "`cursor` must be a number and `follow` true or false";
        return answer::error(StatusCode::BAD_REQUEST, "INVALID_CURSOR", message);
    };
    let owner = match front.service.inspect(whose.as_ref(), &id).await {
        Ok((sandbox, _)) => sandbox.owner,
        Err(error) => return refuse(&error),
    };
    let status = match front.service.status(&owner, &id, &process).await {
        Ok(status) => status,
        Err(error) => return refuse(&error),
    };
    record(&front, whose.as_ref(), &id, ActKind::ReadLogs);
    let from = cursor.min(status.written);
    match front.service.follow(&owner, &id, &process, Position(from)).await {
        Ok(following) => {
            let to = (!follow).then_some(status.written);
            records::response(following, from, to, status.ended.map(|end| end.exit))
        }
        Err(error) => refuse(&error),
    }
}

/// Parses the start offset, and whether to follow the output.
fn parse_place(query: &str) -> Option<(u64, bool)> {
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
fn record(front: &Front, whose: Option<&Owner>, id: &SandboxId, kind: ActKind) {
    if let (None, Some(sandbox)) = (whose, front.service.look(id)) {
        front.service.record_look(&sandbox.owner, kind, ThingKind::Sandbox, id.as_str());
    }
}

/// `POST /coracle/v1/sandboxes/{id}/processes/{process}/signal`: signals everything that a command,
/// session or context has started; SIGTERM if the body names no signal.
pub(super) async fn signal(
    State(front): State<Front>,
    Caller(owner): Caller,
    at: Result<Path<(String, String)>, PathRejection>,
    body: Result<Bytes, BytesRejection>,
) -> Response {
    let Some((id, process)) = process_of(at) else { return not_found() };
    let Some(signal) = body.ok().as_deref().and_then(parse_body) else {
        let names: Vec<&str> = signal::NAMES.iter().map(|(name, _)| *name).collect();
        let names = names.join(", ");
        let message = format!(
            "the body must be `{{\"signal\": \"TERM\"}}` with a number from 1 to 31 or one of {names}"
        );
        return answer::error(StatusCode::BAD_REQUEST, "INVALID_SIGNAL", &message);
    };
    match front.service.signal(&owner, &id, &process, signal, Reach::Tree).await {
        Ok(()) => StatusCode::NO_CONTENT.into_response(),
        Err(error) => refuse(&error),
    }
}

/// Parses the sandbox and process ids in a path; `None` if either is malformed.
pub(super) fn process_of(
    at: Result<Path<(String, String)>, PathRejection>,
) -> Option<(SandboxId, ProcessId)> {
    let Path((id, process)) = at.ok()?;
    Some((SandboxId::parse(&id).ok()?, ProcessId::parse(&process).ok()?))
}

pub(super) fn refuse(error: &ServiceError) -> Response {
    let (status, code) = match error.kind() {
        ErrorKind::NotFound => return not_found(),
        ErrorKind::NoProcess | ErrorKind::NoSession => (StatusCode::NOT_FOUND, "PROCESS_NOT_FOUND"),
        ErrorKind::Invalid => (StatusCode::BAD_REQUEST, "INVALID_SIGNAL"),
        ErrorKind::Conflict { .. } => (StatusCode::CONFLICT, "SANDBOX_NOT_RUNNING"),
        ErrorKind::Busy => (StatusCode::CONFLICT, "PROCESS_BUSY"),
        _ => (StatusCode::INTERNAL_SERVER_ERROR, "INTERNAL"),
    };
    let mut response = answer::error(status, code, &error.to_string());
    answer::add_hint(&mut response, error.hint());
    response
}

/// Parses the signal number; `None` if the body names an unknown signal.
fn parse_body(body: &[u8]) -> Option<i32> {
    if body.is_empty() {
        return Some(signal::TERM);
    }
    let body: SignalBody = serde_json::from_slice(body).ok()?;
    body.signal.as_deref().map_or(Some(signal::TERM), signal::number)
}

impl Shown {
    fn of(tree: ProcessTree) -> Self {
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
            started_at: tree.started.map(time),
            ended_at: ended.map(|ended| time(ended.ended)),
            exit_code: ended.and_then(|ended| match ended.exit {
                Exit::Code(code) => Some(code),
                Exit::Signal(_) | Exit::Oom | Exit::Deadline | Exit::Lost => None,
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
            assert_eq!(signal::number(text), Some(number), "{text}");
        }
        for wrong in ["", "0", "32", "-9", "TERMINATE", "SIG"] {
            assert_eq!(signal::number(wrong), None, "{wrong}");
        }
        assert_eq!(parse_body(b""), Some(signal::TERM));
        assert_eq!(parse_body(b"{}"), Some(signal::TERM));
        assert_eq!(parse_body(br#"{"signal":"INT"}"#), Some(2));
        assert_eq!(parse_body(br#"{"sig":"INT"}"#), None);
    }
}
