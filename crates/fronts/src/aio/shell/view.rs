//! The output of the commands of a session, and waiting for the session to become idle.

use std::time::Duration;

use axum::Json;
use axum::response::{IntoResponse, Response};
use domain::{JournalOffset, ProcessId, SessionId};
use http::HeaderMap;
use serde::{Deserialize, Serialize};
use service::{OutputEvent, ProcessStatus, SandboxRef, ServiceError};
use tokio::time::{Instant, timeout, timeout_at};

use super::super::body::AioJson;
use super::super::commands::fields::parse_seconds;
use super::super::commands::session::GroupSession;
use super::super::envelope::{ResponseEnvelope, data_response};
use super::super::problem::AioProblem;
use super::super::target::AioTarget;
use super::collected_text::CollectedText;
use super::exec::strip_resolve_directory;
use super::exec_response::CONSOLE_PROMPT;
use super::input::StatusBody;
use super::session::{ShellStatus, last_exit_code, read_session, require_session};
use super::{exec_events, view_events};

/// How much output of all commands one view shows, in bytes; the newest comes first.
const MAX_VIEW_BYTES: u64 = 1 << 20;

/// How long reading the output of one command may take. It is stored, so only a hanging agent takes long.
const READ_OUTPUT_TIMEOUT: Duration = Duration::from_secs(5);

const DEFAULT_WAIT: Duration = Duration::from_secs(30);
const DEFAULT_MAX_WAIT: Duration = Duration::from_secs(120);

#[derive(Deserialize)]
pub(super) struct ViewBody {
    id: Option<String>,
}

#[derive(Serialize)]
pub(super) struct SessionView {
    output: String,
    session_id: String,
    console: Vec<ConsoleRecord>,
    status: ShellStatus,
    command: Option<String>,
    exit_code: Option<i32>,
}

/// A command with its output.
#[derive(Debug, Serialize)]
pub(super) struct ConsoleRecord {
    ps1: &'static str,
    command: String,
    output: String,
}

/// The commands of a session and their output.
pub(super) struct SessionTranscript {
    /// The oldest first.
    records: Vec<ConsoleRecord>,
    /// The run in progress, which has the last record.
    pub(super) current: Option<ProcessId>,
}

/// `POST /v1/shell/view`
pub(super) async fn view_session(
    target: AioTarget,
    headers: HeaderMap,
    AioJson(body): AioJson<ViewBody>,
) -> Result<Response, AioProblem> {
    let session = require_session(body.id)?;
    let wants_events = exec_events::accepts_events(&headers);
    if wants_events {
        target.begin_stream()?;
    }
    let shown = read_session(&target, &session).await?;
    let transcript = read_transcript(&target.sandbox, &session).await?;
    if wants_events {
        return Ok(view_events::stream_session(target.sandbox, session, transcript));
    }
    let view = SessionView {
        output: transcript.to_text(),
        session_id: shown.id().to_owned(),
        status: ShellStatus::of_session(&shown),
        command: transcript.records.last().map(|record| record.command.clone()),
        exit_code: last_exit_code(&shown).filter(|_| !shown.busy),
        console: transcript.records,
    };
    Ok(data_response(view).into_response())
}

impl SessionTranscript {
    fn to_text(&self) -> String {
        join_outputs(&self.records)
    }

    /// The output of the commands that have ended.
    pub(super) fn finished_text(&self) -> String {
        let finished = self.records.len() - usize::from(self.current.is_some());
        join_outputs(&self.records[..finished])
    }
}

fn join_outputs(records: &[ConsoleRecord]) -> String {
    let printed: Vec<_> =
        records.iter().map(|record| record.output.as_str()).filter(|text| !text.is_empty()).collect();
    printed.join("\n")
}

/// Reads what the remembered commands of a session have printed. If it is too much, the output of the oldest ones is
/// left out.
async fn read_transcript(sandbox: &SandboxRef, session: &SessionId) -> Result<SessionTranscript, AioProblem> {
    let runs = sandbox.sessions().session_runs(session).await?;
    let last = runs.last().filter(|run| run.ended.is_none());
    let current = last.map(|run| run.process.clone());
    let mut room = MAX_VIEW_BYTES;
    let mut records = Vec::new();
    for run in runs.into_iter().rev() {
        let output = read_output(sandbox, &run, room).await?;
        room = room.saturating_sub(run.written);
        let command = strip_resolve_directory(&run.command).to_owned();
        records.push(ConsoleRecord { ps1: CONSOLE_PROMPT, command, output });
    }
    records.reverse();
    Ok(SessionTranscript { records, current })
}

