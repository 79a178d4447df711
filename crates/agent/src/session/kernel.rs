//! Kernels: programs that keep the state of one language between runs.
//!
//! ```text
//! agent ── fd 3, commands ►  run KEY {"code": "…"}\n          one at a time
//! agent ◄─ fd 4, reports ──  ready\n                          once, when it can take commands
//!                            tell KEY {…}\n                   any number of times
//!                            show KEY {…}\n                   the same, acknowledged in order:
//!              commands ──►  heard KEY\n
//!                            done KEY\n                       the run is over
//! ```
//! Output of a kernel and its children goes through their standard output and error, as with any
//! command. Its reports are passed on as they arrive, without being parsed or stored here: a line
//! may be long, and its writer is not trusted. A kernel that closes its report pipe during a run is
//! useless and is killed, so that no run waits for a report forever.

use std::time::Duration;

use linux::spawn::{ProcessExit, ProcessUsage};
use serde_json::json;
use wire::process::{KernelProgram, OpenKernel};
use wire::{AgentReply, Fault, FaultKind, FaultOperation, StreamTag};

use crate::event_loop::agent::Agent;
use crate::event_loop::alarms::Alarm;
use crate::event_loop::handles::{ConnectionId, SessionHandle};
use crate::fault;
use crate::session::{Session, SessionKind};

/// The longest line that is passed on; a longer one is truncated.
pub(crate) const MAX_REPORT_BYTES: usize = 8 << 20;

/// The longest beginning of a report: a keyword and a key.
const MAX_REPORT_HEAD_BYTES: usize = 80;

/// How long a kernel may take until it is ready.
const READY_TIMEOUT: Duration = Duration::from_secs(60);

/// How often the output pipes are drained for reports in one turn.
pub(crate) const MAX_DRAINS_PER_TURN: u32 = 16;

/// The exit code by which a program reports a missing dependency, as shells do.
const NOT_FOUND_EXIT_CODE: i32 = 127;

/// How much is kept of a kernel's output before it is ready; it is the reason if it never is.
const MAX_STARTUP_OUTPUT_BYTES: usize = 2048;

/// The state of parsing a kernel's reports.
#[derive(Debug, Default)]
pub(crate) struct KernelReportParser {
    part: ReportPosition,
    head: Vec<u8>,
    /// The current line must be acknowledged.
    needs_ack: bool,
    ready: bool,
    startup_output: Vec<u8>,
}

/// The position in a line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum ReportPosition {
    #[default]
    Head,
    /// In the content of a line, of which this many bytes were passed on.
    Content(usize),
    Skipped,
}

/// The next item in a kernel's reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KernelReport<'a> {
    Ready,
    /// The content of a line is about to follow.
    Begin,
    /// A piece of the content; its last byte is the end of the line.
    Content(&'a [u8]),
    Done,
}

