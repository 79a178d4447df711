//! Sessions: create, list, close.

use std::time::Duration;

use axum::Json;
use axum::extract::Path;
use axum::extract::rejection::PathRejection;
use serde::{Deserialize, Serialize};
use service::{ErrorKind, RequestTime};

use super::session::{
    BashSessionInfo, NewBashSession, describe_session, find_session, open_session, optional_session_id,
};
use crate::aio::body::AioJson;
use crate::aio::commands::fields::check_absolute_path;
use crate::aio::commands::session::{SessionGroup, read_sessions};
use crate::aio::envelope::{ResponseEnvelope, data_response, success_response};
use crate::aio::problem::AioProblem;
use crate::aio::target::AioTarget;

/// How long the command of a closed session may take to end.
const CLOSE_GRACE: Duration = Duration::from_secs(5);

#[derive(Deserialize)]
pub(super) struct CreateBashSessionBody {
    session_id: Option<String>,
    exec_dir: Option<String>,
    snapshot_path: Option<String>,
}

/// The session that an operation was about.
#[derive(Serialize)]
pub(super) struct BashSessionName {
    pub(super) session_id: String,
}

/// `POST /v1/bash/sessions/create`: a session that exists is returned as it is.
pub(super) async fn create_session(
    target: AioTarget,
    AioJson(body): AioJson<CreateBashSessionBody>,
) -> Result<Json<ResponseEnvelope<BashSessionInfo>>, AioProblem> {
    let requested = RequestTime::now();
    let new = NewBashSession {
        id: optional_session_id(body.session_id)?,
        directory: check_absolute_path(body.exec_dir, "exec_dir")?,
        script: check_absolute_path(body.snapshot_path, "snapshot_path")?,
    };
    let opened = open_session(&target, new, requested).await?;
    Ok(success_response("Session created", describe_session(&target, opened)))
}

/// `GET /v1/bash/sessions`
pub(super) async fn list_sessions(
    target: AioTarget,
) -> Result<Json<ResponseEnvelope<Vec<BashSessionInfo>>>, AioProblem> {
    let sessions = read_sessions(&target, SessionGroup::Bash).await?;
    Ok(data_response(sessions.into_iter().map(|session| describe_session(&target, session)).collect()))
}

/// `POST /v1/bash/sessions/{id}/close`: does not wait for a command that runs. A session that is not open is closed.
pub(super) async fn close_session(
    target: AioTarget,
    id: Result<Path<String>, PathRejection>,
) -> Result<Json<ResponseEnvelope<BashSessionName>>, AioProblem> {
    let requested = RequestTime::now();
    let Path(id) =
        id.map_err(|_invalid| AioProblem::bad_request("the id of the session is not valid text"))?;
    match find_session(&target, &id).await {
        Ok(found) => {
            let closing =
                target.sandbox.sessions().terminate_shared_session(&found.session, requested, CLOSE_GRACE);
            match closing.await {
                Ok(()) => {}
                // It was closed meanwhile.
                Err(error) if error.kind() == ErrorKind::NoSession => {}
                Err(error) => return Err(error.into()),
            }
        }
        Err(problem) if problem.status == http::StatusCode::NOT_FOUND => {}
        Err(problem) => return Err(problem),
    }
    Ok(success_response("Session closed", BashSessionName { session_id: id }))
}
