//! Runs in sessions, and input for them.

use std::time::Duration;

use domain::process::{MissingDirectory, WorkingDirectory};
use domain::{Backpressure, ProcessId};
use service::{BusyPolicy, RunShell, SandboxRef, ServiceError, SessionRunRequest};
use tokio::time::timeout;

use crate::aio::problem::AioProblem;

/// How often a session is opened for a command if others take its place before the command begins.
pub(in crate::aio) const MAX_OPEN_ATTEMPTS: u32 = 3;

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
