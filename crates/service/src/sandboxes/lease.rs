//! Whether a sandbox is held by a client, or may be evicted to make room.
//!
//! Only a sandbox with a key can be parked: the next request for the key gets a new one.

use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use crate::sandboxes::activity::SandboxActivity;

#[derive(Clone, Copy, PartialEq, Eq)]
enum LeaseState {
    Held,
    /// The client said that it does not need the sandbox for now.
    Released,
    /// The sandbox is being removed.
    Closing,
    /// The same, because its client asked for that.
    Removing,
}

pub(crate) struct SandboxLease(Mutex<LeaseState>);

impl Default for SandboxLease {
    fn default() -> Self {
        Self(Mutex::new(LeaseState::Held))
    }
}

impl SandboxLease {
    /// Holds the sandbox from now on; `false` if it is being removed.
    pub(crate) fn take(&self, activity: &SandboxActivity) -> bool {
        let mut state = self.lock();
        if is_closed(*state) {
            return false;
        }
        activity.touch();
        *state = LeaseState::Held;
        true
    }

    /// Returns `false` if the sandbox was not held.
    pub(crate) fn release(&self) -> bool {
        let mut state = self.lock();
        let held = *state == LeaseState::Held;
        if held {
            *state = LeaseState::Released;
        }
        held
    }

    /// Since when the sandbox is parked, on the boot clock: it was released, or was unused for `park_after`. `None`
    /// while it is held or in use.
    pub(crate) fn parked_since(
        &self,
        activity: &SandboxActivity,
        now: Duration,
        park_after: Duration,
    ) -> Option<Duration> {
        parked_time(*self.lock(), activity, now, park_after)
    }

    /// Prevents the sandbox from being held again, unless it is held or used by now. Returns whether it did.
    pub(crate) fn close_if_parked(
        &self,
        activity: &SandboxActivity,
        now: Duration,
        park_after: Duration,
    ) -> bool {
        let mut state = self.lock();
        let parked = parked_time(*state, activity, now, park_after).is_some();
        if parked {
            *state = LeaseState::Closing;
        }
        parked
    }

    /// Like [`SandboxLease::close_if_parked`], if the sandbox was unused for `limit`, released or not.
    pub(crate) fn close_if_idle(&self, activity: &SandboxActivity, now: Duration, limit: Duration) -> bool {
        let mut state = self.lock();
        let idle = activity.idle_since().is_some_and(|since| since.saturating_add(limit) <= now);
        let closes = idle && !is_closed(*state);
        if closes {
            *state = LeaseState::Closing;
        }
        closes
    }

    /// Prevents the sandbox from being held again, because its client removes it.
    pub(crate) fn close_for_removal(&self) {
        *self.lock() = LeaseState::Removing;
    }

    /// Whether the sandbox is being removed.
    pub(crate) fn is_closed(&self) -> bool {
        is_closed(*self.lock())
    }

    /// Whether the sandbox is being removed because its client asked for that.
    pub(crate) fn is_closed_for_removal(&self) -> bool {
        *self.lock() == LeaseState::Removing
    }

    fn lock(&self) -> MutexGuard<'_, LeaseState> {
        self.0.lock().expect("no thread panics while changing a hold")
    }
}

fn is_closed(state: LeaseState) -> bool {
    matches!(state, LeaseState::Closing | LeaseState::Removing)
}

fn parked_time(
    state: LeaseState,
    activity: &SandboxActivity,
    now: Duration,
    park_after: Duration,
) -> Option<Duration> {
    let since = activity.idle_since()?;
    let parked = match state {
        LeaseState::Held => since.saturating_add(park_after) <= now,
        LeaseState::Released => true,
        LeaseState::Closing | LeaseState::Removing => false,
    };
    parked.then_some(since)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::Clock;

    const LONG: Duration = Duration::from_secs(3600);

    #[test]
    fn held_or_used_sandbox_is_not_parked() {
        let clock = Clock::from_host();
        let (hold, activity) = (SandboxLease::default(), SandboxActivity::new(clock.clone()));
        let parked = || hold.parked_since(&activity, clock.now().boot, LONG).is_some();
        assert!(!parked());
        assert!(hold.release() && parked());
        assert!(!hold.release(), "it was released before");
        let using = activity.start_use();
        assert!(!parked());
        drop(using);
        assert!(parked());
        assert!(hold.take(&activity) && !parked());
    }

    #[test]
    fn unused_sandbox_is_parked_after_a_while() {
        let clock = Clock::from_host();
        let (hold, activity) = (SandboxLease::default(), SandboxActivity::new(clock.clone()));
        let now = clock.now().boot;
        assert!(hold.parked_since(&activity, now, LONG).is_none());
        assert!(hold.parked_since(&activity, now + LONG, LONG).is_some());
    }

    #[test]
    fn closed_hold_cannot_be_taken() {
        let clock = Clock::from_host();
        let (hold, activity) = (SandboxLease::default(), SandboxActivity::new(clock.clone()));
        let close = || hold.close_if_parked(&activity, clock.now().boot, LONG);
        assert!(!close(), "it is held");
        hold.release();
        assert!(close());
        assert!(!hold.take(&activity), "it is being taken away");
        assert!(!close(), "it is closed already");
    }
}
