//! `POST /v1/bash/exec`: runs a command in a session, or in a new one.

use std::collections::BTreeMap;
use std::time::Duration;

use axum::response::Response;
use domain::process::MissingDirectory;
use domain::{JournalOffset, ProcessId, SessionId, UserIdentity};
use http::StatusCode;
use serde::{Deserialize, Serialize};
use service::{
    FileCaller, OutputStream, RequestTime, SandboxRef, ServiceError, SessionRunRequest, WaitLimits,
    WaitOutcome,
};

use super::collected_output::{CollectedOutput, MAX_COLLECTED_CHARS};
use super::command_status::BashStatus;
use super::fields::{check_count, check_long_text, check_variables};
use super::session::{NewBashSession, open_session, optional_session_id};
use crate::aio::body::{AioJson, require_field};
use crate::aio::commands::fields::{check_absolute_path, parse_seconds};
use crate::aio::commands::run::{
    CommandIds, FailedCommand, FailedStage, MAX_OPEN_ATTEMPTS, OVERDUE_TIMEOUT, overdue_problem, queued_run,
    reader_backpressure, sent_directory, start_queued_run,
};
use crate::aio::commands::session::SessionGroup;
use crate::aio::envelope::ResponseEnvelope;
use crate::aio::keep_alive::respond_with_blanks;
use crate::aio::problem::AioProblem;
use crate::aio::target::AioTarget;

/// How many characters of each stream are returned, unless the client says otherwise.
const DEFAULT_OUTPUT_CHARS: u64 = 50_000;

#[derive(Deserialize)]
pub(super) struct BashExecBody {
    command: Option<String>,
    session_id: Option<String>,
    exec_dir: Option<String>,
    env: Option<BTreeMap<String, Option<String>>>,
    async_mode: Option<bool>,
    timeout: Option<f64>,
    hard_timeout: Option<f64>,
    max_output_length: Option<i64>,
}

