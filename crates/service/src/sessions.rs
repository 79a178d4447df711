//! Shells that are kept open between commands.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use domain::process::{Directory, Size};
use domain::{Backpressure, Identity, Nest, NestStatus, Owner, Retention, SandboxId, SessionId};
use wire::{Reply, Request};

use crate::core::new_process_id;
use crate::following::Place;
use crate::{Following, Service, ServiceError, faults, translate};

/// A request to open a shell that is kept open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenSession {
    pub identity: Identity,
    pub directory: Option<Directory>,
    pub env: BTreeMap<String, String>,
    /// Use a terminal of this size instead of pipes.
    pub terminal: Option<Size>,
    /// Run in separate namespaces.
    pub nest: Option<Nest>,
}

/// A text to run in an open shell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Run {
    pub text: String,
    /// The working directory of this run only.
    pub directory: Option<Directory>,
    pub deadline: Option<Duration>,
    pub retention: Retention,
    pub backpressure: Backpressure,
    pub busy: Busy,
    /// Variables of this run only.
    pub env: BTreeMap<String, String>,
    pub place: RunPlace,
}

/// Which shell executes a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunPlace {
    /// The session's own shell, whose state the run may change.
    Shell,
    /// A separate shell in the same nest.
    Beside,
}

/// The treatment of a run while another run of the session is active.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Busy {
    Refuse,
    Queue,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionStatus {
    pub session: SessionId,
    pub busy: bool,
    pub terminal: bool,
    pub nest: Option<NestStatus>,
}

impl Service {
    pub async fn open_session(
        &self,
        owner: &Owner,
        id: &SandboxId,
        request: OpenSession,
    ) -> Result<SessionId, ServiceError> {
        let (handle, _activity) = self.0.enter(owner, id)?;
        let session = new_process_id()?;
        match handle.agent.ask(Request::OpenSession(translate::open_session(&session, request))).await? {
            Ok(Reply::Ok | Reply::Started { .. }) => Ok(session),
            Ok(_) => Err(handle.agent.unexpected()),
            Err(fault) => Err(faults::of_launch(&handle.agent, handle.commands.limit(), fault)),
        }
    }

    /// Runs text in an open shell; the run is a process with its own id.
    pub async fn run(
        &self,
        owner: &Owner,
        id: &SandboxId,
        session: &SessionId,
        run: Run,
    ) -> Result<Following, ServiceError> {
        self.start_run(owner, id, session, run).await.inspect_err(self.0.failed("run", owner, Some(id)))
    }

    async fn start_run(
        &self,
        owner: &Owner,
        id: &SandboxId,
        session: &SessionId,
        run: Run,
    ) -> Result<Following, ServiceError> {
        let (handle, activity) = self.0.enter(owner, id)?;
        let name = new_process_id()?;
        let slot = self.slot(&handle, &name).await?;
        let agent = handle.agent.clone();
        let queued = run.busy == Busy::Queue;
        let mut connection = agent.call(Request::Run(translate::run(session, &name, run))).await?;
        let answer = if queued {
            // Other runs come first, however long they take.
            connection.answer().await.map_err(|source| agent.failed("answer", source))?
        } else {
            agent.first_answer(&mut connection).await?
        };
        match answer {
            Ok(Reply::Started { .. }) => slot.started(),
            Ok(_) => return Err(agent.unexpected()),
            Err(fault) => return Err(faults::of_session(&agent, session, fault)),
        }
        let commands = Arc::clone(&handle.commands);
        Ok(Following::new(name, agent, connection, Place::At(0), commands, activity))
    }

    pub async fn sessions(&self, owner: &Owner, id: &SandboxId) -> Result<Vec<SessionStatus>, ServiceError> {
        let handle = self.0.reach(owner, id)?;
        match handle.agent.ask(Request::Sessions).await? {
            Ok(Reply::Sessions(sessions)) => {
                let sessions = sessions.iter().map(translate::session).collect::<Result<_, _>>();
                sessions.map_err(|source| handle.agent.failed("answer", source))
            }
            Ok(_) => Err(handle.agent.unexpected()),
            Err(fault) => Err(handle.agent.refused(fault)),
        }
    }

    /// Whether sessions of a sandbox can have nests; if not, the reason.
    pub async fn nesting(&self, owner: &Owner, id: &SandboxId) -> Result<Result<(), String>, ServiceError> {
        let handle = self.0.reach(owner, id)?;
        match handle.agent.ask(Request::Nesting).await? {
            Ok(Reply::Ok) => Ok(Ok(())),
            Ok(_) => Err(handle.agent.unexpected()),
            Err(fault) => Ok(Err(fault.subject)),
        }
    }

    /// The text that was stored with a session's nest. It comes from inside the sandbox, so no part of it can be
    /// trusted.
    pub async fn nest_note(
        &self,
        owner: &Owner,
        id: &SandboxId,
        session: &SessionId,
    ) -> Result<String, ServiceError> {
        let handle = self.0.reach(owner, id)?;
        match handle.agent.ask(Request::Note { session: session.as_str().to_owned() }).await? {
            Ok(Reply::Note(note)) => Ok(note),
            Ok(_) => Err(handle.agent.unexpected()),
            Err(fault) => Err(faults::of_session(&handle.agent, session, fault)),
        }
    }

    pub async fn close_session(
        &self,
        owner: &Owner,
        id: &SandboxId,
        session: &SessionId,
    ) -> Result<(), ServiceError> {
        let (handle, _activity) = self.0.enter(owner, id)?;
        match handle.agent.ask(Request::CloseSession { session: session.as_str().to_owned() }).await? {
            Ok(Reply::Ok) => Ok(()),
            Ok(_) => Err(handle.agent.unexpected()),
            Err(fault) => Err(faults::of_session(&handle.agent, session, fault)),
        }
    }
}
