//! Alarms: actions of the agent that are due at a certain time.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use crate::event_loop::handles::{ProcessHandle, SessionHandle, TunnelId};

/// An action that is due at a certain time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Alarm {
    /// A process has reached its deadline.
    Deadline(ProcessHandle),
    /// A port has not accepted a connection in time.
    Dial(TunnelId),
    /// A kernel is not ready in time.
    Ready(SessionHandle),
    /// An isolated session has been idle for too long.
    Idle(SessionHandle),
    /// An interrupted process still runs, so the interrupt is sent again.
    ResendInterrupt(ProcessHandle),
    /// The reader of a process with back-pressure has taken no byte.
    Stall(ProcessHandle),
    /// The run of a closed session has had its time to end.
    CloseGrace(SessionHandle),
    /// The pause after a refresh of the limit files is over.
    LimitView,
}

/// The alarms that are set, in the order of their times.
#[derive(Debug, Default)]
pub(crate) struct AlarmQueue {
    alarms: BTreeSet<(Instant, Alarm)>,
}

impl AlarmQueue {
    /// Returns the time at which the alarm is due; `None`, and no alarm, if the clock cannot
    /// represent it.
    pub(crate) fn set(&mut self, after: Duration, alarm: Alarm) -> Option<Instant> {
        let time = Instant::now().checked_add(after)?;
        self.alarms.insert((time, alarm));
        Some(time)
    }

    /// Removes the alarm that was set for this time, if there is one.
    pub(crate) fn stop(&mut self, time: Option<Instant>, alarm: Alarm) {
        if let Some(time) = time {
            self.alarms.remove(&(time, alarm));
        }
    }

    /// How long the event loop may wait; `None` if no alarm is set.
    pub(crate) fn until_next(&self) -> Option<Duration> {
        let (time, _) = self.alarms.first()?;
        Some(time.saturating_duration_since(Instant::now()))
    }

    /// Removes the first alarm that is due by `now` and returns it.
    pub(crate) fn pop_due(&mut self, now: Instant) -> Option<Alarm> {
        let (time, _) = self.alarms.first()?;
        if *time > now {
            return None;
        }
        self.alarms.pop_first().map(|(_, alarm)| alarm)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alarms_fire_in_the_order_of_their_times() {
        let mut queue = AlarmQueue::default();
        let (later, sooner) = (Alarm::Stall(1.into()), Alarm::Deadline(2.into()));
        let last = queue.set(Duration::from_secs(20), later).expect("the clock goes that far");
        let first = queue.set(Duration::from_secs(10), sooner).expect("the clock goes that far");
        assert_eq!(queue.pop_due(first - Duration::from_nanos(1)), None);
        assert_eq!(queue.pop_due(last), Some(sooner));
        assert_eq!(queue.pop_due(last), Some(later));
        assert_eq!(queue.until_next(), None);
    }

    #[test]
    fn stopped_alarm_does_not_fire() {
        let mut queue = AlarmQueue::default();
        let time = queue.set(Duration::ZERO, Alarm::LimitView);
        queue.stop(time, Alarm::LimitView);
        assert_eq!(queue.pop_due(Instant::now()), None);
    }

    #[test]
    fn time_beyond_the_clock_sets_no_alarm() {
        let mut queue = AlarmQueue::default();
        assert_eq!(queue.set(Duration::MAX, Alarm::LimitView), None);
        assert_eq!(queue.until_next(), None);
    }
}