/// A checked request.
#[derive(Clone, Debug)]
struct BashExecRequest {
    id: Option<String>,
    mode: BashExecMode,
    run: SessionRunRequest,
    /// How many characters of each stream are returned.
    max_chars: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BashExecMode {
    Wait,
    /// The response comes after this time, also if the command goes on.
    WaitAtMost(Duration),
    /// The response does not wait for the command.
    Detached,
}

/// The data of a response.
#[derive(Debug, Serialize)]
struct BashExecResult {
    session_id: String,
    command_id: String,
    command: String,
    status: BashStatus,
    stdout: Option<String>,
    stderr: Option<String>,
    exit_code: Option<i32>,
    offset: u64,
    stderr_offset: u64,
}

impl BashExecRequest {
    fn parse(body: BashExecBody, target: &AioTarget) -> Result<Self, AioProblem> {
        let timeout = parse_seconds(body.timeout, "timeout")?;
        let mode = match (body.async_mode, timeout) {
            (Some(true), _) => BashExecMode::Detached,
            (_, Some(limit)) => BashExecMode::WaitAtMost(limit),
            (_, None) => BashExecMode::Wait,
        };
        let directory = check_absolute_path(body.exec_dir, "exec_dir")?;
        let max_chars = check_count(body.max_output_length, "max_output_length", DEFAULT_OUTPUT_CHARS)?;
        let command = check_long_text(require_field(body.command, "command")?, "command")?;
        let mut run = queued_run(&target.sandbox, command);
        run.directory = directory.map(|path| sent_directory(path, MissingDirectory::Fail));
        run.deadline = parse_seconds(body.hard_timeout, "hard_timeout")?;
        run.env = check_variables(body.env)?;
        if mode == BashExecMode::Wait {
            run.backpressure = reader_backpressure(&target.sandbox);
        }
        Ok(Self {
            id: optional_session_id(body.session_id)?,
            mode,
            run,
            max_chars: match max_chars {
                0 => MAX_COLLECTED_CHARS,
                most => usize::try_from(most).unwrap_or(usize::MAX),
            },
        })
    }
}

/// `POST /v1/bash/exec`
pub(super) async fn exec_command(
    target: AioTarget,
    AioJson(body): AioJson<BashExecBody>,
) -> Result<Response, AioProblem> {
    let requested = RequestTime::now();
    let request = BashExecRequest::parse(body, &target)?;
    target.begin_stream()?;
    respond_with_blanks(run_command(target, request, requested), late_failure).await
}

/// A run that was passed to its session.
struct BegunRun {
    process: ProcessId,
    /// `None` if nothing is waited for.
    output: Option<OutputStream>,
}

/// The response of a command that failed after the response had begun. Clients that do not read `success` find the error
/// in its errors.
fn late_failure(failed: FailedCommand) -> ResponseEnvelope<BashExecResult> {
    let FailedCommand { problem, ids, command, .. } = failed;
    let result = BashExecResult {
        session_id: ids.session,
        command_id: ids.command,
        command,
        status: BashStatus::Killed,
        stdout: None,
        stderr: Some(problem.message.clone()),
        exit_code: Some(-1),
        offset: 0,
        stderr_offset: 0,
    };
    ResponseEnvelope { hint: problem.hint, ..ResponseEnvelope::failure(problem.message, result) }
}

async fn run_command(
    target: AioTarget,
    request: BashExecRequest,
    requested: RequestTime,
) -> Result<ResponseEnvelope<BashExecResult>, FailedCommand> {
    let mut ids = CommandIds { session: request.id.clone().unwrap_or_default(), ..CommandIds::default() };
    let result = wait_for_command(&target, &request, requested, &mut ids).await;
    let stage = if ids.command.is_empty() { FailedStage::NotStarted } else { FailedStage::Started };
    result.map_err(|problem| FailedCommand { problem, stage, ids, command: request.run.text })
}

async fn wait_for_command(
    target: &AioTarget,
    request: &BashExecRequest,
    requested: RequestTime,
    ids: &mut CommandIds,
) -> Result<ResponseEnvelope<BashExecResult>, AioProblem> {
    let deadline = match request.mode {
        BashExecMode::WaitAtMost(limit) => Some(tokio::time::Instant::now() + limit),
        BashExecMode::Wait | BashExecMode::Detached => None,
    };
    let (id, begun) = begin_command(target, request, requested).await?;
    *ids = CommandIds { session: id, command: begun.process.as_str().to_owned() };
    let mut collected = CollectedOutput::new(request.max_chars);
    let mut end = None;
    if let Some(mut output) = begun.output {
        let soft = deadline.map(|deadline| deadline.saturating_duration_since(tokio::time::Instant::now()));
        let overdue = request.run.deadline.filter(|_| soft.is_none()).map(|limit| limit + OVERDUE_TIMEOUT);
        let limits = WaitLimits { soft: soft.or(overdue), quiet: None };
        let outcome = output.wait(limits, |event| collected.add_event(&event)).await?;
        if let WaitOutcome::Ended(ended) = outcome {
            collected.finish();
            end = Some(BashStatus::from_end(&ended));
        } else if overdue.is_some() {
            return Err(overdue_problem());
        }
    }
    let offsets = collected.offsets();
    let (stdout, stderr) = collected.into_texts();
    let message = if end.is_some() { "Command executed" } else { "Command is running" };
    let result = BashExecResult {
        session_id: ids.session.clone(),
        command_id: ids.command.clone(),
        command: request.run.text.clone(),
        status: end.map_or(BashStatus::Running, |(status, _)| status),
        stdout,
        stderr,
        exit_code: end.map(|(_, code)| code),
        offset: offsets.stdout,
        stderr_offset: offsets.stderr,
    };
    Ok(ResponseEnvelope::success(message, result))
}

/// Passes a command to its session, which is opened if necessary. Returns the id of the session.
async fn begin_command(
    target: &AioTarget,
    request: &BashExecRequest,
    requested: RequestTime,
) -> Result<(String, BegunRun), AioProblem> {
    if request.mode != BashExecMode::Wait {
        // The response does not wait for the start, at which the agent checks the directory.
        check_directory(&target.sandbox, &request.run).await?;
    }
    for _ in 0..MAX_OPEN_ATTEMPTS {
        let new = NewBashSession { id: request.id.clone(), ..NewBashSession::default() };
        let opened = open_session(target, new, requested).await?;
        match start_run(&target.sandbox, &opened.session, request).await {
            Ok(begun) => return Ok((opened.id().to_owned(), begun)),
            // Another call has closed the session before the command was passed to it.
            Err(ServiceError::NoSession(_)) => {}
            Err(error) => return Err(start_problem(error)),
        }
    }
    Err(SessionGroup::Bash.too_many_sessions(target))
}

async fn start_run(
    sandbox: &SandboxRef,
    session: &SessionId,
    request: &BashExecRequest,
) -> Result<BegunRun, ServiceError> {
    let run = request.run.clone();
    if request.mode == BashExecMode::Wait {
        let output = start_queued_run(sandbox, session, run).await?;
        return Ok(BegunRun { process: output.process.clone(), output: Some(output) });
    }
    let process = sandbox.sessions().start_detached_run(session, run).await?;
    let output = match request.mode {
        BashExecMode::Detached => None,
        BashExecMode::Wait | BashExecMode::WaitAtMost(_) => {
            Some(sandbox.processes().follow_output(&process, JournalOffset(0)).await?)
        }
    };
    Ok(BegunRun { process, output })
}

/// Refuses a directory that does not exist.
async fn check_directory(sandbox: &SandboxRef, run: &SessionRunRequest) -> Result<(), AioProblem> {
    let Some(directory) = &run.directory else { return Ok(()) };
    let caller = FileCaller { identity: &UserIdentity::Default, isolated_session: None };
    // Only a directory, or a link to one, has this entry.
    let entry = format!("{}/.", directory.path);
    match sandbox.files().stat_files(caller, &[entry]).await {
        Ok(_) => Ok(()),
        Err(ServiceError::File(_)) => {
            Err(AioProblem::bad_request(format!("exec_dir is not a directory: {}", directory.path)))
        }
        Err(error) => Err(error.into()),
    }
}

pub(super) fn start_problem(error: ServiceError) -> AioProblem {
    match error {
        // Too many commands wait for their turn.
        ServiceError::SessionBusy(_) => {
            let message = "too many commands wait in this session";
            AioProblem { retry_after: Some(1), ..AioProblem::new(StatusCode::TOO_MANY_REQUESTS, message) }
        }
        error => error.into(),
    }
}
