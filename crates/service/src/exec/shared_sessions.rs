//! Shells that clients open under names of their choice, and shells without a name.
//!
//! The agent keeps them under ids. The id of a named session follows from its name, so that it is found again after
//! a restart of the server without a table.

use std::time::{Duration, SystemTime};

use domain::process::ExitReason;
use domain::{ProcessId, SessionId, SessionName};
use wire::AgentRequest;
use wire::process::SessionSharing;

use crate::agent::{faults, translate};
use crate::clock::time_since_boot;
use crate::core::draw_entropy;
use crate::{OpenSessionRequest, SandboxSessions, ServiceError, SessionStatus};

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
    /// How many shared sessions the sandbox may have. Beyond that, the one that was idle longest is closed: first one
    /// without a name, never a busy one.
    pub max_sessions: Option<u32>,
    /// After how much time without a run it is closed.
    pub idle_limit: Option<Duration>,
    pub requested: RequestTime,
}

/// The use of a shared session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharedSessionUse {
    pub name: Option<SessionName>,
    pub opened: SystemTime,
    /// When a run last began or ended.
    pub used: SystemTime,
    /// Where the next run starts, once a run has ended.
    pub directory: Option<String>,
    /// The run in progress or, if there is none, the last one.
    pub run: Option<ProcessId>,
    /// The beginning of the text of the run in progress.
    pub command: Option<String>,
    /// How the last run ended.
    pub last_exit: Option<ExitReason>,
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
        let (handle, _activity) = self.0.begin_use()?;
        let session = match &request.name {
            Some(name) => session_of_name(name),
            None => SessionId::from_entropy(draw_entropy()?),
        };
        let sharing = SessionSharing {
            name: request.name.as_ref().map(|name| name.as_str().to_owned()),
            requested_ns: request.requested.0,
            max_sessions: request.max_sessions,
            idle_ms: request.idle_limit.map(|limit| u64::try_from(limit.as_millis()).unwrap_or(u64::MAX)),
        };
        let open = translate::wire_open_session(&session, request.open);
        let text_terminal = request.text_terminal;
        let open = wire::process::OpenSession { sharing: Some(sharing), text_terminal, ..open };
        let answer = handle.agent.request::<wire::process::SessionStatus>(AgentRequest::OpenSession(open));
        match answer.await? {
            Ok(status) => translate::session_status(&status)
                .map_err(|source| handle.agent.agent_error("answer", source)),
            Err(fault) => Err(faults::open_session_error(&handle.agent, &session, fault)),
        }
    }

    /// Closes a session. Requests to open it that were made before `requested` have no effect any more.
    pub async fn close_shared_session(
        self,
        session: &SessionId,
        requested: RequestTime,
    ) -> Result<(), ServiceError> {
        let (handle, _activity) = self.0.begin_use()?;
        let request = AgentRequest::CloseSession {
            session: session.as_str().to_owned(),
            requested_ns: Some(requested.0),
        };
        let closed = handle.agent.request::<()>(request).await?;
        closed.map_err(|fault| faults::session_error(&handle.agent, session, fault))
    }
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
