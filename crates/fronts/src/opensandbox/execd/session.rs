//! Shell sessions that stay open between runs.

use axum::Json;
use axum::response::Response;
use domain::process::MissingDirectory;
use domain::{Backpressure, SessionId, UserIdentity};
use http::StatusCode;
use serde::{Deserialize, Serialize};
use service::{BusyPolicy, OpenSessionRequest, RunShell, SessionRunRequest};

use super::command::{convert_launch_error, expanded_directory, parse_timeout};
use super::problem::{ExecdProblem, JsonOrEmpty};
use super::{ExecTarget, PathName, command_stream as stream};

#[derive(Deserialize)]
pub(super) struct OpenSessionBody {
    cwd: Option<String>,
}

#[derive(Serialize)]
pub(super) struct OpenedSessionBody {
    session_id: String,
}

/// `POST /session`: creates the given directory if it is missing.
pub(super) async fn open_session(
    target: ExecTarget,
    JsonOrEmpty(body): JsonOrEmpty<OpenSessionBody>,
) -> Result<Json<OpenedSessionBody>, ExecdProblem> {
    let cwd = body.cwd.filter(|path| !path.is_empty());
    let request = OpenSessionRequest {
        identity: UserIdentity::Default,
        directory: cwd.map(|path| expanded_directory(path, MissingDirectory::Create)),
        env: Default::default(),
        terminal: None,
        isolation: None,
    };
    let session = target.sandbox.sessions().open_session(request).await?;
    Ok(Json(OpenedSessionBody { session_id: session.to_string() }))
}

#[derive(Deserialize)]
pub(super) struct RunInSessionBody {
    command: Option<String>,
    cwd: Option<String>,
    /// Milliseconds.
    timeout: Option<i64>,
}

/// `POST /session/{id}/run`: one run at a time.
pub(super) async fn run_in_session(
    target: ExecTarget,
    PathName(session): PathName,
    JsonOrEmpty(body): JsonOrEmpty<RunInSessionBody>,
) -> Result<Response, ExecdProblem> {
    let session = parse_session_id(&session)?;
    let text = body.command.filter(|text| !text.trim().is_empty() && !text.contains('\0'));
    let output = target.sandbox.processes().output_settings();
    let run = SessionRunRequest {
        text: text.ok_or_else(|| ExecdProblem::invalid("`command` is empty or contains a NUL byte"))?,
        directory: body
            .cwd
            .filter(|path| !path.is_empty())
            .map(|path| expanded_directory(path, MissingDirectory::Fail)),
        deadline: parse_timeout(body.timeout, 0)?,
        retention: output.retention,
        backpressure: Backpressure::On { stall_limit: Some(output.stall_limit) },
        busy: BusyPolicy::Refuse,
        env: Default::default(),
        shell: RunShell::Shell,
    };
    target.begin_stream()?;
    match target.sandbox.sessions().run_in_session(&session, run).await {
        Ok(following) => Ok(stream::stream_command(following, session.as_str(), target.lines)),
        Err(error) => convert_launch_error(error, session.as_str()),
    }
}

/// `DELETE /session/{id}`
pub(super) async fn close_session(
    target: ExecTarget,
    PathName(session): PathName,
) -> Result<StatusCode, ExecdProblem> {
    target.sandbox.sessions().close_session(&parse_session_id(&session)?).await?;
    Ok(StatusCode::OK)
}

fn parse_session_id(text: &str) -> Result<SessionId, ExecdProblem> {
    SessionId::parse(text).ok().ok_or_else(|| ExecdProblem::no_session(text))
}
