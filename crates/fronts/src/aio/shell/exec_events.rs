//! The output of a command as server-sent events.
//!
//! ```text
//! : connected
//! data: {"output":"…"}             repeated
//! data: {"end":true,"message":"No more output"}, or data: {"error":"…"}
//! ```

use std::convert::Infallible;

use axum::response::Response;
use bytes::Bytes;
use futures_util::stream;
use http::{HeaderMap, header};
use serde_json::{Value, json};
use service::OutputEvent;
use tokio::time::timeout;

use super::super::commands::run::overdue_problem;
use super::super::keep_alive::KEEP_ALIVE_INTERVAL;
use super::command_run::{CommandRun, RunEnd, RunStep};
use super::text::TextCleaner;
use crate::kit::headers::header_text;
use crate::kit::sse::event_stream_response;

/// The beginning of an event stream.
const CONNECTED: &str = ": connected\n\n";

/// Whether a client asks for events instead of one body.
pub(super) fn accepts_events(headers: &HeaderMap) -> bool {
    let accepted = header_text(headers, header::ACCEPT.as_str()).unwrap_or_default();
    accepted.split(',').any(|kind| {
        kind.split(';').next().unwrap_or_default().trim().eq_ignore_ascii_case("text/event-stream")
    })
}

/// Text of a running command, without line feeds at its end: they are sent before the next text.
#[derive(Debug, Default)]
pub(super) struct LiveText {
    cleaner: TextCleaner,
    line_feeds: usize,
}

impl LiveText {
    /// Text that begins on a new line.
    pub(super) fn after_line() -> Self {
        Self { line_feeds: 1, ..Self::default() }
    }

    /// The text that an event adds.
    pub(super) fn add_event(&mut self, event: &OutputEvent) -> String {
        let mut text = String::new();
        match event {
            OutputEvent::Output { bytes, .. } => self.cleaner.clean(bytes, &mut text),
            OutputEvent::Gap { .. } | OutputEvent::Ended(_) => self.cleaner.finish(&mut text),
        }
        let printed = text.trim_end_matches('\n').len();
        let line_feeds = text.len() - printed;
        if printed == 0 {
            self.line_feeds = self.line_feeds.saturating_add(line_feeds);
            return String::new();
        }
        text.truncate(printed);
        // A program that prints only line feeds must not make one event unbounded.
        let before = std::mem::replace(&mut self.line_feeds, line_feeds).min(MAX_LINE_FEEDS);
        "\n".repeat(before) + &text
    }
}

/// How many line feeds one event begins with at most.
const MAX_LINE_FEEDS: usize = 1 << 16;

/// Streams a command until it ends or a limit is reached. The command goes on without its reader.
pub(super) fn stream_command(run: CommandRun) -> Response {
    let state = (run, LiveText::default(), StreamStage::Begin);
    event_stream_response(stream::unfold(state, |(mut run, mut text, stage)| async move {
        let (frame, next) = match stage {
            StreamStage::Begin => (CONNECTED.to_owned(), StreamStage::Output),
            StreamStage::Output => read_frame(&mut run, &mut text).await,
            StreamStage::Over => return None,
        };
        Some((Ok(Bytes::from(frame)), (run, text, next)))
    }))
}

/// Streams a text that is already known.
pub(super) fn stream_text(text: String) -> Response {
    let frames = format!("{CONNECTED}{}{}", output_event(&text), end_event());
    event_stream_response(stream::once(async { Ok::<_, Infallible>(Bytes::from(frames)) }))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StreamStage {
    Begin,
    Output,
    Over,
}

async fn read_frame(run: &mut CommandRun, text: &mut LiveText) -> (String, StreamStage) {
    loop {
        match timeout(KEEP_ALIVE_INTERVAL, run.next()).await {
            Err(_elapsed) => return (": keep-alive\n\n".to_owned(), StreamStage::Output),
            Ok(Ok(RunStep::Event(event))) => {
                let added = text.add_event(&event);
                if !added.is_empty() {
                    return (output_event(&added), StreamStage::Output);
                }
            }
            Ok(Ok(RunStep::Over(end))) => {
                let last = match end {
                    RunEnd::Overdue => return (error_event(&overdue_problem().message), StreamStage::Over),
                    RunEnd::Ended(end) => text.add_event(&OutputEvent::Ended(end)),
                    RunEnd::TooLong | RunEnd::TooQuiet => String::new(),
                };
                let last = if last.is_empty() { last } else { output_event(&last) };
                return (last + &end_event(), StreamStage::Over);
            }
            Ok(Err(error)) => return (error_event(&error.to_string()), StreamStage::Over),
        }
    }
}

pub(super) fn output_event(text: &str) -> String {
    format_data(&json!({"output": text}))
}

pub(super) fn end_event() -> String {
    format_data(&json!({"end": true, "message": "No more output"}))
}

pub(super) fn error_event(message: &str) -> String {
    format_data(&json!({"error": message}))
}

pub(super) fn format_data(data: &Value) -> String {
    format!("data: {data}\n\n")
}

#[cfg(test)]
mod tests {
    use domain::{JournalOffset, StreamKind};

    use super::*;

    fn output(text: &'static str) -> OutputEvent {
        let (stream, bytes) = (StreamKind::Terminal, Bytes::from_static(text.as_bytes()));
        OutputEvent::Output { stream, at: JournalOffset(0), bytes }
    }

    #[test]
    fn last_line_feeds_are_not_sent() {
        let mut text = LiveText::default();
        let added: Vec<_> =
            ["a\n", "\n", "b", "\r\nc\n\n"].into_iter().map(|piece| text.add_event(&output(piece))).collect();
        assert_eq!(added, ["a", "", "\n\nb", "\nc"]);
    }

    #[test]
    fn clients_ask_for_events_by_the_accept_header() {
        let accepts =
            |value: &str| accepts_events(&HeaderMap::from_iter([(header::ACCEPT, value.parse().unwrap())]));
        assert!(accepts("text/event-stream") && accepts("application/json, Text/Event-Stream;q=0.9"));
        assert!(!accepts("*/*") && !accepts("application/json") && !accepts_events(&HeaderMap::new()));
    }
}
