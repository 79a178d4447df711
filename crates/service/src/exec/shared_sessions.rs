//! Sessions that clients open under names of their choice, and sessions without a name: shells, and sessions whose runs
//! are single commands.
//!
//! The agent keeps them under ids. The id of a named session follows from its name, so that it is found again after
//! a restart of the server without a table.

use std::time::{Duration, SystemTime};

use domain::process::ExitReason;
use domain::{ProcessId, SessionId, SessionName};
use wire::AgentRequest;
use wire::process::SessionSharing;
use wire::shared_session::{self, IdleLimit, OpenCommands, UpdateSession};

use crate::agent::client::{AgentClient, AgentError};
use crate::agent::{faults, translate};
use crate::clock::time_since_boot;
use crate::core::draw_entropy;
use crate::{OpenSessionRequest, ProcessStatus, SandboxSessions, ServiceError, SessionStatus};

/// Separates these digests from all others.
const NAME_CONTEXT: &str = "coracle 2026 id of a named session";

/// When a client made a request. Of two requests to open and to close one session the later one decides, in whatever
/// order they reach the agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RequestTime(u64);

/// A request to open a session, or to find it if it is open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharedSessionRequest {
    /// `None` opens a new session.
    pub name: Option<SessionName>,
    /// The shell, if it has to be opened. It cannot be isolated.
    pub open: OpenSessionRequest,
    /// Whether its terminal is for output that is read as text: lines end with LF only, input is not echoed, and programs
    /// are told not to page.
    pub text_terminal: bool,
    /// Opens a session without a shell instead. It has no terminal.
    pub commands: Option<CommandSessionSpec>,
    /// How many shared sessions the sandbox may have. Beyond that, the one that was idle longest is closed: first one
    /// without a name, never a busy one.
    pub max_sessions: Option<u32>,
    /// After how much time without a run it is closed.
    pub idle_limit: Option<Duration>,
    /// A text of the caller that is stored with a new session, at most [`SharedSessionRequest::MAX_NOTE_BYTES`]. Code in
    /// the sandbox may read and change it. An agent of an older server does not keep it.
    pub note: Option<String>,
    pub requested: RequestTime,
}

/// A session without a shell. Each run is a new `bash -c` (or `sh -c`) in its own process group, with separate standard
/// output and error, and with an input that is open until it is closed or the run ends. Only the directory is kept
/// between runs: a run that names one also sets it for those after it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CommandSessionSpec {
    /// A file that the shell of each run reads first, if it is readable.
    pub script: Option<String>,
}

/// The kind of a shared session, by the program that executes its runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SharedSessionKind {
    /// A shell on a terminal.
    TerminalShell,
    /// A shell on pipes.
    PipeShell,
    /// A new process for each run.
    Commands,
}

/// A change of what is stored with a shared session.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SharedSessionUpdate {
    /// `None` keeps the note.
    pub note: Option<String>,
    pub idle_limit: IdleLimitUpdate,
}

/// A change of the time without a run after which a session is closed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IdleLimitUpdate {
    #[default]
    Keep,
    Never,
    /// The time counts from the update on.
    After(Duration),
}

/// The use of a shared session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharedSessionUse {
    pub name: Option<SessionName>,
    pub kind: SharedSessionKind,
    pub opened: SystemTime,
    /// When a run last began or ended.
    pub used: SystemTime,
    /// Where the next run starts, as far as it is known: for a shell, once a run has ended.
    pub directory: Option<String>,
    /// The run in progress or, if there is none, the last one.
    pub run: Option<ProcessId>,
    /// The beginning of the text of the run in progress.
    pub command: Option<String>,
    /// The last run that has ended.
    pub last_run: Option<ProcessId>,
    /// How the last run ended.
    pub last_exit: Option<ExitReason>,
    /// How many runs have begun.
    pub runs: u64,
    pub idle_limit: Option<Duration>,
    /// The text that a caller has stored with the session.
    pub note: Option<String>,
}

impl SharedSessionRequest {
    /// The longest note.
    pub const MAX_NOTE_BYTES: usize = shared_session::MAX_SESSION_NOTE_BYTES;

    /// Checks what the agent would refuse, with an error that names the field.
    pub(super) fn check(&self) -> Result<(), ServiceError> {
        check_note(self.note.as_deref())?;
        let Some(commands) = &self.commands else { return Ok(()) };
        if self.open.terminal.is_some() || self.text_terminal {
            return Err(ServiceError::Invalid("a session without a shell has no terminal".to_owned()));
        }
        let most = CommandSessionSpec::MAX_SCRIPT_BYTES;
        let valid = |path: &String| (1..=most).contains(&path.len()) && !path.contains('\0');
        if !commands.script.as_ref().is_none_or(valid) {
            let reason = format!("the path of a session's script has 1 to {most} bytes, none of them zero");
            return Err(ServiceError::Invalid(reason));
        }
        Ok(())
    }
}

