//! Everything that runs in the sandbox and the resources it uses: one line for each command,
//! session and context.
//!
//! Everything here is bounded: the number of lines in a reply, the length of their texts, and the
//! number of processes that are measured. A fork bomb makes the reply less exact, not slower.

use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{Mode, OFlags};
use rustix::process::Pid;
use wire::process::{TreeKind, TreeStatus, TreeUsage};

use crate::context::AgentContext;
use crate::event_loop::agent::Agent;
use crate::event_loop::handles::GroupId;
use crate::process::ManagedProcess;
use crate::process::child_table::ChildTable;
use crate::process::running_process::{ProcessOwner, RunningProcess};
use crate::process::tree::CommandTree;
use crate::session::Session;

/// The maximum number of processes measured for one reply.
pub(super) const MAX_MEASURED: usize = 4096;

/// The maximum length of a command's text in one line.
const MAX_TEXT: usize = 512;

/// How much is read of one file of `/proc` or of a control group.
const MAX_FILE: u64 = 4096;

/// The maximum number of lines, so that a reply fits in one frame however its texts are escaped.
const MAX_LINES: usize = 1024;

impl Agent {
    /// Everything that runs, the oldest first; with `ended` also the commands that have ended and are
    /// remembered.
    pub(crate) fn tree_statuses(&self, ended: bool) -> Vec<TreeStatus> {
        let mut meter = TreeMeter { children: &self.children, context: &self.context, budget: MAX_MEASURED };
        let shown = |process: &&ManagedProcess| {
            ended || process.ended.is_none() || self.children.has_leftovers(process)
        };
        let mut processes: Vec<&ManagedProcess> = self.processes.values().filter(shown).collect();
        // If there are too many, running processes take precedence, then the newest.
        processes
            .sort_unstable_by_key(|process| (process.ended.is_some(), std::cmp::Reverse(process.number)));
        let sessions = self.sessions.values().filter(|session| !session.closing);
        let mut trees: Vec<TreeStatus> =
            sessions.take(MAX_LINES / 2).map(|session| meter.session_tree(session)).collect();
        let room = MAX_LINES - trees.len();
        let commands = processes.into_iter().take(room);
        trees.extend(commands.map(|process| meter.process_tree(process)));
        trees.sort_by(|one, other| one.started_ms.cmp(&other.started_ms).then(one.id.cmp(&other.id)));
        trees
    }
}

/// Measures trees until the number of processes that one reply may cost is reached.
struct TreeMeter<'a> {
    children: &'a ChildTable,
    context: &'a AgentContext,
    budget: usize,
}

