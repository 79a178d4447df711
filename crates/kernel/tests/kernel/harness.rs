//! A kernel on pipes, as the agent runs it.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::{Value, json};

/// Longer than any step takes on a busy machine.
const STEP_TIMEOUT: Duration = Duration::from_secs(60);

/// Whether a program is installed; if not, the test is reported as skipped.
pub(crate) fn has_program(program: &str) -> bool {
    let found = Command::new("sh").args(["-c", "command -v \"$0\"", program]).stdout(Stdio::null()).status();
    let found = found.is_ok_and(|status| status.success());
    if !found {
        testkit::skip_test(&format!("`{program}` is not installed"));
    }
    found
}

pub(crate) struct KernelProcess {
    process: Child,
    orders: Option<ChildStdin>,
    reports: Receiver<String>,
    output: Receiver<Vec<u8>>,
    printed: Vec<u8>,
    runs: usize,
}

/// All reports about one run.
#[derive(Debug, Default)]
pub(crate) struct RunReports {
    pub count: Option<u64>,
    pub results: Vec<Value>,
    pub displays: Vec<Value>,
    pub errors: Vec<Value>,
}

impl RunReports {
    /// The plain text of the only result.
    pub(crate) fn text(&self) -> &str {
        assert!(self.errors.is_empty(), "{self:?}");
        assert_eq!(self.results.len(), 1, "{self:?}");
        self.results[0]["text/plain"].as_str().unwrap()
    }

    pub(crate) fn error(&self) -> (&str, &str) {
        assert_eq!(self.errors.len(), 1, "{self:?}");
        (self.errors[0]["ename"].as_str().unwrap(), self.errors[0]["evalue"].as_str().unwrap())
    }

    pub(crate) fn traceback(&self) -> String {
        let lines = self.errors[0]["traceback"].as_array().unwrap();
        lines.iter().map(|line| line.as_str().unwrap()).collect::<Vec<_>>().join("\n")
    }
}

impl KernelProcess {
    /// Starts a kernel without waiting for it.
    pub(crate) fn start(words: &[&str], environment: &[(&str, &str)]) -> Self {
        let script = r#"exec "$0" "$@" 3<&0 4>&1 0</dev/null 1>&2"#;
        let mut command = Command::new("/bin/sh");
        command.args(["-c", script, env!("CARGO_BIN_EXE_bare-kernel")]).args(words);
        command.envs(environment.iter().copied()).process_group(0);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut process = command.spawn().unwrap();
        let orders = process.stdin.take();
        let (report, reports) = channel();
        let text = BufReader::new(process.stdout.take().unwrap());
        std::thread::spawn(move || text.lines().map_while(Result::ok).try_for_each(|line| report.send(line)));
        let (print, output) = channel();
        let mut printed = process.stderr.take().unwrap();
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(length @ 1..) = printed.read(&mut buffer) {
                if print.send(buffer[..length].to_vec()).is_err() {
                    return;
                }
            }
        });
        Self { process, orders, reports, output, printed: Vec::new(), runs: 0 }
    }

    /// Starts a kernel and waits until it can take orders.
    pub(crate) fn start_ready(words: &[&str], environment: &[(&str, &str)]) -> Self {
        let kernel = Self::start(words, environment);
        assert_eq!(kernel.next_report().as_deref(), Some("ready"));
        kernel
    }

    pub(crate) fn next_report(&self) -> Option<String> {
        self.reports.recv_timeout(STEP_TIMEOUT).ok()
    }

    pub(crate) fn send_order(&mut self, line: &str) {
        let orders = self.orders.as_mut().unwrap();
        orders.write_all(line.as_bytes()).unwrap();
    }

    /// Begins a run and returns its key.
    pub(crate) fn begin_run(&mut self, code: &str) -> String {
        self.runs += 1;
        let key = format!("k{}", self.runs);
        self.send_order(&format!("run {key} {}\n", json!({ "code": code })));
        key
    }

    /// Waits for the end of a run and returns its reports.
    pub(crate) fn finish_run(&mut self, key: &str) -> RunReports {
        let mut received = RunReports::default();
        loop {
            let line =
                self.next_report().unwrap_or_else(|| panic!("no end of {key}: {}", self.printed_text()));
            if line == format!("done {key}") {
                return received;
            }
            let line = line.strip_prefix(&format!("tell {key} ")).unwrap_or_else(|| panic!("{line}"));
            let tell: Value = serde_json::from_str(line).unwrap();
            let (kind, value) = tell.as_object().unwrap().iter().next().unwrap();
            match kind.as_str() {
                "count" => received.count = value.as_u64(),
                "result" => received.results.push(value.clone()),
                "display" => received.displays.push(value.clone()),
                "error" => received.errors.push(value.clone()),
                other => panic!("{other}"),
            }
        }
    }

    pub(crate) fn run(&mut self, code: &str) -> RunReports {
        let key = self.begin_run(code);
        self.finish_run(&key)
    }

    /// Waits until this text has been printed.
    pub(crate) fn wait_for(&mut self, text: &str) {
        while !self.printed_text().contains(text) {
            let piece = self.output.recv_timeout(STEP_TIMEOUT);
            let piece = piece.unwrap_or_else(|_| {
                panic!(
                    "no {text:?} in {:?}, {:?}",
                    self.printed_text(),
                    self.reports.try_iter().collect::<Vec<_>>()
                )
            });
            self.printed.extend(piece);
        }
    }

    pub(crate) fn printed_text(&mut self) -> String {
        self.printed.extend(self.output.try_iter().flatten());
        String::from_utf8_lossy(&self.printed).into_owned()
    }

    /// Discards the output so far, so that [`Self::wait_for`] waits for new output.
    pub(crate) fn discard_output(&mut self) {
        self.printed_text();
        self.printed.clear();
    }

    pub(crate) fn interrupt(&self) {
        kill_process_group(self.process_group(), Signal::INT).unwrap();
    }

    fn process_group(&self) -> Pid {
        Pid::from_child(&self.process)
    }

    /// Closes the pipe for orders.
    pub(crate) fn close_orders(&mut self) {
        self.orders = None;
    }

    /// Waits for the end of the process.
    pub(crate) fn wait_for_exit(&mut self) -> ExitStatus {
        // Its pipes close when the process and all its children have ended.
        let rest: VecDeque<String> = self.reports.iter().collect();
        assert!(rest.iter().all(|line| line != "ready"), "{rest:?}");
        self.process.wait().unwrap()
    }
}

impl Drop for KernelProcess {
    fn drop(&mut self) {
        // Most kernels have ended already; the others are killed with their group.
        kill_process_group(self.process_group(), Signal::KILL).unwrap_or_default();
        self.process.wait().map(drop).unwrap_or_default();
    }
}
