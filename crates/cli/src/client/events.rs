//! The events of a running command, cut out of a stream of bytes.
//!
//! The API sends one JSON object per event, each followed by a blank line; a `data:` in front is
//! allowed. Chunks of the body end anywhere.

use anyhow::{Context, Result, bail};
use serde::Deserialize;

/// An event that means something to us.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// The process has this id.
    Started(String),
    Stdout(String),
    Stderr(String),
    /// It ended with another code than 0, or never began.
    Failed(Failure),
    Completed,
}

/// How a command failed.
#[derive(Debug, Default, PartialEq, Eq, Deserialize)]
pub(crate) struct Failure {
    /// Its exit code as text, or why there is none.
    #[serde(default, rename = "evalue")]
    pub value: String,
    #[serde(default, rename = "traceback")]
    pub details: Vec<String>,
    /// How it ended if not by an exit code; a server of another make does not say.
    #[serde(rename = "coracle")]
    pub ending: Option<Ending>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(tag = "ending", rename_all = "snake_case")]
pub(crate) enum Ending {
    Signal {
        signal: u8,
    },
    Oom,
    Deadline,
    Missing,
    NotExecutable,
    /// Nobody saw how, or in a way that this client does not know.
    #[serde(other)]
    Lost,
}

/// More than the server ever puts into one event.
const LONGEST: usize = 8 << 20;

/// Bytes on their way to becoming events.
#[derive(Debug, Default)]
pub(super) struct Decoder {
    pending: Vec<u8>,
}

#[derive(Deserialize)]
struct Raw {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    text: String,
    error: Option<Failure>,
}

impl Decoder {
    pub(super) fn feed(&mut self, bytes: &[u8]) -> Result<()> {
        self.pending.extend_from_slice(bytes);
        if self.pending.len() > LONGEST + bytes.len() {
            bail!("the server sent an endless event");
        }
        Ok(())
    }

    /// The next event that is complete.
    pub(super) fn next(&mut self) -> Result<Option<Event>> {
        while let Some(end) = self.pending.iter().position(|byte| *byte == b'\n') {
            let event = read_line(&self.pending[..end]);
            self.pending.drain(..=end);
            if let Some(event) = event? {
                return Ok(Some(event));
            }
        }
        Ok(None)
    }
}

fn read_line(line: &[u8]) -> Result<Option<Event>> {
    let line = line.strip_prefix(b"data:").unwrap_or(line).trim_ascii();
    if line.is_empty() || line.starts_with(b":") {
        return Ok(None);
    }
    let raw: Raw = serde_json::from_slice(line).context("the server sent an event that is not JSON")?;
    Ok(match raw.kind.as_str() {
        "init" => Some(Event::Started(raw.text)),
        "stdout" => Some(Event::Stdout(raw.text)),
        "stderr" => Some(Event::Stderr(raw.text)),
        "error" => Some(Event::Failed(raw.error.unwrap_or_default())),
        "execution_complete" => Some(Event::Completed),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const STREAM: &str = concat!(
        "{\"type\":\"init\",\"text\":\"5b7c\",\"timestamp\":1}\n\n",
        "{\"type\":\"ping\",\"text\":\"pong\",\"timestamp\":1}\n\n",
        "data: {\"type\":\"stdout\",\"text\":\"a\\nb\",\"timestamp\":1}\n\n",
        ": a comment\n\n",
        "{\"type\":\"error\",\"error\":{\"ename\":\"CommandExecError\",\"evalue\":\"3\",\"traceback\":[\"exit status 3\"]},\"timestamp\":1}\n\n",
        "{\"type\":\"error\",\"error\":{\"evalue\":\"-1\",\"coracle\":{\"ending\":\"signal\",\"signal\":9}},\"timestamp\":1}\n\n",
    );

    fn decode(chunks: impl Iterator<Item = Vec<u8>>) -> Vec<Event> {
        let mut decoder = Decoder::default();
        let mut events = Vec::new();
        for chunk in chunks {
            decoder.feed(&chunk).expect("it is short");
            while let Some(event) = decoder.next().expect("it is right") {
                events.push(event);
            }
        }
        events
    }

    #[test]
    fn events_are_the_same_however_the_stream_is_cut() {
        let expected = [
            Event::Started("5b7c".to_owned()),
            Event::Stdout("a\nb".to_owned()),
            Event::Failed(Failure {
                value: "3".to_owned(),
                details: vec!["exit status 3".to_owned()],
                ending: None,
            }),
            Event::Failed(Failure {
                value: "-1".to_owned(),
                details: Vec::new(),
                ending: Some(Ending::Signal { signal: 9 }),
            }),
        ];
        for size in 1..STREAM.len() {
            let chunks = STREAM.as_bytes().chunks(size).map(<[u8]>::to_vec);
            assert_eq!(decode(chunks), expected, "chunks of {size}");
        }
    }

    #[test]
    fn an_endless_event_is_refused() {
        let mut decoder = Decoder::default();
        let chunk = vec![b'x'; 1 << 20];
        assert!((0..20).any(|_| decoder.feed(&chunk).is_err()));
    }

    #[test]
    fn what_is_not_json_is_an_error() {
        let mut decoder = Decoder::default();
        decoder.feed(b"<html>\n").expect("it is short");
        assert!(decoder.next().is_err());
    }
}
