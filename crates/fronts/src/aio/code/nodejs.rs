//! `/v1/nodejs`: JavaScript, in a process of its own or in a session that keeps its state.

use std::collections::BTreeMap;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use domain::{Language, SessionName};
use http::Uri;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use service::{
    ContextOpening, IdleLimitUpdate, NamedContext, SandboxRef, SharedSessionUpdate, context_of_name,
};

use super::context_run::{self, CodeSession, ContextNote, SessionCode, SessionLifetime};
use super::jupyter::{age_seconds, epoch_seconds, run_response};
use super::limits::{DEFAULT_TIMEOUT_SECONDS, parse_code, parse_directory, parse_timeout};
use super::node_process::{self, NodeProcess};
use super::outputs::{CodeOutput, CodeRunStatus, RunReport, StreamName};
use super::session_name::{PathSession, parse_session_name};
use crate::aio::AioState;
use crate::aio::body::AioJson;
use crate::aio::envelope::{ResponseEnvelope, data_response};
use crate::aio::problem::AioProblem;
use crate::aio::target::AioTarget;
use crate::kit::query::QueryParams;

/// The times without a run after which a session may be closed, in seconds.
const IDLE_SECONDS: std::ops::RangeInclusive<i64> = 60..=86_400;
pub(super) const DEFAULT_IDLE_LIMIT: Duration = Duration::from_secs(86_400);

#[derive(Deserialize)]
pub(super) struct NodeExecuteBody {
    code: Option<String>,
    timeout: Option<i64>,
    stdin: Option<String>,
    files: Option<BTreeMap<String, String>>,
    stateful: Option<bool>,
    session_id: Option<String>,
    cwd: Option<String>,
    version: Option<String>,
}

#[derive(Serialize)]
pub(super) struct NodeExecuteData {
    language: &'static str,
    status: CodeRunStatus,
    execution_count: Option<u64>,
    stdout: String,
    stderr: String,
    exit_code: i32,
    outputs: Vec<CodeOutput>,
    code: String,
    session_id: Option<String>,
}

pub(super) fn javascript() -> Language {
    Language::parse("javascript").expect("it is a language")
}

/// `POST /v1/nodejs/execute`: a client that names a session wants its state.
pub(super) async fn execute_code(
    State(state): State<AioState>,
    target: AioTarget,
    AioJson(body): AioJson<NodeExecuteBody>,
) -> Result<Json<ResponseEnvelope<NodeExecuteData>>, AioProblem> {
    let (code, timeout) = (parse_code(body.code)?, parse_timeout(body.timeout)?);
    let (name, directory) = (parse_session_name(body.session_id)?, parse_directory(body.cwd)?);
    let stdin = body.stdin.filter(|text| !text.is_empty());
    let files = node_process::parse_files(body.files.unwrap_or_default())?;
    let is_stateful = body.stateful.unwrap_or_default() || name.is_some();
    if is_stateful && (stdin.is_some() || !files.is_empty()) {
        let field = if stdin.is_some() { "stdin" } else { "files" };
        return Err(AioProblem::invalid_field(
            field,
            "code in a session has no input and no files of its own",
        ));
    }
    check_version(&state, &target.sandbox, body.version).await?;
    target.begin_stream()?;
    let (session, report) = if is_stateful {
        let session = CodeSession { language: javascript(), name, directory, idle_limit: DEFAULT_IDLE_LIMIT };
        let lifetime = SessionLifetime::UntilIdle;
        let call = SessionCode { session, code: code.clone(), timeout, lifetime };
        let (name, report) = context_run::run_in_session(&target.sandbox, call).await?;
        (Some(name), report)
    } else {
        let process = NodeProcess { code: code.clone(), stdin, files, directory, timeout };
        (None, node_process::run_process(&target.sandbox, process).await?)
    };
    let (stdout, stderr) = (report.text_of(StreamName::Stdout), report.text_of(StreamName::Stderr));
    let RunReport { status, message, execution_count, outputs, exit_code } = report;
    let data = NodeExecuteData {
        language: "javascript",
        status,
        execution_count,
        stdout,
        stderr,
        exit_code,
        outputs,
        code,
        session_id: session.map(|name| name.as_str().to_owned()),
    };
    Ok(run_response(status, message, data))
}

