//! A running command as the kernel sees it: its pid, its tree, its pipes.
//!
//! It belongs to a process or to a session's shell, and may outlive its owner's interest in it:
//! processes that a finished command left running continue, and their output is read and discarded,
//! so that they neither block on a full pipe nor die of a closed one.

use std::os::fd::AsFd;

use linux::spawn::{ProcessExit, ProcessUsage};
use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use rustix::process::Pid;
use wire::StreamTag;

use crate::context::CpuShare;
use crate::event_loop::agent::{Agent, ChildRole};
use crate::event_loop::handles::{ProcessHandle, RunningHandle, SessionHandle};
use crate::event_loop::poll::{EventToken, RegisteredFd};
use crate::process::child::ExecFailure;
use crate::process::exec::{CommandPlacement, LaunchedCommand, ParentEnds, TreeControl};
use crate::process::input::InputWriter;
use crate::process::journal::MAX_RECORD_BYTES;
use crate::process::runner::RunnerMessage;
use crate::process::tree::{self, CommandTree};

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
    share: CpuShare,
    pub(crate) report: Option<RegisteredFd>,
    pub(crate) outputs: Vec<(StreamTag, RegisteredFd)>,
    pub(crate) input: Option<InputWriter>,
    pub(crate) terminal: bool,
    /// Whether its pipes were enlarged because it prints so much.
    widened: bool,
    pub(crate) ended: bool,
}

/// The owner of a running process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProcessOwner {
    Process(ProcessHandle),
    Session(SessionHandle),
    /// The first process in the namespaces of an isolated session.
    NamespaceInit(SessionHandle),
    Detached,
}

impl RunningProcess {
    /// Enlarges the pipes, once. This fails for terminals and for users with too many pipes.
    fn widen_pipes(&mut self) {
        if !std::mem::replace(&mut self.widened, true) {
            for (_, source) in &self.outputs {
                rustix::pipe::fcntl_setpipe_size(source, WIDE_PIPE_BYTES).ok();
            }
        }
    }
}

