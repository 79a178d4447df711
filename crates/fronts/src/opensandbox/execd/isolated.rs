//! Isolated sessions: shells in their own namespaces inside a sandbox.
//!
//! The parameters of a session are stored with it in the sandbox, so that any later server process can
//! return them. They come back from inside, so only known fields are returned.

mod create_body;

use std::collections::BTreeMap;
use std::time::Duration;

use axum::Json;
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, any, get, post};
use domain::{Backpressure, ExitReason, IsolatedSessions, ProcessId, SessionId};
use http::request::Parts;
use http::{HeaderName, StatusCode, Uri};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use service::{
    BusyPolicy, ErrorKind, IsolatedSessionStatus, OutputSettings, RunShell, ServiceError, SessionRunRequest,
    SessionStatus,
};

use self::create_body::{CreateIsolatedBody, ECHOED_FIELDS};
use super::command::parse_environment;
use super::problem::{ExecdProblem, JsonOrEmpty};
use super::{ExecTarget, command_stream as stream, logs};
use crate::kit::command_ending::exit_code;
use crate::kit::query::path_param;
use crate::kit::time::format_rfc3339;
use crate::opensandbox::OpenSandboxState;
use crate::opensandbox::types::describe_exit;

const CURSOR_HEADER: HeaderName = HeaderName::from_static("execd-isolated-tail-cursor");

/// The maximum timeout of a run, in seconds.
const MAX_RUN_SECONDS: i64 = 365 * 24 * 3600;

pub(super) fn isolated_routes() -> Vec<(&'static str, MethodRouter<OpenSandboxState>)> {
    vec![
        ("/v1/isolated/capabilities", get(get_isolation_capabilities)),
        ("/v1/isolated/session", post(create_isolated_session)),
        ("/v1/isolated/sessions", get(list_isolated_sessions)),
        ("/v1/isolated/session/{session}", get(get_isolated_session).delete(delete_isolated_session)),
        ("/v1/isolated/session/{session}/run", post(run_in_isolated_session)),
        ("/v1/isolated/session/{session}/runs/{name}", get(run_status)),
        ("/v1/isolated/session/{session}/runs/{name}/logs", get(run_logs)),
        ("/v1/isolated/session/{session}/diff", any(not_supported)),
        ("/v1/isolated/session/{session}/commit", any(not_supported)),
    ]
}

/// An existing isolated session, named in the path.
pub(super) struct IsolatedTarget {
    scope: ExecTarget,
    id: SessionId,
    status: IsolatedSessionStatus,
}

impl axum::extract::FromRequestParts<OpenSandboxState> for IsolatedTarget {
    type Rejection = ExecdProblem;

    async fn from_request_parts(parts: &mut Parts, state: &OpenSandboxState) -> Result<Self, ExecdProblem> {
        let scope = ExecTarget::from_request_parts(parts, state).await?;
        require_isolation(&scope)?;
        let name = path_param(parts, "session").await;
        let id = parse_session_id(&name)?;
        let sessions = scope.sandbox.sessions().list_sessions().await.map_err(session_problem)?;
        let found = sessions.into_iter().find(|session| session.session == id);
        let status = found.and_then(|session| session.isolation).ok_or_else(|| session_not_found(&name))?;
        Ok(Self { scope, id, status })
    }
}

/// Returns the session in a path, if any; used by the file routes.
pub(super) async fn session_in_path(
    parts: &mut Parts,
    state: &OpenSandboxState,
) -> Result<Option<SessionId>, ExecdProblem> {
    use axum::extract::FromRequestParts;
    match path_param(parts, "session").await.as_str() {
        "" => Ok(None),
        _ => IsolatedTarget::from_request_parts(parts, state).await.map(|isolated| Some(isolated.id)),
    }
}

/// Parses a session id, which clients write as a UUID.
fn parse_session_id(text: &str) -> Result<SessionId, ExecdProblem> {
    let plain: String = text.chars().filter(|letter| *letter != '-').collect();
    SessionId::parse(&plain.to_ascii_lowercase()).ok().ok_or_else(|| session_not_found(text))
}

/// Formats an id as a UUID, as clients expect.
fn format_uuid(id: &SessionId) -> String {
    let text = id.as_str();
    format!("{}-{}-{}-{}-{}", &text[..8], &text[8..12], &text[12..16], &text[16..20], &text[20..])
}

fn session_not_found(name: &str) -> ExecdProblem {
    let name: String = name.chars().take(64).collect();
    ExecdProblem::new(
        StatusCode::NOT_FOUND,
        "SESSION_NOT_FOUND",
        format!("isolated session `{name}` not found"),
    )
}

fn isolation_unavailable(why: &str) -> ExecdProblem {
    ExecdProblem::new(StatusCode::SERVICE_UNAVAILABLE, "SERVICE_UNAVAILABLE", why)
}

