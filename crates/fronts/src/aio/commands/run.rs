//! Runs in sessions, and input for them.

use std::pin::pin;
use std::time::Duration;

use domain::process::{MissingDirectory, WorkingDirectory};
use domain::{Backpressure, ProcessId, SessionId};
use http::StatusCode;
use service::{BusyPolicy, ErrorKind, OutputStream, RunShell, SandboxRef, ServiceError, SessionRunRequest};
use tokio::time::{sleep, timeout};

use crate::aio::problem::AioProblem;

/// How often a session is opened for a command if others take its place before the command begins.
pub(in crate::aio) const MAX_OPEN_ATTEMPTS: u32 = 3;

/// How long the end of a command may be overdue. A sandbox that does not enforce its limits must not keep a request.
pub(in crate::aio) const OVERDUE_TIMEOUT: Duration = Duration::from_secs(30);

/// The time between two checks that the session still exists, while a command waits for its turn in it.
const QUEUE_CHECK_INTERVAL: Duration = Duration::from_secs(30);

/// The ids of a command, as far as they are known.
#[derive(Clone, Debug, Default)]
pub(in crate::aio) struct CommandIds {
    pub(in crate::aio) session: String,
    pub(in crate::aio) command: String,
}

/// A command that was not started, or whose end did not arrive, with what is known about it.
#[derive(Debug)]
pub(in crate::aio) struct FailedCommand {
    pub(in crate::aio) problem: AioProblem,
    pub(in crate::aio) stage: FailedStage,
    pub(in crate::aio) ids: CommandIds,
    /// Its text.
    pub(in crate::aio) command: String,
}

/// How far a command came that has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::aio) enum FailedStage {
    /// It was not passed to its session, or waited for its turn there.
    NotStarted,
    Started,
}

impl FailedCommand {
    /// Whether the command alone was refused: it had no effect, and nothing is wrong with its sandbox.
    pub(in crate::aio) fn was_only_refused(&self) -> bool {
        let refusals = [StatusCode::BAD_REQUEST, StatusCode::CONFLICT, StatusCode::TOO_MANY_REQUESTS];
        self.stage == FailedStage::NotStarted
            && (refusals.contains(&self.problem.status) || self.problem.lacks_session)
    }
}

impl From<FailedCommand> for AioProblem {
    fn from(failed: FailedCommand) -> Self {
        failed.problem
    }
}

/// A run that the caller may change further. It waits until those before it in its session have ended.
pub(in crate::aio) fn queued_run(sandbox: &SandboxRef, text: String) -> SessionRunRequest {
    SessionRunRequest {
        text,
        directory: None,
        deadline: None,
        retention: sandbox.processes().output_settings().retention,
        backpressure: Backpressure::Off,
        busy: BusyPolicy::Queue,
        env: Default::default(),
        shell: RunShell::Shell,
    }
}

/// Starts a run after those that are before it in its session, however long they take. Fails if the sandbox does not
/// answer meanwhile.
pub(in crate::aio) async fn start_queued_run(
    sandbox: &SandboxRef,
    session: &SessionId,
    run: SessionRunRequest,
) -> Result<OutputStream, ServiceError> {
    let mut starting = pin!(sandbox.sessions().run_in_session(session, run));
    loop {
        tokio::select! {
            biased;
            started = &mut starting => return started,
            checked = check_queue(sandbox, session) => checked?,
        }
    }
}

/// Waits for some time and then checks that the session still exists.
async fn check_queue(sandbox: &SandboxRef, session: &SessionId) -> Result<(), ServiceError> {
    sleep(QUEUE_CHECK_INTERVAL).await;
    match sandbox.sessions().shared_session(session).await {
        // A paused sandbox goes on later.
        Err(error) if matches!(error.kind(), ErrorKind::Conflict { .. }) => Ok(()),
        checked => checked.map(drop),
    }
}

/// The error of a command that should have been ended by its hard timeout.
pub(in crate::aio) fn overdue_problem() -> AioProblem {
    AioProblem::new(StatusCode::GATEWAY_TIMEOUT, "the sandbox did not end the command in time")
}

/// Lets a run that is waited for stop while its reader is slow.
pub(in crate::aio) fn reader_backpressure(sandbox: &SandboxRef) -> Backpressure {
    Backpressure::On { stall_limit: Some(sandbox.processes().output_settings().stall_limit) }
}

/// A directory as a client has sent it.
pub(in crate::aio) fn sent_directory(path: String, missing: MissingDirectory) -> WorkingDirectory {
    WorkingDirectory { path, missing, expand: false }
}

/// Whether a program has got its input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::aio) enum InputOutcome {
    Written,
    /// The program has ended, or has closed its input.
    ProgramEnded,
}

/// Writes to the input of a running program, which may take so long to accept it.
pub(in crate::aio) async fn send_input(
    sandbox: &SandboxRef,
    process: &ProcessId,
    bytes: &[u8],
    limit: Duration,
) -> Result<InputOutcome, AioProblem> {
    let send = async {
        let mut input = sandbox.processes().open_input(process).await?;
        input.send_bytes(bytes).await
    };
    match timeout(limit, send).await {
        Ok(Ok(())) => Ok(InputOutcome::Written),
        Ok(Err(ServiceError::NoProcess(_) | ServiceError::Invalid(_))) => Ok(InputOutcome::ProgramEnded),
        Ok(Err(error)) => Err(error.into()),
        Err(_elapsed) => Err(AioProblem::bad_request("the running program does not read its input")),
    }
}
