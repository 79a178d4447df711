//! Starts a command: its pipes or terminal, its group or runner, the fork.

use std::os::fd::{AsFd, OwnedFd};

use linux::namespaces::Namespaces;
use linux::pty::Terminal;
use linux::spawn::{Forked, SingleThread};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::Pid;
use wire::process::TerminalSize;

use crate::child::{self, Stdio};
use crate::command::Command;
use crate::identity::Who;
use crate::place::{HIGH, Place};
use crate::{runner, tree};

/// How a command's input and output are connected.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wiring {
    pub(crate) terminal: Option<TerminalSize>,
    pub(crate) stdin: bool,
}

/// The cgroup and processor share that a command is forked into.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Spot {
    /// The number of its own group.
    pub(crate) group: u64,
    /// Its share of the processor, where shares are separate from groups.
    pub(crate) share: usize,
}

/// A forked child that is about to become a command, and our ends of its pipes or terminal.
#[derive(Debug)]
pub(crate) struct Launched {
    /// The command, or its runner.
    pub(crate) pid: Pid,
    pub(crate) keeper: Keeper,
    /// Closed without data if the exec succeeds; otherwise it carries the failure.
    pub(crate) report: OwnedFd,
    pub(crate) ours: Ours,
}

/// The means to signal and kill the whole tree.
#[derive(Debug)]
pub(crate) enum Keeper {
    Group(u64),
    Runner(OwnedFd),
}

/// Our ends; all are non-blocking.
#[derive(Debug)]
pub(crate) enum Ours {
    Pipes { stdin: Option<OwnedFd>, stdout: OwnedFd, stderr: OwnedFd },
    Terminal(OwnedFd),
}

/// Forks a child that becomes the command. Whether that succeeds is reported later.
pub(crate) fn launch(
    place: &Place,
    command: &Command,
    wiring: Wiring,
    spot: Spot,
) -> rustix::io::Result<Launched> {
    let (ours, theirs) = connect(place, wiring, &command.who)?;
    let (report, mut their_report) = pipe_with(PipeFlags::CLOEXEC)?;
    if !command.placed.is_empty() {
        // It must not have a number that another descriptor gets before the exec.
        their_report = rustix::io::fcntl_dupfd_cloexec(&their_report, HIGH)?;
    }
    rustix::io::ioctl_fionbio(&report, true)?;
    let (pid, keeper) = match &place.commands {
        Some(commands) => {
            let pid = fork_into_group(place, command, &theirs, commands, spot, &their_report)?;
            (pid, Keeper::Group(spot.group))
        }
        None => fork_runner(place, command, &theirs, &their_report)?,
    };
    Ok(Launched { pid, keeper, report, ours })
}

fn fork_into_group(
    place: &Place,
    command: &Command,
    stdio: &Stdio,
    commands: &OwnedFd,
    spot: Spot,
    report: &OwnedFd,
) -> rustix::io::Result<Pid> {
    let group = tree::make_group(commands, spot.group)?;
    let mut join = None;
    let mut forked = fork(&place.thread, Some(&group));
    if forked.as_ref().is_err_and(|errno| *errno == Errno::AGAIN) {
        // The group is full. Moving into it is still allowed, and commands from the server have to
        // work while a fork bomb fills the group.
        join = Some(tree::open_members(&group)?);
        forked = fork(&place.thread, None);
    }
    let join = [join.as_ref(), place.command_share(spot.share)];
    match forked {
        Ok(Forked::Child) => child::run(place, command, stdio, join, report.as_fd()),
        Ok(Forked::Parent { pid, .. }) => Ok(pid),
        Err(errno) => {
            tree::remove_group(commands, spot.group);
            Err(errno)
        }
    }
}

fn fork_runner(
    place: &Place,
    command: &Command,
    stdio: &Stdio,
    report: &OwnedFd,
) -> rustix::io::Result<(Pid, Keeper)> {
    let (channel, their_channel) = rustix::net::socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        None,
    )?;
    match fork(&place.thread, None)? {
        Forked::Child => {
            drop(channel);
            runner::run(place, command, stdio, &their_channel, report)
        }
        Forked::Parent { pid, .. } => Ok((pid, Keeper::Runner(channel))),
    }
}

fn fork(thread: &SingleThread, group: Option<&OwnedFd>) -> rustix::io::Result<Forked> {
    let forked = thread.fork(Namespaces::NONE, group.map(AsFd::as_fd));
    forked.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))
}

pub(crate) fn connect(place: &Place, wiring: Wiring, who: &Who) -> rustix::io::Result<(Ours, Stdio)> {
    if let Some(size) = wiring.terminal {
        return connect_terminal(size, who);
    }
    let (stdin, their_stdin) = if wiring.stdin {
        let (theirs, ours) = pipe_with(PipeFlags::CLOEXEC)?;
        (Some(ours), theirs)
    } else {
        (None, rustix::io::fcntl_dupfd_cloexec(&place.null, 3)?)
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
    let theirs = Stdio { stdin: their_stdin, stdout: their_stdout, stderr: their_stderr, terminal: false };
    Ok((Ours::Pipes { stdin, stdout, stderr }, theirs))
}

fn connect_terminal(size: TerminalSize, who: &Who) -> rustix::io::Result<(Ours, Stdio)> {
    let terminal = Terminal::open(size.columns, size.rows, who.uid);
    let terminal = terminal.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
    let copy = || rustix::io::fcntl_dupfd_cloexec(&terminal.slave, 3);
    let (stdout, stderr) = (copy()?, copy()?);
    let theirs = Stdio { stdin: terminal.slave, stdout, stderr, terminal: true };
    Ok((Ours::Terminal(terminal.master), theirs))
}
