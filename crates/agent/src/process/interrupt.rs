//! Resends interrupts that would otherwise be lost.
//!
//! A shell catches SIGINT. Its child inherits the handler between fork and exec, and the exec
//! forgets a signal that was caught there: the program keeps running, and the shell waits for it.
//! Also, a shell blocks the signal while it forks, so a child created at that moment never receives
//! it. The same happens at a terminal, where the user simply presses the keys again. The agent
//! resends the signal, but only to processes that have executed another program since or were
//! forked when the signal was sent, and that neither catch, block nor ignore it. Other processes
//! may have received it and be cleaning up.
//!
//! One case stays as at a terminal: a script whose own trap was triggered just before it forked
//! runs the trap only after that child. The child looks like one that the trap started.

use std::time::Duration;

use rustix::process::{Pid, Signal};

use crate::event_loop::alarms::{Alarm, AlarmQueue};
use crate::event_loop::handles::ProcessHandle;
use crate::process::proc;
use crate::process::table::ProcessTable;

/// The first check is after one millisecond, each further one after twice the time, this many in
/// all. The short intervals reach a program before it installs its own handler.
const MAX_CHECKS: u8 = 10;

/// The maximum number of processes checked, so that a fork bomb cannot keep the agent busy.
const MAX_MEMBERS: usize = 256;

/// The processes that were interrupted.
#[derive(Debug, Default)]
pub(crate) struct InterruptedGroup {
    leader: Option<Pid>,
    /// Each with its program name before the signal, if it existed then.
    members: Vec<(Pid, Option<String>)>,
    /// Processes in which the signal is still pending. Their new children missed it.
    forking: Vec<Pid>,
    checks: u8,
    checking: bool,
}

impl ProcessTable {
    /// Ensures that every process in the group receives the SIGINT that was just sent; `before` is
    /// the state before the signal. Processes started later, for example to clean up, are left
    /// alone.
    pub(crate) fn schedule_interrupt_resend(
        &mut self,
        number: ProcessHandle,
        before: InterruptedGroup,
        alarms: &mut AlarmQueue,
    ) {
        let Some(process) = self.get_mut(number) else { return };
        let was_checking = process.interrupted.as_ref().is_some_and(|group| group.checking);
        let interrupted = process.interrupted.insert(Box::new(before));
        interrupted.checking = true;
        if let Some(leader) = interrupted.leader {
            interrupted.record_descendants(vec![leader], None);
        }
        if !was_checking {
            schedule_check(number, 0, alarms);
        }
    }

    pub(crate) fn resend_interrupt(&mut self, number: ProcessHandle, alarms: &mut AlarmQueue) {
        let process = self.get_mut(number).filter(|process| process.ended.is_none());
        let Some(group) = process.and_then(|process| process.interrupted.as_deref_mut()) else { return };
        group.resend_to_members();
        group.checks += 1;
        group.checking = group.checks < MAX_CHECKS;
        if group.checking {
            schedule_check(number, group.checks, alarms);
        }
    }
}

fn schedule_check(process: ProcessHandle, check: u8, alarms: &mut AlarmQueue) {
    alarms.set(Duration::from_millis(1 << check), Alarm::ResendInterrupt(process));
}

impl InterruptedGroup {
    /// The members of the group before a signal is sent.
    pub(crate) fn capture_members(leader: Pid) -> Self {
        let mut all = Self { leader: Some(leader), ..Self::default() };
        all.record_descendants(vec![leader], Some(program_name));
        all.forking.clear();
        all
    }

    /// Records these processes and their descendants that are in the group. They are found from
    /// parent to child, since reading all of `/proc` takes so long that new ones would appear
    /// meanwhile. For each process the masks are read before its children, so that a child forked
    /// in between is found later.
    fn record_descendants(&mut self, these: Vec<Pid>, name: Option<fn(Pid) -> Option<String>>) {
        let mut found = these;
        let mut asked = 0;
        while let Some(pid) = found.get(asked).copied() {
            let holds = read_sigint_masks(pid).is_some_and(SigintMasks::is_undelivered);
            let children = proc::children_of(pid.as_raw_pid()).filter_map(Pid::from_raw);
            let new: Vec<Pid> = children.filter(|child| !found.contains(child)).collect();
            found.extend(new);
            found.truncate(MAX_MEMBERS);
            if holds {
                self.forking.push(pid);
            }
            asked += 1;
        }
        for pid in found {
            let known = self.members.iter().any(|(member, _)| *member == pid);
            if !known && self.is_member(pid) {
                self.members.push((pid, name.and_then(|name| name(pid))));
            }
        }
    }

    fn is_member(&self, pid: Pid) -> bool {
        let kin = proc::living_relations(pid.as_raw_pid());
        !pid.is_init() && kin.and_then(|kin| Pid::from_raw(kin.group)) == self.leader
    }

