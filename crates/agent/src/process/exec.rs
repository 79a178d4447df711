//! Starts a command: its pipes or terminal, its group or runner, the fork.

use std::os::fd::{AsFd, OwnedFd};

use linux::namespaces::NamespaceSet;
use linux::pty::PtyPair;
use linux::spawn::{ForkResult, SingleThread};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::Pid;
use rustix::termios::{LocalModes, OptionalActions, OutputModes};
use wire::process::TerminalSize;

use crate::context::{AgentContext, CpuShare, MIN_PRIVATE_FD};
use crate::event_loop::handles::GroupId;
use crate::identity::ResolvedUser;
use crate::process::child::{self, ChildStdio};
use crate::process::command::PreparedCommand;
use crate::process::{runner, tree};

/// How a command's input and output are connected.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StdioMode {
    pub(crate) terminal: Option<TerminalSize>,
    /// Whether the terminal passes output on as it is and echoes nothing.
    pub(crate) plain: bool,
    pub(crate) stdin: bool,
}

/// The cgroup and processor share that a command is forked into.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CommandPlacement {
    /// Its own group.
    pub(crate) group: GroupId,
    /// Whether the group was made ahead.
    pub(crate) spare: bool,
    /// Its share of the processor, where shares are separate from groups.
    pub(crate) share: CpuShare,
}

impl CommandPlacement {
    /// Opens the command's group, which is made now unless it was made ahead.
    pub(crate) fn open_group(self, commands: &OwnedFd) -> rustix::io::Result<OwnedFd> {
        match self.spare.then(|| tree::open_group(commands, self.group)) {
            None | Some(Err(Errno::NOENT)) => tree::make_group(commands, self.group),
            Some(opened) => opened,
        }
    }
}

/// A forked child that is about to become a command, and our ends of its pipes or terminal.
#[derive(Debug)]
pub(crate) struct LaunchedCommand {
    /// The command, or its runner.
    pub(crate) pid: Pid,
    pub(crate) control: TreeControl,
    /// Closed without data if the exec succeeds; otherwise it carries the failure.
    pub(crate) report: OwnedFd,
    pub(crate) parent_ends: ParentEnds,
}

/// The means to signal and kill the whole tree.
#[derive(Debug)]
pub(crate) enum TreeControl {
    Group(GroupId),
    Runner(OwnedFd),
}

/// Our ends; all are non-blocking.
#[derive(Debug)]
pub(crate) enum ParentEnds {
    Pipes {
        stdin: Option<OwnedFd>,
        stdout: OwnedFd,
        stderr: OwnedFd,
    },
    Terminal(OwnedFd),
    /// Stands in for a terminal whose output is read as text: output and errors keep their order in one pipe.
    OnePipe {
        stdin: OwnedFd,
        output: OwnedFd,
    },
}

/// Forks a child that becomes the command. Whether that succeeds is reported later. If this fails, the caller removes
/// the group.
pub(crate) fn launch_command(
    context: &AgentContext,
    command: &PreparedCommand,
    wiring: StdioMode,
    placement: CommandPlacement,
) -> rustix::io::Result<LaunchedCommand> {
    let (ours, theirs) = open_stdio(context, wiring, &command.user)?;
    let (report, mut their_report) = pipe_with(PipeFlags::CLOEXEC)?;
    if !command.numbered_fds.is_empty() {
        // It must not have a number that another descriptor gets before the exec.
        their_report = rustix::io::fcntl_dupfd_cloexec(&their_report, MIN_PRIVATE_FD)?;
    }
    rustix::io::ioctl_fionbio(&report, true)?;
    let (pid, control) = match &context.commands {
        Some(commands) => {
            let pid = fork_into_group(context, command, &theirs, commands, placement, &their_report)?;
            (pid, TreeControl::Group(placement.group))
        }
        None => fork_runner(context, command, &theirs, &their_report)?,
    };
    Ok(LaunchedCommand { pid, control, report, parent_ends: ours })
}

fn fork_into_group(
    context: &AgentContext,
    command: &PreparedCommand,
    stdio: &ChildStdio,
    commands: &OwnedFd,
    placement: CommandPlacement,
    report: &OwnedFd,
) -> rustix::io::Result<Pid> {
    let group = placement.open_group(commands)?;
    let mut join = None;
    let mut forked = fork_process(&context.thread, Some(&group));
    if forked.as_ref().is_err_and(|errno| *errno == Errno::AGAIN) {
        // The group is full. Moving into it is still allowed, and commands from the server have to
        // work while a fork bomb fills the group.
        join = Some(tree::open_members(&group)?);
        forked = fork_process(&context.thread, None);
    }
    let join = [join.as_ref(), context.command_share(placement.share)];
    match forked {
        Ok(ForkResult::Child) => child::exec_or_report(context, command, stdio, join, report.as_fd()),
        Ok(ForkResult::Parent { pid, .. }) => Ok(pid),
        Err(errno) => Err(errno),
    }
}

