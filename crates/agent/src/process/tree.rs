//! A command and everything it ever started, as one unit that can be signalled and killed.
//!
//! With a v2 group nothing escapes: every forked process is in the group, and `cgroup.kill` ends
//! all of them at once. Without groups a runner process is the parent of the command and adopts
//! what it leaves behind; that is weaker, because the runner has to search for the processes.

use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;
use rustix::process::{Pid, Signal};

use crate::event_loop::handles::GroupId;
use crate::event_loop::poll::RegisteredFd;
use crate::process::proc;

/// The maximum number of processes in a group that one signal reaches, so that a fork bomb cannot
/// keep the agent busy.
const MAX_MEMBERS: usize = 1 << 16;

#[derive(Debug)]
pub(crate) enum CommandTree {
    /// The v2 group of this number below the commands' group.
    Group(GroupId),
    /// A runner that forwards the signals sent through this channel.
    Runner(RegisteredFd),
    /// Only the process group is left.
    Gone,
}

/// Creates the group of a command and opens it.
///
/// Each command gets a new group. A group that was killed once cannot be used again: the kernel
/// treats a process cloned into it as one that was forked during the kill.
pub(crate) fn make_group(commands: &OwnedFd, number: GroupId) -> rustix::io::Result<OwnedFd> {
    add_group(commands, number)?;
    open_group(commands, number)
}

/// Creates the group of a command.
pub(crate) fn add_group(commands: &OwnedFd, number: GroupId) -> rustix::io::Result<()> {
    rustix::fs::mkdirat(commands, number.to_string(), Mode::from_raw_mode(0o755))
}

/// Opens a group that exists.
pub(crate) fn open_group(commands: &OwnedFd, number: GroupId) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::openat(commands, number.to_string(), flags, Mode::empty())
}

/// Opens the file by which a process forked elsewhere moves into the group.
pub(crate) fn open_members(group: &OwnedFd) -> rustix::io::Result<OwnedFd> {
    rustix::fs::openat(group, "cgroup.procs", OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())
}

/// Moves a process to the group; its children stay where they are.
pub(crate) fn move_process(group: &OwnedFd, pid: Pid) -> rustix::io::Result<()> {
    rustix::io::write(open_members(group)?, pid.as_raw_pid().to_string().as_bytes()).map(drop)
}

/// Removes the group if it is empty.
pub(crate) fn remove_group(commands: &OwnedFd, number: GroupId) -> bool {
    let removed = rustix::fs::unlinkat(commands, number.to_string(), AtFlags::REMOVEDIR);
    matches!(removed, Ok(()) | Err(Errno::NOENT))
}

impl CommandTree {
    /// Kills all processes in the tree.
    pub(crate) fn kill(&self, commands: Option<&OwnedFd>, leader: Option<Pid>) -> rustix::io::Result<()> {
        match (self, commands) {
            (Self::Group(number), Some(commands)) => {
                let flags = OFlags::WRONLY | OFlags::CLOEXEC;
                let file =
                    rustix::fs::openat(commands, format!("{number}/cgroup.kill"), flags, Mode::empty())?;
                rustix::io::write(file, b"1").map(drop)
            }
            _ => self.signal(commands, leader, Signal::KILL),
        }
    }

    /// Whether it contains other processes than its leader.
    pub(crate) fn has_other_members(&self, commands: Option<&OwnedFd>, leader: Option<Pid>) -> bool {
        match (self, commands) {
            (Self::Group(number), Some(commands)) => {
                let members = open_member_list(commands, *number).and_then(|file| read_members(&file));
                // If the list cannot be read, there may be others.
                members.map_or(true, |members| members.len() > 1)
            }
            // Processes that the command left behind are children of the runner.
            _ => leader.map(Pid::as_raw_pid).is_some_and(|leader| {
                let runner = proc::living_relations(leader).map(|kin| proc::children_of(kin.parent));
                proc::children_of(leader).chain(runner.into_iter().flatten()).any(|pid| pid != leader)
            }),
        }
    }

    /// All processes in it, up to `limit`: the members of the group or, without one, the leader and
    /// everything that descends from it or from its runner.
    pub(crate) fn members(&self, commands: Option<&OwnedFd>, leader: Option<Pid>, limit: usize) -> Vec<Pid> {
        if let (Self::Group(number), Some(commands)) = (self, commands) {
            return open_member_list(commands, *number)
                .and_then(|file| read_members(&file))
                .unwrap_or_default();
        }
        let Some(leader) = leader.map(Pid::as_raw_pid) else { return Vec::new() };
        let runner = match self {
            Self::Runner(_) => proc::living_relations(leader).map(|kin| kin.parent),
            Self::Group(_) | Self::Gone => None,
        };
        let mut found = vec![leader];
        found.extend(runner.into_iter().flat_map(proc::children_of).filter(|pid| *pid != leader));
        let mut next = 0;
        while next < found.len() && found.len() < limit {
            let children: Vec<i32> = proc::children_of(found[next]).collect();
            found.extend(children);
            next += 1;
        }
        found.into_iter().filter_map(Pid::from_raw).collect()
    }

    /// Sends a signal to all processes in the tree.
    pub(crate) fn signal(
        &self,
        commands: Option<&OwnedFd>,
        leader: Option<Pid>,
        signal: Signal,
    ) -> rustix::io::Result<()> {
        match (self, commands) {
            (Self::Group(number), Some(commands)) => signal_members(commands, *number, signal),
            (Self::Runner(channel), _) => {
                let number = u8::try_from(signal.as_raw()).map_err(|_too_large| Errno::INVAL)?;
                rustix::io::write(channel.as_fd(), &[number]).map(drop)
            }
            _ => {
                leader.map_or(Err(Errno::SRCH), |leader| rustix::process::kill_process_group(leader, signal))
            }
        }
    }
}

fn signal_members(commands: &OwnedFd, number: GroupId, signal: Signal) -> rustix::io::Result<()> {
    let members = read_members(&open_member_list(commands, number)?)?;
    if members.is_empty() {
        return Err(Errno::SRCH);
    }
    for member in members {
        match rustix::process::kill_process(member, signal) {
            // The process ended in the meantime.
            Ok(()) | Err(Errno::SRCH) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

fn open_member_list(commands: &OwnedFd, number: GroupId) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    rustix::fs::openat(commands, format!("{number}/cgroup.procs"), flags, Mode::empty())
}

fn read_members(file: &OwnedFd) -> rustix::io::Result<Vec<Pid>> {
    let mut text = Vec::new();
    let mut piece = [0; 4096];
    while text.len() < MAX_MEMBERS * 8 {
        match rustix::io::read(file, &mut piece)? {
            0 => break,
            count => text.extend_from_slice(&piece[..count]),
        }
    }
    let text = String::from_utf8_lossy(&text);
    // A member of another pid namespace appears as 0 and is skipped.
    Ok(text.lines().filter_map(|line| line.parse().ok().and_then(Pid::from_raw)).collect())
}
