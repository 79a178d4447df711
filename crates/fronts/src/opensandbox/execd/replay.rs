//! Replays what a terminal printed while a client was disconnected.
//!
//! A terminal counts its output from its first shell on, so that an offset keeps its meaning when the
//! next shell starts. A replay never contains a gap.

use std::time::Duration;

use domain::{Position, Retention};
use service::{Event, Following, ServiceError};
use tokio::time::{Instant, timeout_at};

use super::Scope;
use super::pty::{Running, Shell};
use crate::opensandbox::Front;

/// How much output is retained for clients that reconnect.
pub(super) const KEPT: Retention = Retention { first: 0, last: 1 << 20 };
/// The maximum size of a replay, which is collected before it is sent. It is more than is retained; if
/// a sandbox claims more, the rest is streamed like new output.
const MOST_REPLAYED: u64 = KEPT.last + KEPT.last / 4;
/// How long collecting the replay may take.
const REPLAY_TIME: Duration = Duration::from_secs(10);

/// Output that a client has missed, as far as it was collected.
pub(super) struct Missed {
    /// The offset of the first byte.
    pub(super) start: u64,
    pub(super) bytes: Vec<u8>,
}

impl Missed {
    pub(super) fn nothing(start: u64) -> Self {
        Self { start, bytes: Vec::new() }
    }

    /// The offset after the last byte.
    fn next(&self) -> u64 {
        self.start.saturating_add(self.bytes.len() as u64)
    }

    fn wants_more(&self, to: u64) -> bool {
        self.next() < to && (self.bytes.len() as u64) < MOST_REPLAYED
    }

    /// Adds an event; restarts after a gap.
    fn add(&mut self, event: &Event, base: u64) {
        match event {
            Event::Output { at, bytes, .. } => {
                self.skip_to(base.saturating_add(at.0));
                self.bytes.extend_from_slice(bytes);
            }
            Event::Gap { to, .. } => self.skip_to(base.saturating_add(to.0)),
            Event::Ended(_) => {}
        }
    }

    fn skip_to(&mut self, offset: u64) {
        if self.next() != offset {
            *self = Self::nothing(offset);
        }
    }

    /// Appends later output, or replaces this by it if there is a gap between them.
    fn then(mut self, later: Self) -> Self {
        if self.next() != later.start {
            return later;
        }
        self.bytes.extend_from_slice(&later.bytes);
        let over = self.bytes.len().saturating_sub(usize::try_from(MOST_REPLAYED).unwrap_or(usize::MAX));
        self.bytes.drain(..over);
        Self { start: self.start.saturating_add(over as u64), bytes: self.bytes }
    }
}

/// Follows the shell of a terminal from the first byte the client has not seen, and returns what the
/// client has missed of this shell and the previous one.
pub(super) async fn since(
    front: &Front,
    scope: &Scope,
    running: &Running,
    since: u64,
) -> Result<(Following, Missed), ServiceError> {
    let shell = &running.shell;
    let written = front.service.status(&scope.owner, &scope.id, &shell.process).await?.written;
    let from = since.saturating_sub(shell.base).min(written);
    let (following, missed) = gather(front, scope, shell, from, written).await?;
    Ok((following, before(front, scope, running, since).await.then(missed)))
}

/// Returns what a client has missed of the previous shell, if that is still available.
pub(super) async fn before(front: &Front, scope: &Scope, running: &Running, since: u64) -> Missed {
    let end = running.shell.base;
    let Some(shell) = running.before.as_ref().filter(|_| since < end) else {
        return Missed::nothing(end);
    };
    let from = since.saturating_sub(shell.base);
    match gather(front, scope, shell, from, end.saturating_sub(shell.base)).await {
        Ok((_, missed)) if missed.next() == end => missed,
        Ok(_) => Missed::nothing(end),
        Err(error) => {
            tracing::debug!(%error, "output of a terminal's previous shell is no longer available");
            Missed::nothing(end)
        }
    }
}

/// Collects the output between two offsets, as far as it is retained. Both offsets come from inside
/// the sandbox, so neither the size nor the duration may depend on them. A chunk may extend past the
/// end; the client gets all of it as replay.
async fn gather(
    front: &Front,
    scope: &Scope,
    shell: &Shell,
    from: u64,
    to: u64,
) -> Result<(Following, Missed), ServiceError> {
    let mut following = front.service.follow(&scope.owner, &scope.id, &shell.process, Position(from)).await?;
    let mut missed = Missed::nothing(shell.base.saturating_add(from));
    let deadline = Instant::now() + REPLAY_TIME;
    while missed.wants_more(shell.base.saturating_add(to)) {
        let Ok(event) = timeout_at(deadline, following.next()).await else { break };
        let event = event?;
        missed.add(&event, shell.base);
        if matches!(event, Event::Ended(_)) {
            break;
        }
    }
    Ok((following, missed))
}

#[cfg(test)]
mod tests {
    use domain::Stream;

    use super::*;

    const PIECE: u64 = 64 << 10;

    fn output(at: u64) -> Event {
        let bytes = vec![b'x'; usize::try_from(PIECE).unwrap()];
        Event::Output { stream: Stream::Stdout, at: Position(at), bytes: bytes.into() }
    }

    #[test]
    fn replay_size_is_bounded_if_a_sandbox_claims_endless_output() {
        let mut missed = Missed::nothing(0);
        while missed.wants_more(1 << 60) {
            missed.add(&output(missed.next()), 0);
        }
        assert_eq!(missed.start, 0);
        assert!((KEPT.last..=MOST_REPLAYED + PIECE).contains(&missed.next()), "{}", missed.next());
        let twice = Missed { start: 0, bytes: missed.bytes.clone() }
            .then(Missed { start: missed.next(), bytes: missed.bytes.clone() });
        assert_eq!((twice.bytes.len() as u64, twice.next()), (MOST_REPLAYED, 2 * missed.next()));
    }

    #[test]
    fn replay_starts_after_a_gap() {
        let mut missed = Missed::nothing(105);
        missed.add(&Event::Gap { from: Position(5), to: Position(1000) }, 100);
        assert!(missed.wants_more(1101) && !missed.wants_more(1100));
        missed.add(&output(1000), 100);
        assert_eq!((missed.start, missed.next()), (1100, 1100 + PIECE));
        missed.add(&output(1000 + 2 * PIECE), 100);
        assert_eq!((missed.start, missed.next()), (1100 + 2 * PIECE, 1100 + 3 * PIECE));
    }

    #[test]
    fn output_of_two_shells_is_joined_if_there_is_no_gap() {
        let early = || Missed { start: 3, bytes: b"ab".to_vec() };
        let whole = early().then(Missed { start: 5, bytes: b"c".to_vec() });
        assert_eq!((whole.start, &whole.bytes[..]), (3, &b"abc"[..]));
        let torn = early().then(Missed { start: 6, bytes: b"c".to_vec() });
        assert_eq!((torn.start, &torn.bytes[..]), (6, &b"c"[..]));
    }
}
