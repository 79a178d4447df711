//! Decodes the event stream of a running command from bytes.
//!
//! The API sends one JSON object per event, each followed by a blank line; a leading `data:` is
//! allowed. Body chunks may end anywhere. Lines that are not such events are skipped: comments, the
//! other fields of an event stream, and anything that is not a JSON object.

use serde::Deserialize;
use serde_json::Value;

/// An event that this client understands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CommandEvent {
    /// The process was started and has this id.
    Started(String),
    Stdout(String),
    Stderr(String),
    /// The bytes of the combined output from `from` up to, not including, `to` are missing.
    Gap {
        from: u64,
        to: u64,
    },
    /// The command exited with a code other than 0, or could not be started.
    Failed(CommandFailure),
    Completed,
}

/// How a command failed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CommandFailure {
    /// The exit code as text, or the reason there is none.
    pub value: String,
    pub details: Vec<String>,
    /// How the command ended, if not with an exit code. Only Coracle servers report this.
    pub ending: Option<CommandEnding>,
}

/// How a command ended without an exit code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(tag = "ending", rename_all = "snake_case")]
pub enum CommandEnding {
    Signal {
        signal: u8,
    },
    Oom,
    Deadline,
    /// The program does not exist.
    Missing,
    NotExecutable,
    /// The server did not observe the end, or reported one that this client does not know.
    #[serde(other)]
    Lost,
}

/// The server sent an event that exceeds the size limit.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("server event exceeds {MAX_EVENT} bytes")]
pub struct OversizedEventError;

/// Upper bound for one event; servers stay well below it.
const MAX_EVENT: usize = 8 << 20;

/// Splits a byte stream into events.
#[derive(Debug, Default)]
pub struct EventDecoder {
    pending: Vec<u8>,
    /// How many bytes of `pending` have been consumed.
    read: usize,
}

impl EventDecoder {
    /// Appends received bytes.
    pub fn feed(&mut self, bytes: &[u8]) -> Result<(), OversizedEventError> {
        self.pending.drain(..self.read);
        self.read = 0;
        if self.pending.len() > MAX_EVENT {
            return Err(OversizedEventError);
        }
        self.pending.extend_from_slice(bytes);
        Ok(())
    }

    /// Returns the next complete event.
    pub fn next_event(&mut self) -> Option<CommandEvent> {
        loop {
            let rest = &self.pending[self.read..];
            let end = rest.iter().position(|byte| *byte == b'\n')?;
            let event = parse_event_line(&rest[..end]);
            self.read += end + 1;
            if event.is_some() {
                return event;
            }
        }
    }

    /// Returns the last event if the stream ended without a final newline.
    pub fn finish(&mut self) -> Option<CommandEvent> {
        let event = parse_event_line(&self.pending[self.read..]);
        self.read = self.pending.len();
        event
    }
}

fn parse_event_line(line: &[u8]) -> Option<CommandEvent> {
    let line = line.strip_prefix(b"data:").unwrap_or(line).trim_ascii();
    if !line.starts_with(b"{") {
        return None;
    }
    let value: Value = serde_json::from_slice(line).ok()?;
    let text = || value["text"].as_str().unwrap_or_default().to_owned();
    match value["type"].as_str()? {
        "init" => Some(CommandEvent::Started(text())),
        "stdout" => Some(CommandEvent::Stdout(text())),
        "stderr" => Some(parse_gap(&value).unwrap_or_else(|| CommandEvent::Stderr(text()))),
        "error" => Some(CommandEvent::Failed(parse_failure(&value["error"]))),
        "execution_complete" => Some(CommandEvent::Completed),
        _ => None,
    }
}

fn parse_gap(event: &Value) -> Option<CommandEvent> {
    let gap = event["coracle"]["gap"].as_array()?;
    Some(CommandEvent::Gap { from: gap.first()?.as_u64()?, to: gap.get(1)?.as_u64()? })
}

