//! Limits of what sandboxes use: rates of events, bytes per second, and numbers of open connections.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// How long bytes may wait for a limit before more are read. A shorter pause costs more wake-ups than it evens out.
const MIN_PAUSE_DELAY: Duration = Duration::from_millis(5);

/// Counts events against a rate. A full second of them may come at once.
#[derive(Debug, Default)]
pub(crate) struct EventRate(Mutex<Option<RateState>>);

#[derive(Clone, Copy, Debug)]
struct RateState {
    /// What may still be used now. Bytes are counted after they were read, so it may be negative.
    left: f64,
    updated: Instant,
}

impl EventRate {
    /// Uses one event of `per_second`; `false` if there is none.
    pub(crate) fn try_use(&self, per_second: u32) -> bool {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let refilled = refill(*state, f64::from(per_second));
        let used = refilled.left >= 1.0;
        let left = if used { refilled.left - 1.0 } else { refilled.left };
        *state = Some(RateState { left, ..refilled });
        used
    }

    /// Counts bytes that have passed, and returns how long to wait before the next.
    pub(crate) fn count_bytes(&self, bytes: u64, per_second: u64) -> Duration {
        #[expect(clippy::cast_precision_loss, reason = "rates need no more than 52 bits")]
        let (bytes, per_second) = (bytes as f64, per_second.max(1) as f64);
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let refilled = refill(*state, per_second);
        let left = refilled.left - bytes;
        *state = Some(RateState { left, ..refilled });
        let pause = Duration::try_from_secs_f64(-left.min(0.0) / per_second).unwrap_or_default();
        if pause < MIN_PAUSE_DELAY { Duration::ZERO } else { pause }
    }
}

fn refill(state: Option<RateState>, per_second: f64) -> RateState {
    let now = Instant::now();
    let left = state.map_or(per_second, |state| {
        let elapsed = now.saturating_duration_since(state.updated).as_secs_f64();
        (state.left + elapsed * per_second).min(per_second)
    });
    RateState { left, updated: now }
}

/// A number of things that are open at once.
#[derive(Debug, Default)]
pub(crate) struct OpenCount(Arc<AtomicU32>);

/// One of them; it is counted until it is dropped.
#[derive(Debug)]
pub(crate) struct CountedSlot {
    count: Arc<AtomicU32>,
    /// How many were open before this one.
    pub(crate) position: u32,
}

impl OpenCount {
    /// Counts one more; `None` if `most` are open.
    pub(crate) fn try_open(&self, most: u32) -> Option<CountedSlot> {
        let one_more = |open: u32| (open < most).then_some(open + 1);
        let position = self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, one_more).ok()?;
        Some(CountedSlot { count: Arc::clone(&self.0), position })
    }

    pub(crate) fn open(&self) -> u32 {
        self.0.load(Ordering::Acquire)
    }
}

impl Drop for CountedSlot {
    fn drop(&mut self) {
        self.count.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn events_beyond_the_rate_are_refused_until_time_passes() {
        let rate = EventRate::default();
        assert_eq!((0..15).filter(|_| rate.try_use(10)).count(), 10);
        tokio::time::advance(Duration::from_millis(250)).await;
        assert_eq!((0..15).filter(|_| rate.try_use(10)).count(), 2);
        tokio::time::advance(Duration::from_secs(60)).await;
        assert_eq!((0..15).filter(|_| rate.try_use(10)).count(), 10);
        assert!(!EventRate::default().try_use(0));
    }

    #[tokio::test(start_paused = true)]
    async fn bytes_beyond_the_rate_wait() {
        let rate = EventRate::default();
        assert_eq!(rate.count_bytes(1000, 1000), Duration::ZERO);
        assert_eq!(rate.count_bytes(500, 1000), Duration::from_millis(500));
        tokio::time::advance(Duration::from_millis(500)).await;
        assert_eq!(rate.count_bytes(100, 1000), Duration::from_millis(100));
    }

    #[test]
    fn open_slots_are_bounded_and_returned() {
        let count = OpenCount::default();
        let first = count.try_open(2).expect("a free slot");
        let second = count.try_open(2).expect("a free slot");
        assert_eq!((first.position, second.position), (0, 1));
        assert!(count.try_open(2).is_none());
        drop(first);
        assert_eq!(count.open(), 1);
        assert!(count.try_open(2).is_some());
    }
}
