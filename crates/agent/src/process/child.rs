//! The steps by which a forked child becomes a command.
//!
//! The order matters. Groups are joined first, so that everything after it is charged to the
//! sandbox. The bounding set is reduced while that is still allowed; the identity changes before
//! the capabilities are dropped that this needs; the filter comes late because it forbids the
//! earlier steps. Everything was prepared before the fork, so nothing is allocated here except for
//! a missing directory and for the variables of the sandbox's env file.

use std::convert::Infallible;
use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use linux::caps::{self, CapSet};
use linux::spawn::{self, ExecFile};
use linux::{descriptors, signals};
use rustix::fs::Mode;
use rustix::io::{Errno, FdFlags};
use rustix::process::{Resource, Rlimit};
use wire::process::MissingDirectory;

use crate::context::AgentContext;
use crate::identity::ResolvedUser;
use crate::process::command::{ExecProgram, PreparedCommand, ResolvedDirectory, ResolvedProgram};

/// The command's ends of its pipes, or of its terminal.
#[derive(Debug)]
pub(crate) struct ChildStdio {
    pub(crate) stdin: OwnedFd,
    pub(crate) stdout: OwnedFd,
    pub(crate) stderr: OwnedFd,
    pub(crate) terminal: bool,
}

/// A step that can fail. The names are the `operation` of the fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ExecStep {
    Fork,
    Session,
    Terminal,
    JoinGroup,
    Stdio,
    Limits,
    BoundingSet,
    Identity,
    Capabilities,
    NoNewPrivileges,
    Filter,
    Directory,
    Exec,
}

/// Which step failed, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ExecFailure {
    pub(crate) step: ExecStep,
    pub(crate) errno: Errno,
}

impl ExecStep {
    const ALL: [Self; 13] = [
        Self::Fork,
        Self::Session,
        Self::Terminal,
        Self::JoinGroup,
        Self::Stdio,
        Self::Limits,
        Self::BoundingSet,
        Self::Identity,
        Self::Capabilities,
        Self::NoNewPrivileges,
        Self::Filter,
        Self::Directory,
        Self::Exec,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Fork => "fork",
            Self::Session => "setsid",
            Self::Terminal => "take the terminal",
            Self::JoinGroup => "join the group",
            Self::Stdio => "connect standard input and output",
            Self::Limits => "set limits",
            Self::BoundingSet => "cut the bounding set",
            Self::Identity => "become user",
            Self::Capabilities => "drop capabilities",
            Self::NoNewPrivileges => "forbid new privileges",
            Self::Filter => "load the filter",
            Self::Directory => "change directory",
            Self::Exec => "exec",
        }
    }
}

impl ExecFailure {
    pub(crate) const LENGTH: usize = 5;

    pub(crate) fn to_bytes(self) -> [u8; Self::LENGTH] {
        let mut bytes = [0; Self::LENGTH];
        bytes[0] = self.step as u8;
        bytes[1..].copy_from_slice(&self.errno.raw_os_error().to_le_bytes());
        bytes
    }

    pub(crate) fn from_bytes(bytes: [u8; Self::LENGTH]) -> Self {
        let [step, errno @ ..] = bytes;
        let step = ExecStep::ALL.get(usize::from(step)).copied().unwrap_or(ExecStep::Exec);
        Self { step, errno: Errno::from_raw_os_error(i32::from_le_bytes(errno)) }
    }
}

trait StepErrorContext<T> {
    fn at(self, step: ExecStep) -> Result<T, ExecFailure>;
}

impl<T> StepErrorContext<T> for rustix::io::Result<T> {
    fn at(self, step: ExecStep) -> Result<T, ExecFailure> {
        self.map_err(|errno| ExecFailure { step, errno })
    }
}

impl<T> StepErrorContext<T> for io::Result<T> {
    fn at(self, step: ExecStep) -> Result<T, ExecFailure> {
        self.map_err(|error| ExecFailure { step, errno: Errno::from_io_error(&error).unwrap_or(Errno::IO) })
    }
}

/// Becomes the command; if that fails, writes the reason to `report` and exits.
pub(crate) fn exec_or_report(
    context: &AgentContext,
    command: &PreparedCommand,
    stdio: &ChildStdio,
    join: [Option<&OwnedFd>; 2],
    report: BorrowedFd<'_>,
) -> ! {
    let Err(failure) = become_command(context, command, stdio, join);
    // If this write fails too, the agent learns of the failure from our exit.
    rustix::io::write(report, &failure.to_bytes()).ok();
    spawn::exit_now(127)
}

/// Reports a failure before the first step towards the command, and exits.
pub(crate) fn report_and_exit(error: &io::Error, report: BorrowedFd<'_>) -> ! {
    let errno = Errno::from_io_error(error).unwrap_or(Errno::IO);
    rustix::io::write(report, &ExecFailure { step: ExecStep::Fork, errno }.to_bytes()).ok();
    spawn::exit_now(127)
}

fn become_command(
    context: &AgentContext,
    command: &PreparedCommand,
    stdio: &ChildStdio,
    join: [Option<&OwnedFd>; 2],
) -> Result<Infallible, ExecFailure> {
    rustix::process::setsid().at(ExecStep::Session)?;
    for group in join.into_iter().flatten().chain(&context.tasks) {
        rustix::io::write(group, b"0").at(ExecStep::JoinGroup)?;
    }
    connect_stdio(stdio)?;
    keep_descriptors(command).at(ExecStep::Stdio)?;
    rustix::process::umask(Mode::WGRP | Mode::WOTH);
    set_limits(context).at(ExecStep::Limits)?;
    confine_command(context, command)?;
    let late = command.resolve_with_env_file();
    let path = late.as_ref().and_then(|late| late.directory.as_deref());
    enter_directory(path.unwrap_or(&command.directory.path), &command.directory).at(ExecStep::Directory)?;
    signals::unblock_all().at(ExecStep::Exec)?;
    Err(ExecFailure { step: ExecStep::Exec, errno: exec_program(context, command, late.as_ref()) })
}

