//! Commands in a sandbox: start, follow, feed, signal.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use domain::process::{ProcessSpec, TerminalSize};
use domain::{ExitReason, JournalOffset, ProcessId, SessionId};
use wire::process::{SessionStatus, SignalProcess, TreeStatus};
use wire::{AgentRequest, FaultKind};

use crate::agent::client::AgentClient;
use crate::agent::reply::ProcessStarted;
use crate::agent::{faults, translate};
use crate::core::{Core, new_process_id};
use crate::exec::command_slots::CommandSlot;
use crate::exec::output_stream::ReadPosition;
use crate::sandboxes::registry::SandboxHandle;
use crate::telemetry::service_metrics;
use crate::{OutputSettings, OutputStream, ProcessInput, SandboxRef, ServiceError};

/// How a process ended, and the resources it used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessEnd {
    pub exit: ExitReason,
    /// The overall offset after the last byte it printed.
    pub written: u64,
    pub ended: SystemTime,
    pub duration: Duration,
    pub user: Duration,
    pub system: Duration,
    pub max_rss: domain::Bytes,
    /// Code that passed its deadline was interrupted, and its context keeps its state. Otherwise a deadline ends the
    /// context's kernel, and the next run starts a new one.
    pub interrupted: bool,
    /// The last signal that a caller has sent to it.
    pub signalled: Option<i32>,
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
    pub ended: Option<ProcessEnd>,
    /// The process has ended, but a process that it started still runs.
    pub left: bool,
}

/// The output of a process from an offset on.
pub struct FollowedOutput {
    /// The status when the reading began: the output until `written` is available without waiting.
    pub status: ProcessStatus,
    /// How many bytes before the offset were errors, if the agent knows.
    pub stderr_before: Option<u64>,
    pub output: OutputStream,
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
    pub ended: Option<ProcessEnd>,
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
pub enum SignalTarget {
    /// The process's group, as from a terminal.
    Group,
    /// Everything the process ever started.
    Tree,
}

/// The commands of one sandbox.
#[derive(Clone, Copy)]
pub struct SandboxProcesses<'a>(pub(crate) &'a SandboxRef);

