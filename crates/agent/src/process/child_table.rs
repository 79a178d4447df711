//! The children of the agent: their roles by pid, and the running processes among them.
//!
//! A child that is not in the table is an orphan of the sandbox, which is only reaped. This part
//! starts and ends the bookkeeping of a running process; `running_process.rs` decides what its
//! output and its end mean for others.

use std::collections::{BTreeSet, HashMap};
use std::os::fd::AsFd;

use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use rustix::process::Pid;
use wire::process::ProcessStatus;
use wire::{Fault, FaultKind, StreamTag};

use crate::context::{AgentContext, CpuShare};
use crate::event_loop::event_sources::EventSources;
use crate::event_loop::handles::{GroupId, RunningHandle, SessionHandle};
use crate::event_loop::poll::EventToken;
use crate::fault;
use crate::process::ManagedProcess;
use crate::process::child::ExecFailure;
use crate::process::exec::{CommandPlacement, LaunchedCommand, ParentEnds, TreeControl};
use crate::process::input::InputWriter;
use crate::process::runner::RunnerMessage;
use crate::process::running_process::{ProcessOwner, RunningProcess};
use crate::process::tree::{self, CommandTree};

#[derive(Debug, Default)]
pub(crate) struct ChildTable {
    roles: HashMap<Pid, ChildRole>,
    running: HashMap<RunningHandle, RunningProcess>,
    /// Running processes whose main process has ended and whose groups may still be in use.
    lingering: BTreeSet<RunningHandle>,
    /// An empty group for the next command. It is made when the group of an earlier command is removed, because
    /// nobody waits for it then.
    spare_group: Option<GroupId>,
    /// Whether a group was removed since the last spare group was made.
    is_spare_due: bool,
}

/// The role of a child process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ChildRole {
    /// The main process of a command or shell.
    Leader(RunningHandle),
    /// The runner of a command or shell.
    Runner(RunningHandle),
    /// Does a file operation.
    Worker,
    /// Watches files.
    Watcher,
    /// Creates the namespaces of isolated sessions.
    NamespaceBroker,
}

impl ChildTable {
    pub(crate) fn insert_role(&mut self, pid: Pid, role: ChildRole) {
        self.roles.insert(pid, role);
    }

    /// Removes a child that has ended; `None` for an orphan.
    pub(crate) fn take_role(&mut self, pid: Pid) -> Option<ChildRole> {
        self.roles.remove(&pid)
    }

    pub(crate) fn get(&self, number: RunningHandle) -> Option<&RunningProcess> {
        self.running.get(&number)
    }

    pub(crate) fn get_mut(&mut self, number: RunningHandle) -> Option<&mut RunningProcess> {
        self.running.get_mut(&number)
    }

    pub(crate) fn pid_of(&self, number: RunningHandle) -> Option<Pid> {
        self.running.get(&number).and_then(|running| running.pid)
    }

    /// Kills a running process and everything it has started.
    pub(crate) fn kill_tree(&self, number: RunningHandle, context: &AgentContext) {
        if let Some(running) = self.running.get(&number) {
            // A tree that cannot be killed has ended already.
            running.tree.kill(context.commands.as_ref(), running.pid).ok();
        }
    }

