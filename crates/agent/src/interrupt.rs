//! Interrupts that would get lost.
//!
//! A shell catches SIGINT. So does its child between fork and exec, and forgets with the exec
//! what it has caught: the program runs on, and the shell waits for it. The same happens at a
//! terminal, where somebody presses the keys once more. Here it is done for them: whoever was
//! there, neither catches, blocks nor ignores the signal and is still alive cannot have had it.

use std::time::Duration;

use rustix::process::{Pid, Signal};

use crate::agent::{Agent, Alarm};
use crate::proc;

/// The first look is after a millisecond, each next one after twice the time, this many in all.
/// A program that is about to catch the signal itself is met before it does.
const LOOKS: u8 = 10;

/// How many processes are looked after, so that a fork bomb cannot keep us busy.
const MOST_MEMBERS: usize = 256;

impl Agent {
    /// Sees to it that nobody in a process's group misses the SIGINT it was just sent. Whoever
    /// comes later, as to clean up, is left alone.
    pub(crate) fn insist(&mut self, number: u64, leader: Pid) {
        if let Some(process) = self.processes.get_mut(&number) {
            process.interrupted = members(leader);
            self.look_later(number, 0);
        }
    }

    fn look_later(&mut self, process: u64, look: u8) {
        if look < LOOKS {
            self.set_alarm(Duration::from_millis(1 << look), Alarm::Insist(process, look));
        }
    }

    pub(crate) fn interrupt_again(&mut self, number: u64, look: u8) {
        let Some(process) = self.processes.get(&number).filter(|process| process.ended.is_none()) else {
            return;
        };
        for pid in process.interrupted.iter().copied().filter(|pid| has_missed_it(*pid)) {
            // Some end by themselves, and those in a nest are another process's to signal.
            rustix::process::kill_process(pid, Signal::INT).ok();
        }
        self.look_later(number, look + 1);
    }
}

/// Those of a group that its leader has started, and itself. They are found from parent to child,
/// since by the time all of `/proc` was read there would be new ones.
fn members(leader: Pid) -> Vec<Pid> {
    let mut found = vec![leader.as_raw_pid()];
    let mut asked = 0;
    while asked < found.len() {
        let new: Vec<i32> = proc::children(found[asked]).filter(|pid| !found.contains(pid)).collect();
        found.extend(new);
        found.truncate(MOST_MEMBERS);
        asked += 1;
    }
    let group = leader.as_raw_pid();
    found.retain(|pid| *pid > 1 && proc::living_kin(*pid).is_some_and(|kin| kin.group == group));
    found.into_iter().filter_map(Pid::from_raw).collect()
}

/// Whether SIGINT would end the process, so that one that lives has not had it.
fn has_missed_it(pid: Pid) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{}/status", pid.as_raw_pid()));
    status.is_ok_and(|status| would_end(&status))
}

/// Reads the masks of proc_pid_status(5).
fn would_end(status: &str) -> bool {
    let bit = 1_u64 << (Signal::INT.as_raw() - 1);
    let spared = |name: &str| {
        let mask = status.lines().find_map(|line| line.strip_prefix(name));
        mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).is_none_or(|mask| mask & bit != 0)
    };
    !["SigBlk:", "SigIgn:", "SigCgt:"].into_iter().any(spared)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_who_would_have_died_has_missed_a_signal() {
        let status = |blocked: u8, ignored: u8, caught: u8| {
            format!("Name:\tx\nSigBlk:\t{blocked:016x}\nSigIgn:\t{ignored:016x}\nSigCgt:\t{caught:016x}\n")
        };
        assert!(would_end(&status(1, 4, 1)));
        for spared in [status(2, 0, 0), status(0, 2, 0), status(0, 0, 6), String::new()] {
            assert!(!would_end(&spared), "{spared}");
        }
    }

    #[test]
    fn a_group_has_its_members_and_no_others() {
        use std::io::{BufRead, BufReader};
        use std::os::unix::process::CommandExt;
        use std::process::{Command, Stdio};
        // The second has left the group when it says so.
        let script = "sleep 60 & echo $!; setsid sh -c 'echo away; exec sleep 60' & wait";
        let mut command = Command::new("sh");
        command.args(["-c", script]).process_group(0).stdout(Stdio::piped());
        let mut child = command.spawn().expect("every host has it");
        let lines = BufReader::new(child.stdout.take().expect("it is a pipe")).lines();
        let printed: Vec<String> = lines.take(2).map_while(Result::ok).collect();
        let leader = Pid::from_child(&child);
        let found = members(leader);
        for pid in proc::children(leader.as_raw_pid()).filter_map(Pid::from_raw).chain([leader]) {
            rustix::process::kill_process(pid, Signal::KILL).ok();
        }
        child.wait().expect("it was killed");
        let inside = printed.iter().find_map(|line| line.parse().ok()).and_then(Pid::from_raw);
        assert_eq!(found, [leader, inside.expect("it prints a pid")]);
        assert_eq!(members(leader), []);
    }
}
