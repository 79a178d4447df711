//! The two clocks by which sandboxes age.
//!
//! Clients read and write wall-clock times; the wall clock can be set, so it is only used to show a moment.
//! CLOCK_BOOTTIME cannot be set and counts while the host sleeps, so it decides.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::time::{ClockId, clock_gettime};

/// One moment on both clocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ClockReading {
    pub(crate) wall: SystemTime,
    /// Time since the host started.
    pub(crate) boot: Duration,
}

/// The source of moments. Tests use their own.
#[derive(Clone)]
pub(crate) struct Clock(Arc<dyn Fn() -> ClockReading + Send + Sync>);

impl Clock {
    pub(crate) fn from_host() -> Self {
        Self::new(|| ClockReading { wall: truncate_to_micros(SystemTime::now()), boot: time_since_boot() })
    }

    pub(crate) fn new(read: impl Fn() -> ClockReading + Send + Sync + 'static) -> Self {
        Self(Arc::new(read))
    }

    pub(crate) fn now(&self) -> ClockReading {
        (self.0)()
    }
}

impl ClockReading {
    /// The moment at which the wall clock will show `wall`, if it is not set before.
    pub(crate) fn at_wall(self, wall: SystemTime) -> Self {
        let boot = match wall.duration_since(self.wall) {
            Ok(ahead) => self.boot.saturating_add(ahead),
            Err(past) => self.boot.saturating_sub(past.duration()),
        };
        Self { wall, boot }
    }

    /// The moment `span` later, or `None` if that cannot be represented.
    pub(crate) fn after(self, span: Duration) -> Option<Self> {
        Some(Self { wall: self.wall.checked_add(span)?, boot: self.boot.checked_add(span)? })
    }
}

/// Identifies this boot of the host; another id means that the host has restarted.
pub(crate) fn read_boot_id() -> std::io::Result<String> {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    Ok(text.trim().to_owned())
}

/// Truncates a time to the precision of the store, so that it reads the same after a restart.
pub(crate) fn truncate_to_micros(time: SystemTime) -> SystemTime {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    UNIX_EPOCH + since - Duration::from_nanos(u64::from(since.subsec_nanos() % 1000))
}

pub(crate) fn time_since_boot() -> Duration {
    let time = clock_gettime(ClockId::Boottime);
    let seconds = u64::try_from(time.tv_sec).expect("time since boot is not negative");
    let nanos = u32::try_from(time.tv_nsec).expect("nanoseconds of a second fit in 32 bits");
    Duration::new(seconds, nanos)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wall_time_ahead_is_equally_far_ahead_on_the_boot_clock() {
        let now =
            ClockReading { wall: UNIX_EPOCH + Duration::from_secs(1000), boot: Duration::from_secs(50) };
        let later = now.at_wall(now.wall + Duration::from_secs(9));
        assert_eq!(later.boot, Duration::from_secs(59));
        assert_eq!(now.at_wall(UNIX_EPOCH).boot, Duration::ZERO);
    }

    #[test]
    fn host_clock_is_monotonic() {
        let clock = Clock::from_host();
        let (first, second) = (clock.now(), clock.now());
        assert!(second.boot >= first.boot && first.boot > Duration::ZERO);
    }
}
