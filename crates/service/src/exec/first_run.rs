//! Opens a session without a name and runs its first command, by one request to the agent.
//!
//! ```text
//! open_and_run ─► Started, output           one connection
//!       └─► unsupported: an agent of an older server
//!             open_session ─► Session, then run ─► Started, output
//! ```

use std::sync::Arc;

use domain::{ProcessId, SessionId};
use wire::process::RunInSession;
use wire::shared_session::OpenAndRun;
use wire::{AgentRequest, FaultKind};

use crate::agent::client::OperationConnection;
use crate::agent::reply::ProcessStarted;
use crate::agent::{faults, translate};
use crate::core::new_process_id;
use crate::exec::output_stream::ReadPosition;
use crate::exec::shared_sessions::wire_shared_session;
use crate::{
    BusyPolicy, OutputStream, SandboxSessions, ServiceError, SessionRunRequest, SharedSessionRequest,
};

impl SandboxSessions<'_> {
    /// Opens a session without a name, under an id of [`crate::draw_session_id`], and runs text in it. If only the
    /// directory of the run is missing, the session is open.
    pub async fn run_in_new_session(
        self,
        session: &SessionId,
        request: SharedSessionRequest,
        run: SessionRunRequest,
    ) -> Result<OutputStream, ServiceError> {
        let (handle, activity) = self.0.begin_use()?;
        let name = new_process_id()?;
        let first = translate::wire_run(session, &name, run.clone());
        let started = self.start_first_run(session, &name, request.clone(), first).await;
        match started.inspect_err(self.0.record_failure("run"))? {
            Some(connection) => {
                let (agent, commands) = (handle.agent.clone(), Arc::clone(&handle.commands));
                Ok(OutputStream::new(name, agent, connection, ReadPosition::At(0), commands, activity))
            }
            None => {
                self.open_shared_as(session.clone(), request).await?;
                // A new session is idle, so an answer comes at once. Queueing would wait for it without a limit.
                self.run_in_session(session, SessionRunRequest { busy: BusyPolicy::Refuse, ..run }).await
            }
        }
    }

    /// Like [`SandboxSessions::run_in_new_session`], but nothing waits for the run.
    pub async fn start_detached_in_new_session(
        self,
        session: &SessionId,
        request: SharedSessionRequest,
        run: SessionRunRequest,
    ) -> Result<ProcessId, ServiceError> {
        let name = new_process_id()?;
        let first = RunInSession { detached: true, ..translate::wire_run(session, &name, run.clone()) };
        match self.start_first_run(session, &name, request.clone(), first).await? {
            Some(_connection) => Ok(name),
            None => {
                self.open_shared_as(session.clone(), request).await?;
                self.start_detached_run(session, run).await
            }
        }
    }

    /// Returns the connection on which the output follows, or `None` if the agent does not know the request.
    async fn start_first_run(
        self,
        session: &SessionId,
        name: &ProcessId,
        request: SharedSessionRequest,
        run: RunInSession,
    ) -> Result<Option<OperationConnection>, ServiceError> {
        request.check()?;
        if request.name.is_some() || request.commands.is_some() {
            let reason = "a session that is opened for a run has a shell and no name";
            return Err(ServiceError::Invalid(reason.to_owned()));
        }
        let (handle, _activity) = self.0.begin_use()?;
        let agent = &handle.agent;
        if !agent.may_open_and_run() {
            return Ok(None);
        }
        let slot = self.0.processes().take_command_slot(name).await?;
        let (open, _no_commands) = wire_shared_session(session, request);
        let mut connection = agent.open_request(AgentRequest::OpenAndRun(OpenAndRun { open, run })).await?;
        match agent.first_answer(&mut connection).await? {
            Ok(ProcessStarted) => {
                slot.mark_started();
                Ok(Some(connection))
            }
            Err(fault) if fault.kind == FaultKind::Unsupported => {
                agent.set_lacks_open_and_run();
                Ok(None)
            }
            Err(fault) => Err(faults::open_and_run_error(agent, handle.commands.limit(), session, fault)),
        }
    }
}