/// `GET /v1/nodejs/info`
pub(super) async fn get_info(
    State(state): State<AioState>,
    target: AioTarget,
) -> Result<Json<ResponseEnvelope<Value>>, AioProblem> {
    let tools = state.tools.detect_tools(&target.sandbox).await?;
    let version = tools.node_version();
    let major = version.and_then(major_version).map(|major| format!("node{major}"));
    Ok(data_response(json!({
        "node_version": version.map(|version| format!("v{version}")).unwrap_or_default(),
        "npm_version": tools.npm_version().unwrap_or_default(),
        "supported_languages": ["javascript"],
        "description": "JavaScript, run by Node.js of the sandbox's image",
        "available_versions": major.iter().collect::<Vec<_>>(),
        "current_version": major,
        "error": version.is_none().then_some(NO_NODE),
    })))
}

const NO_NODE: &str = "Node.js is not installed in this sandbox";

/// Refuses a version that the image does not have. The image has one.
async fn check_version(
    state: &AioState,
    sandbox: &SandboxRef,
    version: Option<String>,
) -> Result<(), AioProblem> {
    let Some(wanted) = version.filter(|version| !version.is_empty()) else { return Ok(()) };
    let wanted = wanted.strip_prefix("node").unwrap_or(&wanted).trim_start_matches('v');
    let tools = state.tools.detect_tools(sandbox).await?;
    let found = tools.node_version().ok_or_else(|| AioProblem::bad_request(NO_NODE))?;
    if wanted == found || Some(wanted) == major_version(found) {
        return Ok(());
    }
    let message = format!("this sandbox has Node.js {found} and not the version that was asked for");
    Err(AioProblem::bad_request(message))
}

async fn check_query_version(state: &AioState, sandbox: &SandboxRef, uri: &Uri) -> Result<(), AioProblem> {
    let version = QueryParams::from_uri(uri).first("version").map(str::to_owned);
    check_version(state, sandbox, version).await
}

fn major_version(version: &str) -> Option<&str> {
    version.split('.').next()
}

#[derive(Serialize)]
pub(super) struct NodeSessionData {
    session_id: String,
    cwd: String,
    /// In milliseconds since the epoch, like the next one.
    created_at: f64,
    last_used: f64,
    /// In milliseconds.
    max_idle_time: u64,
    age_seconds: u64,
    state: &'static str,
}

impl NodeSessionData {
    fn of_context(sandbox: &SandboxRef, context: &NamedContext) -> Self {
        let default = || sandbox.read_state(|state| state.spec.guest.default_directory.clone());
        let idle = context.idle_limit.unwrap_or(DEFAULT_IDLE_LIMIT);
        Self {
            session_id: context.name.as_str().to_owned(),
            cwd: ContextNote::of_context(context).directory.unwrap_or_else(default),
            created_at: (epoch_seconds(context.opened) * 1000.0).round(),
            last_used: (epoch_seconds(context.used) * 1000.0).round(),
            max_idle_time: u64::try_from(idle.as_millis()).unwrap_or(u64::MAX),
            age_seconds: age_seconds(context.used),
            state: if context.context.busy { "EXECUTING" } else { "IDLE" },
        }
    }
}

/// `GET /v1/nodejs/sessions`
pub(super) async fn list_sessions(
    State(state): State<AioState>,
    target: AioTarget,
    uri: Uri,
) -> Result<Json<ResponseEnvelope<Value>>, AioProblem> {
    check_query_version(&state, &target.sandbox, &uri).await?;
    let sessions = context_run::list_sessions(&target.sandbox, &javascript()).await?;
    let session = |context: &NamedContext| {
        (context.name.as_str().to_owned(), NodeSessionData::of_context(&target.sandbox, context))
    };
    let sessions: BTreeMap<_, _> = sessions.iter().map(session).collect();
    Ok(data_response(json!({ "sessions": sessions })))
}

#[derive(Deserialize)]
pub(super) struct CreateNodeSessionBody {
    session_id: Option<String>,
    cwd: Option<String>,
    max_idle_time: Option<i64>,
}