    /// Registers a launched command with the event loop.
    pub(crate) fn track_launched(
        &mut self,
        owner: ProcessOwner,
        launched: LaunchedCommand,
        share: CpuShare,
        events: &mut EventSources,
    ) -> rustix::io::Result<RunningHandle> {
        let number = events.next_handle();
        let readable = EventFlags::IN;
        let watch = |fd, token, interest| {
            events
                .poll
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
            report: Some(watch(launched.report, EventToken::Report(number), readable)?),
            outputs: Vec::with_capacity(2),
            ..RunningProcess::without_pipes(owner, pid, tree, share)
        };
        match launched.parent_ends {
            ParentEnds::Pipes { stdin, stdout, stderr } => {
                let silent = EventFlags::empty();
                let stdin = stdin.map(|fd| watch(fd, EventToken::Input(number), silent)).transpose()?;
                running.input = stdin.map(InputWriter::for_pipe);
                let stdout = watch(stdout, EventToken::Stdout(number), readable)?;
                running.outputs.push((StreamTag::Stdout, stdout));
                let stderr = watch(stderr, EventToken::Stderr(number), readable)?;
                running.outputs.push((StreamTag::Stderr, stderr));
            }
            ParentEnds::Terminal(master) => {
                let copy = rustix::io::fcntl_dupfd_cloexec(&master, 3)?;
                let input = watch(copy, EventToken::Input(number), EventFlags::empty())?;
                running.input = Some(InputWriter::for_terminal(input));
                let output = watch(master, EventToken::Terminal(number), readable)?;
                running.outputs.push((StreamTag::Terminal, output));
                running.terminal = true;
            }
            ParentEnds::OnePipe { stdin, output } => {
                let input = watch(stdin, EventToken::Input(number), EventFlags::empty())?;
                running.input = Some(InputWriter::for_pipe(input));
                let output = watch(output, EventToken::Terminal(number), readable)?;
                running.outputs.push((StreamTag::Terminal, output));
            }
        }
        let role = if running.pid.is_some() { ChildRole::Leader(number) } else { ChildRole::Runner(number) };
        self.roles.insert(launched.pid, role);
        self.running.insert(number, running);
        Ok(number)
    }

    /// The processor share with the fewest trees. If all commands had one share, a fork bomb would
    /// leave a new command a hundredth of the processor.
    pub(crate) fn least_used_share(&self, context: &AgentContext) -> CpuShare {
        let busy = |share: &CpuShare| {
            let living = self.running.values().filter(|running| !matches!(running.tree, CommandTree::Gone));
            living.filter(|running| running.share == *share).count()
        };
        context.command_shares().min_by_key(busy).unwrap_or_default()
    }

    /// The group and the share of the next command. A spare group is the caller's from now on.
    pub(crate) fn next_placement(
        &mut self,
        context: &AgentContext,
        events: &mut EventSources,
    ) -> CommandPlacement {
        let spare = self.spare_group.take();
        CommandPlacement {
            group: spare.unwrap_or_else(|| events.next_handle()),
            spare: spare.is_some(),
            share: self.least_used_share(context),
        }
    }

    /// Makes the spare group, if one is due. Without it, the next command makes its group itself.
    pub(crate) fn prepare_spare_group(&mut self, context: &AgentContext, events: &mut EventSources) {
        let is_due = std::mem::take(&mut self.is_spare_due) && self.spare_group.is_none();
        let Some(commands) = context.commands.as_ref().filter(|_| is_due) else { return };
        let group = events.next_handle();
        self.spare_group = tree::add_group(commands, group).is_ok().then_some(group);
    }

    /// Keeps only what is needed to reap the child and to remove its group, if it has one.
    pub(crate) fn track_for_cleanup(
        &mut self,
        pid: Pid,
        placement: CommandPlacement,
        context: &AgentContext,
        events: &mut EventSources,
    ) {
        self.track_without_pipes(ProcessOwner::Detached, pid, placement, context, events);
    }

    /// Registers the first process of an isolated session.
    pub(crate) fn track_namespace_init(
        &mut self,
        session: SessionHandle,
        pid: Pid,
        placement: CommandPlacement,
        context: &AgentContext,
        events: &mut EventSources,
    ) -> RunningHandle {
        self.track_without_pipes(ProcessOwner::NamespaceInit(session), pid, placement, context, events)
    }

    /// Registers a running process without pipes.
    fn track_without_pipes(
        &mut self,
        owner: ProcessOwner,
        pid: Pid,
        placement: CommandPlacement,
        context: &AgentContext,
        events: &mut EventSources,
    ) -> RunningHandle {
        let number = events.next_handle();
        let grouped = context.commands.is_some();
        let tree = if grouped { CommandTree::Group(placement.group) } else { CommandTree::Gone };
        let running = RunningProcess::without_pipes(owner, Some(pid), tree, placement.share);
        self.running.insert(number, running);
        self.roles.insert(pid, ChildRole::Leader(number));
        number
    }