    fn resend_to_members(&mut self) {
        let forking = std::mem::take(&mut self.forking);
        self.record_descendants(forking, None);
        for (pid, former) in &self.members {
            let is_new =
                former.as_ref().is_none_or(|former| program_name(*pid).is_some_and(|name| name != *former));
            if is_new && self.is_member(*pid) && read_sigint_masks(*pid).is_some_and(SigintMasks::would_end) {
                // This may fail: the process may have ended, and in an isolated session only the
                // namespace broker may signal it.
                rustix::process::kill_process(*pid, Signal::INT).ok();
            }
        }
    }
}

/// How a process treats SIGINT.
#[derive(Clone, Copy, Debug)]
struct SigintMasks {
    pending: bool,
    blocked: bool,
    ignored: bool,
    caught: bool,
}

impl SigintMasks {
    /// Whether the signal would have ended it, so that a living process cannot have received it.
    fn would_end(self) -> bool {
        !(self.blocked || self.ignored || self.caught)
    }

    /// Whether a signal that was sent has not been delivered yet.
    fn is_undelivered(self) -> bool {
        self.pending && self.blocked
    }
}

fn read_sigint_masks(pid: Pid) -> Option<SigintMasks> {
    parse_masks(&read_status(pid)?)
}

/// The name of the program, which changes with an exec.
fn program_name(pid: Pid) -> Option<String> {
    read_status(pid)?.lines().find_map(|line| line.strip_prefix("Name:")).map(str::to_owned)
}

fn read_status(pid: Pid) -> Option<String> {
    let status = std::fs::read(format!("/proc/{}/status", pid.as_raw_pid())).ok()?;
    Some(String::from_utf8_lossy(&status).into_owned())
}

/// See proc_pid_status(5).
fn parse_masks(status: &str) -> Option<SigintMasks> {
    let bit = 1_u64 << (Signal::INT.as_raw() - 1);
    let has = |name: &str| {
        let mask = status.lines().find_map(|line| line.strip_prefix(name))?;
        Some(u64::from_str_radix(mask.trim(), 16).ok()? & bit != 0)
    };
    Some(SigintMasks {
        pending: has("SigPnd:")? || has("ShdPnd:")?,
        blocked: has("SigBlk:")?,
        ignored: has("SigIgn:")?,
        caught: has("SigCgt:")?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_process_that_would_have_died_has_missed_a_signal() {
        let status = |pending: u8, blocked: u8, ignored: u8, caught: u8| {
            let masks = [("Pnd", pending), ("Blk", blocked), ("Ign", ignored), ("Cgt", caught)];
            let lines = masks.map(|(name, mask)| format!("Sig{name}:\t{mask:016x}\n"));
            parse_masks(&format!("Name:\tx\nShdPnd:\t{pending:016x}\n{}", lines.concat()))
                .expect("all masks are in the text")
        };
        assert!(status(0, 1, 4, 1).would_end());
        for spared in [status(0, 2, 0, 0), status(0, 0, 2, 0), status(0, 0, 0, 6)] {
            assert!(!spared.would_end(), "{spared:?}");
        }
        assert!(
            status(2, 2, 0, 2).is_undelivered()
                && !status(2, 0, 0, 2).is_undelivered()
                && !status(0, 2, 0, 2).is_undelivered()
        );
        assert!(parse_masks("Name:\tx\n").is_none());
    }

    #[test]
    fn members_are_exactly_those_of_the_group() {
        use std::io::{BufRead, BufReader};
        use std::os::unix::process::CommandExt;
        use std::process::{Command, Stdio};
        // The second one has left the group when it prints.
        let script = "sleep 60 & echo $!; setsid sh -c 'echo away; exec sleep 60' & wait";
        let mut command = Command::new("sh");
        command.args(["-c", script]).process_group(0).stdout(Stdio::piped());
        let mut child = command.spawn().expect("every host has sh");
        let lines = BufReader::new(child.stdout.take().expect("it is a pipe")).lines();
        let printed: Vec<String> = lines.take(2).map_while(Result::ok).collect();
        let leader = Pid::from_child(&child);
        let found: Vec<Pid> =
            InterruptedGroup::capture_members(leader).members.into_iter().map(|(pid, _)| pid).collect();
        for pid in proc::children_of(leader.as_raw_pid()).filter_map(Pid::from_raw).chain([leader]) {
            rustix::process::kill_process(pid, Signal::KILL).ok();
        }
        child.wait().expect("it was killed");
        let inside = printed.iter().find_map(|line| line.parse().ok()).and_then(Pid::from_raw);
        assert_eq!(found, [leader, inside.expect("it prints a pid")]);
        assert!(InterruptedGroup::capture_members(leader).members.is_empty());
    }
}
