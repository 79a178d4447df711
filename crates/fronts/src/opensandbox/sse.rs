//! Encodes the events of a running command: each is one bare JSON object and a blank line, without
//! the `data:` of the standard. All clients of this API were written for that form.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::kit::command_ending::CommandEnding;
use crate::kit::time::now_ms;

/// One event. Clients drop events without a timestamp, so it is added when the event is written.
#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum SseEvent<'a> {
    /// The first event; carries the id of the command.
    Init {
        text: &'a str,
    },
    /// Keeps otherwise silent connections alive.
    Ping {
        text: &'static str,
    },
    Stdout {
        text: &'a str,
    },
    Stderr {
        text: &'a str,
    },
    /// A line on `stderr` that reports which bytes of the output are missing.
    #[serde(rename = "stderr")]
    Gap {
        text: &'a str,
        coracle: GapRange,
    },
    /// The number of a code run in its context.
    ExecutionCount {
        execution_count: u64,
    },
    /// Displayed data or the value of code, by MIME type.
    Result {
        results: BTreeMap<&'a str, &'a str>,
    },
    /// The last event of a run that failed.
    Error {
        error: FailureBody<'a>,
    },
    /// The last event of a run that succeeded; in milliseconds.
    ExecutionComplete {
        execution_time: u128,
    },
}

/// The bytes of the combined output from the first offset up to, not including, the second.
#[derive(Clone, Copy, Serialize)]
pub(super) struct GapRange {
    pub(super) gap: (u64, u64),
}

/// The `ename` of a failed command.
pub(super) const COMMAND_FAILED: &str = "CommandExecError";

#[derive(Serialize)]
pub(super) struct FailureBody<'a> {
    ename: &'a str,
    /// The exit code as text, or the error message.
    evalue: &'a str,
    traceback: Vec<&'a str>,
    /// How the command ended, if not with an exit code; a Coracle addition for clients that use it.
    #[serde(skip_serializing_if = "Option::is_none")]
    coracle: Option<CommandEnding>,
}

impl<'a> FailureBody<'a> {
    pub(super) fn new(ename: &'a str, evalue: &'a str, traceback: Vec<&'a str>) -> Self {
        Self { ename, evalue, traceback, coracle: None }
    }

    pub(super) fn with_ending(self, ending: Option<CommandEnding>) -> Self {
        Self { coracle: ending, ..self }
    }
}

#[derive(Serialize)]
struct TimestampedEvent<'a> {
    #[serde(flatten)]
    event: SseEvent<'a>,
    timestamp: i64,
}

impl<'a> SseEvent<'a> {
    pub(super) fn ping() -> Self {
        Self::Ping { text: "pong" }
    }

    pub(super) fn failure(evalue: &'a str, detail: &'a str) -> Self {
        Self::failure_by(None, evalue, detail)
    }

    pub(super) fn failure_by(ending: Option<CommandEnding>, evalue: &'a str, detail: &'a str) -> Self {
        Self::Error { error: FailureBody::new(COMMAND_FAILED, evalue, vec![detail]).with_ending(ending) }
    }

    /// Replaces the `ename` of a failure.
    pub(super) fn with_ename(self, ename: &'static str) -> Self {
        match self {
            Self::Error { error } => Self::Error { error: FailureBody { ename, ..error } },
            other => other,
        }
    }

    pub(super) fn write_to(self, buffer: &mut Vec<u8>) {
        write_event(buffer, &TimestampedEvent { event: self, timestamp: now_ms() });
    }
}

/// Writes one object, followed by a blank line.
pub(super) fn write_event(buffer: &mut Vec<u8>, object: &impl Serialize) {
    serde_json::to_writer(&mut *buffer, object).expect("events contain only strings and numbers");
    buffer.extend_from_slice(b"\n\n");
}

#[cfg(test)]
mod tests {
    use domain::ExitReason;
    use proptest::prelude::*;
    use serde_json::Value;

    use super::*;

    fn written(event: SseEvent<'_>) -> String {
        let mut buffer = Vec::new();
        event.write_to(&mut buffer);
        String::from_utf8(buffer).unwrap()
    }

    #[test]
    fn events_have_the_format_of_the_reference() {
        for (event, expected) in [
            (SseEvent::Init { text: "ab" }, r#"{"type":"init","text":"ab","timestamp":"#),
            (SseEvent::ping(), r#"{"type":"ping","text":"pong","timestamp":"#),
            (SseEvent::Stdout { text: "a\n" }, r#"{"type":"stdout","text":"a\n","timestamp":"#),
            (
                SseEvent::failure("3", "exit status 3"),
                r#"{"type":"error","error":{"ename":"CommandExecError","evalue":"3","traceback":["exit status 3"]},"timestamp":"#,
            ),
            (
                SseEvent::failure_by(CommandEnding::from_exit(ExitReason::Signal(9)), "-1", "killed"),
                r#"{"type":"error","error":{"ename":"CommandExecError","evalue":"-1","traceback":["killed"],"coracle":{"ending":"signal","signal":9}},"timestamp":"#,
            ),
            (
                SseEvent::ExecutionComplete { execution_time: 12 },
                r#"{"type":"execution_complete","execution_time":12,"timestamp":"#,
            ),
        ] {
            let text = written(event);
            assert!(text.starts_with(expected), "{text}");
            assert!(text.ends_with("}\n\n"), "{text}");
        }
    }

    proptest! {
        #[test]
        fn every_event_is_one_line(text in any::<String>()) {
            let frame = written(SseEvent::Stdout { text: &text });
            prop_assert_eq!(frame.find('\n'), Some(frame.len() - 2));
            let event: Value = serde_json::from_str(frame.trim_end()).unwrap();
            prop_assert_eq!(&event["text"], &Value::String(text));
            prop_assert!(event["timestamp"].is_i64());
        }
    }
}