impl CommandSessionSpec {
    /// The longest path of a script.
    pub const MAX_SCRIPT_BYTES: usize = shared_session::MAX_SESSION_SCRIPT_BYTES;
}

impl RequestTime {
    pub fn now() -> Self {
        Self(u64::try_from(time_since_boot().as_nanos()).unwrap_or(u64::MAX))
    }
}

impl SandboxSessions<'_> {
    /// Opens a session or finds it. Concurrent calls with one name open it once.
    pub async fn open_shared_session(
        self,
        request: SharedSessionRequest,
    ) -> Result<SessionStatus, ServiceError> {
        let session = match &request.name {
            Some(name) => session_of_name(name),
            None => draw_session_id()?,
        };
        self.open_shared_as(session, request).await
    }

    /// Like [`SandboxSessions::open_shared_session`], with the id that the session gets.
    pub(super) async fn open_shared_as(
        self,
        session: SessionId,
        request: SharedSessionRequest,
    ) -> Result<SessionStatus, ServiceError> {
        request.check()?;
        let (handle, _activity) = self.0.begin_use()?;
        let needs_commands = request.commands.is_some();
        let (open, commands) = wire_shared_session(&session, request);
        let request = match commands {
            Some(CommandSessionSpec { script }) => AgentRequest::OpenCommands(OpenCommands { open, script }),
            None => AgentRequest::OpenSession(open),
        };
        match handle.agent.request::<wire::process::SessionStatus>(request).await? {
            Ok(status) => {
                let status = checked_status(&handle.agent, &session, &status)?;
                let is_it = |shared: &SharedSessionUse| {
                    (shared.kind == SharedSessionKind::Commands) == needs_commands
                };
                match &status.shared {
                    Some(shared) if is_it(shared) => Ok(status),
                    _ => Err(impossible(&handle.agent, "a session of another kind than requested")),
                }
            }
            Err(fault) => Err(faults::open_session_error(&handle.agent, &session, fault)),
        }
    }

    /// The status of one shared session. This call does not count as a use.
    pub async fn shared_session(self, session: &SessionId) -> Result<SessionStatus, ServiceError> {
        let handle = self.0.usable_now()?;
        let request = AgentRequest::SessionStatus { session: session.as_str().to_owned() };
        read_shared_session(&handle.agent, session, request).await
    }

    /// Changes what is stored with a shared session, and returns its status.
    pub async fn update_shared_session(
        self,
        session: &SessionId,
        update: SharedSessionUpdate,
    ) -> Result<SessionStatus, ServiceError> {
        check_note(update.note.as_deref())?;
        let (handle, _activity) = self.0.begin_use()?;
        let request = AgentRequest::UpdateSession(UpdateSession {
            session: session.as_str().to_owned(),
            note: update.note,
            idle: match update.idle_limit {
                IdleLimitUpdate::Keep => None,
                IdleLimitUpdate::Never => Some(IdleLimit::Never),
                IdleLimitUpdate::After(limit) => Some(IdleLimit::Milliseconds(duration_millis(limit))),
            },
        });
        read_shared_session(&handle.agent, session, request).await
    }

    /// The runs of an open session that are remembered, the oldest first: at most [`SandboxSessions::MAX_SESSION_RUNS`],
    /// of which the one in progress is one. They are forgotten after all other processes of the sandbox, or when a caller
    /// forgets them. Runs that wait have not begun and are not listed. This call does not count as a use.
    pub async fn session_runs(self, session: &SessionId) -> Result<Vec<ProcessStatus>, ServiceError> {
        let handle = self.0.usable_now()?;
        let agent = &handle.agent;
        let request = AgentRequest::SessionRuns { session: session.as_str().to_owned() };
        let runs = agent.request::<Vec<wire::process::ProcessStatus>>(request).await?;
        let runs = runs.map_err(|fault| faults::session_error(agent, session, fault))?;
        if runs.len() > Self::MAX_SESSION_RUNS {
            return Err(impossible(agent, "more runs of a session than are remembered"));
        }
        if runs.iter().any(|run| run.session.as_deref() != Some(session.as_str())) {
            return Err(impossible(agent, "a run of another session"));
        }
        let runs = runs.into_iter().map(translate::process_status).collect::<Result<_, _>>();
        runs.map_err(|source| agent.agent_error("answer", source))
    }

    /// How many runs of one session are remembered and listed. An agent keeps 4096 finished processes, so if more than
    /// forty sessions have that many runs, the oldest runs are forgotten.
    pub const MAX_SESSION_RUNS: usize = shared_session::MAX_SESSION_RUNS;

    /// Closes a session. Requests to open it that were made before `requested` have no effect any more.
    pub async fn close_shared_session(
        self,
        session: &SessionId,
        requested: RequestTime,
    ) -> Result<(), ServiceError> {
        self.close_shared(session, requested, None).await
    }

    /// Closes a session without a shell. Its run is asked to end by SIGTERM, and is killed after the grace; this call
    /// does not wait for that. An agent of an older server kills it at once.
    pub async fn terminate_shared_session(
        self,
        session: &SessionId,
        requested: RequestTime,
        grace: Duration,
    ) -> Result<(), ServiceError> {
        self.close_shared(session, requested, Some(grace)).await
    }

    async fn close_shared(
        self,
        session: &SessionId,
        requested: RequestTime,
        grace: Option<Duration>,
    ) -> Result<(), ServiceError> {
        let (handle, _activity) = self.0.begin_use()?;
        let request = AgentRequest::CloseSession {
            session: session.as_str().to_owned(),
            requested_ns: Some(requested.0),
            grace_ms: grace.map(duration_millis),
        };
        let closed = handle.agent.request::<()>(request).await?;
        closed.map_err(|fault| faults::session_error(&handle.agent, session, fault))
    }
}

