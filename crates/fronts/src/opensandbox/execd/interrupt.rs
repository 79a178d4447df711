//! Terminates a command: SIGTERM first, then SIGKILL.

use std::time::Duration;

use axum::extract::State;
use domain::{Position, ProcessId};
use http::{StatusCode, Uri};
use service::{ErrorKind, Event, Reach, ServiceError};

use super::Scope;
use super::fault::{Fault, named, process_id};
use crate::opensandbox::Front;
use crate::opensandbox::query::Query;

/// How long a command may take to end after a signal.
const GRACE: Duration = Duration::from_secs(3);
const SIGTERM: i32 = 15;
const SIGKILL: i32 = 9;

/// `DELETE /command?id=…`: responds once the command has ended.
pub(super) async fn interrupt(
    State(front): State<Front>,
    scope: Scope,
    uri: Uri,
) -> Result<StatusCode, Fault> {
    let id = process_id(named(&Query::of(&uri), "id")?)?;
    let process = running(&front, &scope, id).await?;
    // SIGKILL must follow even if this client does not wait for it.
    let ending = tokio::spawn(async move { end(&front, &scope, &process).await });
    match ending.await {
        Ok(ended) => ended.map(|()| StatusCode::OK).map_err(Fault::from),
        Err(error) => Err(Fault::runtime(error.to_string())),
    }
}

/// Finds the running command with this id. The id of a session stands for the command that runs in it,
/// since that is the id in the first event of its streams.
async fn running(front: &Front, scope: &Scope, id: ProcessId) -> Result<ProcessId, Fault> {
    let not_running =
        || Fault::new(StatusCode::NOT_FOUND, "RUNTIME_ERROR", format!("command `{id}` is not running"));
    match front.service.status(&scope.owner, &scope.id, &id).await {
        Ok(status) if status.ended.is_none() => Ok(id),
        Ok(_) => Err(not_running()),
        Err(error) if error.kind() == ErrorKind::NoProcess => {
            let all = front.service.processes(&scope.owner, &scope.id).await?;
            let run = all.into_iter().find(|run| run.session.as_ref() == Some(&id) && run.ended.is_none());
            run.map(|run| run.process).ok_or_else(not_running)
        }
        Err(error) => Err(error.into()),
    }
}

async fn end(front: &Front, scope: &Scope, process: &ProcessId) -> Result<(), ServiceError> {
    let ended = wait(front, scope, process).await?;
    front.service.signal(&scope.owner, &scope.id, process, SIGTERM, Reach::Group).await?;
    match tokio::time::timeout(GRACE, ended).await {
        Ok(()) => Ok(()),
        Err(_elapsed) => kill(front, scope, process).await,
    }
}

/// Kills everything that a process has started and waits for its end, for a limited time.
pub(super) async fn kill(front: &Front, scope: &Scope, process: &ProcessId) -> Result<(), ServiceError> {
    let ended = wait(front, scope, process).await?;
    let killed = front.service.signal(&scope.owner, &scope.id, process, SIGKILL, Reach::Tree).await;
    // A process that ended meanwhile can no longer be signalled.
    let gone =
        matches!(&killed, Err(error) if matches!(error.kind(), ErrorKind::NoProcess | ErrorKind::Invalid));
    if !gone {
        killed?;
    }
    if tokio::time::timeout(GRACE, ended).await.is_err() {
        tracing::warn!(%process, "killed process has not ended yet; no longer waiting for it");
    }
    Ok(())
}

/// Returns a future that resolves when a process has ended.
async fn wait(
    front: &Front,
    scope: &Scope,
    process: &ProcessId,
) -> Result<impl Future<Output = ()> + use<>, ServiceError> {
    let written = front.service.status(&scope.owner, &scope.id, process).await?.written;
    let mut following = front.service.follow(&scope.owner, &scope.id, process, Position(written)).await?;
    Ok(async move { while !matches!(following.next().await, Ok(Event::Ended(_)) | Err(_)) {} })
}
