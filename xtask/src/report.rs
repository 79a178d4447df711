//! The report of a run of chores: each stage with its time, and all skips at the very end, because a skip
//! that scrolls away is taken for a pass.

use std::time::{Duration, Instant};

use crate::side_stage::SideStage;

/// The results so far.
#[derive(Debug, Default)]
pub(crate) struct TestReport {
    stages: Vec<StageResult>,
    skipped: Vec<String>,
    /// The panics of failed tests, a few lines each.
    panics: Vec<String>,
    /// How many more lines belong to the newest panic.
    panic_lines: usize,
    /// How long stages that ran beside others were waited for.
    waited: Duration,
}

/// A panic is repeated with so many lines after its first: the message, but not the stack.
const MAX_PANIC_LINES: usize = 6;

#[derive(Debug)]
struct StageResult {
    name: &'static str,
    took: Duration,
    passed: bool,
    /// Whether it ran beside other stages, so that its time is not added to theirs.
    beside: bool,
}

impl StageResult {
    /// A line of the table of stages: name, verdict, time.
    fn table_row(&self) -> String {
        let verdict = if self.passed { "passed" } else { "FAILED" };
        let beside = if self.beside { ", beside others" } else { "" };
        format!("{:<16} {verdict} {}{beside}", self.name, format_duration(self.took))
    }
}

/// Minutes and seconds, right-aligned, so that the longest stage is seen in a column.
fn format_duration(duration: Duration) -> String {
    let tenths = duration.as_millis() / 100;
    format!("{:>3} min {:>2}.{} s", tenths / 600, tenths / 10 % 60, tenths % 10)
}

impl TestReport {
    /// Runs a stage. A failure is printed at once and counted; later stages still run, so that one run
    /// shows all problems.
    pub(crate) fn run_stage(
        &mut self,
        name: &'static str,
        stage: impl FnOnce(&mut Self) -> anyhow::Result<()>,
    ) -> bool {
        say(format_args!("== {name}"));
        let begun = Instant::now();
        let outcome = stage(self);
        self.add_stage(name, begun.elapsed(), outcome, false)
    }

    /// Waits for a stage that ran beside others, prints its output and counts it like any other.
    pub(crate) fn join_stage(&mut self, stage: SideStage) -> bool {
        let (name, begun) = (stage.name, Instant::now());
        let end = stage.wait();
        self.waited += begun.elapsed();
        say(format_args!("== {name}\n{}", end.output.trim_end()));
        end.output.lines().for_each(|line| self.read_test_line(line));
        self.add_stage(name, end.took(), end.outcome, true)
    }

    fn add_stage(
        &mut self,
        name: &'static str,
        took: Duration,
        outcome: anyhow::Result<()>,
        beside: bool,
    ) -> bool {
        if let Err(error) = &outcome {
            say(format_args!("{name} FAILED: {error:#}"));
        }
        let result = StageResult { name, took, passed: outcome.is_ok(), beside };
        // Also here, for a run that is stopped before its summary.
        say(format_args!("== {}", result.table_row()));
        self.stages.push(result);
        outcome.is_ok()
    }

    pub(crate) fn record_skip(&mut self, what: &str, why: impl std::fmt::Display) {
        self.skipped.push(format!("{what}: {why}"));
    }

    /// As [`TestReport::record_skip`], for a line that already has the subject and the reason.
    pub(crate) fn record_skip_line(&mut self, what_and_why: &str) {
        self.skipped.push(what_and_why.to_owned());
    }

    /// Prints the skips as tests do, for the process that reads the output of this one.
    pub(crate) fn print_skips(&self) {
        for skipped in &self.skipped {
            say(format_args!("SKIPPED {skipped}"));
        }
    }

    /// Looks for a skip or a panic in a line that a test printed. Panics are repeated at the end,
    /// because a run that is shown by its last lines would hide why it failed.
    pub(crate) fn read_test_line(&mut self, line: &str) {
        // Tests print this through `testkit`.
        if let Some(skipped) = line.strip_prefix("SKIPPED ") {
            self.record_skip_line(skipped);
        }
        if line.starts_with("thread '") && line.contains(" panicked at ") {
            self.panics.push(line.to_owned());
            self.panic_lines = MAX_PANIC_LINES;
        } else if line.starts_with("stack backtrace:") || line.starts_with("note: ") || line.is_empty() {
            self.panic_lines = 0;
        } else if let (1.., Some(panic)) = (self.panic_lines, self.panics.last_mut()) {
            self.panic_lines -= 1;
            panic.push_str(&format!("\n  {line}"));
        }
    }

