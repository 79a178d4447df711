//! Converts output to events: lines are assembled, and an unfinished line is sent when nothing more of
//! it arrives.

use std::time::Duration;

use bytes::Bytes;
use domain::{JournalOffset, StreamKind};
use tokio::time::{Instant, Interval, interval_at, sleep_until};

use crate::kit::lines::LineDialect;
use crate::kit::lines::LineSplitter;
use crate::opensandbox::sse::{GapRange, SseEvent};

/// How often a ping is sent.
const PING_INTERVAL: Duration = Duration::from_secs(3);
/// After how long without output an unfinished line is sent.
const PARTIAL_LINE_DELAY: Duration = Duration::from_millis(100);
/// How many bytes are batched if output arrives faster than it is sent.
const MAX_BATCH_BYTES: usize = 64 << 10;

pub(super) struct EventBuffer {
    stdout: LineSplitter,
    stderr: LineSplitter,
    buffer: Vec<u8>,
    ping: Interval,
    /// When an unfinished line will be sent.
    flush_at: Instant,
}

/// The events that every stream begins with.
pub(super) fn opening_events(name: &str) -> Vec<u8> {
    let mut frame = Vec::new();
    SseEvent::Init { text: name }.write_to(&mut frame);
    SseEvent::ping().write_to(&mut frame);
    frame
}

impl EventBuffer {
    pub(super) fn new(name: &str, dialect: LineDialect) -> Self {
        Self {
            stdout: LineSplitter::new(dialect),
            stderr: LineSplitter::new(dialect),
            buffer: opening_events(name),
            ping: interval_at(Instant::now() + PING_INTERVAL, PING_INTERVAL),
            flush_at: Instant::now(),
        }
    }

    /// Waits for the next timer and adds its events. Cancel-safe.
    pub(super) async fn wait_for_timer(&mut self) {
        let unfinished = self.stdout.has_partial() || self.stderr.has_partial();
        tokio::select! {
            () = sleep_until(self.flush_at), if unfinished => self.flush_partial_lines(),
            _ = self.ping.tick() => SseEvent::ping().write_to(&mut self.buffer),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.buffer.is_empty()
    }

    /// Whether the batch is large enough to be sent.
    pub(super) fn is_full(&self) -> bool {
        self.buffer.len() >= MAX_BATCH_BYTES
    }

    pub(super) fn take_bytes(&mut self) -> Bytes {
        Bytes::from(std::mem::take(&mut self.buffer))
    }

    pub(super) fn add_output(&mut self, stream: StreamKind, bytes: &[u8]) {
        let buffer = &mut self.buffer;
        match stream {
            StreamKind::Stdout | StreamKind::Terminal => self.stdout.push(bytes, &mut stdout_events(buffer)),
            StreamKind::Stderr => self.stderr.push(bytes, &mut stderr_events(buffer)),
            // Kernel reports are not printed output.
            StreamKind::KernelEvent => {}
        }
        self.flush_at = Instant::now() + PARTIAL_LINE_DELAY;
    }

    pub(super) fn add_gap(&mut self, from: JournalOffset, to: JournalOffset) {
        self.stdout.break_line(&mut stdout_events(&mut self.buffer));
        self.stderr.break_line(&mut stderr_events(&mut self.buffer));
        let missing = to.0.saturating_sub(from.0);
        let text = format!(
            "coracle: {missing} bytes of output (offsets {} to {}) are missing here: they were not read in time\n",
            from.0, to.0
        );
        self.add_event(SseEvent::Gap { text: &text, coracle: GapRange { gap: (from.0, to.0) } });
    }

    /// Adds a message of this server to the output.
    pub(super) fn add_message(&mut self, text: &str) {
        self.add_event(SseEvent::Stderr { text });
    }

    /// Adds an event after all output so far.
    pub(super) fn add_event(&mut self, event: SseEvent<'_>) {
        self.stdout.finish(&mut stdout_events(&mut self.buffer));
        self.stderr.finish(&mut stderr_events(&mut self.buffer));
        event.write_to(&mut self.buffer);
    }

    fn flush_partial_lines(&mut self) {
        self.stdout.flush(&mut stdout_events(&mut self.buffer));
        self.stderr.flush(&mut stderr_events(&mut self.buffer));
        // The rest is an incomplete character, which waits for its remaining bytes.
        self.flush_at = Instant::now() + PING_INTERVAL;
    }
}

fn stdout_events(buffer: &mut Vec<u8>) -> impl FnMut(&str) {
    |text| SseEvent::Stdout { text }.write_to(buffer)
}

fn stderr_events(buffer: &mut Vec<u8>) -> impl FnMut(&str) {
    |text| SseEvent::Stderr { text }.write_to(buffer)
}
