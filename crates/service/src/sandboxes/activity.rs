//! Whether a sandbox is in use: its open operations, and when the last one ended.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use crate::clock::Clock;

pub(crate) struct SandboxActivity {
    clock: Clock,
    /// Operations, streams and tunnels that are open now.
    open: AtomicUsize,
    /// Microseconds on the boot clock.
    last: AtomicU64,
}

/// The sandbox is in use until this is dropped.
pub(crate) struct ActivityGuard(Arc<SandboxActivity>);

impl SandboxActivity {
    pub(crate) fn new(clock: Clock) -> Arc<Self> {
        let activity = Self { clock, open: AtomicUsize::new(0), last: AtomicU64::new(0) };
        activity.touch();
        Arc::new(activity)
    }

    pub(crate) fn start_use(self: &Arc<Self>) -> ActivityGuard {
        self.open.fetch_add(1, Ordering::AcqRel);
        ActivityGuard(Arc::clone(self))
    }

    pub(crate) fn touch(&self) {
        let now = u64::try_from(self.clock.now().boot.as_micros()).unwrap_or(u64::MAX);
        self.last.fetch_max(now, Ordering::AcqRel);
    }

    /// Since when the sandbox is unused, on the boot clock; `None` while it is in use.
    pub(crate) fn idle_since(&self) -> Option<Duration> {
        let unused = self.open.load(Ordering::Acquire) == 0;
        unused.then(|| Duration::from_micros(self.last.load(Ordering::Acquire)))
    }
}

impl Drop for ActivityGuard {
    fn drop(&mut self) {
        // The time is set first, so that no reader sees the sandbox as unused since long ago.
        self.0.touch();
        self.0.open.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn open_operation_is_not_idle_and_its_end_counts() {
        let activity = SandboxActivity::new(Clock::from_host());
        let before = activity.idle_since().expect("no operation is open");
        let operation = activity.start_use();
        assert_eq!(activity.idle_since(), None);
        drop(operation);
        assert!(activity.idle_since().expect("the operation ended") >= before);
    }
}