impl TreeMeter<'_> {
    fn process_tree(&mut self, process: &ManagedProcess) -> TreeStatus {
        let status = process.status();
        let left = process.ended.is_some() && self.children.has_leftovers(process);
        let shown = process.running.filter(|_| process.ended.is_none() || left);
        // A run in a shell or kernel shares the processes of its session, which are counted there.
        let own = |running: &&RunningProcess| !matches!(running.owner, ProcessOwner::Session(_));
        let running = shown.and_then(|running| self.children.get(running)).filter(own);
        TreeStatus {
            id: status.process,
            kind: if status.session.is_some() { TreeKind::Run } else { TreeKind::Command },
            session: status.session,
            tag: status.tag,
            text: truncate_text(status.command),
            pid: process.pid.map(Pid::as_raw_pid),
            busy: status.ended.is_none(),
            started_ms: status.started_ms,
            ended: status.ended,
            left,
            usage: running.map(|running| self.measure_usage(running)),
        }
    }

    fn session_tree(&mut self, session: &Session) -> TreeStatus {
        let running = session.running_process().and_then(|running| self.children.get(running));
        let (kind, text) = match session.language() {
            Some(language) => (TreeKind::Context, language.to_owned()),
            None if session.runs_commands() => (TreeKind::Session, "commands".to_owned()),
            None if session.open.terminal.is_some() => (TreeKind::Session, "terminal".to_owned()),
            None => (TreeKind::Session, "shell".to_owned()),
        };
        TreeStatus {
            id: session.name.clone(),
            kind,
            session: None,
            tag: None,
            text: truncate_text(text),
            pid: running.and_then(|running| running.pid).map(Pid::as_raw_pid),
            busy: session.current.is_some(),
            started_ms: session.opened_ms,
            ended: None,
            left: false,
            usage: running.map(|running| self.measure_session(session, running)),
        }
    }

    /// The usage of a session's shell and of what earlier runs have left.
    fn measure_session(&mut self, session: &Session, running: &RunningProcess) -> TreeUsage {
        let mut usage = self.measure_usage(running);
        for left in session.earlier_runs.iter().filter_map(|left| self.children.get(*left)) {
            let more = self.measure_usage(left);
            usage.cpu_ms = usage.cpu_ms.saturating_add(more.cpu_ms);
            usage.memory_bytes = usage.memory_bytes.saturating_add(more.memory_bytes);
            usage.processes = usage.processes.saturating_add(more.processes);
        }
        usage
    }

    fn measure_usage(&mut self, running: &RunningProcess) -> TreeUsage {
        let commands = self.context.commands.as_ref();
        let mut members = running.tree.members(commands, running.pid, self.budget);
        members.truncate(self.budget);
        self.budget -= members.len();
        let mut usage = TreeUsage { cpu_ms: 0, memory_bytes: 0, processes: 0 };
        for member in &members {
            let Some((cpu_ms, memory_bytes)) = process_usage(member.as_raw_pid()) else { continue };
            usage.cpu_ms = usage.cpu_ms.saturating_add(cpu_ms);
            usage.memory_bytes = usage.memory_bytes.saturating_add(memory_bytes);
            usage.processes += 1;
        }
        // The group also includes the processor time of members that have ended.
        if let (CommandTree::Group(number), Some(commands)) = (&running.tree, commands)
            && let Some(cpu_ms) = group_cpu_ms(commands, *number)
        {
            usage.cpu_ms = cpu_ms;
        }
        usage
    }
}

fn truncate_text(mut text: String) -> String {
    if text.len() > MAX_TEXT {
        let end = (0..=MAX_TEXT).rev().find(|end| text.is_char_boundary(*end));
        text.truncate(end.unwrap_or(0));
    }
    text
}

/// The processor time in milliseconds and the resident memory of one process. The name in
/// parentheses may contain anything, so the fields are counted after it. See proc_pid_stat(5).
pub(super) fn process_usage(pid: i32) -> Option<(u64, u64)> {
    let stat = read_beginning(rustix::fs::CWD, &format!("/proc/{pid}/stat"))?;
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let number = |index: usize| fields.get(index)?.parse::<u64>().ok();
    // utime, stime, cutime and cstime, in ticks; rss in pages.
    let ticks: u64 = (11..15).filter_map(number).fold(0, u64::saturating_add);
    let rate = rustix::param::clock_ticks_per_second().max(1);
    let page = u64::try_from(rustix::param::page_size()).unwrap_or(4096);
    Some((ticks.saturating_mul(1000) / rate, number(21)?.saturating_mul(page)))
}

fn group_cpu_ms(commands: &OwnedFd, number: GroupId) -> Option<u64> {
    let text = read_beginning(commands.as_fd(), &format!("{number}/cpu.stat"))?;
    let micros: u64 = text.lines().find_map(|line| line.strip_prefix("usage_usec "))?.trim().parse().ok()?;
    Some(micros / 1000)
}

/// The beginning of a file, without blocking on a pipe or device.
fn read_beginning(directory: BorrowedFd<'_>, path: &str) -> Option<String> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = rustix::fs::openat(directory, path, flags, Mode::empty()).ok()?;
    let mut text = Vec::new();
    std::fs::File::from(file).take(MAX_FILE).read_to_end(&mut text).ok()?;
    Some(String::from_utf8_lossy(&text).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_process_uses_memory_and_processor_time() {
        let (_cpu, memory) = process_usage(std::process::id().cast_signed()).expect("we are there");
        assert!(memory > 100 << 10, "{memory}");
        assert_eq!(process_usage(i32::MAX), None);
    }

    #[test]
    fn long_text_is_cut_between_characters() {
        assert_eq!(truncate_text("é".repeat(MAX_TEXT)).len(), MAX_TEXT);
        assert_eq!(truncate_text("short".to_owned()), "short");
    }
}
