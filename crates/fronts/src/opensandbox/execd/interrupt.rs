//! Terminates a command: SIGTERM first, then SIGKILL.

use std::time::Duration;

use axum::extract::State;
use domain::{JournalOffset, ProcessId};
use http::{StatusCode, Uri};
use service::{ErrorKind, OutputEvent, ServiceError, SignalTarget};

use super::ExecTarget;
use super::problem::{ExecdProblem, parse_process_id, required_parameter};
use crate::kit::query::QueryParams;
use crate::opensandbox::OpenSandboxState;

/// How long a command may take to end after a signal.
const TERMINATION_GRACE: Duration = Duration::from_secs(3);
const SIGTERM: i32 = 15;
const SIGKILL: i32 = 9;

/// `DELETE /command?id=…`: responds once the command has ended.
pub(super) async fn interrupt_command(
    State(state): State<OpenSandboxState>,
    target: ExecTarget,
    uri: Uri,
) -> Result<StatusCode, ExecdProblem> {
    let id = parse_process_id(required_parameter(&QueryParams::from_uri(&uri), "id")?)?;
    let process = find_running_command(&state, &target, id).await?;
    // SIGKILL must follow even if this client does not wait for it.
    let ending = tokio::spawn(async move { terminate_process(&state, &target, &process).await });
    match ending.await {
        Ok(ended) => ended.map(|()| StatusCode::OK).map_err(ExecdProblem::from),
        Err(error) => Err(ExecdProblem::runtime_error(error.to_string())),
    }
}

/// Finds the running command with this id. The id of a session stands for the command that runs in it,
/// since that is the id in the first event of its streams.
async fn find_running_command(
    state: &OpenSandboxState,
    target: &ExecTarget,
    id: ProcessId,
) -> Result<ProcessId, ExecdProblem> {
    let not_running = || {
        ExecdProblem::new(StatusCode::NOT_FOUND, "RUNTIME_ERROR", format!("command `{id}` is not running"))
    };
    match state.service.process_status(&target.owner, &target.id, &id).await {
        Ok(status) if status.ended.is_none() => Ok(id),
        Ok(_) => Err(not_running()),
        Err(error) if error.kind() == ErrorKind::NoProcess => {
            let all = state.service.list_processes(&target.owner, &target.id).await?;
            let run = all.into_iter().find(|run| run.session.as_ref() == Some(&id) && run.ended.is_none());
            run.map(|run| run.process).ok_or_else(not_running)
        }
        Err(error) => Err(error.into()),
    }
}

async fn terminate_process(
    state: &OpenSandboxState,
    target: &ExecTarget,
    process: &ProcessId,
) -> Result<(), ServiceError> {
    let ended = watch_process_end(state, target, process).await?;
    state.service.signal_process(&target.owner, &target.id, process, SIGTERM, SignalTarget::Group).await?;
    match tokio::time::timeout(TERMINATION_GRACE, ended).await {
        Ok(()) => Ok(()),
        Err(_elapsed) => kill_process(state, target, process).await,
    }
}

/// Kills everything that a process has started and waits for its end, for a limited time.
pub(super) async fn kill_process(
    state: &OpenSandboxState,
    target: &ExecTarget,
    process: &ProcessId,
) -> Result<(), ServiceError> {
    let ended = watch_process_end(state, target, process).await?;
    let killed =
        state.service.signal_process(&target.owner, &target.id, process, SIGKILL, SignalTarget::Tree).await;
    // A process that ended meanwhile can no longer be signalled.
    let gone =
        matches!(&killed, Err(error) if matches!(error.kind(), ErrorKind::NoProcess | ErrorKind::Invalid));
    if !gone {
        killed?;
    }
    if tokio::time::timeout(TERMINATION_GRACE, ended).await.is_err() {
        tracing::warn!(%process, "killed process has not ended yet; no longer waiting for it");
    }
    Ok(())
}

/// Returns a future that resolves when a process has ended.
async fn watch_process_end(
    state: &OpenSandboxState,
    target: &ExecTarget,
    process: &ProcessId,
) -> Result<impl Future<Output = ()> + use<>, ServiceError> {
    let written = state.service.process_status(&target.owner, &target.id, process).await?.written;
    let mut following =
        state.service.follow_output(&target.owner, &target.id, process, JournalOffset(written)).await?;
    Ok(async move { while !matches!(following.next().await, Ok(OutputEvent::Ended(_)) | Err(_)) {} })
}
