//! Replays what a terminal printed while a client was disconnected.
//!
//! A terminal counts its output from its first shell on, so that an offset keeps its meaning when the
//! next shell starts. A replay never contains a gap.

use std::time::Duration;

use domain::{JournalOffset, OutputRetention};
use tokio::time::{Instant, timeout_at};

use super::session::{ShellProcess, TerminalShell};
use crate::{OutputEvent, OutputStream, SandboxTerminals, ServiceError};

/// How much output is retained for clients that reconnect.
pub(super) const REPLAY_RETENTION: OutputRetention = OutputRetention { first: 0, last: 1 << 20 };
/// The maximum size of a replay, which is collected before it is sent. It is more than is retained; if
/// a sandbox claims more, the rest is streamed like new output.
const MAX_REPLAY_BYTES: u64 = REPLAY_RETENTION.last + REPLAY_RETENTION.last / 4;
/// How long collecting the replay may take.
const REPLAY_TIMEOUT: Duration = Duration::from_secs(10);

/// Output that a client has missed, as far as it was collected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MissedOutput {
    /// The offset of the first byte.
    pub start: u64,
    pub bytes: Vec<u8>,
}

impl MissedOutput {
    fn empty_at(start: u64) -> Self {
        Self { start, bytes: Vec::new() }
    }

    /// The offset after the last byte.
    fn end_offset(&self) -> u64 {
        self.start.saturating_add(self.bytes.len() as u64)
    }

    fn wants_more(&self, to: u64) -> bool {
        self.end_offset() < to && (self.bytes.len() as u64) < MAX_REPLAY_BYTES
    }

    /// Adds an event; restarts after a gap.
    fn add_event(&mut self, event: &OutputEvent, base: u64) {
        match event {
            OutputEvent::Output { at, bytes, .. } => {
                self.skip_to(base.saturating_add(at.0));
                self.bytes.extend_from_slice(bytes);
            }
            OutputEvent::Gap { to, .. } => self.skip_to(base.saturating_add(to.0)),
            OutputEvent::Ended(_) => {}
        }
    }

    fn skip_to(&mut self, offset: u64) {
        if self.end_offset() != offset {
            *self = Self::empty_at(offset);
        }
    }

    /// Appends later output, or replaces this by it if there is a gap between them.
    fn append_or_replace(mut self, later: Self) -> Self {
        if self.end_offset() != later.start {
            return later;
        }
        self.bytes.extend_from_slice(&later.bytes);
        let over = self.bytes.len().saturating_sub(usize::try_from(MAX_REPLAY_BYTES).unwrap_or(usize::MAX));
        self.bytes.drain(..over);
        Self { start: self.start.saturating_add(over as u64), bytes: self.bytes }
    }
}

impl SandboxTerminals<'_> {
    /// Follows the shell of a terminal from the first byte the client has not seen, and returns what the client has
    /// missed of this shell and the previous one.
    pub(super) async fn missed_since(
        self,
        running: &TerminalShell,
        since: u64,
    ) -> Result<(OutputStream, MissedOutput), ServiceError> {
        let shell = &running.shell;
        let written = self.0.processes().process_status(&shell.process).await?.written;
        let from = since.saturating_sub(shell.base).min(written);
        let (following, missed) = self.collect_output(shell, from, written).await?;
        let earlier = self.missed_of_previous_shell(running, since).await;
        Ok((following, earlier.append_or_replace(missed)))
    }

    /// Returns what a client has missed of the previous shell, if that is still available.
    pub(super) async fn missed_of_previous_shell(self, running: &TerminalShell, since: u64) -> MissedOutput {
        let end = running.shell.base;
        let Some(shell) = running.before.as_ref().filter(|_| since < end) else {
            return MissedOutput::empty_at(end);
        };
        let from = since.saturating_sub(shell.base);
        match self.collect_output(shell, from, end.saturating_sub(shell.base)).await {
            Ok((_, missed)) if missed.end_offset() == end => missed,
            Ok(_) => MissedOutput::empty_at(end),
            Err(error) => {
                tracing::debug!(%error, "output of a terminal's previous shell is no longer available");
                MissedOutput::empty_at(end)
            }
        }
    }

    /// Collects the output between two offsets, as far as it is retained. Both offsets come from inside the sandbox, so
    /// neither the size nor the duration may depend on them. A chunk may extend past the end; the client gets all of it
    /// as replay.
    async fn collect_output(
        self,
        shell: &ShellProcess,
        from: u64,
        to: u64,
    ) -> Result<(OutputStream, MissedOutput), ServiceError> {
        let mut following = self.0.processes().follow_output(&shell.process, JournalOffset(from)).await?;
        let mut missed = MissedOutput::empty_at(shell.base.saturating_add(from));
        let deadline = Instant::now() + REPLAY_TIMEOUT;
        while missed.wants_more(shell.base.saturating_add(to)) {
            let Ok(event) = timeout_at(deadline, following.next()).await else { break };
            let event = event?;
            missed.add_event(&event, shell.base);
            if matches!(event, OutputEvent::Ended(_)) {
                break;
            }
        }
        Ok((following, missed))
    }
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
mod tests {
    use domain::StreamKind;

    use super::*;

    const PIECE: u64 = 64 << 10;

    fn output(at: u64) -> OutputEvent {
        let bytes = vec![b'x'; usize::try_from(PIECE).unwrap()];
        OutputEvent::Output { stream: StreamKind::Stdout, at: JournalOffset(at), bytes: bytes.into() }
    }

    #[test]
    fn replay_size_is_bounded_if_a_sandbox_claims_endless_output() {
        let mut missed = MissedOutput::empty_at(0);
        while missed.wants_more(1 << 60) {
            missed.add_event(&output(missed.end_offset()), 0);
        }
        assert_eq!(missed.start, 0);
        assert!(
            (REPLAY_RETENTION.last..=MAX_REPLAY_BYTES + PIECE).contains(&missed.end_offset()),
            "{}",
            missed.end_offset()
        );
        let twice = MissedOutput { start: 0, bytes: missed.bytes.clone() }
            .append_or_replace(MissedOutput { start: missed.end_offset(), bytes: missed.bytes.clone() });
        assert_eq!(
            (twice.bytes.len() as u64, twice.end_offset()),
            (MAX_REPLAY_BYTES, 2 * missed.end_offset())
        );
    }

    #[test]
    fn replay_starts_after_a_gap() {
        let mut missed = MissedOutput::empty_at(105);
        missed.add_event(
            &OutputEvent::Gap { from: JournalOffset(5), to: JournalOffset(1000), stderr_before: None },
            100,
        );
        assert!(missed.wants_more(1101) && !missed.wants_more(1100));
        missed.add_event(&output(1000), 100);
        assert_eq!((missed.start, missed.end_offset()), (1100, 1100 + PIECE));
        missed.add_event(&output(1000 + 2 * PIECE), 100);
        assert_eq!((missed.start, missed.end_offset()), (1100 + 2 * PIECE, 1100 + 3 * PIECE));
    }

    #[test]
    fn output_of_two_shells_is_joined_if_there_is_no_gap() {
        let early = || MissedOutput { start: 3, bytes: b"ab".to_vec() };
        let whole = early().append_or_replace(MissedOutput { start: 5, bytes: b"c".to_vec() });
        assert_eq!((whole.start, &whole.bytes[..]), (3, &b"abc"[..]));
        let torn = early().append_or_replace(MissedOutput { start: 6, bytes: b"c".to_vec() });
        assert_eq!((torn.start, &torn.bytes[..]), (6, &b"c"[..]));
    }
}
