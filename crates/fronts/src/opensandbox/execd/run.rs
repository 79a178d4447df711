//! A command as a stream of events: `init`, `ping`, output, and exactly one of `error` and
//! `execution_complete` at the end.

use axum::response::Response;
use bytes::Bytes;
use domain::Exit;
use futures_util::{FutureExt, stream};
use service::{Ended, Event as ServiceEvent, Following, ServiceError};

use super::transcript::{Transcript, opening};
use crate::opensandbox::sse::{self, Ending, Event};
use crate::opensandbox::types::ended;
use crate::settings::Lines;

/// Streams the output of a process until it ends. Dropping the stream does not stop the process.
pub(super) fn foreground(following: Following, name: &str, dialect: Lines) -> Response {
    follow(Run::new(following, name, dialect))
}

/// Like [`foreground`], with the error name of isolated sessions.
pub(super) fn isolated(following: Following, name: &str, dialect: Lines) -> Response {
    follow(Run { failure: "ExitError", ..Run::new(following, name, dialect) })
}

fn follow(run: Run) -> Response {
    sse::response(stream::unfold(run, |mut run| async {
        let frame = run.frame().await?;
        Some((Ok(frame), run))
    }))
}

/// The complete stream for a command that runs in the background.
pub(super) fn background(name: &str) -> Response {
    let mut frame = opening(name);
    Event::ExecutionComplete { execution_time: 0 }.write_to(&mut frame);
    sse::response(stream::once(async { Ok(Bytes::from(frame)) }))
}

/// The complete stream for a command that could not be started.
pub(super) fn not_started(name: &str, ending: Ending, why: &str) -> Response {
    let mut frame = opening(name);
    Event::failure_by(Some(ending), why, why).write_to(&mut frame);
    sse::response(stream::once(async { Ok(Bytes::from(frame)) }))
}

/// Adds the last event of a command that ended.
pub(super) fn add_end(transcript: &mut Transcript, end: &Ended, failure: &'static str) {
    match end.exit {
        Exit::Code(0) => {
            transcript.add(Event::ExecutionComplete { execution_time: end.duration.as_millis() });
        }
        Exit::Code(code) => {
            let detail = format!("exit status {code}");
            transcript.add(Event::failure(&code.to_string(), &detail).called(failure));
        }
        Exit::Signal(_) | Exit::Oom | Exit::Deadline | Exit::Lost => {
            let detail = format!("the command {}", ended(end.exit));
            transcript.add(Event::failure_by(Ending::of(end.exit), "-1", &detail).called(failure));
        }
    }
}

/// Adds the last event of a command whose output can no longer be followed.
pub(super) fn add_loss(transcript: &mut Transcript, error: &ServiceError) {
    tracing::warn!(%error, "lost the output stream of a command; its client gets an error event");
    transcript.add(Event::failure_by(Some(Ending::Lost), "-1", &error.to_string()));
}

struct Run {
    following: Following,
    transcript: Transcript,
    over: bool,
    /// The error name of a failed run.
    failure: &'static str,
}

impl Run {
    fn new(following: Following, name: &str, dialect: Lines) -> Self {
        let transcript = Transcript::new(name, dialect);
        Self { following, transcript, over: false, failure: sse::COMMAND_FAILED }
    }

    /// Returns the next bytes to send; `None` after the last event.
    async fn frame(&mut self) -> Option<Bytes> {
        while self.transcript.is_empty() {
            if self.over {
                return None;
            }
            // Both branches are cancel-safe.
            tokio::select! {
                event = self.following.next() => self.take(event),
                () = self.transcript.pass_time() => {}
            }
        }
        // Events that are already available are sent together.
        while !self.over
            && !self.transcript.is_full()
            && let Some(event) = self.following.next().now_or_never()
        {
            self.take(event);
        }
        Some(self.transcript.take())
    }

    fn take(&mut self, event: Result<ServiceEvent, ServiceError>) {
        match event {
            Ok(ServiceEvent::Output { stream, bytes, .. }) => self.transcript.print(stream, &bytes),
            Ok(ServiceEvent::Gap { from, to }) => self.transcript.miss(from, to),
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