/// Converts errors to the codes of this part of the API.
fn session_problem(error: ServiceError) -> ExecdProblem {
    match error.kind() {
        ErrorKind::NoSession => {
            ExecdProblem::new(StatusCode::NOT_FOUND, "SESSION_NOT_FOUND", ExecdProblem::from(error).0.message)
        }
        ErrorKind::Unsupported => isolation_unavailable(&ExecdProblem::from(error).0.message),
        ErrorKind::File(_) => ExecdProblem::invalid(ExecdProblem::from(error).0.message),
        _ => error.into(),
    }
}

const NOT_ENABLED_MESSAGE: &str = "isolated sessions are not enabled for this sandbox; create it with the extension `bootstrap.execd.isolation` = `enable`";

/// Fails if the sandbox was created without isolated sessions.
fn require_isolation(target: &ExecTarget) -> Result<(), ExecdProblem> {
    match target.sandbox.read_state(|sandbox| sandbox.spec.isolated_sessions) {
        IsolatedSessions::On => Ok(()),
        IsolatedSessions::Off => Err(isolation_unavailable(NOT_ENABLED_MESSAGE)),
    }
}

/// `GET /v1/isolated/capabilities`
async fn get_isolation_capabilities(target: ExecTarget) -> Result<Json<Value>, ExecdProblem> {
    let available = match target.sandbox.read_state(|sandbox| sandbox.spec.isolated_sessions) {
        IsolatedSessions::Off => Err(NOT_ENABLED_MESSAGE.to_owned()),
        IsolatedSessions::On => target.sandbox.sessions().check_isolation_support().await?,
    };
    let Err(message) = available else {
        let active = json!({"state": "active"});
        return Ok(Json(json!({
            "available": true, "isolator": "coracle", "version": env!("CARGO_PKG_VERSION"),
            "setpriv_available": true, "userns_available": false,
            "commit_supported": false, "diff_supported": false,
            "hardening": {
                "init_mode": "pid1", "signal_shield": true,
                "cap_drop": active, "seccomp": active, "landlock": active,
                "ebpf": {"state": "unsupported", "message": "no program is loaded into the kernel"},
            },
        })));
    };
    Ok(Json(json!({
        "available": false, "message": message, "setpriv_available": false, "userns_available": false,
        "commit_supported": false, "diff_supported": false,
    })))
}

/// `POST /v1/isolated/session`
async fn create_isolated_session(
    target: ExecTarget,
    JsonOrEmpty(body): JsonOrEmpty<CreateIsolatedBody>,
) -> Result<Response, ExecdProblem> {
    require_isolation(&target)?;
    let (open, echo) = create_body::parse_create_body(body)?;
    let opened = target.sandbox.sessions().open_session(open).await;
    let session = opened.map_err(session_problem)?;
    let mut answer = echo;
    answer.insert("session_id".to_owned(), format_uuid(&session).into());
    answer.insert("created_at".to_owned(), format_rfc3339(std::time::SystemTime::now()).into());
    Ok((StatusCode::CREATED, Json(Value::Object(answer))).into_response())
}

/// `GET /v1/isolated/sessions`
async fn list_isolated_sessions(target: ExecTarget) -> Result<Json<Value>, ExecdProblem> {
    require_isolation(&target)?;
    let sessions = target.sandbox.sessions().list_sessions().await.map_err(session_problem)?;
    let shown = |session: &SessionStatus| {
        let mut shown = session_state(session.isolation.as_ref()?);
        shown.insert("session_id".to_owned(), format_uuid(&session.session).into());
        Some(Value::Object(shown))
    };
    Ok(Json(json!({ "sessions": sessions.iter().filter_map(shown).collect::<Vec<_>>() })))
}

fn session_state(status: &IsolatedSessionStatus) -> Map<String, Value> {
    let mut state = Map::new();
    state.insert("status".to_owned(), if status.alive { "active" } else { "dead" }.into());
    state.insert("created_at".to_owned(), format_rfc3339(status.created).into());
    state.insert("last_run_at".to_owned(), format_rfc3339(status.used).into());
    if let Some(left) = status.idle_left {
        state.insert("idle_remaining_seconds".to_owned(), left.as_secs().into());
    }
    state
}

/// `GET /v1/isolated/session/{id}`
async fn get_isolated_session(isolated: IsolatedTarget) -> Result<Json<Value>, ExecdProblem> {
    let IsolatedTarget { scope, id, status } = isolated;
    let note = scope.sandbox.sessions().isolated_session_note(&id).await.map_err(session_problem)?;
    let echo: Map<String, Value> = serde_json::from_str(&note).unwrap_or_default();
    let mut answer: Map<String, Value> =
        echo.into_iter().filter(|(name, _)| ECHOED_FIELDS.contains(&name.as_str())).collect();
    answer.extend(session_state(&status));
    answer.insert("session_id".to_owned(), format_uuid(&id).into());
    Ok(Json(Value::Object(answer)))
}

/// `DELETE /v1/isolated/session/{id}`: removes it with everything in it.
async fn delete_isolated_session(isolated: IsolatedTarget) -> Result<StatusCode, ExecdProblem> {
    let IsolatedTarget { scope, id, .. } = isolated;
    scope.sandbox.sessions().close_session(&id).await.map_err(session_problem)?;
    Ok(StatusCode::NO_CONTENT)
}

