//! `DELETE /command`: finds the command that a client names and terminates it.

use domain::ProcessId;
use http::{StatusCode, Uri};
use service::ErrorKind;

use super::ExecTarget;
use super::problem::{ExecdProblem, parse_process_id, required_parameter};
use crate::kit::query::QueryParams;

/// `DELETE /command?id=…`: responds once the command has ended.
pub(super) async fn interrupt_command(target: ExecTarget, uri: Uri) -> Result<StatusCode, ExecdProblem> {
    let id = parse_process_id(required_parameter(&QueryParams::from_uri(&uri), "id")?)?;
    let process = find_running_command(&target, id).await?;
    // SIGKILL must follow even if this client does not wait for it.
    let ending = tokio::spawn(async move { target.sandbox.processes().terminate_process(&process).await });
    match ending.await {
        Ok(ended) => ended.map(|()| StatusCode::OK).map_err(ExecdProblem::from),
        Err(error) => Err(ExecdProblem::runtime_error(error.to_string())),
    }
}

/// Finds the running command with this id. The id of a session stands for the command that runs in it,
/// since that is the id in the first event of its streams.
async fn find_running_command(target: &ExecTarget, id: ProcessId) -> Result<ProcessId, ExecdProblem> {
    let not_running = || {
        ExecdProblem::new(StatusCode::NOT_FOUND, "RUNTIME_ERROR", format!("command `{id}` is not running"))
    };
    match target.sandbox.processes().process_status(&id).await {
        Ok(status) if status.ended.is_none() => Ok(id),
        Ok(_) => Err(not_running()),
        Err(error) if error.kind() == ErrorKind::NoProcess => {
            let all = target.sandbox.processes().list_processes().await?;
            let session = id.to_session();
            let run =
                all.into_iter().find(|run| run.session.as_ref() == Some(&session) && run.ended.is_none());
            run.map(|run| run.process).ok_or_else(not_running)
        }
        Err(error) => Err(error.into()),
    }
}
