//! Interrupts that would get lost.
//!
//! A shell catches SIGINT. So does its child between fork and exec, and forgets with the exec
//! what it has caught: the program runs on, and the shell waits for it. The same happens at a
//! terminal, where somebody presses the keys once more. Here it is done for them: whoever
//! neither catches, blocks nor ignores the signal and is still alive cannot have had it.

use std::time::Duration;

use rustix::process::{Pid, Signal};

use crate::agent::{Agent, Alarm};
use crate::proc;

/// The first look is after a millisecond, each next one after twice the time, this many in all.
/// A program that is about to catch the signal itself is met before it does.
const LOOKS: u8 = 10;

impl Agent {
    /// Sees to it that nobody in a process's group misses the SIGINT it was just sent.
    pub(crate) fn insist(&mut self, process: u64) {
        self.look_later(process, 0);
    }

    fn look_later(&mut self, process: u64, look: u8) {
        if look < LOOKS {
            self.set_alarm(Duration::from_millis(1 << look), Alarm::Insist(process, look));
        }
    }

    pub(crate) fn interrupt_again(&mut self, number: u64, look: u8) {
        let process = self.processes.get(&number).filter(|process| process.ended.is_none());
        let body = process.and_then(|process| self.bodies.get(&process.body?));
        let Some(leader) = body.and_then(|body| body.pid) else { return };
        for pid in members(leader).filter(|pid| has_missed_it(*pid)) {
            // Some end by themselves, and those in a nest are another process's to signal.
            rustix::process::kill_process(pid, Signal::INT).ok();
        }
        self.look_later(number, look + 1);
    }
}

/// The processes of a group that have not ended.
fn members(leader: Pid) -> impl Iterator<Item = Pid> {
    let group = leader.as_raw_pid();
    let belongs = move |pid: &i32| proc::living_kin(*pid).is_some_and(|kin| kin.group == group);
    proc::pids().filter(belongs).filter_map(Pid::from_raw).filter(|pid| !pid.is_init())
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
        use std::os::unix::process::CommandExt;
        let mut command = std::process::Command::new("sleep");
        let mut child = command.arg("60").process_group(0).spawn().expect("every host has it");
        let pid = Pid::from_child(&child);
        let found: Vec<_> = members(pid).collect();
        child.kill().and_then(|()| child.wait()).expect("it can be ended");
        assert_eq!(found, [pid]);
        assert_eq!(members(pid).count(), 0);
    }
}