/// Reads the last `room` bytes that a command has printed so far.
async fn read_output(sandbox: &SandboxRef, run: &ProcessStatus, room: u64) -> Result<String, ServiceError> {
    let from = run.written.saturating_sub(room);
    let max_chars = usize::try_from(MAX_VIEW_BYTES).unwrap_or(usize::MAX);
    let mut text = CollectedText::new(max_chars);
    if from > 0 {
        text.add_gap();
    }
    let deadline = Instant::now() + READ_OUTPUT_TIMEOUT;
    let mut at = from;
    if at < run.written {
        let mut output = match sandbox.processes().follow_output(&run.process, JournalOffset(from)).await {
            Ok(output) => output,
            // It was forgotten meanwhile.
            Err(ServiceError::NoProcess(_)) => return Ok(text.into_text()),
            Err(error) => return Err(error),
        };
        while at < run.written {
            let Ok(event) = timeout_at(deadline, output.next()).await else { break };
            match event? {
                OutputEvent::Output { at: start, bytes, .. } => {
                    // The next view reads the output that is printed meanwhile.
                    let left = usize::try_from(run.written.saturating_sub(start.0)).unwrap_or(usize::MAX);
                    text.add_bytes(&bytes[..bytes.len().min(left)]);
                    at = start.0.saturating_add(bytes.len() as u64);
                }
                OutputEvent::Gap { to, .. } => {
                    text.add_gap();
                    at = to.0;
                }
                OutputEvent::Ended(_) => break,
            }
        }
    }
    Ok(text.into_text())
}

#[derive(Deserialize)]
pub(super) struct WaitBody {
    id: Option<String>,
    seconds: Option<f64>,
    max_wait_seconds: Option<f64>,
}

/// `POST /v1/shell/wait`: waits until no command runs in the session.
pub(super) async fn wait_for_session(
    target: AioTarget,
    AioJson(body): AioJson<WaitBody>,
) -> Result<Json<ResponseEnvelope<StatusBody>>, AioProblem> {
    let session = require_session(body.id)?;
    let limit = parse_seconds(body.seconds, "seconds")?.unwrap_or(DEFAULT_WAIT);
    let most = parse_seconds(body.max_wait_seconds, "max_wait_seconds")?.unwrap_or(DEFAULT_MAX_WAIT);
    target.begin_stream()?;
    let first = read_session(&target, &session).await?;
    match timeout(limit.min(most), wait_until_idle(&target, first)).await {
        Err(_elapsed) => Ok(data_response(StatusBody { status: ShellStatus::Running })),
        Ok(Ok(idle)) => Ok(data_response(StatusBody { status: ShellStatus::of_session(&idle) })),
        Ok(Err(problem)) if problem.status == http::StatusCode::NOT_FOUND => {
            let vanished = StatusBody { status: ShellStatus::Terminated };
            Ok(Json(ResponseEnvelope::failure("Session not found", vanished)))
        }
        Ok(Err(problem)) => Err(problem),
    }
}

/// Waits for the end of each run until there is none.
async fn wait_until_idle(target: &AioTarget, mut session: GroupSession) -> Result<GroupSession, AioProblem> {
    while let Some(run) = session.running_command().cloned() {
        wait_for_end(&target.sandbox, &run).await?;
        session = read_session(target, &session.session).await?;
        if session.running_command() == Some(&run) {
            // An agent that contradicts itself must not keep us busy.
            return Err(AioProblem::bad_request("the session reports a command that has ended"));
        }
    }
    Ok(session)
}

async fn wait_for_end(sandbox: &SandboxRef, run: &ProcessId) -> Result<(), ServiceError> {
    let mut output = match sandbox.processes().follow_output(run, JournalOffset(u64::MAX)).await {
        Ok(output) => output,
        Err(ServiceError::NoProcess(_)) => return Ok(()),
        Err(error) => return Err(error),
    };
    while !matches!(output.next().await?, OutputEvent::Ended(_)) {}
    Ok(())
}