    /// Moves the main process of a group with other processes to a new group. Returns the former group as a running
    /// process without a main process; `None` if there are no others or the group cannot be left.
    pub(crate) fn split_group(
        &mut self,
        number: RunningHandle,
        context: &AgentContext,
        events: &mut EventSources,
    ) -> Option<RunningHandle> {
        let commands = context.commands.as_ref()?;
        let running = self.running.get_mut(&number)?;
        let (CommandTree::Group(former), Some(pid)) = (&running.tree, running.pid) else { return None };
        if !running.tree.has_other_members(Some(commands), Some(pid)) {
            return None;
        }
        let (former, group) = (*former, events.next_handle());
        let moved = tree::make_group(commands, group).and_then(|made| tree::move_process(&made, pid));
        if moved.is_err() {
            tree::remove_group(commands, group);
            return None;
        }
        running.tree = CommandTree::Group(group);
        let left = events.next_handle();
        let tree = CommandTree::Group(former);
        let share = running.share;
        let former = RunningProcess::without_pipes(ProcessOwner::Detached, None, tree, share);
        self.running.insert(left, RunningProcess { ended: true, ..former });
        self.lingering.insert(left);
        Some(left)
    }

    /// Reads whether the exec succeeded, once that is known.
    pub(crate) fn take_exec_report(
        &mut self,
        number: RunningHandle,
    ) -> Option<(ProcessOwner, Result<(), ExecFailure>)> {
        let running = self.running.get_mut(&number)?;
        let report = running.report.as_ref()?;
        let mut bytes = [0; ExecFailure::LENGTH];
        let outcome = match rustix::io::read(report.as_fd(), &mut bytes) {
            Err(Errno::AGAIN | Errno::INTR) => return None,
            Ok(ExecFailure::LENGTH) => Err(ExecFailure::from_bytes(bytes)),
            Ok(_) | Err(_) => Ok(()),
        };
        running.report = None;
        Some((running.owner, outcome))
    }

    /// The outputs that are open.
    pub(crate) fn open_streams(&self, number: RunningHandle) -> Vec<StreamTag> {
        let running = self.running.get(&number);
        running.map_or_else(Vec::new, |running| running.outputs.iter().map(|(stream, _)| *stream).collect())
    }

    /// Reads once from an output. Returns the number of bytes and their owner; `None` if there are
    /// none now or never again.
    pub(crate) fn read_output(
        &mut self,
        number: RunningHandle,
        stream: StreamTag,
        buffer: &mut [u8],
    ) -> Option<(usize, ProcessOwner)> {
        let running = self.running.get_mut(&number)?;
        let index = running.outputs.iter().position(|(tag, _)| *tag == stream)?;
        match rustix::io::read(running.outputs[index].1.as_fd(), &mut *buffer) {
            Err(Errno::AGAIN | Errno::INTR) => None,
            // A terminal returns EIO when its last user is gone.
            Ok(0) | Err(_) => {
                running.outputs.remove(index);
                self.remove_if_done(number);
                None
            }
            Ok(count) => {
                if count == buffer.len() {
                    running.widen_pipes();
                }
                Some((count, running.owner))
            }
        }
    }

    /// Reads one message of a runner. Returns `None` if there was none, and an inner `None` if it
    /// concerns nobody else.
    pub(crate) fn read_runner_message(&mut self, number: RunningHandle) -> Option<Option<RunnerMessage>> {
        let running = self.running.get_mut(&number)?;
        let CommandTree::Runner(channel) = &running.tree else { return None };
        let mut bytes = [0; RunnerMessage::LENGTH];
        match rustix::io::read(channel.as_fd(), &mut bytes) {
            Ok(RunnerMessage::LENGTH) => {
                let message = RunnerMessage::from_bytes(&bytes);
                match message {
                    Some(RunnerMessage::Started(pid)) => {
                        running.pid = Some(pid);
                        self.roles.insert(pid, ChildRole::Leader(number));
                    }
                    Some(RunnerMessage::Ended(..)) => {
                        running.pid.map(|pid| self.roles.remove(&pid));
                    }
                    None => {}
                }
                Some(message)
            }
            Err(Errno::AGAIN | Errno::INTR) => None,
            // The runner ended without having read a signal. The kernel reports this once, and
            // before the runner's own messages, which can still be read.
            Err(Errno::CONNRESET) => Some(None),
            Ok(_) | Err(_) => {
                running.tree = CommandTree::Gone;
                self.remove_if_done(number);
                None
            }
        }
    }

