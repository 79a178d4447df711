//! The protocol between the agent and a kernel: lines on two descriptors.
//!
//! ```text
//! 3  ─►  run KEY {"code": "…"}
//! 4  ◄─  ready                      once
//!        tell KEY {"count": 3}      or display, result, error
//!        done KEY
//! ```

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::OwnedFd;

use anyhow::{Context, Result};
use linux::descriptors::InheritedDescriptors;
use serde::{Deserialize, Serialize};

/// The maximum length of a line, including its end.
const MAX_LINE_BYTES: usize = 8 << 20;
/// Texts in an error are truncated after this many bytes.
const MAX_TEXT_BYTES: usize = 256 << 10;
const MAX_TRACEBACK_LINES: usize = 256;

/// Takes over the two inherited descriptors.
pub(crate) fn take_descriptors() -> Result<(OrderReader, ReportWriter)> {
    let mut inherited =
        InheritedDescriptors::claim().context("the inherited descriptors are already claimed")?;
    let orders = inherited.take(3).context("descriptor 3 for orders is not open")?;
    let reports = inherited.take(4).context("descriptor 4 for reports is not open")?;
    Ok((OrderReader(BufReader::new(File::from(orders))), ReportWriter(File::from(reports))))
}

/// Code to run.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct RunOrder {
    pub key: String,
    pub code: String,
}

#[derive(Debug)]
pub(crate) struct OrderReader(BufReader<File>);

impl OrderReader {
    #[cfg(test)]
    pub(crate) fn from_file(file: File) -> Self {
        Self(BufReader::new(file))
    }

    /// Reads a line, which may not be a valid order; `None` when there will be no more.
    pub(crate) fn read_next(&mut self) -> io::Result<Option<Option<RunOrder>>> {
        let mut line = String::new();
        let length = self.0.read_line(&mut line)?;
        Ok((length > 0).then(|| parse_order(line.trim_end_matches('\n'))))
    }

    /// Whether lines are buffered that were already read from the descriptor.
    pub(crate) fn is_buffered(&self) -> bool {
        !self.0.buffer().is_empty()
    }

    /// A copy of the descriptor, to poll for new lines.
    pub(crate) fn clone_descriptor(&self) -> io::Result<OwnedFd> {
        self.0.get_ref().try_clone().map(OwnedFd::from)
    }
}

fn parse_order(line: &str) -> Option<RunOrder> {
    #[derive(Deserialize)]
    struct OrderBody {
        code: String,
    }
    let (key, body) = line.strip_prefix("run ")?.split_once(' ')?;
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    if key.is_empty() || key.len() > 64 || !key.bytes().all(plain) {
        return None;
    }
    let body: OrderBody = serde_json::from_str(body).ok()?;
    Some(RunOrder { key: key.to_owned(), code: body.code })
}

/// Representations of one value, by mime type.
pub(crate) type MimeBundle = BTreeMap<String, String>;

/// A report about a run.
#[derive(Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum KernelEvent {
    Count(u64),
    Display(MimeBundle),
    Result(MimeBundle),
    Error(ExecutionError),
}

#[derive(Debug, Serialize)]
pub(crate) struct ExecutionError {
    pub ename: String,
    pub evalue: String,
    pub traceback: Vec<String>,
}

#[derive(Debug)]
pub(crate) struct ReportWriter(File);

impl ReportWriter {
    pub(crate) fn send_ready(&mut self) -> io::Result<()> {
        self.0.write_all(b"ready\n")
    }

    pub(crate) fn send_event(&mut self, key: &str, tell: KernelEvent) -> io::Result<()> {
        self.0.write_all(format_event_line(key, tell)?.as_bytes())
    }

    pub(crate) fn send_done(&mut self, key: &str) -> io::Result<()> {
        self.0.write_all(format!("done {key}\n").as_bytes())
    }

    /// A copy that a child process inherits.
    pub(crate) fn clone_for_child(&self) -> io::Result<OwnedFd> {
        Ok(rustix::io::dup(&self.0)?)
    }
}

fn format_event_line(key: &str, tell: KernelEvent) -> io::Result<String> {
    let short = match tell {
        KernelEvent::Error(failure) => KernelEvent::Error(failure.truncate_texts()),
        other => other,
    };
    let text = format!("tell {key} {}\n", serde_json::to_string(&short)?);
    if text.len() <= MAX_LINE_BYTES {
        return Ok(text);
    }
    let instead = format!("a value of {} bytes is too large to be shown", text.len());
    let bundle = || MimeBundle::from([("text/plain".to_owned(), instead.clone())]);
    let smaller = match short {
        KernelEvent::Result(_) => KernelEvent::Result(bundle()),
        KernelEvent::Display(_) | KernelEvent::Count(_) => KernelEvent::Display(bundle()),
        KernelEvent::Error(failure) => {
            KernelEvent::Error(ExecutionError { traceback: vec![instead], ..failure })
        }
    };
    Ok(format!("tell {key} {}\n", serde_json::to_string(&smaller)?))
}

impl ExecutionError {
    fn truncate_texts(mut self) -> Self {
        self.traceback.truncate(MAX_TRACEBACK_LINES);
        for text in [&mut self.ename, &mut self.evalue].into_iter().chain(&mut self.traceback) {
            truncate_text(text);
        }
        self
    }
}

fn truncate_text(text: &mut String) {
    if text.len() > MAX_TEXT_BYTES {
        let end = (0..=MAX_TEXT_BYTES).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
        text.truncate(end);
        text.push('…');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_are_read_and_other_lines_are_not() {
        let order = parse_order(r#"run k1 {"code":"1 + 1\n"}"#).expect("a valid order");
        assert_eq!(order, RunOrder { key: "k1".to_owned(), code: "1 + 1\n".to_owned() });
        for line in ["", "run", "run k", "run k {}", "run K1 {\"code\":\"\"}", "stop k {\"code\":\"\"}"] {
            assert_eq!(parse_order(line), None, "{line}");
        }
        let long = format!("run {} {{\"code\":\"\"}}", "k".repeat(65));
        assert_eq!(parse_order(&long), None);
    }

    #[test]
    fn too_large_value_is_replaced_by_a_sentence() {
        let bundle = MimeBundle::from([("text/html".to_owned(), "x".repeat(MAX_LINE_BYTES))]);
        let text = format_event_line("k", KernelEvent::Result(bundle)).expect("it is JSON");
        assert!(text.len() < 200 && text.contains("too large to be shown"), "{text}");
    }

    #[test]
    fn errors_are_cut_between_characters() {
        let failure = ExecutionError {
            ename: "E".to_owned(),
            evalue: "ß".repeat(MAX_TEXT_BYTES),
            traceback: vec!["t".to_owned(); 10_000],
        };
        let text = format_event_line("k", KernelEvent::Error(failure)).expect("it is JSON");
        assert!(text.len() < MAX_TEXT_BYTES + 10_000 && text.contains('…'));
    }
}