impl KernelReportParser {
    /// Parses the next item and removes it from `bytes`. Reports with the key of another run and
    /// malformed lines are skipped.
    pub(crate) fn next_report<'a>(
        &mut self,
        bytes: &mut &'a [u8],
        key: Option<&str>,
    ) -> Option<KernelReport<'a>> {
        while !bytes.is_empty() {
            let end = memchr::memchr(b'\n', bytes).map(|index| index + 1);
            match self.part {
                ReportPosition::Skipped => {
                    take_front(bytes, end);
                    self.part = if end.is_some() { ReportPosition::Head } else { ReportPosition::Skipped };
                }
                ReportPosition::Content(passed) => {
                    return Some(self.parse_content(passed, take_front(bytes, end), end.is_some()));
                }
                ReportPosition::Head => {
                    let byte = take_front(bytes, Some(1))[0];
                    if let Some(heard) = self.parse_head_byte(byte, key) {
                        return Some(heard);
                    }
                }
            }
        }
        None
    }

    fn parse_content<'a>(&mut self, passed: usize, piece: &'a [u8], ends: bool) -> KernelReport<'a> {
        self.part = if ends { ReportPosition::Head } else { ReportPosition::Content(passed + piece.len()) };
        let room = MAX_REPORT_BYTES - passed;
        if piece.len() < room || (ends && piece.len() == room) {
            return KernelReport::Content(piece);
        }
        // The line is truncated here, because the next piece might exceed the limit.
        if !ends {
            self.part = ReportPosition::Skipped;
        }
        KernelReport::Content(b"\n")
    }

    fn parse_head_byte(&mut self, byte: u8, key: Option<&str>) -> Option<KernelReport<'static>> {
        if byte != b'\n' {
            self.head.push(byte);
            if self.head.len() > MAX_REPORT_HEAD_BYTES {
                self.head.clear();
                self.part = ReportPosition::Skipped;
                return None;
            }
            let content = self.head.strip_prefix(b"tell ").or_else(|| self.head.strip_prefix(b"show "));
            if byte != b' ' || content.is_none_or(<[u8]>::is_empty) {
                return None;
            }
        }
        let head = std::mem::take(&mut self.head);
        let names = |word: &[u8]| {
            let named = head.strip_prefix(word).map(<[u8]>::trim_ascii);
            named.is_some_and(|named| key.is_some_and(|key| key.as_bytes() == named))
        };
        if byte == b' ' {
            self.needs_ack = names(b"show ");
            self.part = if self.needs_ack || names(b"tell ") {
                ReportPosition::Content(0)
            } else {
                ReportPosition::Skipped
            };
            return (self.part != ReportPosition::Skipped).then_some(KernelReport::Begin);
        }
        match head.as_slice() {
            b"ready" => Some(KernelReport::Ready),
            _ if names(b"done ") => Some(KernelReport::Done),
            _ => None,
        }
    }

    /// Keeps the end of what was printed before the kernel was ready.
    pub(crate) fn keep_startup_output(&mut self, bytes: &[u8]) {
        if self.ready {
            return;
        }
        self.startup_output.extend_from_slice(bytes);
        let surplus = self.startup_output.len().saturating_sub(MAX_STARTUP_OUTPUT_BYTES);
        self.startup_output.drain(..surplus);
    }

    /// The reason why the kernel never became ready, as far as it is known.
    pub(crate) fn startup_fault(&self, program: &str, end: ProcessExit) -> Fault {
        let words = String::from_utf8_lossy(&self.startup_output);
        let how = match end {
            ProcessExit::Code(code) => format!("{program} ended with exit code {code}"),
            ProcessExit::Signal(signal) => format!("{program} was ended by signal {signal}"),
        };
        let (kind, subject) = match words.trim() {
            "" => (FaultKind::Other, how),
            // The kernel itself reports what is missing, so its message is enough.
            words if end == ProcessExit::Code(NOT_FOUND_EXIT_CODE) => (FaultKind::NotFound, words.to_owned()),
            words => (FaultKind::Other, format!("{how}: {words}")),
        };
        fault::from_kind(kind, FaultOperation::StartKernel, &subject)
    }
}

/// Formats the command for one run.
pub(crate) fn format_run_command(text: &str, key: &str) -> Vec<u8> {
    format!("run {key} {}\n", json!({ "code": text })).into_bytes()
}

/// A short word without blanks; the agent only repeats it in statuses.
fn is_language_name(name: &str) -> bool {
    (1..=64).contains(&name.len()) && name.bytes().all(|byte| byte.is_ascii_graphic())
}

/// Removes this many bytes from the front, or all of them.
fn take_front<'a>(bytes: &mut &'a [u8], count: Option<usize>) -> &'a [u8] {
    let (front, rest) = bytes.split_at(count.unwrap_or(bytes.len()));
    *bytes = rest;
    front
}

impl Agent {
    /// Opens a session with a kernel; the reply comes when the kernel is ready.
    pub(crate) fn open_kernel(&mut self, connection: ConnectionId, request: OpenKernel) -> Result<(), Fault> {
        let OpenKernel { open, kernel } = request;
        if !is_language_name(&kernel.language) {
            return Err(fault::from_kind(FaultKind::Invalid, "open kernel", "the name of the language"));
        }
        if open.terminal.is_some() && kernel.program != KernelProgram::Shell {
            return Err(fault::from_kind(FaultKind::Invalid, "open kernel", "a terminal"));
        }
        let number = self.add_session(Some(connection), open, SessionKind::Kernel(kernel))?;
        self.events.alarms.set(READY_TIMEOUT, Alarm::Ready(number));
        Ok(())
    }

    /// A kernel has not become ready in time.
    pub(crate) fn kernel_ready_timed_out(&mut self, number: SessionHandle) {
        let session = self.sessions.get_mut(number).filter(|session| !session.openers.is_empty());
        if let Some((_, parser)) = session.and_then(Session::report_parser) {
            parser.keep_startup_output(b"\nthe kernel was not ready in time");
            self.sessions.kill_shell(number, &self.children, &self.context);
        }
    }

