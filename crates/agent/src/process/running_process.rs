//! A running command as the kernel sees it: its pid, its tree, its pipes.
//!
//! It belongs to a process or to a session's shell, and may outlive its owner's interest in it:
//! processes that a finished command left running continue, and their output is read and discarded,
//! so that they neither block on a full pipe nor die of a closed one.

use linux::spawn::{ProcessExit, ProcessUsage};
use rustix::process::Pid;
use wire::StreamTag;

use crate::context::CpuShare;
use crate::event_loop::agent::Agent;
use crate::event_loop::handles::{ProcessHandle, RunningHandle, SessionHandle};
use crate::event_loop::poll::RegisteredFd;
use crate::process::input::InputWriter;
use crate::process::journal::MAX_RECORD_BYTES;
use crate::process::runner::RunnerMessage;
use crate::process::tree::CommandTree;

/// How much is read from one pipe when its process has ended. A pipe holds less; survivors that
/// keep writing must not delay the report of the end.
const MAX_DRAIN_BYTES: usize = 1 << 20;

/// How much is read from one pipe in one turn of the event loop.
const MAX_READ_PER_TURN: usize = 8 * MAX_RECORD_BYTES;

/// The size of the pipes of a command that fills them. With a small pipe, every few pages cost two
/// context switches.
const WIDE_PIPE_BYTES: usize = 1 << 20;

#[derive(Debug)]
pub(crate) struct RunningProcess {
    pub(crate) owner: ProcessOwner,
    /// The command's own pid; with a runner it becomes known a little later.
    pub(crate) pid: Option<Pid>,
    pub(crate) tree: CommandTree,
    pub(crate) share: CpuShare,
    pub(crate) report: Option<RegisteredFd>,
    pub(crate) outputs: Vec<(StreamTag, RegisteredFd)>,
    pub(crate) input: Option<InputWriter>,
    pub(crate) terminal: bool,
    /// Whether its pipes were enlarged because it prints so much.
    pub(crate) widened: bool,
    pub(crate) ended: bool,
}

/// The owner of a running process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProcessOwner {
    Process(ProcessHandle),
    Session(SessionHandle),
    /// The present run of a session without a shell.
    CommandRun(SessionHandle),
    /// The first process in the namespaces of an isolated session.
    NamespaceInit(SessionHandle),
    Detached,
}

impl RunningProcess {
    pub(crate) fn without_pipes(
        owner: ProcessOwner,
        pid: Option<Pid>,
        tree: CommandTree,
        share: CpuShare,
    ) -> Self {
        Self {
            owner,
            pid,
            tree,
            share,
            report: None,
            outputs: Vec::new(),
            input: None,
            terminal: false,
            widened: false,
            ended: false,
        }
    }

    /// Enlarges the pipes, once. This fails for terminals and for users with too many pipes.
    pub(crate) fn widen_pipes(&mut self) {
        if !std::mem::replace(&mut self.widened, true) {
            for (_, source) in &self.outputs {
                rustix::pipe::fcntl_setpipe_size(source, WIDE_PIPE_BYTES).ok();
            }
        }
    }
}

impl Agent {
    /// The child has executed the command, or reports why it could not.
    pub(crate) fn on_exec_report(&mut self, number: RunningHandle) {
        let Some((owner, outcome)) = self.children.take_exec_report(number) else { return };
        if self.children.pid_of(number).is_none() {
            // The runner sends the pid first, so it is readable before the report pipe closes.
            self.read_runner_message(number);
        }
        if outcome.is_err() {
            self.children.detach_owner(number);
        }
        match owner {
            ProcessOwner::Process(process) => self.process_started(process, outcome),
            ProcessOwner::Session(session) => self.shell_started(session, outcome),
            ProcessOwner::CommandRun(session) => self.command_run_started(session, outcome),
            ProcessOwner::NamespaceInit(_) | ProcessOwner::Detached => {}
        }
    }

    /// Reads from one of a process's outputs, but not so much that others have to wait.
    pub(crate) fn on_output(&mut self, number: RunningHandle, stream: StreamTag) {
        self.read_output(number, stream, MAX_READ_PER_TURN);
    }

    /// Reads until the pipe is empty or `most` bytes have arrived.
    fn read_output(&mut self, number: RunningHandle, stream: StreamTag, most: usize) {
        let mut buffer = std::mem::take(&mut self.buffers.scratch);
        let mut total = 0;
        while total < most {
            let Some((count, owner)) = self.children.read_output(number, stream, &mut buffer) else { break };
            total += count;
            self.dispatch_output(owner, stream, &buffer[..count]);
        }
        self.buffers.scratch = buffer;
    }

    fn dispatch_output(&mut self, owner: ProcessOwner, stream: StreamTag, bytes: &[u8]) {
        let process = match owner {
            ProcessOwner::Process(process) => Some(process),
            ProcessOwner::Session(session) | ProcessOwner::CommandRun(session) => {
                self.sessions.current_run(session)
            }
            ProcessOwner::NamespaceInit(_) | ProcessOwner::Detached => None,
        };
        match (process, owner) {
            (Some(process), _) => self.append_output(process, stream, bytes),
            (None, ProcessOwner::Session(session)) => {
                self.sessions.keep_startup_output(session, stream, bytes);
            }
            (
                None,
                ProcessOwner::Process(_)
                | ProcessOwner::CommandRun(_)
                | ProcessOwner::NamespaceInit(_)
                | ProcessOwner::Detached,
            ) => {}
        }
    }

    /// Reads everything that is in the pipes now.
    pub(crate) fn drain_outputs(&mut self, number: RunningHandle) {
        for stream in self.children.open_streams(number) {
            self.read_output(number, stream, MAX_DRAIN_BYTES);
        }
    }

    /// A runner has sent messages.
    pub(crate) fn on_runner_readable(&mut self, number: RunningHandle) {
        while self.read_runner_message(number) {}
    }

    /// Reads one message. Returns false if there was none.
    fn read_runner_message(&mut self, number: RunningHandle) -> bool {
        let Some(message) = self.children.read_runner_message(number) else { return false };
        if let Some(RunnerMessage::Ended(end, usage)) = message {
            self.leader_ended(number, end, usage);
        }
        true
    }

    /// The command's main process has ended.
    pub(crate) fn leader_ended(&mut self, number: RunningHandle, end: ProcessExit, usage: ProcessUsage) {
        self.on_exec_report(number);
        self.drain_outputs(number);
        match self.children.mark_ended(number) {
            Some(ProcessOwner::Process(process)) => self.process_ended(process, end, usage),
            Some(ProcessOwner::Session(session)) => self.shell_ended(session, end, usage),
            Some(ProcessOwner::CommandRun(session)) => self.command_run_ended(session, end, usage),
            Some(ProcessOwner::NamespaceInit(session)) => self.namespace_init_ended(session),
            Some(ProcessOwner::Detached) | None => {}
        }
        self.children.remove_if_done(number);
    }
}
