//! `POST /v1/shell/exec`: runs a command in a session, or in a new one.

use axum::response::Response;
use domain::SessionId;
use domain::process::MissingDirectory;
use http::HeaderMap;
use serde::Deserialize;
use service::{FileFault, RequestTime, ServiceError, SessionRunRequest, draw_session_id};

use super::super::body::{AioJson, require_field};
use super::super::commands::fields::{check_path, parse_seconds};
use super::super::commands::run::{
    CommandIds, FailedCommand, FailedStage, MAX_OPEN_ATTEMPTS, overdue_problem, queued_run,
    reader_backpressure, sent_directory,
};
use super::super::commands::session::SessionGroup;
use super::super::keep_alive::respond_with_blanks;
use super::super::problem::AioProblem;
use super::super::target::AioTarget;
use super::collected_text::{CollectedText, MAX_COLLECTED_CHARS, MAX_TRUNCATED_CHARS};
use super::command_run::{CommandRun, RunEnd, RunLimits, RunStep};
use super::exec_events;
use super::exec_response::{CommandResult, EXECUTED_MESSAGE};
use super::session::{ShellStatus, anonymous_session, check_command, session_of_id};

/// Leads a command that runs in the directory that links lead to, and not in the path with the links.
const RESOLVE_DIRECTORY: &str = "command cd -P .\n";

#[derive(Deserialize)]
pub(in crate::aio) struct ExecBody {
    id: Option<String>,
    command: Option<String>,
    exec_dir: Option<String>,
    async_mode: Option<bool>,
    timeout: Option<f64>,
    strict: Option<bool>,
    no_change_timeout: Option<f64>,
    hard_timeout: Option<f64>,
    preserve_symlinks: Option<bool>,
    truncate: Option<bool>,
}

/// A checked request.
#[derive(Clone, Debug)]
pub(super) struct ExecRequest {
    /// `None` runs in a new session.
    pub(super) id: Option<String>,
    command: String,
    mode: ExecMode,
    limits: RunLimits,
    run: SessionRunRequest,
    /// The directory that must exist.
    strict_directory: Option<String>,
    /// How much output is returned.
    pub(super) max_chars: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ExecMode {
    Wait,
    /// The response does not wait for the command.
    Detached,
}

impl ExecRequest {
    pub(super) fn parse(body: ExecBody, target: &AioTarget) -> Result<Self, AioProblem> {
        let command = check_command(require_field(body.command, "command")?, "command")?;
        let directory = check_path(body.exec_dir, "exec_dir")?;
        let strict = body.strict == Some(true);
        let mode = if body.async_mode == Some(true) { ExecMode::Detached } else { ExecMode::Wait };
        let resolve = directory.is_some() && body.preserve_symlinks != Some(true);
        let text = if resolve { format!("{RESOLVE_DIRECTORY}{command}") } else { command.clone() };
        let mut run = queued_run(&target.sandbox, text);
        let missing = if strict { MissingDirectory::Fail } else { MissingDirectory::Ignore };
        run.directory = directory.clone().map(|path| sent_directory(path, missing));
        run.deadline = parse_seconds(body.hard_timeout, "hard_timeout")?;
        if mode == ExecMode::Wait {
            run.backpressure = reader_backpressure(&target.sandbox);
        }
        let kept = run.retention.first.saturating_add(run.retention.last);
        Ok(Self {
            id: body.id.filter(|id| !id.is_empty()),
            command,
            mode,
            limits: RunLimits {
                soft: parse_seconds(body.timeout, "timeout")?,
                quiet: parse_seconds(body.no_change_timeout, "no_change_timeout")?,
            },
            run,
            strict_directory: directory.filter(|_| strict),
            max_chars: match body.truncate {
                Some(false) => usize::try_from(kept)
                    .unwrap_or(usize::MAX)
                    .clamp(MAX_TRUNCATED_CHARS, MAX_COLLECTED_CHARS),
                _ => MAX_TRUNCATED_CHARS,
            },
        })
    }

    /// Whether a command was not started because its directory is missing.
    fn lacks_directory(&self, error: &ServiceError) -> bool {
        let ServiceError::File(file) = error else { return false };
        self.strict_directory.is_some()
            && self.mode == ExecMode::Wait
            && file.launch_step.is_none()
            && matches!(file.fault, FileFault::NotFound | FileFault::NotADirectory)
    }