    /// The main process has ended: it has no owner any more. Returns the former one.
    pub(crate) fn mark_ended(&mut self, number: RunningHandle) -> Option<ProcessOwner> {
        let running = self.running.get_mut(&number)?;
        running.ended = true;
        running.input = None;
        running.pid = None;
        Some(std::mem::replace(&mut running.owner, ProcessOwner::Detached))
    }

    pub(crate) fn detach_owner(&mut self, number: RunningHandle) {
        if let Some(running) = self.running.get_mut(&number) {
            running.owner = ProcessOwner::Detached;
        }
    }

    /// Whether something that a process has started still runs.
    pub(crate) fn has_leftovers(&self, process: &ManagedProcess) -> bool {
        process.running.is_some_and(|running| self.has_tree(running))
    }

    /// Whether something may still run in the tree of a running process.
    pub(crate) fn has_tree(&self, number: RunningHandle) -> bool {
        self.running.get(&number).is_some_and(|running| !matches!(running.tree, CommandTree::Gone))
    }

    /// The status of a process, with whether something that it has started still runs.
    pub(crate) fn status_of(&self, process: &ManagedProcess) -> ProcessStatus {
        ProcessStatus { left: process.ended.is_some() && self.has_leftovers(process), ..process.status() }
    }

    /// Checks that a process takes input.
    pub(crate) fn find_open_input(&self, process: &ManagedProcess) -> Result<RunningHandle, Fault> {
        let is_open =
            |number: &RunningHandle| self.running.get(number).is_some_and(|running| running.input.is_some());
        let name = &process.name;
        let closed =
            || fault::from_kind(FaultKind::Invalid, "write", &format!("{name}: its input is not open"));
        process.running.filter(|_| process.ended.is_none()).filter(is_open).ok_or_else(closed)
    }

    pub(crate) fn resize_terminal(
        &self,
        process: &ManagedProcess,
        columns: u16,
        rows: u16,
    ) -> Result<(), Fault> {
        let name = &process.name;
        let running = process.running.and_then(|running| self.running.get(&running));
        let terminal = running.filter(|running| running.terminal);
        let Some((_, master)) = terminal.and_then(|running| running.outputs.first()) else {
            let subject = format!("{name}: it has no terminal");
            return Err(fault::from_kind(FaultKind::Invalid, "resize", &subject));
        };
        linux::pty::resize_terminal(master, columns, rows)
            .map_err(|error| fault::from_io(&error, "resize", name))
    }

    /// Pauses or resumes reading the outputs of a running process.
    pub(crate) fn set_output_interest(&mut self, number: RunningHandle, interest: EventFlags) {
        if let Some(running) = self.running.get_mut(&number) {
            for (_, source) in &mut running.outputs {
                source.set_interest(interest);
            }
        }
    }

    /// Removes a running process of which nothing is left. Its group is removed at the end of the
    /// turn.
    pub(crate) fn remove_if_done(&mut self, number: RunningHandle) {
        let Some(running) = self.running.get(&number) else { return };
        if !running.ended {
            return;
        }
        match running.tree {
            CommandTree::Group(_) => {
                self.lingering.insert(number);
            }
            CommandTree::Gone if running.outputs.is_empty() => {
                self.running.remove(&number);
            }
            CommandTree::Gone | CommandTree::Runner(_) => {}
        }
    }

    /// Removes the groups that are empty. This is the last step of a turn, so that no reply waits
    /// for it.
    pub(crate) fn remove_empty_groups(&mut self, context: &AgentContext) {
        let Some(commands) = &context.commands else { return };
        let (all, is_spare_due) = (&mut self.running, &mut self.is_spare_due);
        self.lingering.retain(|number| {
            let Some(running) = all.get_mut(number) else { return false };
            if let CommandTree::Group(group) = running.tree {
                if !tree::remove_group(commands, group) {
                    return true;
                }
                running.tree = CommandTree::Gone;
                *is_spare_due = true;
            }
            if running.outputs.is_empty() {
                all.remove(number);
            }
            false
        });
    }
}