#[derive(Deserialize)]
struct RunIsolatedBody {
    code: Option<String>,
    envs: Option<BTreeMap<String, Option<String>>>,
    /// Seconds.
    timeout_seconds: Option<i64>,
    background: Option<bool>,
}

impl RunIsolatedBody {
    fn into_run(self, output: OutputSettings) -> Result<SessionRunRequest, ExecdProblem> {
        let text = self.code.filter(|text| !text.trim().is_empty() && !text.contains('\0'));
        let deadline = match self.timeout_seconds {
            None | Some(0) => None,
            Some(seconds @ 1..=MAX_RUN_SECONDS) => Some(Duration::from_secs(seconds.unsigned_abs())),
            Some(_) => {
                return Err(ExecdProblem::invalid("`timeout_seconds` must be a positive number of seconds"));
            }
        };
        let background = self.background == Some(true);
        Ok(SessionRunRequest {
            text: text.ok_or_else(|| ExecdProblem::invalid("`code` is empty or contains a NUL byte"))?,
            directory: None,
            deadline: deadline.filter(|_| !background),
            retention: output.retention,
            backpressure: if background {
                Backpressure::Off
            } else {
                Backpressure::On { stall_limit: Some(output.stall_limit) }
            },
            busy: BusyPolicy::Queue,
            env: parse_environment(self.envs)?,
            shell: if background { RunShell::Separate } else { RunShell::Shell },
        })
    }
}

/// `POST /v1/isolated/session/{id}/run`: runs in the session's shell, one after the other, or in the
/// background.
async fn run_in_isolated_session(
    isolated: IsolatedTarget,
    JsonOrEmpty(body): JsonOrEmpty<RunIsolatedBody>,
) -> Result<Response, ExecdProblem> {
    let IsolatedTarget { scope, id, status } = isolated;
    let run = body.into_run(scope.sandbox.processes().output_settings())?;
    if !status.alive {
        return Err(ExecdProblem::new(StatusCode::CONFLICT, "RUNTIME_ERROR", "the session is dead"));
    }
    let background = run.shell == RunShell::Separate;
    if !background {
        scope.begin_stream()?;
    }
    let following = scope.sandbox.sessions().run_in_session(&id, run).await.map_err(session_problem)?;
    if !background {
        let name = following.process.to_string();
        return Ok(stream::stream_isolated_run(following, &name, scope.lines));
    }
    let answer = json!({
        "session_id": format_uuid(&id),
        "run_id": following.process.as_str(),
        "started_at": format_rfc3339(std::time::SystemTime::now()),
    });
    Ok((StatusCode::ACCEPTED, Json(answer)).into_response())
}

/// The name of a run in the path.
struct RunName(String);

impl axum::extract::FromRequestParts<OpenSandboxState> for RunName {
    type Rejection = std::convert::Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &OpenSandboxState) -> Result<Self, Self::Rejection> {
        Ok(Self(path_param(parts, "name").await))
    }
}

#[derive(Serialize)]
struct RunStatus {
    session_id: String,
    run_id: String,
    running: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    exit_code: Option<i32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    started_at: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    finished_at: Option<String>,
}

/// Finds a run of this session.
async fn find_run(isolated: &IsolatedTarget, name: &str) -> Result<service::ProcessStatus, ExecdProblem> {
    let absent = || ExecdProblem::no_process(name);
    let process = ProcessId::parse(name).ok().ok_or_else(absent)?;
    let status = isolated.scope.sandbox.processes().process_status(&process).await?;
    if status.session.as_ref() == Some(&isolated.id) { Ok(status) } else { Err(absent()) }
}

/// `GET /v1/isolated/session/{id}/runs/{run}`
async fn run_status(
    isolated: IsolatedTarget,
    RunName(name): RunName,
) -> Result<Json<RunStatus>, ExecdProblem> {
    let status = find_run(&isolated, &name).await?;
    let exit = status.ended.map(|end| end.exit);
    Ok(Json(RunStatus {
        session_id: format_uuid(&isolated.id),
        run_id: name,
        running: exit.is_none(),
        exit_code: exit.map(exit_code),
        error: exit
            .filter(|exit| !matches!(exit, ExitReason::Code(_)))
            .map(|exit| format!("the run {}", describe_exit(exit))),
        started_at: format_rfc3339(status.started),
        finished_at: status.ended.map(|end| format_rfc3339(end.ended)),
    }))
}

/// `GET /v1/isolated/session/{id}/runs/{run}/logs?cursor=…`
async fn run_logs(
    isolated: IsolatedTarget,
    RunName(name): RunName,
    uri: Uri,
) -> Result<Response, ExecdProblem> {
    let status = find_run(&isolated, &name).await?;
    logs::logs_response(&isolated.scope, &status.process, &uri, CURSOR_HEADER).await
}

/// Refuses diff and commit.
async fn not_supported(isolated: IsolatedTarget) -> Result<Response, ExecdProblem> {
    require_isolation(&isolated.scope)?;
    let message = "this server does not support diff and commit of isolated sessions";
    Err(ExecdProblem::new(StatusCode::SERVICE_UNAVAILABLE, "NOT_SUPPORTED", message))
}
