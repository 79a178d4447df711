//! Isolated sessions: shells in their own namespaces inside a sandbox.
//!
//! The parameters of a session are stored with it in the sandbox, so that any later server process can
//! return them. They come back from inside, so only known fields are returned.

mod wish;

use std::collections::BTreeMap;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, any, get, post};
use domain::{Backpressure, Exit, Nesting, ProcessId, SessionId};
use http::request::Parts;
use http::{HeaderName, StatusCode, Uri};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use service::{Busy, ErrorKind, NestStatus, OutputSettings, Run, RunPlace, ServiceError, SessionStatus};

use self::wish::{CreateBody, ECHOED};
use super::command::environment;
use super::fault::{Fault, Wish};
use super::{Scope, logs, run as stream};
use crate::opensandbox::Front;
use crate::opensandbox::access::param;
use crate::opensandbox::types::{ended, rfc3339};

const CURSOR: HeaderName = HeaderName::from_static("execd-isolated-tail-cursor");

/// The maximum timeout of a run, in seconds.
const LONGEST_RUN: i64 = 365 * 24 * 3600;

pub(super) fn table() -> Vec<(&'static str, MethodRouter<Front>)> {
    vec![
        ("/v1/isolated/capabilities", get(capabilities)),
        ("/v1/isolated/session", post(create)),
        ("/v1/isolated/sessions", get(list)),
        ("/v1/isolated/session/{session}", get(look).delete(delete)),
        ("/v1/isolated/session/{session}/run", post(run)),
        ("/v1/isolated/session/{session}/runs/{name}", get(run_status)),
        ("/v1/isolated/session/{session}/runs/{name}/logs", get(run_logs)),
        ("/v1/isolated/session/{session}/diff", any(not_supported)),
        ("/v1/isolated/session/{session}/commit", any(not_supported)),
    ]
}

/// An existing isolated session, named in the path.
pub(super) struct Isolated {
    scope: Scope,
    id: SessionId,
    nest: NestStatus,
}

impl axum::extract::FromRequestParts<Front> for Isolated {
    type Rejection = Fault;

    async fn from_request_parts(parts: &mut Parts, front: &Front) -> Result<Self, Fault> {
        let scope = Scope::from_request_parts(parts, front).await?;
        offered(front, &scope)?;
        let name = param(parts, "session").await;
        let id = session_id(&name)?;
        let sessions = front.service.sessions(&scope.owner, &scope.id).await.map_err(told)?;
        let found = sessions.into_iter().find(|session| session.session == id);
        let nest = found.and_then(|session| session.nest).ok_or_else(|| no_session(&name))?;
        Ok(Self { scope, id, nest })
    }
}

/// Returns the session in a path, if any; used by the file routes.
pub(super) async fn session_of(parts: &mut Parts, front: &Front) -> Result<Option<SessionId>, Fault> {
    use axum::extract::FromRequestParts;
    match param(parts, "session").await.as_str() {
        "" => Ok(None),
        _ => Isolated::from_request_parts(parts, front).await.map(|isolated| Some(isolated.id)),
    }
}

/// Parses a session id, which clients write as a UUID.
fn session_id(text: &str) -> Result<SessionId, Fault> {
    let plain: String = text.chars().filter(|letter| *letter != '-').collect();
    SessionId::parse(&plain.to_ascii_lowercase()).ok().ok_or_else(|| no_session(text))
}

/// Formats an id as a UUID, as clients expect.
fn uuid(id: &ProcessId) -> String {
    let text = id.as_str();
    format!("{}-{}-{}-{}-{}", &text[..8], &text[8..12], &text[12..16], &text[16..20], &text[20..])
}

fn no_session(name: &str) -> Fault {
    let name: String = name.chars().take(64).collect();
    Fault::new(StatusCode::NOT_FOUND, "SESSION_NOT_FOUND", format!("isolated session `{name}` not found"))
}

fn unavailable(why: &str) -> Fault {
    Fault::new(StatusCode::SERVICE_UNAVAILABLE, "SERVICE_UNAVAILABLE", why)
}

