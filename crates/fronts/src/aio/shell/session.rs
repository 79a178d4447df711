//! A session as this API knows it: its id, what is stored with it, and its status.

use std::time::Duration;

use domain::process::{MissingDirectory, TerminalSize, WorkingDirectory};
use domain::{ExitReason, SessionId, SessionName, UserIdentity};
use serde::{Deserialize, Serialize};
use service::{
    OpenSessionRequest, RequestTime, ServiceError, SessionStatus, SharedSessionKind, SharedSessionRequest,
    SharedSessionUse, session_of_name,
};

use super::super::body::require_text;
use super::super::problem::AioProblem;
use super::super::target::AioTarget;

/// How long a session without a command is kept.
pub(super) const SESSION_IDLE_TIMEOUT: Duration = Duration::from_secs(3600);

/// How long a command may print nothing, unless the call or the session says otherwise.
pub(super) const DEFAULT_QUIET_SECONDS: u64 = 120;

/// Longer limits mean the same as this one.
const MAX_QUIET_SECONDS: u64 = 1_000_000_000;

/// Programs shorten what they print on a narrow terminal.
const SESSION_TERMINAL_SIZE: TerminalSize = TerminalSize { columns: 1000, rows: 1000 };

/// The status of a command or session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum ShellStatus {
    Running,
    Completed,
    NoChangeTimeout,
    HardTimeout,
    /// The shell was killed. Clients give the whole sandbox up, so no other end is reported in this way.
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

/// A session with its use.
#[derive(Debug)]
pub(super) struct ShellSession {
    pub(super) session: SessionId,
    pub(super) busy: bool,
    pub(super) shared: SharedSessionUse,
}

impl ShellSession {
    /// `None` if it is not a session of this API.
    pub(super) fn from_status(status: SessionStatus) -> Option<Self> {
        let shared = status.shared.filter(|shared| shared.kind == SharedSessionKind::TerminalShell)?;
        Some(Self { session: status.session, busy: status.busy, shared })
    }

    /// The id that clients know: the name that one of them chose, or the agent's id.
    pub(super) fn id(&self) -> &str {
        self.shared.name.as_ref().map_or(self.session.as_str(), SessionName::as_str)
    }

    pub(super) fn status(&self) -> ShellStatus {
        if self.busy {
            return ShellStatus::Running;
        }
        self.shared.last_exit.map_or(ShellStatus::Completed, |exit| ShellStatus::from_exit(exit).0)
    }

    /// The exit code of the last command that has ended.
    pub(super) fn last_exit_code(&self) -> Option<i32> {
        self.shared.last_exit.map(|exit| ShellStatus::from_exit(exit).1)
    }

    pub(super) fn working_directory(&self, target: &AioTarget) -> String {
        let default = || target.sandbox.read_state(|state| state.spec.guest.default_directory.clone());
        self.shared.directory.clone().unwrap_or_else(default)
    }
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
) -> Result<ShellSession, AioProblem> {
    let status = target.sandbox.sessions().shared_session(session).await?;
    ShellSession::from_status(status).ok_or_else(AioProblem::no_session)
}

/// Every session of this API.
pub(super) async fn read_sessions(target: &AioTarget) -> Result<Vec<ShellSession>, AioProblem> {
    let all = target.sandbox.sessions().list_sessions().await?;
    Ok(all.into_iter().filter_map(ShellSession::from_status).collect())
}

/// A session to open.
#[derive(Debug, Default)]
pub(super) struct NewSession {
    pub(super) name: Option<SessionName>,
    /// Ignored if it does not exist.
    pub(super) directory: Option<String>,
    pub(super) note: SessionNote,
}

/// Opens a session, or finds the one with its name.
pub(super) async fn open_session(
    target: &AioTarget,
    new: NewSession,
    requested: RequestTime,
) -> Result<ShellSession, AioProblem> {
    let most = target.notes.max_shell_sessions;
    let directory =
        new.directory.map(|path| WorkingDirectory { path, missing: MissingDirectory::Ignore, expand: false });
    let request = SharedSessionRequest {
        name: new.name,
        open: OpenSessionRequest {
            identity: UserIdentity::Default,
            directory,
            env: Default::default(),
            terminal: Some(SESSION_TERMINAL_SIZE),
            isolation: None,
        },
        text_terminal: true,
        commands: None,
        max_sessions: Some(most),
        idle_limit: Some(SESSION_IDLE_TIMEOUT),
        note: Some(new.note.to_text()),
        requested,
    };
    let opened = target.sandbox.sessions().open_shared_session(request).await;
    let opened = opened.map_err(|error| match error {
        ServiceError::TooManySessions(_) => too_many_sessions(most),
        error => error.into(),
    })?;
    ShellSession::from_status(opened).ok_or_else(AioProblem::no_session)
}

/// A directory that is used if it exists.
pub(super) fn optional_directory(path: String) -> WorkingDirectory {
    WorkingDirectory { path, missing: MissingDirectory::Ignore, expand: false }
}

/// Clients match this text.
pub(super) fn too_many_sessions(most: u32) -> AioProblem {
    AioProblem::bad_request(format!(
        "Cannot create shell session: session limit reached and all {most} existing sessions have active commands"
    ))
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
