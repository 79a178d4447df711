//! Creates under a key whose caller has disconnected.
//!
//! Such a create goes on, because a retry with the same key expects its result. While an owner has too many of them,
//! the owner's further creates under new keys are refused; otherwise a caller that disconnects at once could start any number.
//!
//! ```text
//! attached ─► ended                 the caller got the result
//!     └────► detached ─► ended      the caller disconnected before
//! ```

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use domain::Owner;

use crate::ServiceError;

/// The maximum number of one owner.
pub(crate) const MAX_DETACHED_PER_OWNER: usize = 64;
/// The maximum number of all owners together.
pub(crate) const MAX_DETACHED: usize = 256;

#[derive(Clone, Default)]
pub(crate) struct DetachedCreates(Arc<Mutex<HashMap<Owner, usize>>>);

/// A create that is running.
struct WatchedCreate {
    detached: DetachedCreates,
    owner: Owner,
    stage: Mutex<CreateStage>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum CreateStage {
    Attached,
    Detached,
    Ended,
}

/// Kept by the caller while it waits.
pub(crate) struct CallerPresence(Arc<WatchedCreate>);

/// Kept by the task that creates.
pub(crate) struct CreateProgress(Arc<WatchedCreate>);

impl DetachedCreates {
    /// Watches a new create, unless too many are detached.
    pub(crate) fn watch_create(
        &self,
        owner: &Owner,
    ) -> Result<(CallerPresence, CreateProgress), ServiceError> {
        let counts = self.lock();
        let (own, total) = (counts.get(owner).copied().unwrap_or(0), counts.values().sum::<usize>());
        drop(counts);
        if own >= MAX_DETACHED_PER_OWNER || total >= MAX_DETACHED {
            return Err(ServiceError::TooManyDetachedCreates);
        }
        let (detached, owner, stage) = (self.clone(), owner.clone(), Mutex::new(CreateStage::Attached));
        let create = Arc::new(WatchedCreate { detached, owner, stage });
        Ok((CallerPresence(Arc::clone(&create)), CreateProgress(create)))
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Owner, usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl WatchedCreate {
    /// Enters a stage and returns the one before. The last stage is never left.
    fn enter(&self, next: CreateStage) -> CreateStage {
        let mut stage = self.stage.lock().unwrap_or_else(PoisonError::into_inner);
        let former = *stage;
        if former != CreateStage::Ended {
            *stage = next;
        }
        former
    }
}

impl Drop for CallerPresence {
    fn drop(&mut self) {
        // The count is taken first, so that the end of the create, which may come now, finds it.
        let create = &self.0;
        let mut counts = create.detached.lock();
        if create.enter(CreateStage::Detached) == CreateStage::Attached {
            *counts.entry(create.owner.clone()).or_default() += 1;
        }
    }
}

impl Drop for CreateProgress {
    fn drop(&mut self) {
        let create = &self.0;
        let mut counts = create.detached.lock();
        if create.enter(CreateStage::Ended) == CreateStage::Detached
            && let Some(count) = counts.get_mut(&create.owner)
        {
            *count -= 1;
            if *count == 0 {
                counts.remove(&create.owner);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owner(name: &str) -> Owner {
        Owner::from_valid_name(name)
    }

    /// Starts creates whose callers disconnect, until one is refused.
    fn detach_all(creates: &DetachedCreates, owner: &Owner) -> Vec<CreateProgress> {
        std::iter::from_fn(|| creates.watch_create(owner).ok().map(|(_caller, create)| create)).collect()
    }

    #[test]
    fn only_creates_without_a_caller_count() {
        let creates = DetachedCreates::default();
        let one = owner("one");
        let attached: Vec<_> =
            (0..1000).map(|_| creates.watch_create(&one).expect("none is detached")).collect();
        assert!(creates.lock().is_empty());
        // The result comes before the caller is gone.
        for (caller, create) in attached {
            drop(create);
            drop(caller);
        }
        assert!(creates.lock().is_empty());
    }

    #[test]
    fn detached_creates_are_limited_per_owner_and_in_total() {
        let creates = DetachedCreates::default();
        let first = detach_all(&creates, &owner("one"));
        assert_eq!(first.len(), MAX_DETACHED_PER_OWNER);
        let others: Vec<_> =
            (0..10).map(|number| detach_all(&creates, &owner(&format!("o{number}")))).collect();
        assert_eq!(others.iter().map(Vec::len).sum::<usize>(), MAX_DETACHED - MAX_DETACHED_PER_OWNER);
        assert!(creates.watch_create(&owner("last")).is_err());
        drop(others);
        assert!(creates.watch_create(&owner("last")).is_ok());
        assert!(creates.watch_create(&owner("one")).is_err());
        drop(first);
        assert!(creates.lock().is_empty());
    }
}
