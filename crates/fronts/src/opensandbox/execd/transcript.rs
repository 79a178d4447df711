//! Converts output to events: lines are assembled, and an unfinished line is sent when nothing more of
//! it arrives.

use std::time::Duration;

use bytes::Bytes;
use domain::{Position, Stream};
use tokio::time::{Instant, Interval, interval_at, sleep_until};

use crate::opensandbox::lines::Splitter;
use crate::opensandbox::sse::{Event, Missing};
use crate::settings::Lines;

/// How often a ping is sent.
const PING: Duration = Duration::from_secs(3);
/// After how long without output an unfinished line is sent.
const PAUSE: Duration = Duration::from_millis(100);
/// How many bytes are batched if output arrives faster than it is sent.
const ENOUGH: usize = 64 << 10;

pub(super) struct Transcript {
    stdout: Splitter,
    stderr: Splitter,
    buffer: Vec<u8>,
    ping: Interval,
    /// When an unfinished line will be sent.
    show_at: Instant,
}

/// The events that every stream begins with.
pub(super) fn opening(name: &str) -> Vec<u8> {
    let mut frame = Vec::new();
    Event::Init { text: name }.write_to(&mut frame);
    Event::ping().write_to(&mut frame);
    frame
}

impl Transcript {
    pub(super) fn new(name: &str, dialect: Lines) -> Self {
        Self {
            stdout: Splitter::new(dialect),
            stderr: Splitter::new(dialect),
            buffer: opening(name),
            ping: interval_at(Instant::now() + PING, PING),
            show_at: Instant::now(),
        }
    }

    /// Waits for the next timer and adds its events. Cancel-safe.
    pub(super) async fn pass_time(&mut self) {
        let unfinished = self.stdout.has_partial() || self.stderr.has_partial();
        tokio::select! {
            () = sleep_until(self.show_at), if unfinished => self.show_unfinished(),
            _ = self.ping.tick() => Event::ping().write_to(&mut self.buffer),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.buffer.is_empty()
    }

    /// Whether the batch is large enough to be sent.
    pub(super) fn is_full(&self) -> bool {
        self.buffer.len() >= ENOUGH
    }

    pub(super) fn take(&mut self) -> Bytes {
        Bytes::from(std::mem::take(&mut self.buffer))
    }

    pub(super) fn print(&mut self, stream: Stream, bytes: &[u8]) {
        let buffer = &mut self.buffer;
        match stream {
            Stream::Stdout | Stream::Terminal => self.stdout.push(bytes, &mut stdout(buffer)),
            Stream::Stderr => self.stderr.push(bytes, &mut stderr(buffer)),
            // Kernel reports are not printed output.
            Stream::Tell => {}
        }
        self.show_at = Instant::now() + PAUSE;
    }

    pub(super) fn miss(&mut self, from: Position, to: Position) {
        self.stdout.break_line(&mut stdout(&mut self.buffer));
        self.stderr.break_line(&mut stderr(&mut self.buffer));
        let missing = to.0.saturating_sub(from.0);
        let text = format!(
            "coracle: {missing} bytes of output (offsets {} to {}) are missing here: they were not read in time\n",
            from.0, to.0
        );
        self.add(Event::Gap { text: &text, coracle: Missing { gap: (from.0, to.0) } });
    }

    /// Adds a message of this server to the output.
    pub(super) fn note(&mut self, text: &str) {
        self.add(Event::Stderr { text });
    }

    /// Adds an event after all output so far.
    pub(super) fn add(&mut self, event: Event<'_>) {
        self.stdout.finish(&mut stdout(&mut self.buffer));
        self.stderr.finish(&mut stderr(&mut self.buffer));
        event.write_to(&mut self.buffer);
    }

    fn show_unfinished(&mut self) {
        self.stdout.flush(&mut stdout(&mut self.buffer));
        self.stderr.flush(&mut stderr(&mut self.buffer));
        // The rest is an incomplete character, which waits for its remaining bytes.
        self.show_at = Instant::now() + PING;
    }
}

fn stdout(buffer: &mut Vec<u8>) -> impl FnMut(&str) {
    |text| Event::Stdout { text }.write_to(buffer)
}

fn stderr(buffer: &mut Vec<u8>) -> impl FnMut(&str) {
    |text| Event::Stderr { text }.write_to(buffer)
}
