//! A session as this API knows it: how it is opened, found and listed.

use domain::process::MissingDirectory;
use domain::{SessionId, SessionName};
use http::StatusCode;
use serde::Serialize;
use service::{ErrorKind, RequestTime, ServiceError, session_of_name};

use crate::aio::body::{check_text, require_field};
use crate::aio::commands::run::sent_directory;
use crate::aio::commands::session::{GroupSession, NewSession, SessionGroup, open_group_session};
use crate::aio::problem::AioProblem;
use crate::aio::target::AioTarget;
use crate::kit::time::format_rfc3339;

/// How a session is listed.
#[derive(Debug, Serialize)]
pub(super) struct BashSessionInfo {
    session_id: String,
    status: &'static str,
    working_dir: String,
    created_at: String,
    last_used_at: String,
    current_command: Option<String>,
    command_count: u64,
}

pub(super) fn describe_session(target: &AioTarget, session: GroupSession) -> BashSessionInfo {
    BashSessionInfo {
        session_id: session.id().to_owned(),
        status: "ready",
        created_at: format_rfc3339(session.shared.opened),
        last_used_at: format_rfc3339(session.shared.used),
        command_count: session.shared.runs,
        working_dir: session.working_directory(target),
        current_command: session.shared.command,
    }
}

/// A session to open.
#[derive(Clone, Debug, Default)]
pub(super) struct NewBashSession {
    /// `None` opens one without a chosen id.
    pub(super) id: Option<String>,
    pub(super) directory: Option<String>,
    /// A file that is read before each command.
    pub(super) script: Option<String>,
}

/// Opens a session, or finds the one with its id.
pub(super) async fn open_session(
    target: &AioTarget,
    new: NewBashSession,
    requested: RequestTime,
) -> Result<GroupSession, AioProblem> {
    let name = match &new.id {
        Some(id) => match find_unnamed_session(target, id).await? {
            Some(found) => return Ok(found),
            None => Some(name_of_id(id).ok_or_else(|| {
                let most = SessionName::MAX_BYTES - SessionGroup::Bash.name_prefix().len();
                AioProblem::invalid_field("session_id", format!("the id has more than {most} bytes"))
            })?),
        },
        None => None,
    };
    let directory = new.directory.map(|path| sent_directory(path, MissingDirectory::Fail));
    let request = NewSession { name, directory, script: new.script, note: None };
    let opened = open_group_session(target, SessionGroup::Bash, request, requested).await;
    let opened = opened.map_err(|error| match (&error, &new.id) {
        (ServiceError::TooManySessions(_), _) => SessionGroup::Bash.too_many_sessions(target),
        // It was closed by a later request.
        (ServiceError::NoSession(_), Some(id)) => no_session(id),
        _ => error.into(),
    })?;
    opened.ok_or_else(|| AioProblem::new(StatusCode::INTERNAL_SERVER_ERROR, "internal error"))
}

/// Finds an open session.
pub(super) async fn find_session(target: &AioTarget, id: &str) -> Result<GroupSession, AioProblem> {
    if let Some(found) = find_unnamed_session(target, id).await? {
        return Ok(found);
    }
    let name = name_of_id(id).ok_or_else(|| no_session(id))?;
    read_session(target, &session_of_name(&name)).await?.ok_or_else(|| no_session(id))
}

/// The session that has no name and this id. Most ids of clients are of another form, and nothing is asked then.
async fn find_unnamed_session(target: &AioTarget, id: &str) -> Result<Option<GroupSession>, AioProblem> {
    let Ok(session) = SessionId::parse(id) else { return Ok(None) };
    let found = read_session(target, &session).await?;
    Ok(found.filter(|found| found.shared.name.is_none()))
}

async fn read_session(target: &AioTarget, session: &SessionId) -> Result<Option<GroupSession>, AioProblem> {
    match target.sandbox.sessions().shared_session(session).await {
        Ok(status) => Ok(GroupSession::from_status(SessionGroup::Bash, status)),
        Err(error) if error.kind() == ErrorKind::NoSession => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// The id in a request that must name a session.
pub(super) fn require_session_id(id: Option<String>) -> Result<String, AioProblem> {
    check_text(require_field(id, "session_id")?, "session_id")
}

/// The id in a request that may leave it out; an empty one counts as absent.
pub(super) fn optional_session_id(id: Option<String>) -> Result<Option<String>, AioProblem> {
    id.filter(|id| !id.is_empty()).map(|id| check_text(id, "session_id")).transpose()
}

fn name_of_id(id: &str) -> Option<SessionName> {
    let name = format!("{}{id}", SessionGroup::Bash.name_prefix());
    SessionName::parse(&name).ok().filter(|_| !id.is_empty())
}

pub(super) fn no_session(id: &str) -> AioProblem {
    AioProblem::new(StatusCode::NOT_FOUND, format!("Session {id} not found"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_of_clients_are_names_with_a_prefix() {
        let name = name_of_id("a/b ü").unwrap();
        assert_eq!(name.as_str(), "bash:a/b ü");
        assert!(name_of_id("").is_none());
        assert!(name_of_id(&"x".repeat(251)).is_some());
        assert!(name_of_id(&"x".repeat(252)).is_none());
    }
}
