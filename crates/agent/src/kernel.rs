//! Kernels: programs that keep the state of one language between runs.
//!
//! ```text
//! agent ── fd 3, orders ──►  run KEY {"code": "…"}\n          one at a time
//! agent ◄─ fd 4, reports ──  ready\n                          once, when it can take orders
//!                            tell KEY {…}\n                   any number of times
//!                            show KEY {…}\n                   the same, acknowledged in order:
//!                 orders ──►  heard KEY\n
//!                            done KEY\n                       the run is over
//! ```
//! Output of a kernel and its children goes through their standard output and error, as with any
//! command. Its reports are passed on as they arrive, without being parsed or stored here: a line
//! may be long, and its writer is not trusted. A kernel that closes its report pipe during a run is
//! useless and is killed, so that no run waits for a report forever.

use std::time::Duration;

use linux::spawn::{End, Usage};
use serde_json::json;
use wire::process::{OpenKernel, Program};
use wire::{Fault, FaultKind, Reply, StreamTag};

use crate::agent::{Agent, Alarm};
use crate::fault;
use crate::session::Session;

/// The longest line that is passed on; a longer one is truncated.
pub(crate) const LONGEST_TELL: usize = 8 << 20;

/// The longest beginning of a report: a keyword and a key.
const LONGEST_HEAD: usize = 80;

/// How long a kernel may take until it is ready.
const PATIENCE: Duration = Duration::from_secs(60);

/// How often the output pipes are drained for reports in one turn.
pub(crate) const MOST_DRAINS: u32 = 16;

/// The exit code by which a program reports a missing dependency, as shells do.
const NOT_FOUND: i32 = 127;

/// How much is kept of a kernel's output before it is ready; it is the reason if it never is.
const LAST_WORDS: usize = 2048;

/// The state of parsing a kernel's reports.
#[derive(Debug, Default)]
pub(crate) struct Hearing {
    part: Part,
    head: Vec<u8>,
    /// The current line must be acknowledged.
    shown: bool,
    ready: bool,
    last_words: Vec<u8>,
}

/// The position in a line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Part {
    #[default]
    Head,
    /// In the content of a line, of which this many bytes were passed on.
    Telling(usize),
    Skipped,
}

/// The next item in a kernel's reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Heard<'a> {
    Ready,
    /// The content of a line is about to follow.
    Begin,
    /// A piece of the content; its last byte is the end of the line.
    Tell(&'a [u8]),
    Done,
}

impl Hearing {
    /// Parses the next item and removes it from `bytes`. Reports with the key of another run and
    /// malformed lines are skipped.
    pub(crate) fn next<'a>(&mut self, bytes: &mut &'a [u8], key: Option<&str>) -> Option<Heard<'a>> {
        while !bytes.is_empty() {
            let end = memchr::memchr(b'\n', bytes).map(|index| index + 1);
            match self.part {
                Part::Skipped => {
                    take(bytes, end);
                    self.part = if end.is_some() { Part::Head } else { Part::Skipped };
                }
                Part::Telling(passed) => return Some(self.tell(passed, take(bytes, end), end.is_some())),
                Part::Head => {
                    let byte = take(bytes, Some(1))[0];
                    if let Some(heard) = self.head(byte, key) {
                        return Some(heard);
                    }
                }
            }
        }
        None
    }

    fn tell<'a>(&mut self, passed: usize, piece: &'a [u8], ends: bool) -> Heard<'a> {
        self.part = if ends { Part::Head } else { Part::Telling(passed + piece.len()) };
        let room = LONGEST_TELL - passed;
        if piece.len() < room || (ends && piece.len() == room) {
            return Heard::Tell(piece);
        }
        // The line is truncated here, because the next piece might exceed the limit.
        if !ends {
            self.part = Part::Skipped;
        }
        Heard::Tell(b"\n")
    }

    fn head(&mut self, byte: u8, key: Option<&str>) -> Option<Heard<'static>> {
        if byte != b'\n' {
            self.head.push(byte);
            if self.head.len() > LONGEST_HEAD {
                self.head.clear();
                self.part = Part::Skipped;
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
            self.shown = names(b"show ");
            self.part = if self.shown || names(b"tell ") { Part::Telling(0) } else { Part::Skipped };
            return (self.part != Part::Skipped).then_some(Heard::Begin);
        }
        match head.as_slice() {
            b"ready" => Some(Heard::Ready),
            _ if names(b"done ") => Some(Heard::Done),
            _ => None,
        }
    }

    /// Keeps the end of what was printed before the kernel was ready.
    pub(crate) fn overhear(&mut self, bytes: &[u8]) {
        if self.ready {
            return;
        }
        self.last_words.extend_from_slice(bytes);
        let surplus = self.last_words.len().saturating_sub(LAST_WORDS);
        self.last_words.drain(..surplus);
    }

    /// The reason why the kernel never became ready, as far as it is known.
    pub(crate) fn obituary(&self, program: &str, end: End) -> Fault {
        let words = String::from_utf8_lossy(&self.last_words);
        let how = match end {
            End::Code(code) => format!("{program} ended with exit code {code}"),
            End::Signal(signal) => format!("{program} was ended by signal {signal}"),
        };
        let (kind, subject) = match words.trim() {
            "" => (FaultKind::Other, how),
            // The kernel itself reports what is missing, so its message is enough.
            words if end == End::Code(NOT_FOUND) => (FaultKind::NotFound, words.to_owned()),
            words => (FaultKind::Other, format!("{how}: {words}")),
        };
        fault::plain(kind, "start kernel", &subject)
    }
}

