//! Whether somebody counts on a sandbox, or its place may be given to another.
//!
//! Only a sandbox with a key can be parked: whoever asks for the key again gets a new one.

use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use crate::activity::Activity;

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Held,
    /// Whoever held it said that it is not needed for now.
    Released,
    /// It is being taken away.
    Closing,
}

pub(crate) struct Hold(Mutex<State>);

impl Default for Hold {
    fn default() -> Self {
        Self(Mutex::new(State::Held))
    }
}

impl Hold {
    /// Counts on the sandbox from now on; `false` if it is being taken away.
    pub(crate) fn take(&self, activity: &Activity) -> bool {
        let mut state = self.lock();
        if *state == State::Closing {
            return false;
        }
        activity.touch();
        *state = State::Held;
        true
    }

    /// `false` if nobody held it.
    pub(crate) fn release(&self) -> bool {
        let mut state = self.lock();
        let held = *state == State::Held;
        if held {
            *state = State::Released;
        }
        held
    }

    /// Since when nobody needs it, on the boot clock: it was released, or nobody has used it for
    /// `park_after`. `None` while somebody does.
    pub(crate) fn parked_since(
        &self,
        activity: &Activity,
        now: Duration,
        park_after: Duration,
    ) -> Option<Duration> {
        parked(*self.lock(), activity, now, park_after)
    }

    /// Makes sure that nobody takes it any more, unless somebody just did.
    pub(crate) fn close(&self, activity: &Activity, now: Duration, park_after: Duration) -> bool {
        let mut state = self.lock();
        let parked = parked(*state, activity, now, park_after).is_some();
        if parked {
            *state = State::Closing;
        }
        parked
    }

    /// As [`Hold::close`], if nobody has used it for `limit`, released or not.
    pub(crate) fn close_idle(&self, activity: &Activity, now: Duration, limit: Duration) -> bool {
        let mut state = self.lock();
        let idle = activity.idle_since().is_some_and(|since| since.saturating_add(limit) <= now);
        let closes = idle && *state != State::Closing;
        if closes {
            *state = State::Closing;
        }
        closes
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().expect("nobody panics while changing a hold")
    }
}

fn parked(state: State, activity: &Activity, now: Duration, park_after: Duration) -> Option<Duration> {
    let since = activity.idle_since()?;
    let parked = match state {
        State::Held => since.saturating_add(park_after) <= now,
        State::Released => true,
        State::Closing => false,
    };
    parked.then_some(since)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::Clock;

    const LONG: Duration = Duration::from_secs(3600);

    #[test]
    fn what_is_held_or_used_is_not_parked() {
        let clock = Clock::host();
        let (hold, activity) = (Hold::default(), Activity::new(clock.clone()));
        let parked = || hold.parked_since(&activity, clock.now().boot, LONG).is_some();
        assert!(!parked());
        assert!(hold.release() && parked());
        assert!(!hold.release(), "nobody held it any more");
        let using = activity.begin();
        assert!(!parked());
        drop(using);
        assert!(parked());
        assert!(hold.take(&activity) && !parked());
    }

    #[test]
    fn what_nobody_uses_is_parked_after_a_while() {
        let clock = Clock::host();
        let (hold, activity) = (Hold::default(), Activity::new(clock.clone()));
        let now = clock.now().boot;
        assert!(hold.parked_since(&activity, now, LONG).is_none());
        assert!(hold.parked_since(&activity, now + LONG, LONG).is_some());
    }

    #[test]
    fn either_it_is_taken_or_it_is_closed() {
        let clock = Clock::host();
        let (hold, activity) = (Hold::default(), Activity::new(clock.clone()));
        let close = || hold.close(&activity, clock.now().boot, LONG);
        assert!(!close(), "it is held");
        hold.release();
        assert!(close());
        assert!(!hold.take(&activity), "it is being taken away");
        assert!(!close(), "somebody does it already");
    }
}