/// A request to open a session, as the agent gets it.
pub(super) fn wire_shared_session(
    session: &SessionId,
    request: SharedSessionRequest,
) -> (wire::process::OpenSession, Option<CommandSessionSpec>) {
    let sharing = SessionSharing {
        name: request.name.as_ref().map(|name| name.as_str().to_owned()),
        requested_ns: request.requested.0,
        max_sessions: request.max_sessions,
        idle_ms: request.idle_limit.map(duration_millis),
        note: request.note,
    };
    let open = translate::wire_open_session(session, request.open);
    let text_terminal = request.text_terminal;
    (wire::process::OpenSession { sharing: Some(sharing), text_terminal, ..open }, request.commands)
}

/// Sends a request about a shared session that is answered with its status.
async fn read_shared_session(
    agent: &AgentClient,
    session: &SessionId,
    request: AgentRequest,
) -> Result<SessionStatus, ServiceError> {
    let status = agent.request::<wire::process::SessionStatus>(request).await?;
    let status = status.map_err(|fault| faults::session_error(agent, session, fault))?;
    let status = checked_status(agent, session, &status)?;
    // A session that only its opener uses does not exist for others.
    if status.shared.is_some() { Ok(status) } else { Err(ServiceError::NoSession(session.clone())) }
}

/// The status, which must be that of the session that was asked for.
fn checked_status(
    agent: &AgentClient,
    session: &SessionId,
    status: &wire::process::SessionStatus,
) -> Result<SessionStatus, ServiceError> {
    let status = translate::session_status(status).map_err(|source| agent.agent_error("answer", source))?;
    if status.session == *session { Ok(status) } else { Err(impossible(agent, "another session")) }
}

fn impossible(agent: &AgentClient, what: &'static str) -> ServiceError {
    agent.agent_error("answer", AgentError::Impossible(what))
}

pub(super) fn check_note(note: Option<&str>) -> Result<(), ServiceError> {
    let most = SharedSessionRequest::MAX_NOTE_BYTES;
    if note.is_some_and(|note| note.len() > most) {
        return Err(ServiceError::Invalid(format!("the note of a session has at most {most} bytes")));
    }
    Ok(())
}

pub(super) fn duration_millis(limit: Duration) -> u64 {
    u64::try_from(limit.as_millis()).unwrap_or(u64::MAX)
}

/// The id of a new session without a name.
pub fn draw_session_id() -> Result<SessionId, ServiceError> {
    Ok(SessionId::from_entropy(draw_entropy()?))
}

/// The id of the session with this name. The id of a session without a name is its name, too.
pub fn session_of_name(name: &SessionName) -> SessionId {
    SessionId::parse(name.as_str()).unwrap_or_else(|_other| {
        let digest = blake3::derive_key(NAME_CONTEXT, name.as_str().as_bytes());
        let (entropy, _) = digest.split_first_chunk::<16>().expect("a digest has 32 bytes");
        SessionId::from_entropy(*entropy)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn id_follows_from_the_name() {
        let id = |name: &str| session_of_name(&SessionName::parse(name).expect("it is valid"));
        assert_eq!(id("a/b ü"), id("a/b ü"));
        assert_ne!(id("a"), id("A"));
        let anonymous = SessionId::from_entropy([7; 16]);
        assert_eq!(id(anonymous.as_str()), anonymous);
    }
}
