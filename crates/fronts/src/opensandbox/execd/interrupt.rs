//! Ends a command: politely first, then not.

use std::time::Duration;

use axum::extract::State;
use domain::{Position, ProcessId};
use http::{StatusCode, Uri};
use service::{ErrorKind, Event, ProcessStatus, Reach, ServiceError};

use super::Scope;
use super::fault::{Fault, process_id};
use crate::opensandbox::Front;
use crate::opensandbox::query::Query;

/// How long a command may take to end by itself once it was asked to.
const GRACE: Duration = Duration::from_secs(3);
const SIGTERM: i32 = 15;
pub(super) const SIGKILL: i32 = 9;

/// `DELETE /command?id=…`: answers when the command has ended.
pub(super) async fn interrupt(
    State(front): State<Front>,
    scope: Scope,
    uri: Uri,
) -> Result<StatusCode, Fault> {
    let query = Query::of(&uri);
    let id = query.first("id").filter(|id| !id.is_empty()).ok_or_else(|| Fault::missing_query("id"))?;
    let run = running(&front, &scope, process_id(id)?).await?;
    // The second signal is owed even if this client does not wait for it.
    let ending = tokio::spawn(async move { end(&front, &scope, &run).await });
    match ending.await {
        Ok(ended) => ended.map(|()| StatusCode::OK).map_err(Fault::from),
        Err(error) => Err(Fault::runtime(error.to_string())),
    }
}

/// The running command of this name. The name of a session stands for what runs in it, since
/// that is the name its streams begin with.
async fn running(front: &Front, scope: &Scope, id: ProcessId) -> Result<ProcessStatus, Fault> {
    let not_running =
        || Fault::new(StatusCode::NOT_FOUND, "RUNTIME_ERROR", format!("no command `{id}` is running"));
    match front.service.status(&scope.owner, &scope.id, &id).await {
        Ok(status) if status.ended.is_none() => Ok(status),
        Ok(_) => Err(not_running()),
        Err(error) if error.kind() == ErrorKind::NoProcess => {
            let all = front.service.processes(&scope.owner, &scope.id).await?;
            let run = all.into_iter().find(|run| run.session.as_ref() == Some(&id) && run.ended.is_none());
            run.ok_or_else(not_running)
        }
        Err(error) => Err(error.into()),
    }
}

async fn end(front: &Front, scope: &Scope, run: &ProcessStatus) -> Result<(), ServiceError> {
    let (owner, id, process) = (&scope.owner, &scope.id, &run.process);
    let mut following = front.service.follow(owner, id, process, Position(run.written)).await?;
    front.service.signal(owner, id, process, SIGTERM, Reach::Group).await?;
    let ended = async { while !matches!(following.next().await, Ok(Event::Ended(_)) | Err(_)) {} };
    if tokio::time::timeout(GRACE, ended).await.is_err() {
        front.service.signal(owner, id, process, SIGKILL, Reach::Tree).await?;
    }
    Ok(())
}
