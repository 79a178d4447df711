//! A code run as a stream of events: like a command's, with `execution_count` and `result` in addition.
//! An error of the code is sent at the end, instead of `execution_complete`.

use std::collections::BTreeMap;

use axum::response::Response;
use bytes::Bytes;
use domain::{ExitReason, Language, LanguageRuntime};
use futures_util::{FutureExt, stream};
use service::{CodeError, CodeEvent, CodeExecution, MimeForms, ProcessEnd, ServiceError};

use super::command_stream::{add_end, add_loss};
use super::event_buffer::{EventBuffer, opening_events};
use crate::kit::command_ending::CommandEnding;
use crate::kit::lines::LineDialect;
use crate::kit::sse::event_stream_response;
use crate::opensandbox::sse::{COMMAND_FAILED, FailureBody, SseEvent};
use crate::opensandbox::types::describe_exit;

/// The MIME type of plain text, and the name under which some clients expect it.
const PLAIN_TEXT_MIME: &str = "text/plain";
const PLAIN_TEXT_ALIAS: &str = "text";

/// Streams the events of a code run. The core decides what happens if the stream is dropped.
pub(super) fn stream_code_run(
    running: CodeExecution,
    name: &str,
    language: &Language,
    dialect: LineDialect,
) -> Response {
    let run = CodeEventStream {
        running,
        transcript: EventBuffer::new(name, dialect),
        shell: language.runtime() == LanguageRuntime::Bash,
        error: None,
        over: false,
    };
    event_stream_response(stream::unfold(run, |mut run| async {
        let frame = run.next_frame().await?;
        Some((Ok(frame), run))
    }))
}

/// The complete stream for code that was sent while other code runs.
pub(super) fn busy_response(name: &str) -> Response {
    let mut frame = opening_events(name);
    let value = "session is busy: other code is running";
    SseEvent::Error { error: FailureBody::new("SessionBusy", value, vec![value]) }.write_to(&mut frame);
    event_stream_response(stream::once(async { Ok(Bytes::from(frame)) }))
}

struct CodeEventStream {
    running: CodeExecution,
    transcript: EventBuffer,
    /// Whether the exit code is that of the code itself.
    shell: bool,
    error: Option<CodeError>,
    over: bool,
}

impl CodeEventStream {
    /// Returns the next bytes to send; `None` after the last event.
    async fn next_frame(&mut self) -> Option<Bytes> {
        while self.transcript.is_empty() {
            if self.over {
                return None;
            }
            // Both branches are cancel-safe.
            tokio::select! {
                event = self.running.next() => self.handle_event(event),
                () = self.transcript.wait_for_timer() => {}
            }
        }
        // Events that are already available are sent together.
        while !self.over
            && !self.transcript.is_full()
            && let Some(event) = self.running.next().now_or_never()
        {
            self.handle_event(event);
        }
        Some(self.transcript.take_bytes())
    }

    fn handle_event(&mut self, event: Result<CodeEvent, ServiceError>) {
        let transcript = &mut self.transcript;
        match event {
            Ok(CodeEvent::Output { stream, bytes }) => transcript.add_output(stream, &bytes),
            Ok(CodeEvent::Gap { from, to }) => transcript.add_gap(from, to),
            Ok(CodeEvent::Count(execution_count)) => {
                transcript.add_event(SseEvent::ExecutionCount { execution_count });
            }
            Ok(CodeEvent::Display(forms) | CodeEvent::Result(forms)) => {
                transcript.add_event(SseEvent::Result { results: with_text(&forms) });
            }
            Ok(CodeEvent::Error(error)) => self.error = Some(error),
            Ok(CodeEvent::Garbled) => {
                transcript.add_message("coracle: dropped a kernel message that is too long or malformed\n");
            }
            Ok(CodeEvent::Ended(end)) => self.add_end_event(&end),
            Err(error) => {
                add_loss(transcript, &error);
                self.over = true;
            }
        }
    }

    fn add_end_event(&mut self, end: &ProcessEnd) {
        self.over = true;
        match (&self.error, end.exit) {
            _ if self.shell => add_end(&mut self.transcript, end, COMMAND_FAILED),
            (Some(error), ExitReason::Code(0)) => {
                let traceback = error.traceback.iter().map(String::as_str).collect();
                let error = FailureBody::new(&error.name, &error.value, traceback);
                self.transcript.add_event(SseEvent::Error { error });
            }
            (None, ExitReason::Code(0)) => add_end(&mut self.transcript, end, COMMAND_FAILED),
            (_, exit) => {
                let value = format!(
                    "the kernel {}; its state is lost, and the next run starts a new one",
                    describe_exit(exit)
                );
                let error = FailureBody::new("KernelDied", &value, vec![&value])
                    .with_ending(CommandEnding::from_exit(exit));
                self.transcript.add_event(SseEvent::Error { error });
            }
        }
    }
}

/// Adds plain text under both of its names, since clients differ in which one they read.
fn with_text(forms: &MimeForms) -> BTreeMap<&str, &str> {
    let mut named: BTreeMap<&str, &str> =
        forms.iter().map(|(mime, text)| (mime.as_str(), text.as_str())).collect();
    if let Some(plain) = forms.get(PLAIN_TEXT_MIME) {
        named.entry(PLAIN_TEXT_ALIAS).or_insert(plain);
    }
    named
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_text_has_both_names() {
        let forms = MimeForms::from([
            (PLAIN_TEXT_MIME.to_owned(), "4".to_owned()),
            ("image/png".to_owned(), "x".to_owned()),
        ]);
        let named = with_text(&forms);
        assert_eq!((named[PLAIN_TEXT_MIME], named[PLAIN_TEXT_ALIAS], named.len()), ("4", "4", 3));
        assert_eq!(named[PLAIN_TEXT_MIME].as_ptr(), named[PLAIN_TEXT_ALIAS].as_ptr(), "the text was copied");
        assert!(with_text(&MimeForms::new()).is_empty());
    }
}