impl SandboxProcesses<'_> {
    /// How much output of commands is kept unless the caller says otherwise.
    pub fn output_settings(self) -> OutputSettings {
        self.0.core.config().output
    }

    /// Starts a process; its output can be read from the first byte.
    pub async fn launch_process(self, process: ProcessSpec) -> Result<OutputStream, ServiceError> {
        let began = Instant::now();
        let launched = self.start_process(process).await.inspect_err(self.0.record_failure("launch"))?;
        service_metrics::record_launch_time(began.elapsed());
        Ok(launched)
    }

    async fn start_process(self, process: ProcessSpec) -> Result<OutputStream, ServiceError> {
        let (handle, activity) = self.0.begin_use()?;
        let name = new_process_id()?;
        let slot = self.take_command_slot(&name).await?;
        let agent = handle.agent.clone();
        let mut connection =
            agent.open_request(AgentRequest::Start(translate::wire_start(&name, process))).await?;
        match agent.first_answer(&mut connection).await? {
            Ok(ProcessStarted) => slot.mark_started(),
            Err(fault) => return Err(faults::launch_error(&agent, handle.commands.limit(), fault)),
        }
        let commands = Arc::clone(&handle.commands);
        Ok(OutputStream::new(name, agent, connection, ReadPosition::At(0), commands, activity))
    }

    /// Takes a command slot; the agent is asked only if our count says that none is free.
    pub(crate) async fn take_command_slot(self, process: &ProcessId) -> Result<CommandSlot, ServiceError> {
        let handle = &*self.0.handle;
        if let Some(slot) = handle.commands.take(process) {
            return Ok(slot);
        }
        handle.commands.correct_count(&self.0.core.read_processes(&handle.agent).await?);
        let (id, limit) = (handle.id.clone(), handle.commands.limit());
        handle.commands.take(process).ok_or(ServiceError::TooManyCommands { id, limit })
    }

    /// Reads the output of a process from an overall offset. If those bytes are gone, a gap is reported and reading
    /// continues after it.
    pub async fn follow_output(
        self,
        process: &ProcessId,
        from: JournalOffset,
    ) -> Result<OutputStream, ServiceError> {
        self.follow_output_with_status(process, from).await.map(|followed| followed.output)
    }

    /// Like [`SandboxProcesses::follow_output`], and tells what the process was when the reading began.
    pub async fn follow_output_with_status(
        self,
        process: &ProcessId,
        from: JournalOffset,
    ) -> Result<FollowedOutput, ServiceError> {
        let (handle, activity) = self.0.begin_use()?;
        let agent = handle.agent.clone();
        let request = AgentRequest::Follow { process: process.as_str().to_owned(), from: from.0 };
        let mut connection = agent.open_request(request).await?;
        let status = agent.first_answer::<wire::process::ProcessStatus>(&mut connection).await?;
        let status = status.map_err(|fault| faults::process_error(&agent, process, fault))?;
        let place = ReadPosition::starting_at(from.0, status.written);
        let commands = Arc::clone(&handle.commands);
        let stderr_before = status.stderr_before.filter(|stderr| *stderr <= from.0);
        let status =
            translate::process_status(status).map_err(|source| agent.agent_error("answer", source))?;
        let output = OutputStream::new(process.clone(), agent, connection, place, commands, activity);
        Ok(FollowedOutput { status, stderr_before, output })
    }

    pub async fn process_status(self, process: &ProcessId) -> Result<ProcessStatus, ServiceError> {
        let handle = self.0.usable_now()?;
        let request = AgentRequest::Status { process: process.as_str().to_owned() };
        let agent = &handle.agent;
        let status = agent.request::<wire::process::ProcessStatus>(request).await?;
        let status = status.map_err(|fault| faults::process_error(agent, process, fault))?;
        translate::process_status(status).map_err(|source| agent.agent_error("answer", source))
    }

    pub async fn list_processes(self) -> Result<Vec<ProcessStatus>, ServiceError> {
        let handle = self.0.usable_now()?;
        self.0.core.read_processes(&handle.agent).await
    }

    /// Every command, session and context with what it has started. This call does not count as a use.
    pub async fn process_trees(self, filter: TreeFilter) -> Result<Vec<ProcessTree>, ServiceError> {
        let handle = self.0.usable_now()?;
        let agent = &handle.agent;
        let request = AgentRequest::Trees { ended: filter == TreeFilter::All };
        match agent.request::<Vec<TreeStatus>>(request).await? {
            Ok(trees) => {
                let trees = trees.into_iter().map(translate::process_tree).collect::<Result<_, _>>();
                trees.map_err(|source| agent.agent_error("answer", source))
            }
            // An agent that was started by an older server cannot measure usage, but knows what runs.
            Err(fault) if fault.kind == FaultKind::Unsupported => {
                self.0.core.unmeasured_trees(agent, filter).await
            }
            Err(fault) => Err(agent.fault_error(fault)),
        }
    }

    /// Signals everything that a command, session or context has started.
    pub async fn signal_process(
        self,
        process: &ProcessId,
        signal: i32,
        reach: SignalTarget,
    ) -> Result<(), ServiceError> {
        let (handle, _activity) = self.0.begin_use()?;
        let signal = SignalProcess {
            process: process.as_str().to_owned(),
            signal,
            reach: translate::wire_signal_target(reach),
        };
        request_for_process(handle, process, AgentRequest::Signal(signal)).await
    }

    pub async fn open_input(self, process: &ProcessId) -> Result<ProcessInput, ServiceError> {
        let (handle, activity) = self.0.begin_use()?;
        let agent = handle.agent.clone();
        let mut connection =
            agent.open_request(AgentRequest::Input { process: process.as_str().to_owned() }).await?;
        match agent.first_answer(&mut connection).await? {
            Ok(()) => Ok(ProcessInput::new(process.clone(), agent, connection, activity)),
            Err(fault) => Err(faults::process_error(&agent, process, fault)),
        }
    }

    pub async fn resize_terminal(self, process: &ProcessId, size: TerminalSize) -> Result<(), ServiceError> {
        let (handle, _activity) = self.0.begin_use()?;
        let TerminalSize { columns, rows } = size;
        let request = AgentRequest::Resize { process: process.as_str().to_owned(), columns, rows };
        request_for_process(handle, process, request).await
    }

    /// Drops a finished process and its output.
    pub async fn forget_process(self, process: &ProcessId) -> Result<(), ServiceError> {
        let handle = self.0.usable_now()?;
        request_for_process(handle, process, AgentRequest::Forget { process: process.as_str().to_owned() })
            .await
    }
}

impl Core {
    async fn unmeasured_trees(
        &self,
        agent: &AgentClient,
        filter: TreeFilter,
    ) -> Result<Vec<ProcessTree>, ServiceError> {
        let sessions = agent.request::<Vec<SessionStatus>>(AgentRequest::Sessions).await?;
        let sessions = sessions.map_err(|fault| agent.fault_error(fault))?;
        let mut trees = sessions.iter().map(translate::session_tree).collect::<Result<Vec<_>, _>>();
        let processes = self.read_processes(agent).await?;
        let shown =
            |status: &ProcessStatus| filter == TreeFilter::All || status.ended.is_none() || status.left;
        if let Ok(trees) = &mut trees {
            trees.extend(processes.into_iter().filter(shown).map(ProcessTree::from));
        }
        trees.map_err(|source| agent.agent_error("answer", source))
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
async fn request_for_process(
    handle: &SandboxHandle,
    process: &ProcessId,
    request: AgentRequest,
) -> Result<(), ServiceError> {
    let answer = handle.agent.request::<()>(request).await?;
    answer.map_err(|fault| faults::process_error(&handle.agent, process, fault))
}
