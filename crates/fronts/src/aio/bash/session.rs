//! A session as this API knows it: its id and its status.
//!
//! Ids that clients choose are names in the core, with a prefix, because the sessions of `/v1/shell` have ids of their
//! own. A session without a chosen id has no name, and its id is that of the core.

use std::time::Duration;

use domain::process::{MissingDirectory, WorkingDirectory};
use domain::{ProcessId, SessionId, SessionName, UserIdentity};
use http::StatusCode;
use serde::Serialize;
use service::{
    CommandSessionSpec, ErrorKind, OpenSessionRequest, RequestTime, ServiceError, SessionStatus,
    SharedSessionKind, SharedSessionRequest, SharedSessionUse, session_of_name,
};

use crate::aio::body::{check_text, require_field};
use crate::aio::problem::AioProblem;
use crate::aio::target::AioTarget;
use crate::kit::time::format_rfc3339;

/// Precedes the ids of clients in the names of sessions.
const NAME_PREFIX: &str = "bash:";
/// How long a session without a command is kept.
const SESSION_IDLE_TIMEOUT: Duration = Duration::from_secs(3600);
/// The variable of a sandbox that sets how many sessions it may have.
const MAX_SESSIONS_VARIABLE: &str = "MAX_BASH_SESSIONS";
const DEFAULT_SESSIONS: u32 = 50;
/// The highest number of sessions that the variable can set.
const MAX_SESSIONS: u32 = 1000;

/// A session with its use.
#[derive(Debug)]
pub(super) struct BashSession {
    pub(super) session: SessionId,
    busy: bool,
    shared: SharedSessionUse,
}

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

impl BashSession {
    /// `None` if it is not a session of this API.
    pub(super) fn from_status(status: SessionStatus) -> Option<Self> {
        let is_own = |shared: &SharedSessionUse| {
            let named = shared.name.as_ref().is_none_or(|name| name.as_str().starts_with(NAME_PREFIX));
            shared.kind == SharedSessionKind::Commands && named
        };
        let shared = status.shared.filter(is_own)?;
        Some(Self { session: status.session, busy: status.busy, shared })
    }

    /// The id that clients know.
    pub(super) fn id(&self) -> &str {
        let chosen = self.shared.name.as_ref().and_then(|name| name.as_str().strip_prefix(NAME_PREFIX));
        chosen.unwrap_or(self.session.as_str())
    }

    /// The command that runs now.
    pub(super) fn running_command(&self) -> Option<&ProcessId> {
        self.shared.run.as_ref().filter(|_| self.busy)
    }

    /// The command that runs now or, if there is none, the last one.
    pub(super) fn last_command(&self) -> Option<&ProcessId> {
        self.shared.run.as_ref()
    }

    pub(super) fn into_info(self, target: &AioTarget) -> BashSessionInfo {
        let default = || target.sandbox.read_state(|state| state.spec.guest.default_directory.clone());
        BashSessionInfo {
            session_id: self.id().to_owned(),
            status: "ready",
            created_at: format_rfc3339(self.shared.opened),
            last_used_at: format_rfc3339(self.shared.used),
            current_command: self.shared.command,
            command_count: self.shared.runs,
            working_dir: self.shared.directory.unwrap_or_else(default),
        }
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
) -> Result<BashSession, AioProblem> {
    let name = match &new.id {
        Some(id) => match find_unnamed_session(target, id).await? {
            Some(found) => return Ok(found),
            None => Some(name_of_id(id).ok_or_else(|| {
                let most = SessionName::MAX_BYTES - NAME_PREFIX.len();
                AioProblem::invalid_field("session_id", format!("the id has more than {most} bytes"))
            })?),
        },
        None => None,
    };
    let directory =
        new.directory.map(|path| WorkingDirectory { path, missing: MissingDirectory::Fail, expand: false });
    let most = max_sessions(target);
    let request = SharedSessionRequest {
        name,
        open: OpenSessionRequest {
            identity: UserIdentity::Default,
            directory,
            env: Default::default(),
            terminal: None,
            isolation: None,
        },
        text_terminal: false,
        commands: Some(CommandSessionSpec { script: new.script }),
        max_sessions: Some(most),
        idle_limit: Some(SESSION_IDLE_TIMEOUT),
        note: None,
        requested,
    };
    let opened = target.sandbox.sessions().open_shared_session(request).await;
    let opened = opened.map_err(|error| match (&error, &new.id) {
        (ServiceError::TooManySessions(_), _) => too_many_sessions(most),
        // It was closed by a later request.
        (ServiceError::NoSession(_), Some(id)) => no_session(id),
        _ => error.into(),
    })?;
    let not_ours = || AioProblem::new(StatusCode::INTERNAL_SERVER_ERROR, "internal error");
    BashSession::from_status(opened).ok_or_else(not_ours)
}

/// Finds an open session.
pub(super) async fn find_session(target: &AioTarget, id: &str) -> Result<BashSession, AioProblem> {
    if let Some(found) = find_unnamed_session(target, id).await? {
        return Ok(found);
    }
    let name = name_of_id(id).ok_or_else(|| no_session(id))?;
    read_session(target, &session_of_name(&name)).await?.ok_or_else(|| no_session(id))
}

/// The session that has no name and this id. Most ids of clients are of another form, and nothing is asked then.
async fn find_unnamed_session(target: &AioTarget, id: &str) -> Result<Option<BashSession>, AioProblem> {
    let Ok(session) = SessionId::parse(id) else { return Ok(None) };
    let found = read_session(target, &session).await?;
    Ok(found.filter(|found| found.shared.name.is_none()))
}

async fn read_session(target: &AioTarget, session: &SessionId) -> Result<Option<BashSession>, AioProblem> {
    match target.sandbox.sessions().shared_session(session).await {
        Ok(status) => Ok(BashSession::from_status(status)),
        Err(error) if error.kind() == ErrorKind::NoSession => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Every session of this API.
pub(super) async fn read_sessions(target: &AioTarget) -> Result<Vec<BashSession>, AioProblem> {
    let all = target.sandbox.sessions().list_sessions().await?;
    Ok(all.into_iter().filter_map(BashSession::from_status).collect())
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
    SessionName::parse(&format!("{NAME_PREFIX}{id}")).ok().filter(|_| !id.is_empty())
}

/// How many sessions a sandbox may have.
fn max_sessions(target: &AioTarget) -> u32 {
    let set = target.sandbox.read_state(|state| {
        let value = state.spec.env.get(MAX_SESSIONS_VARIABLE);
        value.and_then(|value| value.trim().parse().ok())
    });
    set.unwrap_or(DEFAULT_SESSIONS).clamp(1, MAX_SESSIONS)
}

pub(super) fn no_session(id: &str) -> AioProblem {
    AioProblem::new(StatusCode::NOT_FOUND, format!("Session {id} not found"))
}

pub(super) fn too_many_sessions(most: u32) -> AioProblem {
    AioProblem::bad_request(format!(
        "Cannot create bash session: session limit reached and all {most} existing sessions have active commands"
    ))
}

/// Sessions were closed by others as fast as they were opened.
pub(super) fn sessions_closed_early(target: &AioTarget) -> AioProblem {
    too_many_sessions(max_sessions(target))
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
