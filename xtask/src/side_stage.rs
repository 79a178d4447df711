//! A stage that runs beside others: a chore in a process of its own.
//!
//! Its output is kept and printed in one piece, so that no lines of two stages mix. It has a lower
//! priority, because the stage in front of it may contain tests that measure time.

use std::fs::File;
use std::io::{Read, Seek};
use std::process::Command;
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

/// How much lower the priority is, as nice(1) counts.
const PRIORITY_STEP: &str = "5";

/// A chore that is running, or that waits for another one.
pub(crate) struct SideStage {
    pub(crate) name: &'static str,
    running: JoinHandle<SideStageEnd>,
    ended: Arc<OnceLock<()>>,
}

/// A chore that has ended.
pub(crate) struct SideStageEnd {
    begun: Instant,
    ended: Instant,
    pub(crate) output: String,
    pub(crate) outcome: Result<()>,
}

impl SideStage {
    /// Starts `cargo xtask` with these words.
    pub(crate) fn start(name: &'static str, words: &[&str]) -> Self {
        Self::start_when(name, words, || {})
    }

    /// As [`SideStage::start`], once the other stage has ended, whether it passed or not.
    pub(crate) fn start_after(other: &Self, name: &'static str, words: &[&str]) -> Self {
        let other = Arc::clone(&other.ended);
        Self::start_when(name, words, move || _ = other.wait())
    }

    fn start_when(name: &'static str, words: &[&str], wait: impl FnOnce() + Send + 'static) -> Self {
        // The file may have been replaced by a newer build, so this very program is started again.
        let own = format!("/proc/{}/exe", std::process::id());
        let mut command = Command::new("nice");
        command.args(["-n", PRIORITY_STEP, &own]).args(words);
        let ended = Arc::new(OnceLock::new());
        let end = Arc::clone(&ended);
        let running = thread::spawn(move || {
            wait();
            let result = run_to_end(command);
            end.get_or_init(|| ());
            result
        });
        Self { name, running, ended }
    }

    /// Waits until it has ended.
    pub(crate) fn wait(self) -> SideStageEnd {
        self.running.join().expect("it returns its errors")
    }
}

impl SideStageEnd {
    pub(crate) fn took(&self) -> Duration {
        self.ended - self.begun
    }
}

fn run_to_end(mut command: Command) -> SideStageEnd {
    let begun = Instant::now();
    let mut output = String::new();
    let outcome = run_captured(&mut command, &mut output);
    SideStageEnd { begun, ended: Instant::now(), output, outcome }
}

/// The output goes to a file, since a process that was left behind would keep a pipe open for ever.
fn run_captured(command: &mut Command, output: &mut String) -> Result<()> {
    let mut file: File = tempfile::tempfile().context("could not make a file for the output")?;
    let status = command.stdout(file.try_clone()?).stderr(file.try_clone()?).status();
    let status = status.context("could not start a stage beside others")?;
    let mut bytes = Vec::new();
    file.rewind()?;
    file.read_to_end(&mut bytes)?;
    *output = String::from_utf8_lossy(&bytes).into_owned();
    if status.success() { Ok(()) } else { bail!("it ended with {status}; its output is above") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_of_both_streams_is_kept_in_order_and_failure_is_reported() {
        let mut shell = Command::new("sh");
        shell.args(["-c", "echo one; echo two >&2; echo three; exit 3"]);
        let end = run_to_end(shell);
        assert_eq!(end.output, "one\ntwo\nthree\n");
        assert!(end.outcome.is_err());
    }

    #[test]
    fn stage_waits_for_the_one_before_it() {
        let first = SideStage::start("first", &["--list"]);
        let second = SideStage::start_after(&first, "second", &["--list"]);
        let (first, second) = (first.wait(), second.wait());
        assert!(second.begun >= first.ended, "the second stage began before the end of the first");
    }

    #[test]
    fn own_program_is_started_again() {
        let end = SideStage::start("list", &["--list"]).wait();
        end.outcome.expect("the test harness lists its tests");
        assert!(end.output.contains("own_program_is_started_again: test"), "{}", end.output);
    }
}
