//! Shell sessions that stay open between runs.

use axum::Json;
use axum::extract::State;
use axum::response::Response;
use domain::process::Missing;
use domain::{Backpressure, Identity, SessionId};
use http::StatusCode;
use serde::{Deserialize, Serialize};
use service::{Busy, OpenSession, Run, RunPlace};

use super::command::{directory, refuse, timeout};
use super::fault::{Fault, Wish};
use super::{Name, Scope, run as stream};
use crate::opensandbox::Front;

#[derive(Deserialize)]
pub(super) struct OpenBody {
    cwd: Option<String>,
}

#[derive(Serialize)]
pub(super) struct Opened {
    session_id: String,
}

/// `POST /session`: creates the given directory if it is missing.
pub(super) async fn open(
    State(front): State<Front>,
    scope: Scope,
    Wish(body): Wish<OpenBody>,
) -> Result<Json<Opened>, Fault> {
    let cwd = body.cwd.filter(|path| !path.is_empty());
    let request = OpenSession {
        identity: Identity::Default,
        directory: cwd.map(|path| directory(path, Missing::Create)),
        env: Default::default(),
        terminal: None,
        nest: None,
    };
    let session = front.service.open_session(&scope.owner, &scope.id, request).await?;
    Ok(Json(Opened { session_id: session.to_string() }))
}

#[derive(Deserialize)]
pub(super) struct RunBody {
    command: Option<String>,
    cwd: Option<String>,
    /// Milliseconds.
    timeout: Option<i64>,
}

/// `POST /session/{id}/run`: one run at a time.
pub(super) async fn run(
    State(front): State<Front>,
    scope: Scope,
    Name(session): Name,
    Wish(body): Wish<RunBody>,
) -> Result<Response, Fault> {
    let session = session_id(&session)?;
    let text = body.command.filter(|text| !text.trim().is_empty() && !text.contains('\0'));
    let output = front.service.output_settings();
    let run = Run {
        text: text.ok_or_else(|| Fault::invalid("`command` is empty or contains a NUL byte"))?,
        directory: body.cwd.filter(|path| !path.is_empty()).map(|path| directory(path, Missing::Fail)),
        deadline: timeout(body.timeout, 0)?,
        retention: output.retention,
        backpressure: Backpressure::On { stall_limit: Some(output.stall_limit) },
        busy: Busy::Refuse,
        env: Default::default(),
        place: RunPlace::Shell,
    };
    match front.service.run(&scope.owner, &scope.id, &session, run).await {
        Ok(following) => Ok(stream::foreground(following, session.as_str(), scope.lines)),
        Err(error) => refuse(error, session.as_str()),
    }
}

/// `DELETE /session/{id}`
pub(super) async fn close(
    State(front): State<Front>,
    scope: Scope,
    Name(session): Name,
) -> Result<StatusCode, Fault> {
    front.service.close_session(&scope.owner, &scope.id, &session_id(&session)?).await?;
    Ok(StatusCode::OK)
}

fn session_id(text: &str) -> Result<SessionId, Fault> {
    SessionId::parse(text).ok().ok_or_else(|| Fault::no_session(text))
}
