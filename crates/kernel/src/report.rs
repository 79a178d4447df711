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
use linux::descriptors::Inherited;
use serde::{Deserialize, Serialize};

/// The maximum length of a line, including its end.
const LONGEST_LINE: usize = 8 << 20;
/// Texts in an error are truncated after this many bytes.
const LONGEST_TEXT: usize = 256 << 10;
const MOST_TRACEBACK: usize = 256;

/// Takes over the two inherited descriptors.
pub(crate) fn take() -> Result<(Orders, Reports)> {
    let mut inherited = Inherited::claim().context("the inherited descriptors are already claimed")?;
    let orders = inherited.take(3).context("descriptor 3 for orders is not open")?;
    let reports = inherited.take(4).context("descriptor 4 for reports is not open")?;
    Ok((Orders(BufReader::new(File::from(orders))), Reports(File::from(reports))))
}

/// Code to run.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Order {
    pub key: String,
    pub code: String,
}

#[derive(Debug)]
pub(crate) struct Orders(BufReader<File>);

impl Orders {
    #[cfg(test)]
    pub(crate) fn from_file(file: File) -> Self {
        Self(BufReader::new(file))
    }

    /// Reads a line, which may not be a valid order; `None` when there will be no more.
    pub(crate) fn next(&mut self) -> io::Result<Option<Option<Order>>> {
        let mut line = String::new();
        let length = self.0.read_line(&mut line)?;
        Ok((length > 0).then(|| read_order(line.trim_end_matches('\n'))))
    }

    /// Whether lines are buffered that were already read from the descriptor.
    pub(crate) fn is_buffered(&self) -> bool {
        !self.0.buffer().is_empty()
    }

    /// A copy of the descriptor, to poll for new lines.
    pub(crate) fn descriptor(&self) -> io::Result<OwnedFd> {
        self.0.get_ref().try_clone().map(OwnedFd::from)
    }
}

fn read_order(line: &str) -> Option<Order> {
    #[derive(Deserialize)]
    struct Body {
        code: String,
    }
    let (key, body) = line.strip_prefix("run ")?.split_once(' ')?;
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    if key.is_empty() || key.len() > 64 || !key.bytes().all(plain) {
        return None;
    }
    let body: Body = serde_json::from_str(body).ok()?;
    Some(Order { key: key.to_owned(), code: body.code })
}

/// Representations of one value, by mime type.
pub(crate) type Bundle = BTreeMap<String, String>;

/// A report about a run.
#[derive(Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Tell {
    Count(u64),
    Display(Bundle),
    Result(Bundle),
    Error(Failure),
}

#[derive(Debug, Serialize)]
pub(crate) struct Failure {
    pub ename: String,
    pub evalue: String,
    pub traceback: Vec<String>,
}

#[derive(Debug)]
pub(crate) struct Reports(File);

impl Reports {
    pub(crate) fn ready(&mut self) -> io::Result<()> {
        self.0.write_all(b"ready\n")
    }

    pub(crate) fn tell(&mut self, key: &str, tell: Tell) -> io::Result<()> {
        self.0.write_all(line(key, tell)?.as_bytes())
    }

    pub(crate) fn done(&mut self, key: &str) -> io::Result<()> {
        self.0.write_all(format!("done {key}\n").as_bytes())
    }

    /// A copy that a child process inherits.
    pub(crate) fn for_child(&self) -> io::Result<OwnedFd> {
        Ok(rustix::io::dup(&self.0)?)
    }
}

fn line(key: &str, tell: Tell) -> io::Result<String> {
    let short = match tell {
        Tell::Error(failure) => Tell::Error(failure.cut()),
        other => other,
    };
    let text = format!("tell {key} {}\n", serde_json::to_string(&short)?);
    if text.len() <= LONGEST_LINE {
        return Ok(text);
    }
    let instead = format!("a value of {} bytes is too large to be shown", text.len());
    let bundle = || Bundle::from([("text/plain".to_owned(), instead.clone())]);
    let smaller = match short {
        Tell::Result(_) => Tell::Result(bundle()),
        Tell::Display(_) | Tell::Count(_) => Tell::Display(bundle()),
        Tell::Error(failure) => Tell::Error(Failure { traceback: vec![instead], ..failure }),
    };
    Ok(format!("tell {key} {}\n", serde_json::to_string(&smaller)?))
}

impl Failure {
    fn cut(mut self) -> Self {
        self.traceback.truncate(MOST_TRACEBACK);
        for text in [&mut self.ename, &mut self.evalue].into_iter().chain(&mut self.traceback) {
            cut(text);
        }
        self
    }
}

fn cut(text: &mut String) {
    if text.len() > LONGEST_TEXT {
        let end = (0..=LONGEST_TEXT).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
        text.truncate(end);
        text.push('…');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_are_read_and_other_lines_are_not() {
        let order = read_order(r#"run k1 {"code":"1 + 1\n"}"#).expect("a valid order");
        assert_eq!(order, Order { key: "k1".to_owned(), code: "1 + 1\n".to_owned() });
        for line in ["", "run", "run k", "run k {}", "run K1 {\"code\":\"\"}", "stop k {\"code\":\"\"}"] {
            assert_eq!(read_order(line), None, "{line}");
        }
        let long = format!("run {} {{\"code\":\"\"}}", "k".repeat(65));
        assert_eq!(read_order(&long), None);
    }

    #[test]
    fn too_large_value_is_replaced_by_a_sentence() {
        let bundle = Bundle::from([("text/html".to_owned(), "x".repeat(LONGEST_LINE))]);
        let text = line("k", Tell::Result(bundle)).expect("it is JSON");
        assert!(text.len() < 200 && text.contains("too large to be shown"), "{text}");
    }

    #[test]
    fn errors_are_cut_between_characters() {
        let failure = Failure {
            ename: "E".to_owned(),
            evalue: "ß".repeat(LONGEST_TEXT),
            traceback: vec!["t".to_owned(); 10_000],
        };
        let text = line("k", Tell::Error(failure)).expect("it is JSON");
        assert!(text.len() < LONGEST_TEXT + 10_000 && text.contains('…'));
    }
}