    /// Handles a kernel's reports. `drains` counts how often its output pipes were drained in this
    /// turn.
    pub(crate) fn handle_kernel_reports(
        &mut self,
        number: SessionHandle,
        mut bytes: &[u8],
        drains: &mut u32,
    ) {
        loop {
            let Some(session) = self.sessions.get_mut(number) else { return };
            let run = session.current.as_ref().map(|run| (run.process, run.key.clone()));
            let Some((running, parser)) = session.report_parser() else { return };
            let heard = parser.next_report(&mut bytes, run.as_ref().map(|(_, key)| key.as_str()));
            match (heard, run) {
                (None, _) => return,
                (Some(KernelReport::Ready), _) => {
                    parser.ready = true;
                    parser.startup_output = Vec::new();
                    for opener in std::mem::take(&mut session.openers) {
                        self.connections.send_final_reply(opener, &AgentReply::Ok);
                    }
                }
                // Output printed before a report precedes it, unless there are so many reports that
                // draining for each of them would starve the other connections.
                (Some(KernelReport::Begin), _) if *drains >= MAX_DRAINS_PER_TURN => {}
                (Some(KernelReport::Begin), _) => {
                    *drains += 1;
                    self.drain_outputs(running);
                }
                (Some(KernelReport::Content(piece)), Some((process, key))) => {
                    let shown = piece.ends_with(b"\n") && std::mem::take(&mut parser.needs_ack);
                    self.append_output(process, StreamTag::KernelEvent, piece);
                    if shown {
                        self.sessions.send_to_kernel(number, format!("heard {key}\n").as_bytes());
                    }
                }
                // All output of a run precedes its end.
                (Some(KernelReport::Done), Some(_)) => {
                    *drains += 1;
                    self.drain_outputs(running);
                    self.finish_run(number, ProcessExit::Code(0), ProcessUsage::default());
                    self.begin_next_run(number);
                }
                // The run has ended while a report about it arrived.
                (Some(KernelReport::Content(_) | KernelReport::Done), None) => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parse_all(parser: &mut KernelReportParser, mut bytes: &[u8], key: &str) -> Vec<String> {
        let mut heard = Vec::new();
        while let Some(next) = parser.next_report(&mut bytes, Some(key)) {
            match next {
                KernelReport::Ready => heard.push("ready".to_owned()),
                KernelReport::Begin => heard.push(String::new()),
                KernelReport::Content(piece) => heard
                    .last_mut()
                    .expect("a line has begun")
                    .push_str(std::str::from_utf8(piece).expect("the tests write text")),
                KernelReport::Done => heard.push("done".to_owned()),
            }
        }
        heard
    }

    fn check(text: &str, expected: &[&str]) {
        assert_eq!(parse_all(&mut KernelReportParser::default(), text.as_bytes(), "k1"), expected, "{text}");
    }

    #[test]
    fn only_reports_with_the_key_of_the_run_count() {
        check("ready\ntell k1 {\"count\":1}\ndone k1\n", &["ready", "{\"count\":1}\n", "done"]);
        check("tell k2 {}\ndone k2\ndone k1\n", &["done"]);
        check("tell k1\ndone\n\n  done k1\nready?\n", &[]);
        check("tell  k1 {}\ndone  k1\n", &["done"]);
        check("show k1 {}\nshow k2 {}\nshow \n", &["{}\n"]);
        check(&format!("{}\nready\n", "x".repeat(1000)), &["ready"]);
        check("done k1", &[]);
    }

    #[test]
    fn overlong_report_is_truncated() {
        let mut parser = KernelReportParser::default();
        let long = "y".repeat(MAX_REPORT_BYTES + 5);
        let heard = parse_all(&mut parser, format!("tell k {long}\ndone k\n").as_bytes(), "k");
        assert_eq!(heard, ["\n", "done"]);
        let mut parser = KernelReportParser::default();
        let just = "y".repeat(MAX_REPORT_BYTES - 1);
        let heard = parse_all(&mut parser, format!("tell k {just}\n").as_bytes(), "k");
        assert_eq!(heard[0].len(), MAX_REPORT_BYTES);
    }

    proptest! {
        #[test]
        fn chunking_of_reports_does_not_matter(
            words in prop::collection::vec(prop_oneof![
                Just("ready\n"), Just("tell k1 {\"a\": 1}\n"), Just("done k1\n"), Just("\n"), Just("tell "),
                Just("k1 "), Just("rubbish"), Just("tell k2 x\n"),
            ], 0..20),
            cut in 0usize..200,
        ) {
            let text = words.concat();
            let whole = parse_all(&mut KernelReportParser::default(), text.as_bytes(), "k1").concat();
            let cut = cut.min(text.len());
            let mut parser = KernelReportParser::default();
            let mut pieces = String::new();
            for part in [&text[..cut], &text[cut..]] {
                let mut bytes = part.as_bytes();
                while let Some(next) = parser.next_report(&mut bytes, Some("k1")) {
                    match next {
                        KernelReport::Ready => pieces.push_str("ready"),
                        KernelReport::Begin => {}
                        KernelReport::Content(piece) => pieces.push_str(std::str::from_utf8(piece).expect("it is text")),
                        KernelReport::Done => pieces.push_str("done"),
                    }
                }
            }
            prop_assert_eq!(pieces, whole);
        }
    }
}
