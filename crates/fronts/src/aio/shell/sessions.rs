//! Opening, changing, listing and closing sessions.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use axum::Json;
use axum::extract::Path;
use domain::process::MissingDirectory;
use domain::{SessionId, SessionName};
use futures_util::{StreamExt, stream};
use serde::{Deserialize, Serialize};
use service::{BusyPolicy, OutputEvent, RequestTime, SandboxRef, ServiceError, SharedSessionUpdate};
use tokio::time::timeout;

use super::super::body::{AioJson, check_text};
use super::super::commands::fields::{check_path, parse_seconds};
use super::super::commands::run::{queued_run, sent_directory};
use super::super::commands::session::{GroupSession, SessionGroup, read_sessions};
use super::super::envelope::{ResponseEnvelope, data_response, success_response};
use super::super::problem::AioProblem;
use super::super::target::AioTarget;
use super::session::{
    NewShellSession, SessionNote, ShellStatus, open_session, read_session, require_session, session_of_id,
};
use crate::kit::time::format_rfc3339;
use crate::server::request_log::unique_hex;

/// A session that was used within this time counts as active.
const ACTIVE_TIME: Duration = Duration::from_secs(300);

/// How many sessions are closed at the same time.
const MAX_CONCURRENT_CLOSES: usize = 8;

/// How long a new session may take to report its directory. Clients give up after five seconds.
const FIRST_DIRECTORY_TIMEOUT: Duration = Duration::from_secs(2);

/// The first command of a session that was opened in a directory: it makes the shell report where it is.
const RESOLVE_COMMAND: &str = "command cd -P .";
const KEEP_LINKS_COMMAND: &str = ":";

#[derive(Deserialize)]
pub(super) struct CreateShellSessionBody {
    id: Option<String>,
    exec_dir: Option<String>,
    no_change_timeout: Option<f64>,
    preserve_symlinks: Option<bool>,
}

#[derive(Serialize)]
pub(super) struct CreatedSession {
    session_id: String,
    working_dir: String,
}

/// `POST /v1/shell/sessions/create`: finds the session if it exists.
pub(super) async fn create_session(
    target: AioTarget,
    AioJson(body): AioJson<CreateShellSessionBody>,
) -> Result<Json<ResponseEnvelope<CreatedSession>>, AioProblem> {
    let requested = RequestTime::now();
    let name = body.id.filter(|id| !id.is_empty()).map(parse_name).transpose()?;
    let directory = check_path(body.exec_dir, "exec_dir")?;
    let opened_by = directory.is_some().then(unique_hex);
    let no_change_timeout = parse_quiet_seconds(body.no_change_timeout)?;
    let note = SessionNote { no_change_timeout, opened_by: opened_by.clone() };
    let new = NewShellSession { name, directory: directory.clone(), note };
    let mut session = open_session(&target, new, requested).await?;
    let is_new = SessionNote::of_session(&session.shared).opened_by == opened_by;
    if let Some(directory) = directory.filter(|_| is_new) {
        let command = if body.preserve_symlinks == Some(true) { KEEP_LINKS_COMMAND } else { RESOLVE_COMMAND };
        let reported = report_directory(&target.sandbox, &session.session, directory, command);
        match timeout(FIRST_DIRECTORY_TIMEOUT, reported).await {
            Ok(Ok(())) => session = read_session(&target, &session.session).await?,
            // A concurrent call has started a command in it.
            Ok(Err(error)) => tracing::debug!(%error, "new session did not report its directory"),
            Err(_elapsed) => tracing::debug!("new session did not report its directory in time"),
        }
    }
    let working_dir = session.working_directory(&target);
    let created = CreatedSession { session_id: session.id().to_owned(), working_dir };
    Ok(success_response("Session created", created))
}

/// Changes to a directory in the shell, which knows the path with its links, and lets the session report it. The command
/// is removed from the transcript.
async fn report_directory(
    sandbox: &SandboxRef,
    session: &SessionId,
    directory: String,
    command: &str,
) -> Result<(), ServiceError> {
    let mut run = queued_run(sandbox, command.to_owned());
    run.directory = Some(sent_directory(directory, MissingDirectory::Ignore));
    run.deadline = Some(FIRST_DIRECTORY_TIMEOUT);
    run.busy = BusyPolicy::Refuse;
    let mut output = sandbox.sessions().run_in_session(session, run).await?;
    while !matches!(output.next().await?, OutputEvent::Ended(_)) {}
    sandbox.processes().forget_process(&output.process).await
}

fn parse_name(id: String) -> Result<SessionName, AioProblem> {
    let id = check_text(id, "id")?;
    SessionName::parse(&id).map_err(|error| AioProblem::invalid_field("id", error.to_string()))
}

/// The limit that is stored with a session, in whole seconds.
fn parse_quiet_seconds(seconds: Option<f64>) -> Result<Option<u64>, AioProblem> {
    let limit = parse_seconds(seconds, "no_change_timeout")?;
    Ok(limit.map(|limit| (limit + Duration::from_nanos(999_999_999)).as_secs()))
}

#[derive(Deserialize)]
pub(super) struct UpdateShellSessionBody {
    id: Option<String>,
    no_change_timeout: Option<f64>,
}

#[derive(Serialize)]
pub(super) struct UpdatedSession {
    session_id: String,
    no_change_timeout: u64,
}

