//! A session as this API knows it: its id, what is stored with it, and its status.

use domain::process::MissingDirectory;
use domain::{ExitReason, SessionId, SessionName};
use serde::{Deserialize, Serialize};
use service::{RequestTime, ServiceError, SharedSessionRequest, SharedSessionUse, session_of_name};

use super::super::body::require_text;
use super::super::commands::fields::check_bounded_text;
use super::super::commands::run::sent_directory;
use super::super::commands::session::{
    GroupSession, NewSession, SessionGroup, open_group_session, session_request,
};
use super::super::problem::AioProblem;
use super::super::target::AioTarget;

/// The longest command or input. Linux has the same bound for one argument of a program.
const MAX_COMMAND_BYTES: usize = 128 << 10;

/// How long a command may print nothing, unless the call or the session says otherwise.
pub(super) const DEFAULT_QUIET_SECONDS: u64 = 120;

/// Longer limits mean the same as this one.
const MAX_QUIET_SECONDS: u64 = 1_000_000_000;

/// The status of a command or session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(in crate::aio) enum ShellStatus {
    Running,
    Completed,
    NoChangeTimeout,
    HardTimeout,
    /// The shell was killed, the directory of a strict command is missing, or the sandbox failed after the response had
    /// begun. Clients then give the whole sandbox up.
    Terminated,
}

impl ShellStatus {
    /// The status of a command that has ended, and its exit code.
    pub(super) fn from_exit(exit: ExitReason) -> (Self, i32) {
        match exit {
            ExitReason::Code(code) => (Self::Completed, code),
            ExitReason::Deadline => (Self::HardTimeout, -1),
            // Usually a program of the command was killed and the shell has reported it.
            ExitReason::Oom => (Self::Completed, 128 + 9),
            ExitReason::Signal(_) | ExitReason::Lost => (Self::Terminated, -1),
        }
    }

    pub(super) fn of_session(session: &GroupSession) -> Self {
        if session.busy {
            return Self::Running;
        }
        session.shared.last_exit.map_or(Self::Completed, |exit| Self::from_exit(exit).0)
    }
}

/// The note that this front stores with a session. Code in the sandbox may change it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SessionNote {
    /// Seconds.
    pub(super) no_change_timeout: Option<u64>,
    /// The request that has opened the session. Another request with its name has only found it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) opened_by: Option<String>,
}

impl SessionNote {
    pub(super) fn of_session(shared: &SharedSessionUse) -> Self {
        shared.note.as_deref().and_then(|note| serde_json::from_str(note).ok()).unwrap_or_default()
    }

    pub(super) fn to_text(&self) -> String {
        serde_json::to_string(self).expect("a note contains only numbers and texts")
    }

    pub(super) fn quiet_seconds(&self) -> u64 {
        let seconds = self.no_change_timeout.filter(|seconds| *seconds > 0);
        seconds.unwrap_or(DEFAULT_QUIET_SECONDS).min(MAX_QUIET_SECONDS)
    }
}

/// The exit code of the last command of a session that has ended.
pub(super) fn last_exit_code(session: &GroupSession) -> Option<i32> {
    session.shared.last_exit.map(|exit| ShellStatus::from_exit(exit).1)
}

/// Checks a command or an input.
pub(super) fn check_command(text: String, field: &str) -> Result<String, AioProblem> {
    check_bounded_text(text, field, MAX_COMMAND_BYTES)
}

/// The session with an id from a request body. A name that no session can have is unknown, too.
pub(super) fn require_session(id: Option<String>) -> Result<SessionId, AioProblem> {
    session_of_id(&require_text(id, "id")?)
}

pub(super) fn session_of_id(id: &str) -> Result<SessionId, AioProblem> {
    let name = SessionName::parse(id).map_err(|_invalid| AioProblem::no_session())?;
    Ok(session_of_name(&name))
}

/// Reads a session.
pub(super) async fn read_session(
    target: &AioTarget,
    session: &SessionId,
) -> Result<GroupSession, AioProblem> {
    let status = target.sandbox.sessions().shared_session(session).await?;
    GroupSession::from_status(SessionGroup::Shell, status).ok_or_else(AioProblem::no_session)
}

/// A session to open.
#[derive(Debug, Default)]
pub(super) struct NewShellSession {
    pub(super) name: Option<SessionName>,
    /// Ignored if it does not exist.
    pub(super) directory: Option<String>,
    pub(super) note: SessionNote,
}

impl NewShellSession {
    fn into_group_session(self) -> NewSession {
        let directory = self.directory.map(|path| sent_directory(path, MissingDirectory::Ignore));
        NewSession { name: self.name, directory, script: None, note: Some(self.note.to_text()) }
    }
}

/// A request to open a session without a chosen id.
pub(super) fn anonymous_session(target: &AioTarget, requested: RequestTime) -> SharedSessionRequest {
    let new = NewShellSession::default().into_group_session();
    session_request(target, SessionGroup::Shell, new, requested)
}

/// Opens a session, or finds the one with its name.
pub(super) async fn open_session(
    target: &AioTarget,
    new: NewShellSession,
    requested: RequestTime,
) -> Result<GroupSession, AioProblem> {
    let opened = open_group_session(target, SessionGroup::Shell, new.into_group_session(), requested).await;
    let opened = opened.map_err(|error| match error {
        ServiceError::TooManySessions(_) => SessionGroup::Shell.too_many_sessions(target),
        error => error.into(),
    })?;
    opened.ok_or_else(AioProblem::no_session)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_killed_shell_is_terminated() {
        for (exit, expected) in [
            (ExitReason::Code(0), (ShellStatus::Completed, 0)),
            (ExitReason::Code(3), (ShellStatus::Completed, 3)),
            (ExitReason::Oom, (ShellStatus::Completed, 137)),
            (ExitReason::Deadline, (ShellStatus::HardTimeout, -1)),
            (ExitReason::Signal(9), (ShellStatus::Terminated, -1)),
            (ExitReason::Lost, (ShellStatus::Terminated, -1)),
        ] {
            assert_eq!(ShellStatus::from_exit(exit), expected);
        }
    }

    #[test]
    fn notes_are_read_again() {
        for seconds in [None, Some(7)] {
            let note = SessionNote { no_change_timeout: seconds, opened_by: None };
            assert_eq!(serde_json::from_str::<SessionNote>(&note.to_text()).ok(), Some(note.clone()));
            assert_eq!(note.quiet_seconds(), seconds.unwrap_or(DEFAULT_QUIET_SECONDS));
        }
    }
}
