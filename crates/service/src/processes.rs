//! Commands in a sandbox: start, follow, feed, signal.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use domain::process::{Process, Size};
use domain::{Exit, Owner, Position, ProcessId, SandboxId, SessionId};
use wire::process::SignalProcess;
use wire::{FaultKind, Reply, Request};

use crate::agent_client::Agent;
use crate::commands::Slot;
use crate::core::{Core, new_process_id};
use crate::following::Place;
use crate::registry::Handle;
use crate::{Following, Input, OutputSettings, Service, ServiceError, faults, measure, translate};

/// How a process ended, and the resources it used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ended {
    pub exit: Exit,
    /// The overall offset after the last byte it printed.
    pub written: u64,
    pub ended: SystemTime,
    pub duration: Duration,
    pub user: Duration,
    pub system: Duration,
    pub max_rss: domain::Bytes,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessStatus {
    pub process: ProcessId,
    pub tag: Option<String>,
    /// The session that this process is a run of.
    pub session: Option<SessionId>,
    /// The shell text, or the arguments joined by spaces; cut after 4 KiB.
    pub command: String,
    pub started: SystemTime,
    pub written: u64,
    /// How many bytes are kept from the beginning of its output.
    pub first: u64,
    /// `None` while the process runs.
    pub ended: Option<Ended>,
    /// The process has ended, but a process that it started still runs.
    pub left: bool,
}

/// A command, session or context of a sandbox with everything it has started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessTree {
    pub id: ProcessId,
    pub kind: TreeKind,
    /// The session that a run belongs to.
    pub session: Option<SessionId>,
    pub tag: Option<String>,
    /// The beginning of the command's text, the language of a context, or the kind of session.
    pub text: String,
    /// Whether the command runs, or the session or context has an active run.
    pub busy: bool,
    pub started: Option<SystemTime>,
    pub ended: Option<Ended>,
    /// The command has ended, but a process that it started still runs.
    pub left: bool,
    pub usage: Option<TreeUsage>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TreeKind {
    Command,
    /// A command that was given to a session or context.
    Run,
    Session,
    Context,
}

/// The current usage of a process tree, as the agent reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TreeUsage {
    pub cpu: Duration,
    /// Resident memory; pages that processes share count for each of them.
    pub memory: domain::Bytes,
    pub processes: u32,
}

/// Which commands a list of trees contains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TreeFilter {
    Living,
    /// Also commands that have ended and are still remembered.
    All,
}

/// Which processes a signal goes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// The process's group, as from a terminal.
    Group,
    /// Everything the process ever started.
    Tree,
}

impl Service {
    /// How much output of commands is kept unless the caller says otherwise.
    pub fn output_settings(&self) -> OutputSettings {
        self.0.config().output
    }

    /// Starts a process; its output can be read from the first byte.
    pub async fn launch(
        &self,
        owner: &Owner,
        id: &SandboxId,
        process: Process,
    ) -> Result<Following, ServiceError> {
        let began = Instant::now();
        let launched = self.start_process(owner, id, process).await.inspect_err(self.0.failed(
            "launch",
            owner,
            Some(id),
        ))?;
        measure::launched(began.elapsed());
        Ok(launched)
    }

    async fn start_process(
        &self,
        owner: &Owner,
        id: &SandboxId,
        process: Process,
    ) -> Result<Following, ServiceError> {
        let (handle, activity) = self.0.enter(owner, id)?;
        let name = new_process_id()?;
        let slot = self.slot(&handle, &name).await?;
        let agent = handle.agent.clone();
        let mut connection = agent.call(Request::Start(translate::start(&name, process))).await?;
        match agent.first_answer(&mut connection).await? {
            Ok(Reply::Started { .. }) => slot.started(),
            Ok(_) => return Err(agent.unexpected()),
            Err(fault) => return Err(faults::of_launch(&agent, handle.commands.limit(), fault)),
        }
        let commands = Arc::clone(&handle.commands);
        Ok(Following::new(name, agent, connection, Place::At(0), commands, activity))
    }

    /// Takes a command slot; the agent is asked only if our count says that none is free.
    pub(crate) async fn slot(&self, handle: &Handle, process: &ProcessId) -> Result<Slot, ServiceError> {
        if let Some(slot) = handle.commands.take(process) {
            return Ok(slot);
        }
        handle.commands.correct(&self.0.processes_of(&handle.agent).await?);
        let (id, limit) = (handle.id.clone(), handle.commands.limit());
        handle.commands.take(process).ok_or(ServiceError::TooManyCommands { id, limit })
    }

    /// Reads the output of a process from an overall offset. If those bytes are gone, a gap is reported and reading
    /// continues after it.
    pub async fn follow(
        &self,
        owner: &Owner,
        id: &SandboxId,
        process: &ProcessId,
        from: Position,
    ) -> Result<Following, ServiceError> {
        let (handle, activity) = self.0.enter(owner, id)?;
        let agent = handle.agent.clone();
        let request = Request::Follow { process: process.as_str().to_owned(), from: from.0 };
        let mut connection = agent.call(request).await?;
        let place = match agent.first_answer(&mut connection).await? {
            Ok(Reply::Status(status)) => Place::starting(from.0, status.written),
            Ok(_) => return Err(agent.unexpected()),
            Err(fault) => return Err(faults::of_process(&agent, process, fault)),
        };
        let commands = Arc::clone(&handle.commands);
        Ok(Following::new(process.clone(), agent, connection, place, commands, activity))
    }