fn connect_stdio(stdio: &ChildStdio) -> Result<(), ExecFailure> {
    if stdio.terminal {
        rustix::process::ioctl_tiocsctty(&stdio.stdin).at(ExecStep::Terminal)?;
    }
    rustix::stdio::dup2_stdin(&stdio.stdin).at(ExecStep::Stdio)?;
    rustix::stdio::dup2_stdout(&stdio.stdout).at(ExecStep::Stdio)?;
    rustix::stdio::dup2_stderr(&stdio.stderr).at(ExecStep::Stdio)
}

/// Only the standard descriptors and those the command needs survive the exec.
fn keep_descriptors(command: &PreparedCommand) -> io::Result<()> {
    descriptors::close_on_exec_from(3)?;
    for fd in &command.inherited_fds {
        rustix::io::fcntl_setfd(fd, FdFlags::empty())?;
    }
    descriptors::duplicate_from(3, &command.numbered_fds)
}

pub(crate) fn set_limits(context: &AgentContext) -> rustix::io::Result<()> {
    rustix::process::setrlimit(Resource::Nofile, context.open_files)?;
    rustix::process::setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) })?;
    match context.config.process_rlimit {
        Some(most) => {
            rustix::process::setrlimit(Resource::Nproc, Rlimit { current: Some(most), maximum: Some(most) })
        }
        None => Ok(()),
    }
}

fn confine_command(context: &AgentContext, command: &PreparedCommand) -> Result<(), ExecFailure> {
    let keep = if command.user.is_root() { context.capabilities } else { CapSet::NONE };
    confine_process(context, &command.user, keep)
}

/// Takes everything from this process that a command of the user does not have, and all capabilities but `keep`.
pub(crate) fn confine_process(
    context: &AgentContext,
    user: &ResolvedUser,
    keep: CapSet,
) -> Result<(), ExecFailure> {
    caps::limit_bounding_set_from(context.bounding_set, keep).at(ExecStep::BoundingSet)?;
    user.assume_identity(&context.config).at(ExecStep::Identity)?;
    caps::set_capabilities(keep).at(ExecStep::Capabilities)?;
    linux::set_no_new_privs().at(ExecStep::NoNewPrivileges)?;
    context.drop_broker_privileges().at(ExecStep::Filter)?;
    if context.filter.is_empty() { Ok(()) } else { context.filter.install().at(ExecStep::Filter) }
}

fn enter_directory(path: &CStr, directory: &ResolvedDirectory) -> rustix::io::Result<()> {
    match (rustix::process::chdir(path), directory.missing) {
        (Ok(()), _) => Ok(()),
        (Err(errno), MissingDirectory::Fail) => Err(errno),
        (Err(Errno::NOENT), MissingDirectory::Create) => {
            make_directories(path)?;
            rustix::process::chdir(path)
        }
        (Err(errno), MissingDirectory::Create) => Err(errno),
        (Err(_), MissingDirectory::Ignore) => {
            rustix::process::chdir(&directory.fallback).or_else(|_| rustix::process::chdir(c"/"))
        }
    }
}

fn make_directories(path: &CStr) -> rustix::io::Result<()> {
    let bytes = path.to_bytes();
    let ends = bytes.iter().enumerate().skip(1).filter(|(_, byte)| **byte == b'/').map(|(index, _)| index);
    for end in ends.chain([bytes.len()]) {
        match rustix::fs::mkdir(&bytes[..end], Mode::from_raw_mode(0o755)) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

/// Tries each candidate as execvp(3) does: a missing one is skipped; if one may not be executed,
/// the search continues and EACCES is reported at its end.
fn exec_program(context: &AgentContext, command: &PreparedCommand, late: Option<&ResolvedProgram>) -> Errno {
    let environment = late.map_or(&command.environment, |late| &late.environment);
    let execute = |program| {
        let error = spawn::exec_program(program, &command.arguments, environment);
        Errno::from_io_error(&error).unwrap_or(Errno::IO)
    };
    let programs = match (&command.program, late) {
        (ExecProgram::Own, _) => return execute(ExecFile::File(context.kernels_executable.as_fd())),
        (ExecProgram::Paths(_), Some(late)) => &late.programs,
        (ExecProgram::Paths(programs), None) => programs,
    };
    let mut reason = Errno::NOENT;
    for program in programs {
        match execute(ExecFile::Path(program)) {
            Errno::NOENT | Errno::NOTDIR => {}
            Errno::ACCESS => reason = Errno::ACCESS,
            other => return other,
        }
    }
    reason
}

/// Keeps only the standard descriptors and `fd`, and returns the number under which it remains
/// open.
pub(crate) fn close_all_except(fd: impl AsFd) -> io::Result<OwnedFd> {
    descriptors::close_all_except(rustix::io::fcntl_dupfd_cloexec(fd, 3)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_survives_the_pipe() {
        for step in ExecStep::ALL {
            let failure = ExecFailure { step, errno: Errno::NOENT };
            assert_eq!(ExecFailure::from_bytes(failure.to_bytes()), failure);
        }
    }
}