fn fork_runner(
    context: &AgentContext,
    command: &PreparedCommand,
    stdio: &ChildStdio,
    report: &OwnedFd,
) -> rustix::io::Result<(Pid, TreeControl)> {
    let (channel, their_channel) = rustix::net::socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        None,
    )?;
    match fork_process(&context.thread, None)? {
        ForkResult::Child => {
            drop(channel);
            runner::runner_main(context, command, stdio, &their_channel, report)
        }
        ForkResult::Parent { pid, .. } => Ok((pid, TreeControl::Runner(channel))),
    }
}

fn fork_process(thread: &SingleThread, group: Option<&OwnedFd>) -> rustix::io::Result<ForkResult> {
    let forked = thread.fork(NamespaceSet::NONE, group.map(AsFd::as_fd));
    forked.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))
}

pub(crate) fn open_stdio(
    context: &AgentContext,
    wiring: StdioMode,
    who: &ResolvedUser,
) -> rustix::io::Result<(ParentEnds, ChildStdio)> {
    if let Some(size) = wiring.terminal {
        return match open_terminal_stdio(size, wiring.plain, who) {
            // The sandbox has no terminal left. Programs only notice that they print to a pipe.
            Err(Errno::AGAIN) if wiring.plain => open_pipe_as_terminal(who),
            opened => opened,
        };
    }
    let (stdin, their_stdin) = if wiring.stdin {
        let (theirs, ours) = pipe_with(PipeFlags::CLOEXEC)?;
        (Some(ours), theirs)
    } else {
        (None, rustix::io::fcntl_dupfd_cloexec(&context.null, 3)?)
    };
    let (stdout, their_stdout) = pipe_with(PipeFlags::CLOEXEC)?;
    let (stderr, their_stderr) = pipe_with(PipeFlags::CLOEXEC)?;
    for fd in stdin.iter().chain([&stdout, &stderr]) {
        rustix::io::ioctl_fionbio(fd, true)?;
    }
    if !who.is_root() {
        // Lets the command open its own /dev/stdout, which opens the pipe anew.
        for fd in [&their_stdout, &their_stderr] {
            rustix::fs::fchown(fd, Some(who.uid), Some(who.gid))?;
        }
    }
    let theirs =
        ChildStdio { stdin: their_stdin, stdout: their_stdout, stderr: their_stderr, terminal: false };
    Ok((ParentEnds::Pipes { stdin, stdout, stderr }, theirs))
}

fn open_pipe_as_terminal(who: &ResolvedUser) -> rustix::io::Result<(ParentEnds, ChildStdio)> {
    let (their_stdin, stdin) = pipe_with(PipeFlags::CLOEXEC)?;
    let (output, their_stdout) = pipe_with(PipeFlags::CLOEXEC)?;
    for fd in [&stdin, &output] {
        rustix::io::ioctl_fionbio(fd, true)?;
    }
    if !who.is_root() {
        rustix::fs::fchown(&their_stdout, Some(who.uid), Some(who.gid))?;
    }
    let their_stderr = rustix::io::fcntl_dupfd_cloexec(&their_stdout, 3)?;
    let theirs =
        ChildStdio { stdin: their_stdin, stdout: their_stdout, stderr: their_stderr, terminal: false };
    Ok((ParentEnds::OnePipe { stdin, output }, theirs))
}

fn open_terminal_stdio(
    size: TerminalSize,
    plain: bool,
    who: &ResolvedUser,
) -> rustix::io::Result<(ParentEnds, ChildStdio)> {
    let terminal = PtyPair::open(size.columns, size.rows, who.uid);
    let terminal = terminal.map_err(|error| match Errno::from_io_error(&error) {
        // The sandbox has no terminal left; this says nothing about its disk.
        Some(Errno::NOSPC) => Errno::AGAIN,
        Some(errno) => errno,
        None => Errno::IO,
    })?;
    if plain {
        let mut modes = rustix::termios::tcgetattr(&terminal.slave)?;
        modes.output_modes.remove(OutputModes::OPOST);
        modes.local_modes.remove(LocalModes::ECHO);
        rustix::termios::tcsetattr(&terminal.slave, OptionalActions::Now, &modes)?;
    }
    let copy = || rustix::io::fcntl_dupfd_cloexec(&terminal.slave, 3);
    let (stdout, stderr) = (copy()?, copy()?);
    let theirs = ChildStdio { stdin: terminal.slave, stdout, stderr, terminal: true };
    Ok((ParentEnds::Terminal(terminal.master), theirs))
}
