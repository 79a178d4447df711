//! Kills trees without a group: a runner process is the parent of one command.
//!
//! ```text
//! agent ──► runner (subreaper) ──► command ──► …
//!   ◄── Started(pid), Ended(…) ──┘
//!   ──► a signal number ────────►┘  sent to every descendant; KILL until none is left
//! ```
//! Processes that the command leaves behind become the runner's children, so they can be found
//! again. The runner ends when it has no descendants left, and kills all of them if the agent is
//! gone.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, OwnedFd};

use linux::namespaces::NamespaceSet;
use linux::signals::{self, SignalFd};
use linux::spawn::{self, ForkResult, ProcessExit, ProcessUsage, ReapedChild};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::process::{Pid, Signal};

use crate::context::AgentContext;
use crate::process::child::{self, ChildStdio, ExecFailure, ExecStep};
use crate::process::command::PreparedCommand;
use crate::process::proc;

/// A message from the runner to the agent; each is one packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RunnerMessage {
    Started(Pid),
    Ended(ProcessExit, ProcessUsage),
}

impl RunnerMessage {
    pub(crate) const LENGTH: usize = 29;

    fn to_bytes(self) -> [u8; Self::LENGTH] {
        let (kind, number, usage) = match self {
            Self::Started(pid) => (0, pid.as_raw_pid(), ProcessUsage::default()),
            Self::Ended(ProcessExit::Code(code), usage) => (1, code, usage),
            Self::Ended(ProcessExit::Signal(signal), usage) => (2, signal, usage),
        };
        let mut bytes = [0; Self::LENGTH];
        bytes[0] = kind;
        bytes[1..5].copy_from_slice(&number.to_le_bytes());
        bytes[5..13].copy_from_slice(&usage.user_ms.to_le_bytes());
        bytes[13..21].copy_from_slice(&usage.system_ms.to_le_bytes());
        bytes[21..29].copy_from_slice(&usage.max_rss_kib.to_le_bytes());
        bytes
    }

    pub(crate) fn from_bytes(bytes: &[u8; Self::LENGTH]) -> Option<Self> {
        let word = |from: usize| bytes[from..from + 8].try_into().map_or(0, u64::from_le_bytes);
        let number = i32::from_le_bytes([bytes[1], bytes[2], bytes[3], bytes[4]]);
        let usage = ProcessUsage { user_ms: word(5), system_ms: word(13), max_rss_kib: word(21) };
        match bytes[0] {
            0 => Pid::from_raw(number).map(Self::Started),
            1 => Some(Self::Ended(ProcessExit::Code(number), usage)),
            2 => Some(Self::Ended(ProcessExit::Signal(number), usage)),
            _ => None,
        }
    }
}

/// The main function of the runner: starts the command as its child and watches over it.
pub(crate) fn runner_main(
    context: &AgentContext,
    command: &PreparedCommand,
    stdio: &ChildStdio,
    channel: &OwnedFd,
    report: &OwnedFd,
) -> ! {
    let failed = |errno| -> ! {
        rustix::io::write(report, &ExecFailure { step: ExecStep::Fork, errno }.to_bytes()).ok();
        spawn::exit_now(127)
    };
    if let Err(errno) = rustix::process::set_child_subreaper(Some(rustix::process::getpid())) {
        failed(errno);
    }
    match context.thread.fork(NamespaceSet::NONE, None) {
        Ok(ForkResult::Child) => child::exec_or_report(context, command, stdio, [None, None], report.as_fd()),
        Ok(ForkResult::Parent { pid, .. }) => supervise_command(pid, channel),
        Err(error) => failed(Errno::from_io_error(&error).unwrap_or(Errno::IO)),
    }
}

fn supervise_command(leader: Pid, channel: &OwnedFd) -> ! {
    // The agent receives the pid before our copy of the report pipe closes.
    rustix::io::write(channel, &RunnerMessage::Started(leader).to_bytes()).ok();
    let result = child::close_all_except(channel)
        .and_then(|channel| Ok((channel, SignalFd::watch(&[signals::SIGCHLD])?)));
    let Ok((channel, children)) = result else { spawn::exit_now(1) };
    loop {
        let mut fds = [PollFd::new(&channel, PollFlags::IN), PollFd::new(&children, PollFlags::IN)];
        rustix::event::poll(&mut fds, None).ok();
        let (signalled, ended) = (fds[0].revents(), fds[1].revents());
        if !ended.is_empty() {
            children.clear().ok();
            reap_descendants(leader, &channel);
        }
        if !signalled.is_empty() {
            forward_signal(leader, &channel, &children);
        }
    }
}

/// Reaps children, reports the end of the command itself to the agent, and exits after the last
/// child.
fn reap_descendants(leader: Pid, channel: &OwnedFd) {
    loop {
        match spawn::reap_child() {
            Ok(Some(ReapedChild { pid, end, usage })) if pid == leader => {
                rustix::io::write(channel, &RunnerMessage::Ended(end, usage).to_bytes()).ok();
            }
            Ok(Some(_)) => {}
            Ok(None) => return,
            Err(_) => spawn::exit_now(0),
        }
    }
}

fn forward_signal(leader: Pid, channel: &OwnedFd, children: &SignalFd) {
    let mut number = [0];
    let signal = match rustix::io::read(channel, &mut number) {
        Ok(1) => Signal::from_named_raw(i32::from(number[0])),
        // The agent is gone, so the command is no longer needed.
        Ok(_) => Some(Signal::KILL),
        Err(_) => None,
    };
    let Some(signal) = signal else { return };
    loop {
        let below = find_descendants();
        for pid in &below {
            rustix::process::kill_process(*pid, signal).ok();
        }
        if signal != Signal::KILL || below.is_empty() {
            return;
        }
        // New processes may be forked while others are killed, so this repeats until none is left.
        let pause = Timespec { tv_sec: 0, tv_nsec: 5_000_000 };
        rustix::event::poll(&mut [PollFd::new(children, PollFlags::IN)], Some(&pause)).ok();
        reap_descendants(leader, channel);
    }
}

/// All descendants of this process, found from the parent of every process.
fn find_descendants() -> Vec<Pid> {
    let mut children: BTreeMap<i32, Vec<i32>> = BTreeMap::new();
    for pid in proc::list_pids() {
        if let Some(kin) = proc::living_relations(pid) {
            children.entry(kin.parent).or_default().push(pid);
        }
    }
    let mut found = BTreeSet::new();
    let mut next = vec![rustix::process::getpid().as_raw_pid()];
    while let Some(pid) = next.pop() {
        let below = children.remove(&pid).unwrap_or_default();
        next.extend(&below);
        found.extend(below);
    }
    found.into_iter().filter_map(Pid::from_raw).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_round_trip() {
        let usage = ProcessUsage { user_ms: 1, system_ms: 2, max_rss_kib: u64::MAX };
        for message in [
            RunnerMessage::Started(Pid::INIT),
            RunnerMessage::Ended(ProcessExit::Code(-1), usage),
            RunnerMessage::Ended(ProcessExit::Signal(9), usage),
        ] {
            assert_eq!(RunnerMessage::from_bytes(&message.to_bytes()), Some(message));
        }
        assert_eq!(RunnerMessage::from_bytes(&[9; RunnerMessage::LENGTH]), None);
    }
}