    pub async fn status(
        &self,
        owner: &Owner,
        id: &SandboxId,
        process: &ProcessId,
    ) -> Result<ProcessStatus, ServiceError> {
        let handle = self.0.reach(owner, id)?;
        let request = Request::Status { process: process.as_str().to_owned() };
        match handle.agent.ask(request).await? {
            Ok(Reply::Status(status)) => {
                translate::status(status).map_err(|source| handle.agent.failed("answer", source))
            }
            Ok(_) => Err(handle.agent.unexpected()),
            Err(fault) => Err(faults::of_process(&handle.agent, process, fault)),
        }
    }

    pub async fn processes(&self, owner: &Owner, id: &SandboxId) -> Result<Vec<ProcessStatus>, ServiceError> {
        let handle = self.0.reach(owner, id)?;
        self.0.processes_of(&handle.agent).await
    }

    /// The processes of a sandbox of one owner, or of any owner. This call does not count as a use.
    pub async fn process_trees(
        &self,
        owner: Option<&Owner>,
        id: &SandboxId,
        filter: TreeFilter,
    ) -> Result<Vec<ProcessTree>, ServiceError> {
        let owner = self.0.visible(owner, id)?.owner.clone();
        let handle = self.0.reach(&owner, id)?;
        let agent = &handle.agent;
        match agent.ask(Request::Trees { ended: filter == TreeFilter::All }).await? {
            Ok(Reply::Trees(trees)) => {
                let trees = trees.into_iter().map(translate::tree).collect::<Result<_, _>>();
                trees.map_err(|source| agent.failed("answer", source))
            }
            Ok(_) => Err(agent.unexpected()),
            // An agent that was started by an older server cannot measure usage, but knows what runs.
            Err(fault) if fault.kind == FaultKind::Unsupported => {
                self.0.unmeasured_trees(agent, filter).await
            }
            Err(fault) => Err(agent.refused(fault)),
        }
    }

    /// Signals everything that a command, session or context has started.
    pub async fn signal(
        &self,
        owner: &Owner,
        id: &SandboxId,
        process: &ProcessId,
        signal: i32,
        reach: Reach,
    ) -> Result<(), ServiceError> {
        let (handle, _activity) = self.0.enter(owner, id)?;
        let signal =
            SignalProcess { process: process.as_str().to_owned(), signal, reach: translate::reach(reach) };
        of_process(&handle, process, Request::Signal(signal)).await
    }

    pub async fn input(
        &self,
        owner: &Owner,
        id: &SandboxId,
        process: &ProcessId,
    ) -> Result<Input, ServiceError> {
        let (handle, activity) = self.0.enter(owner, id)?;
        let agent = handle.agent.clone();
        let mut connection = agent.call(Request::Input { process: process.as_str().to_owned() }).await?;
        match agent.first_answer(&mut connection).await? {
            Ok(Reply::Ok) => Ok(Input::new(process.clone(), agent, connection, activity)),
            Ok(_) => Err(agent.unexpected()),
            Err(fault) => Err(faults::of_process(&agent, process, fault)),
        }
    }

    pub async fn resize(
        &self,
        owner: &Owner,
        id: &SandboxId,
        process: &ProcessId,
        size: Size,
    ) -> Result<(), ServiceError> {
        let (handle, _activity) = self.0.enter(owner, id)?;
        let Size { columns, rows } = size;
        let request = Request::Resize { process: process.as_str().to_owned(), columns, rows };
        of_process(&handle, process, request).await
    }

    /// Drops a finished process and its output.
    pub async fn forget(
        &self,
        owner: &Owner,
        id: &SandboxId,
        process: &ProcessId,
    ) -> Result<(), ServiceError> {
        let handle = self.0.reach(owner, id)?;
        of_process(&handle, process, Request::Forget { process: process.as_str().to_owned() }).await
    }
}

impl Core {
    async fn unmeasured_trees(
        &self,
        agent: &Agent,
        filter: TreeFilter,
    ) -> Result<Vec<ProcessTree>, ServiceError> {
        let sessions = match agent.ask(Request::Sessions).await? {
            Ok(Reply::Sessions(sessions)) => sessions,
            Ok(_) => return Err(agent.unexpected()),
            Err(fault) => return Err(agent.refused(fault)),
        };
        let mut trees = sessions.iter().map(translate::session_tree).collect::<Result<Vec<_>, _>>();
        let processes = self.processes_of(agent).await?;
        let shown =
            |status: &ProcessStatus| filter == TreeFilter::All || status.ended.is_none() || status.left;
        if let Ok(trees) = &mut trees {
            trees.extend(processes.into_iter().filter(shown).map(ProcessTree::from));
        }
        trees.map_err(|source| agent.failed("answer", source))
    }
}

impl From<ProcessStatus> for ProcessTree {
    fn from(status: ProcessStatus) -> Self {
        Self {
            id: status.process,
            kind: if status.session.is_some() { TreeKind::Run } else { TreeKind::Command },
            session: status.session,
            tag: status.tag,
            text: status.command,
            busy: status.ended.is_none(),
            started: Some(status.started),
            ended: status.ended,
            left: status.left,
            usage: None,
        }
    }
}

/// Sends a request about one process whose only answer is success.
async fn of_process(handle: &Handle, process: &ProcessId, request: Request) -> Result<(), ServiceError> {
    match handle.agent.ask(request).await? {
        Ok(Reply::Ok) => Ok(()),
        Ok(_) => Err(handle.agent.unexpected()),
        Err(fault) => Err(faults::of_process(&handle.agent, process, fault)),
    }
}