/// `POST /v1/nodejs/sessions`: a session that exists is left as it is.
pub(super) async fn create_session(
    State(state): State<AioState>,
    target: AioTarget,
    uri: Uri,
    AioJson(body): AioJson<CreateNodeSessionBody>,
) -> Result<Json<ResponseEnvelope<Value>>, AioProblem> {
    let session = CodeSession {
        language: javascript(),
        name: parse_session_name(body.session_id)?,
        directory: parse_directory(body.cwd)?,
        idle_limit: parse_idle_limit(body.max_idle_time)?.unwrap_or(DEFAULT_IDLE_LIMIT),
    };
    check_query_version(&state, &target.sandbox, &uri).await?;
    let (name, opening) = context_run::open_session(&target.sandbox, session).await?;
    let created = opening == ContextOpening::Opened;
    let session = find_session(&target.sandbox, &name).await?;
    Ok(data_response(json!({
        "session_id": name.as_str(),
        "created": created,
        "message": (!created).then_some("Session already exists"),
        "session": NodeSessionData::of_context(&target.sandbox, &session),
    })))
}

/// `GET /v1/nodejs/sessions/{session_id}`
pub(super) async fn get_session(
    State(state): State<AioState>,
    target: AioTarget,
    PathSession(name): PathSession,
    uri: Uri,
) -> Result<Json<ResponseEnvelope<Value>>, AioProblem> {
    check_query_version(&state, &target.sandbox, &uri).await?;
    let session = find_session(&target.sandbox, &name).await?;
    Ok(data_response(json!({"session": NodeSessionData::of_context(&target.sandbox, &session)})))
}

#[derive(Deserialize)]
pub(super) struct UpdateNodeSessionBody {
    max_idle_time: Option<i64>,
    cwd: Option<String>,
}

/// `PATCH /v1/nodejs/sessions/{session_id}`
pub(super) async fn update_session(
    State(state): State<AioState>,
    target: AioTarget,
    PathSession(name): PathSession,
    uri: Uri,
    AioJson(body): AioJson<UpdateNodeSessionBody>,
) -> Result<Json<ResponseEnvelope<Value>>, AioProblem> {
    let (idle, directory) = (parse_idle_limit(body.max_idle_time)?, parse_directory(body.cwd)?);
    let (sandbox, language) = (&target.sandbox, javascript());
    check_query_version(&state, sandbox, &uri).await?;
    let found = find_session(sandbox, &name).await?;
    let id = context_of_name(&language, &name);
    if let Some(path) = &directory {
        let timeout = parse_timeout(Some(DEFAULT_TIMEOUT_SECONDS))?;
        let changed = context_run::change_directory(sandbox, &id, &language, path, timeout).await?;
        if changed.status != CodeRunStatus::Ok {
            let reason = changed.error_value().unwrap_or(&changed.message);
            return Err(AioProblem::bad_request(format!("the working directory cannot be used: {reason}")));
        }
    }
    let note = directory.map(|path| {
        let note = ContextNote { directory: Some(path), ..ContextNote::of_context(&found) };
        note.to_text().unwrap_or_default()
    });
    let idle_limit = idle.map_or(IdleLimitUpdate::Keep, IdleLimitUpdate::After);
    let updated =
        sandbox.contexts().update_named_context(&id, SharedSessionUpdate { note, idle_limit }).await?;
    Ok(data_response(json!({"updated": true, "session": NodeSessionData::of_context(sandbox, &updated)})))
}

/// `DELETE /v1/nodejs/sessions/{session_id}`
pub(super) async fn delete_session(
    State(state): State<AioState>,
    target: AioTarget,
    PathSession(name): PathSession,
    uri: Uri,
) -> Result<Json<ResponseEnvelope<Value>>, AioProblem> {
    check_query_version(&state, &target.sandbox, &uri).await?;
    context_run::close_session(&target.sandbox, &javascript(), &name).await?;
    Ok(data_response(json!({"deleted": true})))
}

async fn find_session(sandbox: &SandboxRef, name: &SessionName) -> Result<NamedContext, AioProblem> {
    let sessions = context_run::list_sessions(sandbox, &javascript()).await?;
    sessions.into_iter().find(|session| session.name == *name).ok_or_else(AioProblem::no_session)
}

fn parse_idle_limit(seconds: Option<i64>) -> Result<Option<Duration>, AioProblem> {
    let Some(seconds) = seconds else { return Ok(None) };
    let valid = u64::try_from(seconds).ok().filter(|_| IDLE_SECONDS.contains(&seconds));
    let refused = || AioProblem::invalid_field("max_idle_time", "an idle time has 60 to 86400 seconds");
    valid.map(|seconds| Some(Duration::from_secs(seconds))).ok_or_else(refused)
}
