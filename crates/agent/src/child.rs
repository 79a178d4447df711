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
use linux::spawn::{self, Executable};
use linux::{descriptors, signals};
use rustix::fs::Mode;
use rustix::io::{Errno, FdFlags};
use rustix::process::{Resource, Rlimit};
use wire::process::Missing;

use crate::command::{Command, Found, Program, Workdir};
use crate::place::Place;

/// The command's ends of its pipes, or of its terminal.
#[derive(Debug)]
pub(crate) struct Stdio {
    pub(crate) stdin: OwnedFd,
    pub(crate) stdout: OwnedFd,
    pub(crate) stderr: OwnedFd,
    pub(crate) terminal: bool,
}

/// A step that can fail. The names are the `operation` of the fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
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
pub(crate) struct Failure {
    pub(crate) step: Step,
    pub(crate) errno: Errno,
}

impl Step {
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

impl Failure {
    pub(crate) const LENGTH: usize = 5;

    pub(crate) fn to_bytes(self) -> [u8; Self::LENGTH] {
        let mut bytes = [0; Self::LENGTH];
        bytes[0] = self.step as u8;
        bytes[1..].copy_from_slice(&self.errno.raw_os_error().to_le_bytes());
        bytes
    }

    pub(crate) fn from_bytes(bytes: [u8; Self::LENGTH]) -> Self {
        let [step, errno @ ..] = bytes;
        let step = Step::ALL.get(usize::from(step)).copied().unwrap_or(Step::Exec);
        Self { step, errno: Errno::from_raw_os_error(i32::from_le_bytes(errno)) }
    }
}

trait At<T> {
    fn at(self, step: Step) -> Result<T, Failure>;
}

impl<T> At<T> for rustix::io::Result<T> {
    fn at(self, step: Step) -> Result<T, Failure> {
        self.map_err(|errno| Failure { step, errno })
    }
}

impl<T> At<T> for io::Result<T> {
    fn at(self, step: Step) -> Result<T, Failure> {
        self.map_err(|error| Failure { step, errno: Errno::from_io_error(&error).unwrap_or(Errno::IO) })
    }
}

/// Becomes the command; if that fails, writes the reason to `report` and exits.
pub(crate) fn run(
    place: &Place,
    command: &Command,
    stdio: &Stdio,
    join: [Option<&OwnedFd>; 2],
    report: BorrowedFd<'_>,
) -> ! {
    let Err(failure) = become_command(place, command, stdio, join);
    // If this write fails too, the agent learns of the failure from our exit.
    rustix::io::write(report, &failure.to_bytes()).ok();
    spawn::exit_now(127)
}

/// Reports a failure before the first step towards the command, and exits.
pub(crate) fn fail(error: &io::Error, report: BorrowedFd<'_>) -> ! {
    let errno = Errno::from_io_error(error).unwrap_or(Errno::IO);
    rustix::io::write(report, &Failure { step: Step::Fork, errno }.to_bytes()).ok();
    spawn::exit_now(127)
}

fn become_command(
    place: &Place,
    command: &Command,
    stdio: &Stdio,
    join: [Option<&OwnedFd>; 2],
) -> Result<Infallible, Failure> {
    rustix::process::setsid().at(Step::Session)?;
    for group in join.into_iter().flatten().chain(&place.tasks) {
        rustix::io::write(group, b"0").at(Step::JoinGroup)?;
    }
    connect(stdio)?;
    keep(command).at(Step::Stdio)?;
    rustix::process::umask(Mode::WGRP | Mode::WOTH);
    limit(place).at(Step::Limits)?;
    confine(place, command)?;
    let late = command.with_variables_of_file();
    let path = late.as_ref().and_then(|late| late.directory.as_deref());
    enter(path.unwrap_or(&command.directory.path), &command.directory).at(Step::Directory)?;
    signals::unblock_all().at(Step::Exec)?;
    Err(Failure { step: Step::Exec, errno: exec(place, command, late.as_ref()) })
}

fn connect(stdio: &Stdio) -> Result<(), Failure> {
    if stdio.terminal {
        rustix::process::ioctl_tiocsctty(&stdio.stdin).at(Step::Terminal)?;
    }
    rustix::stdio::dup2_stdin(&stdio.stdin).at(Step::Stdio)?;
    rustix::stdio::dup2_stdout(&stdio.stdout).at(Step::Stdio)?;
    rustix::stdio::dup2_stderr(&stdio.stderr).at(Step::Stdio)
}

/// Only the standard descriptors and those the command needs survive the exec.
fn keep(command: &Command) -> io::Result<()> {
    descriptors::close_on_exec_from(3)?;
    for fd in &command.kept {
        rustix::io::fcntl_setfd(fd, FdFlags::empty())?;
    }
    descriptors::place_from(3, &command.placed)
}

fn limit(place: &Place) -> rustix::io::Result<()> {
    rustix::process::setrlimit(Resource::Nofile, place.open_files)?;
    rustix::process::setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) })?;
    match place.config.process_rlimit {
        Some(most) => {
            rustix::process::setrlimit(Resource::Nproc, Rlimit { current: Some(most), maximum: Some(most) })
        }
        None => Ok(()),
    }
}

fn confine(place: &Place, command: &Command) -> Result<(), Failure> {
    let keep = if command.who.is_root() { place.capabilities } else { CapSet::NONE };
    caps::bound_to(keep).at(Step::BoundingSet)?;
    command.who.assume(&place.config).at(Step::Identity)?;
    caps::set(keep).at(Step::Capabilities)?;
    linux::set_no_new_privs().at(Step::NoNewPrivileges)?;
    place.confine_late().at(Step::Filter)?;
    if place.filter.is_empty() { Ok(()) } else { place.filter.install().at(Step::Filter) }
}

fn enter(path: &CStr, directory: &Workdir) -> rustix::io::Result<()> {
    match (rustix::process::chdir(path), directory.missing) {
        (Ok(()), _) => Ok(()),
        (Err(errno), Missing::Fail) => Err(errno),
        (Err(Errno::NOENT), Missing::Create) => {
            make_directories(path)?;
            rustix::process::chdir(path)
        }
        (Err(errno), Missing::Create) => Err(errno),
        (Err(_), Missing::Ignore) => {
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
fn exec(place: &Place, command: &Command, late: Option<&Found>) -> Errno {
    let environment = late.map_or(&command.environment, |late| &late.environment);
    let execute = |program| {
        let error = spawn::exec(program, &command.arguments, environment);
        Errno::from_io_error(&error).unwrap_or(Errno::IO)
    };
    let programs = match (&command.program, late) {
        (Program::Own, _) => return execute(Executable::File(place.own.as_fd())),
        (Program::Paths(_), Some(late)) => &late.programs,
        (Program::Paths(programs), None) => programs,
    };
    let mut reason = Errno::NOENT;
    for program in programs {
        match execute(Executable::Path(program)) {
            Errno::NOENT | Errno::NOTDIR => {}
            Errno::ACCESS => reason = Errno::ACCESS,
            other => return other,
        }
    }
    reason
}

/// Keeps only the standard descriptors and `fd`, and returns the number under which it remains
/// open.
pub(crate) fn alone_with(fd: impl AsFd) -> io::Result<OwnedFd> {
    descriptors::keep_only(rustix::io::fcntl_dupfd_cloexec(fd, 3)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_survives_the_pipe() {
        for step in Step::ALL {
            let failure = Failure { step, errno: Errno::NOENT };
            assert_eq!(Failure::from_bytes(failure.to_bytes()), failure);
        }
    }
}