/// Formats the order for one run.
pub(crate) fn order(text: &str, key: &str) -> Vec<u8> {
    format!("run {key} {}\n", json!({ "code": text })).into_bytes()
}

/// A short word without blanks; the agent only repeats it in statuses.
fn is_language(name: &str) -> bool {
    (1..=64).contains(&name.len()) && name.bytes().all(|byte| byte.is_ascii_graphic())
}

/// Removes this many bytes from the front, or all of them.
fn take<'a>(bytes: &mut &'a [u8], count: Option<usize>) -> &'a [u8] {
    let (front, rest) = bytes.split_at(count.unwrap_or(bytes.len()));
    *bytes = rest;
    front
}

impl Agent {
    /// Opens a session with a kernel; the reply comes when the kernel is ready.
    pub(crate) fn open_kernel(&mut self, connection: u64, request: OpenKernel) -> Result<(), Fault> {
        let OpenKernel { open, kernel } = request;
        if !is_language(&kernel.language) {
            return Err(fault::plain(FaultKind::Invalid, "open kernel", "the name of the language"));
        }
        if open.terminal.is_some() && kernel.program != Program::Shell {
            return Err(fault::plain(FaultKind::Invalid, "open kernel", "a terminal"));
        }
        let number = self.add_session(connection, open, Some(kernel))?;
        self.set_alarm(PATIENCE, Alarm::Ready(number));
        Ok(())
    }

    /// A kernel has not become ready in time.
    pub(crate) fn kernel_is_late(&mut self, number: u64) {
        let session = self.sessions.get_mut(&number).filter(|session| session.opener.is_some());
        if let Some((_, hearing)) = session.and_then(Session::hearing) {
            hearing.overhear(b"\nthe kernel was not ready in time");
            self.kill_shell(number);
        }
    }

    /// Handles a kernel's reports. `drains` counts how often its output pipes were drained in this
    /// turn.
    pub(crate) fn hear(&mut self, number: u64, mut bytes: &[u8], drains: &mut u32) {
        loop {
            let Some(session) = self.sessions.get_mut(&number) else { return };
            let run = session.current.as_ref().map(|run| (run.process, run.key.clone()));
            let Some((body, hearing)) = session.hearing() else { return };
            let heard = hearing.next(&mut bytes, run.as_ref().map(|(_, key)| key.as_str()));
            match (heard, run) {
                (None, _) => return,
                (Some(Heard::Ready), _) => {
                    hearing.ready = true;
                    hearing.last_words = Vec::new();
                    if let Some(opener) = session.opener.take() {
                        self.answer(opener, &Reply::Ok);
                    }
                }
                // Output printed before a report precedes it, unless there are so many reports that
                // draining for each of them would starve the other connections.
                (Some(Heard::Begin), _) if *drains >= MOST_DRAINS => {}
                (Some(Heard::Begin), _) => {
                    *drains += 1;
                    self.drain(body);
                }
                (Some(Heard::Tell(piece)), Some((process, key))) => {
                    let shown = piece.ends_with(b"\n") && std::mem::take(&mut hearing.shown);
                    self.append_output(process, StreamTag::Tell, piece);
                    if shown {
                        self.give_to_kernel(number, format!("heard {key}\n").as_bytes());
                    }
                }
                // All output of a run precedes its end.
                (Some(Heard::Done), Some(_)) => {
                    *drains += 1;
                    self.drain(body);
                    self.finish_run(number, End::Code(0), Usage::default());
                    self.begin_next(number);
                }
                // The run has ended while a report about it arrived.
                (Some(Heard::Tell(_) | Heard::Done), None) => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn all(hearing: &mut Hearing, mut bytes: &[u8], key: &str) -> Vec<String> {
        let mut heard = Vec::new();
        while let Some(next) = hearing.next(&mut bytes, Some(key)) {
            match next {
                Heard::Ready => heard.push("ready".to_owned()),
                Heard::Begin => heard.push(String::new()),
                Heard::Tell(piece) => heard
                    .last_mut()
                    .expect("a line has begun")
                    .push_str(std::str::from_utf8(piece).expect("the tests write text")),
                Heard::Done => heard.push("done".to_owned()),
            }
        }
        heard
    }

    fn check(text: &str, expected: &[&str]) {
        assert_eq!(all(&mut Hearing::default(), text.as_bytes(), "k1"), expected, "{text}");
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
        let mut hearing = Hearing::default();
        let long = "y".repeat(LONGEST_TELL + 5);
        let heard = all(&mut hearing, format!("tell k {long}\ndone k\n").as_bytes(), "k");
        assert_eq!(heard, ["\n", "done"]);
        let mut hearing = Hearing::default();
        let just = "y".repeat(LONGEST_TELL - 1);
        let heard = all(&mut hearing, format!("tell k {just}\n").as_bytes(), "k");
        assert_eq!(heard[0].len(), LONGEST_TELL);
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
            let whole = all(&mut Hearing::default(), text.as_bytes(), "k1").concat();
            let cut = cut.min(text.len());
            let mut hearing = Hearing::default();
            let mut pieces = String::new();
            for part in [&text[..cut], &text[cut..]] {
                let mut bytes = part.as_bytes();
                while let Some(next) = hearing.next(&mut bytes, Some("k1")) {
                    match next {
                        Heard::Ready => pieces.push_str("ready"),
                        Heard::Begin => {}
                        Heard::Tell(piece) => pieces.push_str(std::str::from_utf8(piece).expect("it is text")),
                        Heard::Done => pieces.push_str("done"),
                    }
                }
            }
            prop_assert_eq!(pieces, whole);
        }
    }
}
