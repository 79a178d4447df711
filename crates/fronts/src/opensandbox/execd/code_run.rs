//! A code run as a stream of events: like a command's, with `execution_count` and `result` in addition.
//! An error of the code is sent at the end, instead of `execution_complete`.

use std::collections::BTreeMap;

use axum::response::Response;
use bytes::Bytes;
use domain::{Exit, Language, Worker};
use futures_util::{FutureExt, stream};
use service::{CodeError, CodeEvent, Ended, Forms, Running, ServiceError};

use super::run::{add_end, add_loss};
use super::transcript::{Transcript, opening};
use crate::opensandbox::sse::{self, COMMAND_FAILED, Ending, Event, Failure};
use crate::opensandbox::types::ended;
use crate::settings::Lines;

/// The MIME type of plain text, and the name under which some clients expect it.
const PLAIN: &str = "text/plain";
const TEXT: &str = "text";

/// Streams the events of a code run. The core decides what happens if the stream is dropped.
pub(super) fn stream(running: Running, name: &str, language: &Language, dialect: Lines) -> Response {
    let run = CodeRun {
        running,
        transcript: Transcript::new(name, dialect),
        shell: language.worker() == Worker::Bash,
        error: None,
        over: false,
    };
    sse::response(stream::unfold(run, |mut run| async {
        let frame = run.frame().await?;
        Some((Ok(frame), run))
    }))
}

/// The complete stream for code that was sent while other code runs.
pub(super) fn busy(name: &str) -> Response {
    let mut frame = opening(name);
    let value = "session is busy: other code is running";
    Event::Error { error: Failure::new("SessionBusy", value, vec![value]) }.write_to(&mut frame);
    sse::response(stream::once(async { Ok(Bytes::from(frame)) }))
}

struct CodeRun {
    running: Running,
    transcript: Transcript,
    /// Whether the exit code is that of the code itself.
    shell: bool,
    error: Option<CodeError>,
    over: bool,
}

impl CodeRun {
    /// Returns the next bytes to send; `None` after the last event.
    async fn frame(&mut self) -> Option<Bytes> {
        while self.transcript.is_empty() {
            if self.over {
                return None;
            }
            // Both branches are cancel-safe.
            tokio::select! {
                event = self.running.next() => self.take(event),
                () = self.transcript.pass_time() => {}
            }
        }
        // Events that are already available are sent together.
        while !self.over
            && !self.transcript.is_full()
            && let Some(event) = self.running.next().now_or_never()
        {
            self.take(event);
        }
        Some(self.transcript.take())
    }

    fn take(&mut self, event: Result<CodeEvent, ServiceError>) {
        let transcript = &mut self.transcript;
        match event {
            Ok(CodeEvent::Output { stream, bytes }) => transcript.print(stream, &bytes),
            Ok(CodeEvent::Gap { from, to }) => transcript.miss(from, to),
            Ok(CodeEvent::Count(execution_count)) => {
                transcript.add(Event::ExecutionCount { execution_count });
            }
            Ok(CodeEvent::Display(forms) | CodeEvent::Result(forms)) => {
                transcript.add(Event::Result { results: with_text(&forms) });
            }
            Ok(CodeEvent::Error(error)) => self.error = Some(error),
            Ok(CodeEvent::Garbled) => {
                transcript.note("coracle: dropped a kernel message that is too long or malformed\n");
            }
            Ok(CodeEvent::Ended(end)) => self.end(&end),
            Err(error) => {
                add_loss(transcript, &error);
                self.over = true;
            }
        }
    }

    fn end(&mut self, end: &Ended) {
        self.over = true;
        match (&self.error, end.exit) {
            _ if self.shell => add_end(&mut self.transcript, end, COMMAND_FAILED),
            (Some(error), Exit::Code(0)) => {
                let traceback = error.traceback.iter().map(String::as_str).collect();
                let error = Failure::new(&error.name, &error.value, traceback);
                self.transcript.add(Event::Error { error });
            }
            (None, Exit::Code(0)) => add_end(&mut self.transcript, end, COMMAND_FAILED),
            (_, exit) => {
                let value = format!(
                    "the kernel {}; its state is lost, and the next run starts a new one",
                    ended(exit)
                );
                let error = Failure::new("KernelDied", &value, vec![&value]).by(Ending::of(exit));
                self.transcript.add(Event::Error { error });
            }
        }
    }
}

/// Adds plain text under both of its names, since clients differ in which one they read.
fn with_text(forms: &Forms) -> BTreeMap<&str, &str> {
    let mut named: BTreeMap<&str, &str> =
        forms.iter().map(|(mime, text)| (mime.as_str(), text.as_str())).collect();
    if let Some(plain) = forms.get(PLAIN) {
        named.entry(TEXT).or_insert(plain);
    }
    named
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_text_has_both_names() {
        let forms =
            Forms::from([(PLAIN.to_owned(), "4".to_owned()), ("image/png".to_owned(), "x".to_owned())]);
        let named = with_text(&forms);
        assert_eq!((named[PLAIN], named[TEXT], named.len()), ("4", "4", 3));
        assert_eq!(named[PLAIN].as_ptr(), named[TEXT].as_ptr(), "the text was copied");
        assert!(with_text(&Forms::new()).is_empty());
    }
}