    /// Prints times, failures and skips, and returns whether everything that ran passed.
    pub(crate) fn finish(&self) -> bool {
        say(format_args!("\n{}", self.summary()));
        self.stages.iter().all(|stage| stage.passed)
    }

    fn summary(&self) -> String {
        let mut text = String::new();
        for stage in &self.stages {
            text.push_str(&format!("{}\n", stage.table_row()));
        }
        let in_turn = self.stages.iter().filter(|stage| !stage.beside).map(|stage| stage.took);
        let total = in_turn.sum::<Duration>() + self.waited;
        text.push_str(&format!("{:<16} {:<6} {}\n", "total", "", format_duration(total)));
        let failed = self.stages.iter().filter(|stage| !stage.passed).count();
        // Tests that expect a panic print one too.
        for panic in self.panics.iter().filter(|_| failed > 0) {
            text.push_str(&format!("{panic}\n"));
        }
        for skipped in &self.skipped {
            text.push_str(&format!("SKIPPED {skipped}\n"));
        }
        text.push_str(&match (failed, self.skipped.len()) {
            (0, 0) => "everything passed".to_owned(),
            (0, skipped) => format!("everything that ran passed, {skipped} skipped"),
            (failed, _) => format!("{failed} of {} stages FAILED", self.stages.len()),
        });
        text
    }
}

/// Writes a line to standard error. If that is closed, there is no reader left.
#[cfg(not(test))]
pub(crate) fn say(text: std::fmt::Arguments<'_>) {
    use std::io::Write;
    writeln!(std::io::stderr().lock(), "{text}").ok();
}

/// In our own tests the harness captures the line: `cargo xtask test` reads the output of all tests, and
/// must not take this line for a report of its own.
#[cfg(test)]
#[expect(clippy::print_stderr, reason = "the harness captures nothing else")]
pub(crate) fn say(text: std::fmt::Arguments<'_>) {
    eprintln!("{text}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn skips_are_printed_last_and_failures_decide() {
        let mut report = TestReport::default();
        report.run_stage("first", |report| {
            report.record_skip_line("a_test: it needs root");
            report.record_skip("nginx", "not installed");
            Ok(())
        });
        assert!(report.finish());
        let summary = report.summary();
        let last: Vec<&str> = summary.lines().rev().take(3).collect();
        let expected = [
            "everything that ran passed, 2 skipped",
            "SKIPPED nginx: not installed",
            "SKIPPED a_test: it needs root",
        ];
        assert_eq!(last, expected);

        report.run_stage("second", |_| anyhow::bail!("broken"));
        assert!(!report.finish());
        assert!(report.summary().ends_with("1 of 2 stages FAILED"));
    }

    #[test]
    fn stages_are_listed_as_run_with_their_times() {
        let stage = |name, millis, passed, beside| {
            let took = Duration::from_millis(millis);
            StageResult { name, took, passed, beside }
        };
        let stages = vec![
            stage("lints", 62_349, true, false),
            stage("cgroup v2", 90_000, true, true),
            stage("release archive", 3_621_000, false, false),
        ];
        let report = TestReport { stages, waited: Duration::from_secs(10), ..TestReport::default() };
        let expected = "\
lints            passed   1 min  2.3 s
cgroup v2        passed   1 min 30.0 s, beside others
release archive  FAILED  60 min 21.0 s
total                    61 min 33.3 s
1 of 3 stages FAILED";
        assert_eq!(report.summary(), expected);
    }

    #[test]
    fn panics_of_failed_tests_are_repeated_without_their_stacks() {
        let mut report = TestReport::default();
        let output = "test a ... FAILED\n---- a stdout ----\n\nthread 'a' (7) panicked at src/a.rs:1:2:\n\
            left behind: [\n    1,\n]\nstack backtrace:\n   0: rust_begin_unwind\n";
        output.lines().for_each(|line| report.read_test_line(line));
        report.run_stage("tests", |_| anyhow::bail!("failed"));
        let expected = "thread 'a' (7) panicked at src/a.rs:1:2:\n  left behind: [\n      1,\n  ]\n1 of 1";
        assert!(report.summary().contains(expected), "{}", report.summary());
    }
}