impl Agent {
    /// Registers a launched command with the event loop.
    pub(crate) fn track_launched(
        &mut self,
        owner: ProcessOwner,
        launched: LaunchedCommand,
        share: CpuShare,
    ) -> rustix::io::Result<RunningHandle> {
        let number = self.next_handle();
        let readable = EventFlags::IN;
        let watch = |fd, token, interest| {
            self.poll
                .register_fd(fd, token, interest)
                .map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::IO))
        };
        let (tree, pid) = match launched.control {
            TreeControl::Group(group) => (CommandTree::Group(group), Some(launched.pid)),
            TreeControl::Runner(channel) => {
                (CommandTree::Runner(watch(channel, EventToken::Runner(number), readable)?), None)
            }
        };
        let mut running = RunningProcess {
            owner,
            pid,
            tree,
            share,
            report: Some(watch(launched.report, EventToken::Report(number), readable)?),
            outputs: Vec::with_capacity(2),
            input: None,
            terminal: false,
            widened: false,
            ended: false,
        };
        match launched.parent_ends {
            ParentEnds::Pipes { stdin, stdout, stderr } => {
                let silent = EventFlags::empty();
                let stdin = stdin.map(|fd| watch(fd, EventToken::Input(number), silent)).transpose()?;
                running.input = stdin.map(InputWriter::for_pipe);
                running
                    .outputs
                    .push((StreamTag::Stdout, watch(stdout, EventToken::Stdout(number), readable)?));
                running
                    .outputs
                    .push((StreamTag::Stderr, watch(stderr, EventToken::Stderr(number), readable)?));
            }
            ParentEnds::Terminal(master) => {
                let copy = rustix::io::fcntl_dupfd_cloexec(&master, 3)?;
                let input = watch(copy, EventToken::Input(number), EventFlags::empty())?;
                running.input = Some(InputWriter::for_terminal(input));
                running
                    .outputs
                    .push((StreamTag::Terminal, watch(master, EventToken::Terminal(number), readable)?));
                running.terminal = true;
            }
        }
        let child = if running.pid.is_some() { ChildRole::Leader(number) } else { ChildRole::Runner(number) };
        self.children.insert(launched.pid, child);
        self.running_processes.insert(number, running);
        Ok(number)
    }

    /// The processor share with the fewest trees. If all commands had one share, a fork bomb would
    /// leave a new command a hundredth of the processor.
    pub(crate) fn least_used_share(&self) -> CpuShare {
        let busy = |share: &CpuShare| {
            let living =
                self.running_processes.values().filter(|running| !matches!(running.tree, CommandTree::Gone));
            living.filter(|running| running.share == *share).count()
        };
        self.context.command_shares().min_by_key(busy).unwrap_or_default()
    }

    /// Keeps only what is needed to reap the child and to remove its group, if it has one.
    pub(crate) fn track_for_cleanup(&mut self, pid: Pid, placement: CommandPlacement) {
        self.track_without_pipes(ProcessOwner::Detached, pid, placement);
    }

    /// Registers the first process of an isolated session.
    pub(crate) fn track_namespace_init(
        &mut self,
        session: SessionHandle,
        pid: Pid,
        placement: CommandPlacement,
    ) -> RunningHandle {
        self.track_without_pipes(ProcessOwner::NamespaceInit(session), pid, placement)
    }

    /// Registers a running process without pipes.
    fn track_without_pipes(
        &mut self,
        owner: ProcessOwner,
        pid: Pid,
        placement: CommandPlacement,
    ) -> RunningHandle {
        let number = self.next_handle();
        let running = RunningProcess {
            owner,
            pid: Some(pid),
            tree: if self.context.commands.is_some() {
                CommandTree::Group(placement.group)
            } else {
                CommandTree::Gone
            },
            share: placement.share,
            report: None,
            outputs: Vec::new(),
            input: None,
            terminal: false,
            widened: false,
            ended: false,
        };
        self.running_processes.insert(number, running);
        self.children.insert(pid, ChildRole::Leader(number));
        number
    }

    /// The child has executed the command, or reports why it could not.
    pub(crate) fn on_exec_report(&mut self, number: RunningHandle) {
        let Some(running) = self.running_processes.get_mut(&number) else { return };
        let Some(report) = &running.report else { return };
        let mut bytes = [0; ExecFailure::LENGTH];
        let outcome = match rustix::io::read(report.as_fd(), &mut bytes) {
            Err(Errno::AGAIN | Errno::INTR) => return,
            Ok(ExecFailure::LENGTH) => Err(ExecFailure::from_bytes(bytes)),
            Ok(_) | Err(_) => Ok(()),
        };
        running.report = None;
        let owner = running.owner;
        if self.running_processes.get(&number).is_some_and(|running| running.pid.is_none()) {
            // The runner sends the pid first, so it is readable before the report pipe closes.
            self.read_runner_message(number);
        }
        if outcome.is_err() {
            self.detach_owner(number);
        }
        match owner {
            ProcessOwner::Process(process) => self.process_started(process, outcome),
            ProcessOwner::Session(session) => self.shell_started(session, outcome),
            ProcessOwner::NamespaceInit(_) | ProcessOwner::Detached => {}
        }
    }

    /// Reads from one of a process's outputs, but not so much that others have to wait.
    pub(crate) fn on_output(&mut self, number: RunningHandle, stream: StreamTag) {
        self.read_output(number, stream, MAX_READ_PER_TURN);
    }

    /// Reads until the pipe is empty or `most` bytes have arrived.
    fn read_output(&mut self, number: RunningHandle, stream: StreamTag, most: usize) {
        let mut buffer = std::mem::take(&mut self.scratch);
        let mut total = 0;
        while total < most {
            let Some(running) = self.running_processes.get_mut(&number) else { break };
            let Some(index) = running.outputs.iter().position(|(tag, _)| *tag == stream) else { break };
            match rustix::io::read(running.outputs[index].1.as_fd(), &mut buffer) {
                Err(Errno::AGAIN | Errno::INTR) => break,
                // A terminal returns EIO when its last user is gone.
                Ok(0) | Err(_) => {
                    running.outputs.remove(index);
                    self.remove_if_done(number);
                    break;
                }
                Ok(count) => {
                    total += count;
                    if count == buffer.len() {
                        running.widen_pipes();
                    }
                    let owner = running.owner;
                    self.dispatch_output(owner, stream, &buffer[..count]);
                }
            }
        }
        self.scratch = buffer;
    }

    fn dispatch_output(&mut self, owner: ProcessOwner, stream: StreamTag, bytes: &[u8]) {
        let process = match owner {
            ProcessOwner::Process(process) => Some(process),
            ProcessOwner::Session(session) => self.current_run(session),
            ProcessOwner::NamespaceInit(_) | ProcessOwner::Detached => None,
        };
        match (process, owner) {
            (Some(process), _) => self.append_output(process, stream, bytes),
            (None, ProcessOwner::Session(session)) => self.on_idle_output(session, stream, bytes),
            (None, ProcessOwner::Process(_) | ProcessOwner::NamespaceInit(_) | ProcessOwner::Detached) => {}
        }
    }

    /// Reads everything that is in the pipes now.
    pub(crate) fn drain_outputs(&mut self, number: RunningHandle) {
        let streams: Vec<StreamTag> = match self.running_processes.get(&number) {
            Some(running) => running.outputs.iter().map(|(stream, _)| *stream).collect(),
            None => return,
        };
        for stream in streams {
            self.read_output(number, stream, MAX_DRAIN_BYTES);
        }
    }

    /// A runner has sent messages.
    pub(crate) fn on_runner_readable(&mut self, number: RunningHandle) {
        while self.read_runner_message(number) {}
    }

    /// Reads one message. Returns false if there was none.
    fn read_runner_message(&mut self, number: RunningHandle) -> bool {
        let Some(running) = self.running_processes.get_mut(&number) else { return false };
        let CommandTree::Runner(channel) = &running.tree else { return false };
        let mut bytes = [0; RunnerMessage::LENGTH];
        match rustix::io::read(channel.as_fd(), &mut bytes) {
            Ok(RunnerMessage::LENGTH) => {
                if let Some(message) = RunnerMessage::from_bytes(&bytes) {
                    self.handle_runner_message(number, message);
                }
                true
            }
            Err(Errno::AGAIN | Errno::INTR) => false,
            // The runner ended without having read a signal. The kernel reports this once, and
            // before the runner's own messages, which can still be read.
            Err(Errno::CONNRESET) => true,
            Ok(_) | Err(_) => {
                running.tree = CommandTree::Gone;
                self.remove_if_done(number);
                false
            }
        }
    }

    fn handle_runner_message(&mut self, number: RunningHandle, message: RunnerMessage) {
        let Some(running) = self.running_processes.get_mut(&number) else { return };
        match message {
            RunnerMessage::Started(pid) => {
                running.pid = Some(pid);
                self.children.insert(pid, ChildRole::Leader(number));
            }
            RunnerMessage::Ended(end, usage) => {
                if let Some(pid) = running.pid {
                    self.children.remove(&pid);
                }
                self.leader_ended(number, end, usage);
            }
        }
    }

    /// The command's main process has ended.
    pub(crate) fn leader_ended(&mut self, number: RunningHandle, end: ProcessExit, usage: ProcessUsage) {
        self.on_exec_report(number);
        self.drain_outputs(number);
        let Some(running) = self.running_processes.get_mut(&number) else { return };
        running.ended = true;
        running.input = None;
        running.pid = None;
        let owner = running.owner;
        self.detach_owner(number);
        match owner {
            ProcessOwner::Process(process) => self.process_ended(process, end, usage),
            ProcessOwner::Session(session) => self.shell_ended(session, end, usage),
            ProcessOwner::NamespaceInit(session) => self.namespace_init_ended(session),
            ProcessOwner::Detached => {}
        }
        self.remove_if_done(number);
    }

    fn detach_owner(&mut self, number: RunningHandle) {
        if let Some(running) = self.running_processes.get_mut(&number) {
            running.owner = ProcessOwner::Detached;
        }
    }

    /// Removes a running process of which nothing is left. Its group is removed at the end of the turn.
    fn remove_if_done(&mut self, number: RunningHandle) {
        let Some(running) = self.running_processes.get(&number) else { return };
        if !running.ended {
            return;
        }
        match running.tree {
            CommandTree::Group(_) => {
                self.lingering.insert(number);
            }
            CommandTree::Gone if running.outputs.is_empty() => {
                self.running_processes.remove(&number);
            }
            CommandTree::Gone | CommandTree::Runner(_) => {}
        }
    }

    /// Removes the groups that are empty. This is the last step of a turn, so that no reply waits
    /// for it.
    pub(crate) fn remove_empty_groups(&mut self) {
        let Some(commands) = &self.context.commands else { return };
        let running_processes = &mut self.running_processes;
        self.lingering.retain(|number| {
            let Some(running) = running_processes.get_mut(number) else { return false };
            if let CommandTree::Group(group) = running.tree {
                if !tree::remove_group(commands, group) {
                    return true;
                }
                running.tree = CommandTree::Gone;
            }
            if running.outputs.is_empty() {
                running_processes.remove(number);
            }
            false
        });
    }
}