/// Converts errors to the codes of this part of the API.
fn told(error: ServiceError) -> Fault {
    match error.kind() {
        ErrorKind::NoSession => {
            Fault::new(StatusCode::NOT_FOUND, "SESSION_NOT_FOUND", Fault::from(error).0.message)
        }
        ErrorKind::Unsupported => unavailable(&Fault::from(error).0.message),
        ErrorKind::File(_) => Fault::invalid(Fault::from(error).0.message),
        _ => error.into(),
    }
}

const NOT_ASKED: &str = "isolated sessions are not enabled for this sandbox; create it with the extension `bootstrap.execd.isolation` = `enable`";

/// Fails if the sandbox was created without isolated sessions.
fn offered(front: &Front, scope: &Scope) -> Result<(), Fault> {
    match front.service.get(&scope.owner, &scope.id)?.spec.nesting {
        Nesting::On => Ok(()),
        Nesting::Off => Err(unavailable(NOT_ASKED)),
    }
}

/// `GET /v1/isolated/capabilities`
async fn capabilities(State(front): State<Front>, scope: Scope) -> Result<Json<Value>, Fault> {
    let available = match front.service.get(&scope.owner, &scope.id)?.spec.nesting {
        Nesting::Off => Err(NOT_ASKED.to_owned()),
        Nesting::On => front.service.nesting(&scope.owner, &scope.id).await?,
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
async fn create(
    State(front): State<Front>,
    scope: Scope,
    Wish(body): Wish<CreateBody>,
) -> Result<Response, Fault> {
    offered(&front, &scope)?;
    let (open, echo) = wish::parse(body)?;
    let opened = front.service.open_session(&scope.owner, &scope.id, open).await;
    let session = opened.map_err(told)?;
    let mut answer = echo;
    answer.insert("session_id".to_owned(), uuid(&session).into());
    answer.insert("created_at".to_owned(), rfc3339(std::time::SystemTime::now()).into());
    Ok((StatusCode::CREATED, Json(Value::Object(answer))).into_response())
}

/// `GET /v1/isolated/sessions`
async fn list(State(front): State<Front>, scope: Scope) -> Result<Json<Value>, Fault> {
    offered(&front, &scope)?;
    let sessions = front.service.sessions(&scope.owner, &scope.id).await.map_err(told)?;
    let shown = |session: &SessionStatus| {
        let mut shown = state(session.nest.as_ref()?);
        shown.insert("session_id".to_owned(), uuid(&session.session).into());
        Some(Value::Object(shown))
    };
    Ok(Json(json!({ "sessions": sessions.iter().filter_map(shown).collect::<Vec<_>>() })))
}

fn state(nest: &NestStatus) -> Map<String, Value> {
    let mut state = Map::new();
    state.insert("status".to_owned(), if nest.alive { "active" } else { "dead" }.into());
    state.insert("created_at".to_owned(), rfc3339(nest.created).into());
    state.insert("last_run_at".to_owned(), rfc3339(nest.used).into());
    if let Some(left) = nest.idle_left {
        state.insert("idle_remaining_seconds".to_owned(), left.as_secs().into());
    }
    state
}

/// `GET /v1/isolated/session/{id}`
async fn look(State(front): State<Front>, isolated: Isolated) -> Result<Json<Value>, Fault> {
    let Isolated { scope, id, nest } = isolated;
    let note = front.service.nest_note(&scope.owner, &scope.id, &id).await.map_err(told)?;
    let echo: Map<String, Value> = serde_json::from_str(&note).unwrap_or_default();
    let mut answer: Map<String, Value> =
        echo.into_iter().filter(|(name, _)| ECHOED.contains(&name.as_str())).collect();
    answer.extend(state(&nest));
    answer.insert("session_id".to_owned(), uuid(&id).into());
    Ok(Json(Value::Object(answer)))
}

/// `DELETE /v1/isolated/session/{id}`: removes it with everything in it.
async fn delete(State(front): State<Front>, isolated: Isolated) -> Result<StatusCode, Fault> {
    let Isolated { scope, id, .. } = isolated;
    front.service.close_session(&scope.owner, &scope.id, &id).await.map_err(told)?;
    Ok(StatusCode::NO_CONTENT)
}

#[derive(Deserialize)]
struct RunBody {
    code: Option<String>,
    envs: Option<BTreeMap<String, Option<String>>>,
    /// Seconds.
    timeout_seconds: Option<i64>,
    background: Option<bool>,
}

impl RunBody {
    fn run(self, output: OutputSettings) -> Result<Run, Fault> {
        let text = self.code.filter(|text| !text.trim().is_empty() && !text.contains('\0'));
        let deadline = match self.timeout_seconds {
            None | Some(0) => None,
            Some(seconds @ 1..=LONGEST_RUN) => Some(Duration::from_secs(seconds.unsigned_abs())),
            Some(_) => return Err(Fault::invalid("`timeout_seconds` must be a positive number of seconds")),
        };
        let background = self.background == Some(true);
        Ok(Run {
            text: text.ok_or_else(|| Fault::invalid("`code` is empty or contains a NUL byte"))?,
            directory: None,
            deadline: deadline.filter(|_| !background),
            retention: output.retention,
            backpressure: if background {
                Backpressure::Off
            } else {
                Backpressure::On { stall_limit: Some(output.stall_limit) }
            },
            busy: Busy::Queue,
            env: environment(self.envs)?,
            place: if background { RunPlace::Beside } else { RunPlace::Shell },
        })
    }
}

/// `POST /v1/isolated/session/{id}/run`: runs in the session's shell, one after the other, or in the
/// background.
async fn run(
    State(front): State<Front>,
    isolated: Isolated,
    Wish(body): Wish<RunBody>,
) -> Result<Response, Fault> {
    let Isolated { scope, id, nest } = isolated;
    let run = body.run(front.service.output_settings())?;
    if !nest.alive {
        return Err(Fault::new(StatusCode::CONFLICT, "RUNTIME_ERROR", "the session is dead"));
    }
    let background = run.place == RunPlace::Beside;
    let following = front.service.run(&scope.owner, &scope.id, &id, run).await.map_err(told)?;
    if !background {
        let name = following.process.to_string();
        return Ok(stream::isolated(following, &name, scope.lines));
    }
    let answer = json!({
        "session_id": uuid(&id),
        "run_id": following.process.as_str(),
        "started_at": rfc3339(std::time::SystemTime::now()),
    });
    Ok((StatusCode::ACCEPTED, Json(answer)).into_response())
}

/// The name of a run in the path.
struct RunName(String);

impl axum::extract::FromRequestParts<Front> for RunName {
    type Rejection = std::convert::Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &Front) -> Result<Self, Self::Rejection> {
        Ok(Self(param(parts, "name").await))
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
async fn find_run(front: &Front, isolated: &Isolated, name: &str) -> Result<service::ProcessStatus, Fault> {
    let absent = || Fault::no_process(name);
    let process = ProcessId::parse(name).ok().ok_or_else(absent)?;
    let status = front.service.status(&isolated.scope.owner, &isolated.scope.id, &process).await?;
    if status.session.as_ref() == Some(&isolated.id) { Ok(status) } else { Err(absent()) }
}

/// `GET /v1/isolated/session/{id}/runs/{run}`
async fn run_status(
    State(front): State<Front>,
    isolated: Isolated,
    RunName(name): RunName,
) -> Result<Json<RunStatus>, Fault> {
    let status = find_run(&front, &isolated, &name).await?;
    let exit = status.ended.map(|end| end.exit);
    Ok(Json(RunStatus {
        session_id: uuid(&isolated.id),
        run_id: name,
        running: exit.is_none(),
        exit_code: exit.map(super::command::exit_code),
        error: exit
            .filter(|exit| !matches!(exit, Exit::Code(_)))
            .map(|exit| format!("the run {}", ended(exit))),
        started_at: rfc3339(status.started),
        finished_at: status.ended.map(|end| rfc3339(end.ended)),
    }))
}

/// `GET /v1/isolated/session/{id}/runs/{run}/logs?cursor=…`
async fn run_logs(
    State(front): State<Front>,
    isolated: Isolated,
    RunName(name): RunName,
    uri: Uri,
) -> Result<Response, Fault> {
    let status = find_run(&front, &isolated, &name).await?;
    logs::tail(&front, &isolated.scope, &status.process, &uri, CURSOR).await
}

/// Refuses diff and commit.
async fn not_supported(State(front): State<Front>, isolated: Isolated) -> Result<Response, Fault> {
    offered(&front, &isolated.scope)?;
    let message = "this server does not support diff and commit of isolated sessions";
    Err(Fault::new(StatusCode::SERVICE_UNAVAILABLE, "NOT_SUPPORTED", message))
}