/// `POST /v1/shell/sessions/update`
pub(super) async fn update_session(
    target: AioTarget,
    AioJson(body): AioJson<UpdateShellSessionBody>,
) -> Result<Json<ResponseEnvelope<UpdatedSession>>, AioProblem> {
    let session = require_session(body.id)?;
    let seconds = parse_quiet_seconds(body.no_change_timeout)?;
    let mut updated = read_session(&target, &session).await?;
    if seconds.is_some() {
        let note = SessionNote { no_change_timeout: seconds, ..SessionNote::of_session(&updated.shared) };
        let note = Some(note.to_text());
        let update = SharedSessionUpdate { note, ..Default::default() };
        let status = target.sandbox.sessions().update_shared_session(&session, update).await?;
        updated =
            GroupSession::from_status(SessionGroup::Shell, status).ok_or_else(AioProblem::no_session)?;
    }
    let no_change_timeout = SessionNote::of_session(&updated.shared).quiet_seconds();
    let updated = UpdatedSession { session_id: updated.id().to_owned(), no_change_timeout };
    Ok(success_response("Session updated", updated))
}

#[derive(Serialize)]
pub(super) struct SessionList {
    sessions: BTreeMap<String, SessionInfo>,
}

#[derive(Serialize)]
pub(super) struct SessionInfo {
    working_dir: String,
    created_at: String,
    last_used_at: String,
    age_seconds: u64,
    status: ShellStatus,
    current_command: Option<String>,
}

/// `GET /v1/shell/sessions`
pub(super) async fn list_sessions(
    target: AioTarget,
) -> Result<Json<ResponseEnvelope<SessionList>>, AioProblem> {
    let sessions = read_sessions(&target, SessionGroup::Shell).await?;
    let describe = |session: GroupSession| (session.id().to_owned(), describe_session(&target, session));
    Ok(data_response(SessionList { sessions: sessions.into_iter().map(describe).collect() }))
}

fn describe_session(target: &AioTarget, session: GroupSession) -> SessionInfo {
    SessionInfo {
        working_dir: session.working_directory(target),
        created_at: format_rfc3339(session.shared.opened),
        last_used_at: format_rfc3339(session.shared.used),
        age_seconds: time_since(session.shared.opened).as_secs(),
        status: ShellStatus::of_session(&session),
        current_command: session
            .shared
            .command
            .map(|command| super::exec::strip_resolve_directory(&command).to_owned()),
    }
}

#[derive(Serialize)]
pub(super) struct SessionStats {
    total_sessions: usize,
    active_sessions: usize,
    idle_sessions: usize,
    max_sessions: u32,
    /// Seconds.
    session_timeout: u64,
    usage_ratio: f64,
}

/// `GET /v1/shell/sessions/stats`
pub(super) async fn get_stats(target: AioTarget) -> Result<Json<ResponseEnvelope<SessionStats>>, AioProblem> {
    let sessions = read_sessions(&target, SessionGroup::Shell).await?;
    let is_active = |session: &&GroupSession| session.busy || time_since(session.shared.used) < ACTIVE_TIME;
    let (total, active) = (sessions.len(), sessions.iter().filter(is_active).count());
    let max_sessions = target.notes.max_shell_sessions;
    Ok(data_response(SessionStats {
        total_sessions: total,
        active_sessions: active,
        idle_sessions: total - active,
        max_sessions,
        session_timeout: SessionGroup::Shell.idle_timeout(&target).as_secs(),
        usage_ratio: u32::try_from(total)
            .map_or(1.0, |total| f64::from(total) / f64::from(max_sessions.max(1))),
    }))
}

#[derive(Serialize)]
pub(super) struct SessionReference {
    session_id: String,
}

/// `DELETE /v1/shell/sessions/{id}`: an unknown session is not an HTTP error.
pub(super) async fn delete_session(
    target: AioTarget,
    Path(id): Path<String>,
) -> Result<Json<ResponseEnvelope<SessionReference>>, AioProblem> {
    let requested = RequestTime::now();
    let closed = match session_of_id(&id) {
        Ok(session) => target.sandbox.sessions().close_shared_session(&session, requested).await,
        Err(_invalid) => return Ok(unknown_session(id)),
    };
    match closed {
        Ok(()) => Ok(success_response("Session cleaned up", SessionReference { session_id: id })),
        Err(ServiceError::NoSession(_)) => Ok(unknown_session(id)),
        Err(error) => Err(error.into()),
    }
}

fn unknown_session(id: String) -> Json<ResponseEnvelope<SessionReference>> {
    let message = format!("Session {id} not found");
    Json(ResponseEnvelope::failure(message, SessionReference { session_id: id }))
}

#[derive(Serialize)]
pub(super) struct ClosedSessions {
    cleaned_sessions: usize,
}

/// `DELETE /v1/shell/sessions`
pub(super) async fn delete_all_sessions(
    target: AioTarget,
) -> Result<Json<ResponseEnvelope<ClosedSessions>>, AioProblem> {
    let requested = RequestTime::now();
    let sessions = read_sessions(&target, SessionGroup::Shell).await?;
    let closes = sessions.into_iter().map(|session| {
        let sandbox = target.sandbox.clone();
        async move { sandbox.sessions().close_shared_session(&session.session, requested).await }
    });
    let closed: Vec<_> = stream::iter(closes).buffer_unordered(MAX_CONCURRENT_CLOSES).collect().await;
    let mut cleaned_sessions = 0;
    for closed in closed {
        match closed {
            Ok(()) => cleaned_sessions += 1,
            // Another call has closed it.
            Err(ServiceError::NoSession(_)) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(data_response(ClosedSessions { cleaned_sessions }))
}

/// The agent's clock may differ from ours.
fn time_since(time: SystemTime) -> Duration {
    time.elapsed().unwrap_or_default()
}
