//! Ends sandboxes whose time is over, and removes volumes that were unused for long enough: one task and one schedule for
//! all of them.
//!
//! The schedule uses the boot clock, so setting the wall clock neither ends a sandbox early nor keeps it alive for
//! ever. The task only asks a driver to check; the driver decides.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use domain::SandboxId;
use tokio::sync::Notify;

use crate::clock::ClockReading;
use crate::core::Core;
use crate::sandboxes::driver::DriverCommand;
use crate::sandboxes::registry::SandboxHandle;

/// How often both clocks are compared. A timer does not notice that the host slept or that
/// the clock was set, so no sleep is longer than this.
const CLOCK_CHECK_INTERVAL: Duration = Duration::from_secs(30);

/// How far the clocks may drift apart before one of them must have been set.
const MAX_CLOCK_DRIFT: Duration = Duration::from_secs(1);

/// The time after which a driver whose mailbox was full is asked again.
const RETRY_DELAY: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum DueReason {
    Expiry,
    Idle,
}

/// When each sandbox is due, on the boot clock.
#[derive(Default)]
pub(crate) struct ExpirySchedule {
    dates: Mutex<DueTimes>,
    sooner: Notify,
}

#[derive(Default)]
struct DueTimes {
    order: BTreeSet<(Duration, SandboxId, DueReason)>,
    by_sandbox: HashMap<(SandboxId, DueReason), Duration>,
}

impl ExpirySchedule {
    /// Sets or moves a due time.
    pub(crate) fn set_due(&self, id: &SandboxId, why: DueReason, due: Duration) {
        let mut dates = self.lock();
        dates.remove(id, why);
        dates.by_sandbox.insert((id.clone(), why), due);
        dates.order.insert((due, id.clone(), why));
        let first = dates.order.first().is_some_and(|first| first.1 == *id);
        drop(dates);
        if first {
            self.sooner.notify_one();
        }
    }

    /// Has the reaper look for what is due first, because something else than a sandbox may be.
    pub(crate) fn wake_reaper(&self) {
        self.sooner.notify_one();
    }

    pub(crate) fn forget_sandbox(&self, id: &SandboxId) {
        let mut dates = self.lock();
        dates.remove(id, DueReason::Expiry);
        dates.remove(id, DueReason::Idle);
    }

    #[cfg(test)]
    pub(crate) fn count(&self) -> usize {
        self.lock().order.len()
    }

    /// Removes and returns one entry that is due.
    fn take_due(&self, now: Duration) -> Option<(SandboxId, DueReason)> {
        let mut dates = self.lock();
        let (due, id, why) = dates.order.pop_first()?;
        if due > now {
            dates.order.insert((due, id, why));
            return None;
        }
        dates.by_sandbox.remove(&(id.clone(), why));
        Some((id, why))
    }

    fn next_due(&self) -> Option<Duration> {
        self.lock().order.first().map(|(due, _, _)| *due)
    }

    fn lock(&self) -> MutexGuard<'_, DueTimes> {
        self.dates.lock().expect("no thread panics while moving a date")
    }
}

impl DueTimes {
    fn remove(&mut self, id: &SandboxId, why: DueReason) {
        if let Some(due) = self.by_sandbox.remove(&(id.clone(), why)) {
            self.order.remove(&(due, id.clone(), why));
        }
    }
}

/// Runs until the service stops.
pub(crate) async fn run_reaper(core: Arc<Core>) {
    let mut last = core.clock.now();
    loop {
        let now = core.clock.now();
        if clock_was_set(last, now) {
            tracing::warn!("the wall clock was set; expiries keep their remaining time");
            core.lifecycle.registry.all().iter().for_each(|handle| notify_clock_set(handle));
        }
        last = now;
        while let Some((id, why)) = core.lifecycle.schedule.take_due(now.boot) {
            request_end(&core, &id, why, now.boot);
        }
        core.remove_due_volumes(now.boot);
        let next = [core.lifecycle.schedule.next_due(), core.catalog.volumes.next_due()];
        let wait = next
            .into_iter()
            .flatten()
            .min()
            .map_or(CLOCK_CHECK_INTERVAL, |due| due.saturating_sub(now.boot).min(CLOCK_CHECK_INTERVAL));
        tokio::select! {
            () = tokio::time::sleep(wait) => {}
            () = core.lifecycle.schedule.sooner.notified() => {}
            () = core.tasks.cancelled() => return,
        }
    }
}

fn request_end(core: &Core, id: &SandboxId, why: DueReason, now: Duration) {
    let Some(handle) = core.lifecycle.registry.find(id) else { return };
    let command = match why {
        DueReason::Expiry => DriverCommand::Expire,
        DueReason::Idle => DriverCommand::Idle,
    };
    if handle.mailbox.try_send(command).is_err() {
        core.lifecycle.schedule.set_due(id, why, now.saturating_add(RETRY_DELAY));
    }
}

/// Whether the wall clock has moved by another span than the boot clock.
fn clock_was_set(last: ClockReading, now: ClockReading) -> bool {
    let expected = last.at_wall(now.wall).boot;
    expected.abs_diff(now.boot) > MAX_CLOCK_DRIFT
}

fn notify_clock_set(handle: &SandboxHandle) {
    if handle.mailbox.try_send(DriverCommand::ClockSet).is_err() {
        tracing::warn!(sandbox = %handle.id, "driver mailbox is full; the expiry of the sandbox is still shown in the old time");
    }
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use super::*;

    fn id(byte: u8) -> SandboxId {
        SandboxId::from_entropy([byte; 20])
    }

    fn seconds(count: u64) -> Duration {
        Duration::from_secs(count)
    }

    #[test]
    fn entries_are_returned_in_order_and_only_when_due() {
        let schedule = ExpirySchedule::default();
        schedule.set_due(&id(1), DueReason::Expiry, seconds(20));
        schedule.set_due(&id(2), DueReason::Idle, seconds(10));
        assert_eq!(schedule.take_due(seconds(9)), None);
        assert_eq!(schedule.take_due(seconds(30)), Some((id(2), DueReason::Idle)));
        assert_eq!(schedule.take_due(seconds(30)), Some((id(1), DueReason::Expiry)));
        assert_eq!(schedule.take_due(seconds(30)), None);
    }

    #[test]
    fn moved_or_forgotten_entry_leaves_nothing_behind() {
        let schedule = ExpirySchedule::default();
        for due in 1..100 {
            schedule.set_due(&id(1), DueReason::Expiry, seconds(due));
        }
        assert_eq!(schedule.lock().order.len(), 1);
        assert_eq!(schedule.take_due(seconds(98)), None);
        schedule.forget_sandbox(&id(1));
        assert_eq!(schedule.take_due(seconds(1000)), None);
    }

    #[test]
    fn clock_changes_are_noticed_and_drift_is_not() {
        let moment = |wall, boot| ClockReading { wall: UNIX_EPOCH + seconds(wall), boot: seconds(boot) };
        let last = moment(1_000_000, 5000);
        assert!(!clock_was_set(last, moment(1_000_030, 5030)));
        assert!(clock_was_set(last, moment(1_003_600, 5030)));
        assert!(clock_was_set(last, moment(996_400, 5030)));
    }
}
