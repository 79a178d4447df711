//! Sessions of the core as the two groups of routes use them.
//!
//! An id that a client chooses is a name in the core. Names of `/v1/bash` have a prefix, because each group has ids of
//! its own. A session without a chosen id has no name, and its id is that of the core.

use std::time::Duration;

use domain::process::{TerminalSize, WorkingDirectory};
use domain::{ProcessId, SessionId, SessionName, UserIdentity};
use service::{
    CommandSessionSpec, OpenSessionRequest, RequestTime, ServiceError, SessionStatus, SharedSessionKind,
    SharedSessionRequest, SharedSessionUse,
};

use crate::aio::problem::AioProblem;
use crate::aio::target::AioTarget;

/// How long a session without a command is kept, unless the sandbox has a variable for it.
const SESSION_IDLE_TIMEOUT: Duration = Duration::from_secs(3600);

/// Programs shorten what they print on a narrow terminal.
const SESSION_TERMINAL_SIZE: TerminalSize = TerminalSize { columns: 1000, rows: 1000 };

/// The variable of a sandbox that sets how many sessions of `/v1/bash` it may have.
pub(in crate::aio) const MAX_BASH_SESSIONS_VARIABLE: &str = "MAX_BASH_SESSIONS";
const DEFAULT_BASH_SESSIONS: u32 = 50;
/// The highest number of sessions that the variable can set.
pub(in crate::aio) const MAX_BASH_SESSIONS: u32 = 1000;

/// A group of routes with sessions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::aio) enum SessionGroup {
    /// `/v1/shell`: a shell on a terminal.
    Shell,
    /// `/v1/bash`: a new process for each command.
    Bash,
}

impl SessionGroup {
    fn kind(self) -> SharedSessionKind {
        match self {
            Self::Shell => SharedSessionKind::TerminalShell,
            Self::Bash => SharedSessionKind::Commands,
        }
    }

    pub(in crate::aio) fn name_prefix(self) -> &'static str {
        match self {
            Self::Shell => "",
            Self::Bash => "bash:",
        }
    }

    /// How many sessions a sandbox may have.
    fn max_sessions(self, target: &AioTarget) -> u32 {
        match self {
            Self::Shell => target.notes.max_shell_sessions,
            Self::Bash => {
                let set = target.sandbox.read_state(|state| {
                    let value = state.spec.env.get(MAX_BASH_SESSIONS_VARIABLE);
                    value.and_then(|value| value.trim().parse().ok())
                });
                set.unwrap_or(DEFAULT_BASH_SESSIONS).clamp(1, MAX_BASH_SESSIONS)
            }
        }
    }

    /// How long a session without a command is kept.
    pub(in crate::aio) fn idle_timeout(self, target: &AioTarget) -> Duration {
        let variable = match self {
            Self::Shell => "SHELL_SESSION_TIMEOUT",
            Self::Bash => "BASH_SESSION_TIMEOUT",
        };
        target.variable_seconds(variable).unwrap_or(SESSION_IDLE_TIMEOUT)
    }

    /// Clients match this text.
    pub(in crate::aio) fn too_many_sessions(self, target: &AioTarget) -> AioProblem {
        let most = self.max_sessions(target);
        let name = match self {
            Self::Shell => "shell",
            Self::Bash => "bash",
        };
        AioProblem::bad_request(format!(
            "Cannot create {name} session: session limit reached and all {most} existing sessions have active commands"
        ))
    }
}

/// A session with its use.
#[derive(Debug)]
pub(in crate::aio) struct GroupSession {
    group: SessionGroup,
    pub(in crate::aio) session: SessionId,
    pub(in crate::aio) busy: bool,
    pub(in crate::aio) shared: SharedSessionUse,
}

impl GroupSession {
    /// `None` if it is not a session of this group.
    pub(in crate::aio) fn from_status(group: SessionGroup, status: SessionStatus) -> Option<Self> {
        let is_own = |shared: &SharedSessionUse| {
            let prefix = group.name_prefix();
            let named = shared.name.as_ref().is_none_or(|name| name.as_str().starts_with(prefix));
            shared.kind == group.kind() && named
        };
        let shared = status.shared.filter(is_own)?;
        Some(Self { group, session: status.session, busy: status.busy, shared })
    }

    /// The id that clients know: the name that one of them chose, or that of the core.
    pub(in crate::aio) fn id(&self) -> &str {
        let prefix = self.group.name_prefix();
        let chosen = self.shared.name.as_ref().and_then(|name| name.as_str().strip_prefix(prefix));
        chosen.unwrap_or(self.session.as_str())
    }

    /// The command that runs now.
    pub(in crate::aio) fn running_command(&self) -> Option<&ProcessId> {
        self.shared.run.as_ref().filter(|_| self.busy)
    }

    pub(in crate::aio) fn working_directory(&self, target: &AioTarget) -> String {
        let default = || target.sandbox.read_state(|state| state.spec.guest.default_directory.clone());
        self.shared.directory.clone().unwrap_or_else(default)
    }
}

/// A session to open.
#[derive(Debug, Default)]
pub(in crate::aio) struct NewSession {
    pub(in crate::aio) name: Option<SessionName>,
    pub(in crate::aio) directory: Option<WorkingDirectory>,
    /// A file that is read before each command of `/v1/bash`.
    pub(in crate::aio) script: Option<String>,
    pub(in crate::aio) note: Option<String>,
}

/// A request to open a session.
pub(in crate::aio) fn session_request(
    target: &AioTarget,
    group: SessionGroup,
    new: NewSession,
    requested: RequestTime,
) -> SharedSessionRequest {
    let on_terminal = group == SessionGroup::Shell;
    SharedSessionRequest {
        name: new.name,
        open: OpenSessionRequest {
            identity: UserIdentity::Default,
            directory: new.directory,
            env: Default::default(),
            terminal: on_terminal.then_some(SESSION_TERMINAL_SIZE),
            isolation: None,
        },
        text_terminal: on_terminal,
        commands: (!on_terminal).then_some(CommandSessionSpec { script: new.script }),
        max_sessions: Some(group.max_sessions(target)),
        idle_limit: Some(group.idle_timeout(target)),
        note: new.note,
        requested,
    }
}

/// Opens a session, or finds the one with its name. Returns `None` if that is no session of this group.
pub(in crate::aio) async fn open_group_session(
    target: &AioTarget,
    group: SessionGroup,
    new: NewSession,
    requested: RequestTime,
) -> Result<Option<GroupSession>, ServiceError> {
    let request = session_request(target, group, new, requested);
    let opened = target.sandbox.sessions().open_shared_session(request).await?;
    Ok(GroupSession::from_status(group, opened))
}

/// Every session of a group.
pub(in crate::aio) async fn read_sessions(
    target: &AioTarget,
    group: SessionGroup,
) -> Result<Vec<GroupSession>, AioProblem> {
    let all = target.sandbox.sessions().list_sessions().await?;
    Ok(all.into_iter().filter_map(|status| GroupSession::from_status(group, status)).collect())
}