fn parse_failure(error: &Value) -> CommandFailure {
    let text = |value: &Value| match value {
        Value::String(text) => Some(text.clone()),
        Value::Number(number) => Some(number.to_string()),
        _ => None,
    };
    let value = text(&error["evalue"]).or_else(|| text(&error["ename"])).unwrap_or_default();
    let details = error["traceback"].as_array().into_iter().flatten().filter_map(text).collect();
    CommandFailure { value, details, ending: serde_json::from_value(error["coracle"].clone()).ok() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const STREAM: &str = concat!(
        "{\"type\":\"init\",\"text\":\"5b7c\",\"timestamp\":1}\n\n",
        "{\"type\":\"ping\",\"text\":\"pong\",\"timestamp\":1}\n\n",
        "event: stdout\nid: 7\nretry: 100\n",
        "data: {\"type\":\"stdout\",\"text\":\"a\\nb\",\"timestamp\":1}\r\n\r\n",
        ": a comment\n\n",
        "<html>not JSON</html>\n{broken\n[1]\n{}\n",
        "{\"type\":\"stdout\",\"text\":null}\n",
        "{\"type\":\"stderr\",\"text\":\"coracle: 4 bytes\",\"coracle\":{\"gap\":[3,7]}}\n",
        "{\"type\":\"error\",\"error\":{\"ename\":\"CommandExecError\",\"evalue\":\"3\",\"traceback\":[\"exit status 3\"]},\"timestamp\":1}\n\n",
        "{\"type\":\"error\",\"error\":{\"evalue\":\"-1\",\"traceback\":null,\"coracle\":{\"ending\":\"signal\",\"signal\":9}},\"timestamp\":1}\n\n",
        "{\"type\":\"error\",\"error\":null}\n",
        "{\"type\":\"error\",\"error\":{\"evalue\":5,\"coracle\":null}}\n",
    );

    fn decode(chunks: impl Iterator<Item = Vec<u8>>) -> Vec<CommandEvent> {
        let mut decoder = EventDecoder::default();
        let mut events = Vec::new();
        for chunk in chunks {
            decoder.feed(&chunk).expect("the input is below the limit");
            while let Some(event) = decoder.next_event() {
                events.push(event);
            }
        }
        events
    }

    #[test]
    fn events_do_not_depend_on_chunk_boundaries() {
        let failed = |value: &str, details: &[&str], ending| {
            let details = details.iter().map(|text| (*text).to_owned()).collect();
            CommandEvent::Failed(CommandFailure { value: value.to_owned(), details, ending })
        };
        let expected = [
            CommandEvent::Started("5b7c".to_owned()),
            CommandEvent::Stdout("a\nb".to_owned()),
            CommandEvent::Stdout(String::new()),
            CommandEvent::Gap { from: 3, to: 7 },
            failed("3", &["exit status 3"], None),
            failed("-1", &[], Some(CommandEnding::Signal { signal: 9 })),
            failed("", &[], None),
            failed("5", &[], None),
        ];
        for size in 1..STREAM.len() {
            let chunks = STREAM.as_bytes().chunks(size).map(<[u8]>::to_vec);
            assert_eq!(decode(chunks), expected, "chunks of {size}");
        }
    }

    #[test]
    fn oversized_event_is_an_error() {
        let mut decoder = EventDecoder::default();
        let chunk = vec![b'x'; 1 << 20];
        assert!((0..20).any(|_| decoder.feed(&chunk).is_err()));
    }

    #[test]
    fn last_line_needs_no_newline() {
        let mut decoder = EventDecoder::default();
        decoder.feed(b"{\"type\":\"execution_complete\"}").expect("the input is below the limit");
        assert_eq!(decoder.next_event(), None);
        assert_eq!(decoder.finish(), Some(CommandEvent::Completed));
        assert_eq!(decoder.finish(), None);
    }

    proptest! {
        #[test]
        fn decoding_arbitrary_bytes_does_not_panic(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
            let mut decoder = EventDecoder::default();
            decoder.feed(&bytes).expect("the input is below the limit");
            while decoder.next_event().is_some() {}
            decoder.finish();
        }
    }
}