    fn missing_directory_text(&self) -> String {
        format!("{} No such file or directory", self.strict_directory.as_deref().unwrap_or_default())
    }
}

/// A command as clients sent it, from the text that its shell was given.
pub(super) fn strip_resolve_directory(text: &str) -> &str {
    text.strip_prefix(RESOLVE_DIRECTORY).unwrap_or(text)
}

/// `POST /v1/shell/exec`
pub(super) async fn exec_command(
    target: AioTarget,
    headers: HeaderMap,
    AioJson(body): AioJson<ExecBody>,
) -> Result<Response, AioProblem> {
    let requested = RequestTime::now();
    let wants_events = exec_events::accepts_events(&headers);
    let body = ExecBody { async_mode: body.async_mode.filter(|_| !wants_events), ..body };
    let request = ExecRequest::parse(body, &target)?;
    target.begin_stream()?;
    if wants_events {
        return Ok(match begin_command(&target, &request, requested).await? {
            BegunCommand { run: Some(run), .. } => exec_events::stream_command(run),
            BegunCommand { run: None, .. } => exec_events::stream_text(request.missing_directory_text()),
        });
    }
    respond_with_blanks(run_command(target, request, requested), CommandResult::late_failure).await
}

/// Runs a command until it ends or a limit is reached, or only starts it.
pub(super) async fn run_command(
    target: AioTarget,
    request: ExecRequest,
    requested: RequestTime,
) -> Result<CommandResult, FailedCommand> {
    let mut ids = CommandIds { session: request.id.clone().unwrap_or_default(), ..CommandIds::default() };
    let begun = match begin_command(&target, &request, requested).await {
        Ok(begun) => begun,
        Err(problem) => {
            let stage = FailedStage::NotStarted;
            return Err(FailedCommand { problem, stage, ids, command: request.command });
        }
    };
    ids.session.clone_from(&begun.id);
    let result = wait_for_command(&request, begun).await;
    let stage = FailedStage::Started;
    result.map_err(|problem| FailedCommand { problem, stage, ids, command: request.command })
}

async fn wait_for_command(request: &ExecRequest, begun: BegunCommand) -> Result<CommandResult, AioProblem> {
    let BegunCommand { id, run } = begun;
    let command = request.command.clone();
    let Some(mut run) = run else {
        return Ok(match request.mode {
            ExecMode::Detached => CommandResult::running(id, command, "Command sent for execution"),
            ExecMode::Wait => {
                let output = request.missing_directory_text();
                CommandResult::ended(id, command, (ShellStatus::Terminated, 1), output)
            }
        });
    };
    let mut collected = CollectedText::new(request.max_chars);
    let end = loop {
        match run.next().await? {
            RunStep::Event(event) => collected.add_event(&event),
            RunStep::Over(end) => break end,
        }
    };
    Ok(match end {
        RunEnd::TooLong => {
            let running = CommandResult::running(id, command, EXECUTED_MESSAGE);
            running.with_partial_output(collected.into_text())
        }
        RunEnd::TooQuiet => CommandResult::quiet(id, command, collected.into_text()),
        RunEnd::Overdue => return Err(overdue_problem()),
        RunEnd::Ended(end) => {
            let ended = ShellStatus::from_exit(end.exit);
            CommandResult::ended(id, command, ended, collected.into_text())
        }
    })
}

/// A command that was passed to its session.
struct BegunCommand {
    /// The id of its session.
    id: String,
    /// `None` if nothing is waited for: the command is detached, or its directory is missing.
    run: Option<CommandRun>,
}

/// Starts a command, or leaves it in the queue of its session if the time was up before its turn.
async fn begin_command(
    target: &AioTarget,
    request: &ExecRequest,
    requested: RequestTime,
) -> Result<BegunCommand, AioProblem> {
    let Some(id) = &request.id else { return begin_in_new_session(target, request, requested).await };
    match start_command(target, request, session_of_id(id)?).await {
        Ok(run) => Ok(BegunCommand { id: id.clone(), run }),
        Err(error) if request.lacks_directory(&error) => Ok(BegunCommand { id: id.clone(), run: None }),
        Err(error) => Err(error.into()),
    }
}

/// Starts a command in a session that is opened for it.
async fn begin_in_new_session(
    target: &AioTarget,
    request: &ExecRequest,
    requested: RequestTime,
) -> Result<BegunCommand, AioProblem> {
    for _ in 0..MAX_OPEN_ATTEMPTS {
        let session = draw_session_id()?;
        let id = session.as_str().to_owned();
        match start_in_new_session(target, request, session, requested).await {
            Ok(run) => return Ok(BegunCommand { id, run }),
            // Only an agent of an older server answers so: between its two requests, another call at the limit closed
            // the new session.
            Err(ServiceError::NoSession(_)) => {}
            Err(ServiceError::TooManySessions(_)) => break,
            Err(error) if request.lacks_directory(&error) => return Ok(BegunCommand { id, run: None }),
            Err(error) => return Err(error.into()),
        }
    }
    Err(SessionGroup::Shell.too_many_sessions(target))
}

async fn start_in_new_session(
    target: &AioTarget,
    request: &ExecRequest,
    session: SessionId,
    requested: RequestTime,
) -> Result<Option<CommandRun>, ServiceError> {
    let (sessions, run) = (target.sandbox.sessions(), request.run.clone());
    let open = anonymous_session(target, requested);
    match request.mode {
        ExecMode::Detached => {
            sessions.start_detached_in_new_session(&session, open, run).await?;
            Ok(None)
        }
        ExecMode::Wait => {
            let hard = run.deadline;
            let output = sessions.run_in_new_session(&session, open, run).await?;
            Ok(Some(CommandRun::started(target.sandbox.clone(), session, output, hard, request.limits)))
        }
    }
}

async fn start_command(
    target: &AioTarget,
    request: &ExecRequest,
    session: SessionId,
) -> Result<Option<CommandRun>, ServiceError> {
    let run = request.run.clone();
    match request.mode {
        ExecMode::Detached => {
            target.sandbox.sessions().start_detached_run(&session, run).await?;
            Ok(None)
        }
        ExecMode::Wait => {
            let mut run = CommandRun::new(target.sandbox.clone(), session, run, request.limits);
            run.wait_for_start().await?;
            Ok(Some(run))
        }
    }
}
