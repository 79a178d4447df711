//! Shells that are kept open between commands.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use domain::process::{TerminalSize, WorkingDirectory};
use domain::{
    Backpressure, IsolatedSessionSpec, IsolatedSessionStatus, OutputRetention, ProcessId, SessionId,
    UserIdentity,
};
use wire::AgentRequest;

use crate::agent::reply::{ProcessStarted, SessionNote, SessionOpened};
use crate::agent::{faults, translate};
use crate::core::{draw_entropy, new_process_id};
use crate::exec::output_stream::ReadPosition;
use crate::exec::shared_sessions::SharedSessionUse;
use crate::{OutputStream, SandboxRef, ServiceError};

/// A request to open a shell that is kept open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenSessionRequest {
    pub identity: UserIdentity,
    pub directory: Option<WorkingDirectory>,
    pub env: BTreeMap<String, String>,
    /// Use a terminal of this size instead of pipes.
    pub terminal: Option<TerminalSize>,
    /// Run in separate namespaces.
    pub isolation: Option<IsolatedSessionSpec>,
}

/// A text to run in an open shell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionRunRequest {
    pub text: String,
    /// The working directory of this run only; in a session without a shell also that of the runs after it.
    pub directory: Option<WorkingDirectory>,
    pub deadline: Option<Duration>,
    pub retention: OutputRetention,
    pub backpressure: Backpressure,
    pub busy: BusyPolicy,
    /// Variables of this run only.
    pub env: BTreeMap<String, String>,
    pub shell: RunShell,
}

/// Which shell executes a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunShell {
    /// The session's own shell, whose state the run may change.
    Shell,
    /// A separate shell in the same namespaces.
    Separate,
}

/// The treatment of a run while another run of the session is active.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BusyPolicy {
    Refuse,
    Queue,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionStatus {
    pub session: SessionId,
    pub busy: bool,
    pub terminal: bool,
    pub isolation: Option<IsolatedSessionStatus>,
    /// How a session is used that several callers may open.
    pub shared: Option<SharedSessionUse>,
}

/// The shells of one sandbox that are kept open.
#[derive(Clone, Copy)]
pub struct SandboxSessions<'a>(pub(crate) &'a SandboxRef);

impl SandboxSessions<'_> {
    pub async fn open_session(self, request: OpenSessionRequest) -> Result<SessionId, ServiceError> {
        let (handle, _activity) = self.0.begin_use()?;
        let session = SessionId::from_entropy(draw_entropy()?);
        let request = AgentRequest::OpenSession(translate::wire_open_session(&session, request));
        match handle.agent.request::<SessionOpened>(request).await? {
            Ok(SessionOpened) => Ok(session),
            Err(fault) => Err(faults::launch_error(&handle.agent, handle.commands.limit(), fault)),
        }
    }

    /// Runs text in an open shell; the run is a process with its own id.
    pub async fn run_in_session(
        self,
        session: &SessionId,
        run: SessionRunRequest,
    ) -> Result<OutputStream, ServiceError> {
        self.start_run(session, run).await.inspect_err(self.0.record_failure("run"))
    }

    /// Queues a run and returns its id at once, also if other runs come first. Its output is kept like that of any
    /// process.
    pub async fn start_detached_run(
        self,
        session: &SessionId,
        run: SessionRunRequest,
    ) -> Result<ProcessId, ServiceError> {
        let (handle, _activity) = self.0.begin_use()?;
        let name = new_process_id()?;
        let slot = self.0.processes().take_command_slot(&name).await?;
        let run = wire::process::RunInSession { detached: true, ..translate::wire_run(session, &name, run) };
        match handle.agent.request::<ProcessStarted>(AgentRequest::Run(run)).await? {
            Ok(ProcessStarted) => {
                slot.mark_started();
                Ok(name)
            }
            Err(fault) => Err(faults::session_error(&handle.agent, session, fault)),
        }
    }

    async fn start_run(
        self,
        session: &SessionId,
        run: SessionRunRequest,
    ) -> Result<OutputStream, ServiceError> {
        let (handle, activity) = self.0.begin_use()?;
        let name = new_process_id()?;
        let slot = self.0.processes().take_command_slot(&name).await?;
        let agent = handle.agent.clone();
        let queued = run.busy == BusyPolicy::Queue;
        let mut connection =
            agent.open_request(AgentRequest::Run(translate::wire_run(session, &name, run))).await?;
        let answer = if queued {
            // Other runs come first, however long they take.
            agent.late_answer(&mut connection).await?
        } else {
            agent.first_answer(&mut connection).await?
        };
        match answer {
            Ok(ProcessStarted) => slot.mark_started(),
            Err(fault) => return Err(faults::session_error(&agent, session, fault)),
        }
        let commands = Arc::clone(&handle.commands);
        Ok(OutputStream::new(name, agent, connection, ReadPosition::At(0), commands, activity))
    }

    pub async fn list_sessions(self) -> Result<Vec<SessionStatus>, ServiceError> {
        let handle = self.0.usable_now()?;
        let agent = &handle.agent;
        let sessions = agent.request::<Vec<wire::process::SessionStatus>>(AgentRequest::Sessions).await?;
        let sessions = sessions.map_err(|fault| agent.fault_error(fault))?;
        let sessions = sessions.iter().map(translate::session_status).collect::<Result<_, _>>();
        sessions.map_err(|source| agent.agent_error("answer", source))
    }

    /// Whether sessions of a sandbox can be isolated; if not, the reason.
    pub async fn check_isolation_support(self) -> Result<Result<(), String>, ServiceError> {
        let handle = self.0.usable_now()?;
        let answer = handle.agent.request::<()>(AgentRequest::IsolatedSessions).await?;
        Ok(answer.map_err(|fault| fault.subject))
    }

    /// The text that was stored with an isolated session. It comes from inside the sandbox, so no part of it can be
    /// trusted.
    pub async fn isolated_session_note(self, session: &SessionId) -> Result<String, ServiceError> {
        let handle = self.0.usable_now()?;
        match handle.agent.request(AgentRequest::Note { session: session.as_str().to_owned() }).await? {
            Ok(SessionNote(note)) => Ok(note),
            Err(fault) => Err(faults::session_error(&handle.agent, session, fault)),
        }
    }

    pub async fn close_session(self, session: &SessionId) -> Result<(), ServiceError> {
        let (handle, _activity) = self.0.begin_use()?;
        let request = AgentRequest::CloseSession {
            session: session.as_str().to_owned(),
            requested_ns: None,
            grace_ms: None,
        };
        let closed = handle.agent.request::<()>(request).await?;
        closed.map_err(|fault| faults::session_error(&handle.agent, session, fault))
    }
}
