//! A command's life as a stream of events: `init`, `ping`, output, and exactly one of `error`
//! and `execution_complete` at the end.

use std::time::Duration;

use axum::response::Response;
use bytes::Bytes;
use domain::{Exit, Stream};
use futures_util::{FutureExt, stream};
use service::{Ended, Event as Happening, Following, ServiceError};
use tokio::time::{Instant, Interval, interval_at, sleep_until};

use crate::opensandbox::lines::Splitter;
use crate::opensandbox::sse::{self, Ending, Event};
use crate::opensandbox::types::ended;
use crate::settings::Lines;

/// How often a silent stream shows that it lives.
const PING: Duration = Duration::from_secs(3);
/// After how long without output an unfinished line is shown.
const PAUSE: Duration = Duration::from_millis(100);
/// How much is gathered before it is sent, if it comes faster than it is taken.
const ENOUGH: usize = 64 << 10;

/// Streams what a process prints until it ends. Dropping the stream leaves the process alone.
pub(super) fn foreground(following: Following, name: &str, dialect: Lines) -> Response {
    follow(Run::new(following, name, dialect))
}

/// As [`foreground`], in the words of isolated sessions.
pub(super) fn isolated(following: Following, name: &str, dialect: Lines) -> Response {
    follow(Run { failure: "ExitError", ..Run::new(following, name, dialect) })
}

fn follow(run: Run) -> Response {
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

fn opening(name: &str) -> Vec<u8> {
    let mut frame = Vec::new();
    Event::Init { text: name }.write_to(&mut frame);
    Event::ping().write_to(&mut frame);
    frame
}

struct Run {
    following: Following,
    stdout: Splitter,
    stderr: Splitter,
    buffer: Vec<u8>,
    ping: Interval,
    /// When an unfinished line will be shown.
    show_at: Instant,
    over: bool,
    /// What an end is called that is none of success.
    failure: &'static str,
}

impl Run {
    fn new(following: Following, name: &str, dialect: Lines) -> Self {
        Self {
            following,
            stdout: Splitter::new(dialect),
            stderr: Splitter::new(dialect),
            buffer: opening(name),
            ping: interval_at(Instant::now() + PING, PING),
            show_at: Instant::now(),
            over: false,
            failure: sse::COMMAND_FAILED,
        }
    }

    /// The next bytes to send; `None` after the last event.
    async fn frame(&mut self) -> Option<Bytes> {
        while self.buffer.is_empty() {
            if self.over {
                return None;
            }
            self.step().await;
        }
        // What is there already goes out in one piece.
        while !self.over
            && self.buffer.len() < ENOUGH
            && let Some(happening) = self.following.next().now_or_never()
        {
            self.take(happening);
        }
        Some(Bytes::from(std::mem::take(&mut self.buffer)))
    }

    /// Waits for one thing to happen. Each of the branches may be dropped and begun again.
    async fn step(&mut self) {
        let unfinished = self.stdout.has_partial() || self.stderr.has_partial();
        tokio::select! {
            happening = self.following.next() => self.take(happening),
            () = sleep_until(self.show_at), if unfinished => self.show_unfinished(),
            _ = self.ping.tick() => Event::ping().write_to(&mut self.buffer),
        }
    }

    fn take(&mut self, happening: Result<Happening, ServiceError>) {
        match happening {
            Ok(Happening::Output { stream, bytes, .. }) => {
                let buffer = &mut self.buffer;
                match stream {
                    Stream::Stdout | Stream::Terminal => self.stdout.push(&bytes, &mut stdout(buffer)),
                    Stream::Stderr => self.stderr.push(&bytes, &mut stderr(buffer)),
                }
                self.show_at = Instant::now() + PAUSE;
            }
            Ok(Happening::Gap { from, to }) => {
                self.show_all();
                let missing = to.0.saturating_sub(from.0);
                let note = format!("coracle: {missing} bytes of output came too fast and are missing here\n");
                Event::Stderr { text: &note }.write_to(&mut self.buffer);
            }
            Ok(Happening::Ended(end)) => self.end(&end),
            Err(error) => {
                self.show_all();
                tracing::warn!(%error, "a command was lost while it was followed");
                Event::failure_by(Some(Ending::Lost), "-1", &error.to_string()).write_to(&mut self.buffer);
                self.over = true;
            }
        }
    }

    fn end(&mut self, end: &Ended) {
        self.show_all();
        match end.exit {
            Exit::Code(0) => {
                Event::ExecutionComplete { execution_time: end.duration.as_millis() }
                    .write_to(&mut self.buffer);
            }
            Exit::Code(code) => {
                let detail = format!("exit status {code}");
                Event::failure(&code.to_string(), &detail).called(self.failure).write_to(&mut self.buffer);
            }
            Exit::Signal(_) | Exit::Oom | Exit::Deadline | Exit::Lost => {
                let detail = format!("the command {}", ended(end.exit));
                Event::failure_by(Ending::of(end.exit), "-1", &detail)
                    .called(self.failure)
                    .write_to(&mut self.buffer);
            }
        }
        self.over = true;
    }

    fn show_unfinished(&mut self) {
        self.stdout.flush(&mut stdout(&mut self.buffer));
        self.stderr.flush(&mut stderr(&mut self.buffer));
        // What is left is a cut character; it waits for its rest.
        self.show_at = Instant::now() + PING;
    }

    fn show_all(&mut self) {
        self.stdout.finish(&mut stdout(&mut self.buffer));
        self.stderr.finish(&mut stderr(&mut self.buffer));
    }
}

fn stdout(buffer: &mut Vec<u8>) -> impl FnMut(&str) {
    |text| Event::Stdout { text }.write_to(buffer)
}

fn stderr(buffer: &mut Vec<u8>) -> impl FnMut(&str) {
    |text| Event::Stderr { text }.write_to(buffer)
}
