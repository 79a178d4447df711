//! A command as a stream of events: `init`, `ping`, output, and exactly one of `error` and
//! `execution_complete` at the end.

use axum::response::Response;
use bytes::Bytes;
use domain::ExitReason;
use futures_util::{FutureExt, stream};
use service::{OutputEvent as ServiceEvent, OutputStream, ProcessEnd, ServiceError};

use super::event_buffer::{EventBuffer, opening_events};
use crate::kit::command_ending::CommandEnding;
use crate::kit::lines::LineDialect;
use crate::kit::sse::event_stream_response;
use crate::opensandbox::sse::{self, SseEvent};
use crate::opensandbox::types::describe_exit;

/// Streams the output of a process until it ends. Dropping the stream does not stop the process.
pub(super) fn stream_command(following: OutputStream, name: &str, dialect: LineDialect) -> Response {
    stream_response(CommandEventStream::new(following, name, dialect))
}

/// Like [`stream_command`], with the error name of isolated sessions.
pub(super) fn stream_isolated_run(following: OutputStream, name: &str, dialect: LineDialect) -> Response {
    stream_response(CommandEventStream {
        failure: "ExitError",
        ..CommandEventStream::new(following, name, dialect)
    })
}

fn stream_response(run: CommandEventStream) -> Response {
    event_stream_response(stream::unfold(run, |mut run| async {
        let frame = run.next_frame().await?;
        Some((Ok(frame), run))
    }))
}

/// The complete stream for a command that runs in the background.
pub(super) fn background_response(name: &str) -> Response {
    let mut frame = opening_events(name);
    SseEvent::ExecutionComplete { execution_time: 0 }.write_to(&mut frame);
    event_stream_response(stream::once(async { Ok(Bytes::from(frame)) }))
}

/// The complete stream for a command that could not be started.
pub(super) fn not_started_response(name: &str, ending: CommandEnding, why: &str) -> Response {
    let mut frame = opening_events(name);
    SseEvent::failure_by(Some(ending), why, why).write_to(&mut frame);
    event_stream_response(stream::once(async { Ok(Bytes::from(frame)) }))
}

/// Adds the last event of a command that ended.
pub(super) fn add_end(transcript: &mut EventBuffer, end: &ProcessEnd, failure: &'static str) {
    match end.exit {
        ExitReason::Code(0) => {
            transcript.add_event(SseEvent::ExecutionComplete { execution_time: end.duration.as_millis() });
        }
        ExitReason::Code(code) => {
            let detail = format!("exit status {code}");
            transcript.add_event(SseEvent::failure(&code.to_string(), &detail).with_ename(failure));
        }
        ExitReason::Signal(_) | ExitReason::Oom | ExitReason::Deadline | ExitReason::Lost => {
            let detail = format!("the command {}", describe_exit(end.exit));
            transcript.add_event(
                SseEvent::failure_by(CommandEnding::from_exit(end.exit), "-1", &detail).with_ename(failure),
            );
        }
    }
}

/// Adds the last event of a command whose output can no longer be followed.
pub(super) fn add_loss(transcript: &mut EventBuffer, error: &ServiceError) {
    tracing::warn!(%error, "lost the output stream of a command; its client gets an error event");
    transcript.add_event(SseEvent::failure_by(Some(CommandEnding::Lost), "-1", &error.to_string()));
}

struct CommandEventStream {
    following: OutputStream,
    transcript: EventBuffer,
    over: bool,
    /// The error name of a failed run.
    failure: &'static str,
}

impl CommandEventStream {
    fn new(following: OutputStream, name: &str, dialect: LineDialect) -> Self {
        let transcript = EventBuffer::new(name, dialect);
        Self { following, transcript, over: false, failure: sse::COMMAND_FAILED }
    }

    /// Returns the next bytes to send; `None` after the last event.
    async fn next_frame(&mut self) -> Option<Bytes> {
        while self.transcript.is_empty() {
            if self.over {
                return None;
            }
            // Both branches are cancel-safe.
            tokio::select! {
                event = self.following.next() => self.handle_event(event),
                () = self.transcript.wait_for_timer() => {}
            }
        }
        // Events that are already available are sent together.
        while !self.over
            && !self.transcript.is_full()
            && let Some(event) = self.following.next().now_or_never()
        {
            self.handle_event(event);
        }
        Some(self.transcript.take_bytes())
    }

    fn handle_event(&mut self, event: Result<ServiceEvent, ServiceError>) {
        match event {
            Ok(ServiceEvent::Output { stream, bytes, .. }) => self.transcript.add_output(stream, &bytes),
            Ok(ServiceEvent::Gap { from, to, .. }) => self.transcript.add_gap(from, to),
            Ok(ServiceEvent::Ended(end)) => {
                add_end(&mut self.transcript, &end, self.failure);
                self.over = true;
            }
            Err(error) => {
                add_loss(&mut self.transcript, &error);
                self.over = true;
            }
        }
    }
}
