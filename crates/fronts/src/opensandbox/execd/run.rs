//! A command's life as a stream of events: `init`, `ping`, output, and exactly one of `error`
//! and `execution_complete` at the end.

use axum::response::Response;
use bytes::Bytes;
use domain::Exit;
use futures_util::{FutureExt, stream};
use service::{Ended, Event as Happening, Following, ServiceError};

use super::transcript::{Transcript, opening};
use crate::opensandbox::sse::{self, Ending, Event};
use crate::opensandbox::types::ended;
use crate::settings::Lines;

/// Streams what a process prints until it ends. Dropping the stream leaves the process alone.
pub(super) fn foreground(following: Following, name: &str, dialect: Lines) -> Response {
    let run = Run { following, transcript: Transcript::new(name, dialect), over: false };
    sse::response(stream::unfold(run, |mut run| async {
        let frame = run.frame().await?;
        Some((Ok(frame), run))
    }))
}

/// The whole story of something that was started and goes on without this client.
pub(super) fn background(name: &str) -> Response {
    let mut frame = opening(name);
    Event::ExecutionComplete { execution_time: 0 }.write_to(&mut frame);
    sse::response(stream::once(async { Ok(Bytes::from(frame)) }))
}

/// The whole story of something that could not be started.
pub(super) fn not_started(name: &str, ending: Ending, why: &str) -> Response {
    let mut frame = opening(name);
    Event::failure_by(Some(ending), why, why).write_to(&mut frame);
    sse::response(stream::once(async { Ok(Bytes::from(frame)) }))
}

/// Adds the last event of something that ends with an exit code.
pub(super) fn add_end(transcript: &mut Transcript, end: &Ended) {
    match end.exit {
        Exit::Code(0) => {
            transcript.add(Event::ExecutionComplete { execution_time: end.duration.as_millis() });
        }
        Exit::Code(code) => {
            transcript.add(Event::failure(&code.to_string(), &format!("exit status {code}")));
        }
        Exit::Signal(_) | Exit::Oom | Exit::Deadline | Exit::Lost => {
            let detail = format!("the command {}", ended(end.exit));
            transcript.add(Event::failure_by(Ending::of(end.exit), "-1", &detail));
        }
    }
}

/// Adds the last event of something that was lost sight of.
pub(super) fn add_loss(transcript: &mut Transcript, error: &ServiceError) {
    tracing::warn!(%error, "a command was lost while it was followed");
    transcript.add(Event::failure_by(Some(Ending::Lost), "-1", &error.to_string()));
}

struct Run {
    following: Following,
    transcript: Transcript,
    over: bool,
}

impl Run {
    /// The next bytes to send; `None` after the last event.
    async fn frame(&mut self) -> Option<Bytes> {
        while self.transcript.is_empty() {
            if self.over {
                return None;
            }
            // Each of the two may be dropped and begun again.
            tokio::select! {
                happening = self.following.next() => self.take(happening),
                () = self.transcript.pass_time() => {}
            }
        }
        // What is there already goes out in one piece.
        while !self.over
            && !self.transcript.is_full()
            && let Some(happening) = self.following.next().now_or_never()
        {
            self.take(happening);
        }
        Some(self.transcript.take())
    }

    fn take(&mut self, happening: Result<Happening, ServiceError>) {
        match happening {
            Ok(Happening::Output { stream, bytes, .. }) => self.transcript.print(stream, &bytes),
            Ok(Happening::Gap { from, to }) => self.transcript.miss(from, to),
            Ok(Happening::Ended(end)) => {
                add_end(&mut self.transcript, &end);
                self.over = true;
            }
            Err(error) => {
                add_loss(&mut self.transcript, &error);
                self.over = true;
            }
        }
    }
}
