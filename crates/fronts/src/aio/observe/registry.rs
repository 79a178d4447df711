//! The sessions and reports of all sandboxes.
//!
//! Each sandbox has a lock of its own. That of the map is held only to find or add one, so calls about one sandbox do
//! not wait for those about others.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use bytes::Bytes;
use domain::SandboxId;

/// How many sessions of one sandbox are remembered, and how many reports; the oldest is dropped for a new one.
const MAX_SESSIONS: usize = 8;
const MAX_REPORTS: usize = 8;
/// When there are this many sandboxes, those that have ended are looked for and dropped for the first time.
const MIN_SWEEP_COUNT: usize = 64;

/// How closely a sandbox is observed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ObserveMode {
    /// The core's own sampling, which is always on.
    Guardrail,
    /// A client has asked for a report.
    Capture,
}

impl ObserveMode {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Guardrail => "guardrail",
            Self::Capture => "capture",
        }
    }
}

#[derive(Clone, Debug)]
pub(super) struct ObserveSession {
    pub(super) id: String,
    pub(super) mode: ObserveMode,
    /// With this key a retry finds the session of the first attempt.
    pub(super) retry_key: Option<String>,
    pub(super) started: SystemTime,
    /// When it ends or has ended; `None` if it lasts until it is stopped.
    pub(super) ends: Option<SystemTime>,
}

impl ObserveSession {
    pub(super) fn is_active(&self, now: SystemTime) -> bool {
        self.ends.is_none_or(|end| end > now)
    }
}

#[derive(Clone, Debug)]
pub(super) struct ObserveReport {
    pub(super) id: String,
    pub(super) session: Option<String>,
    pub(super) retry_key: Option<String>,
    pub(super) reason: String,
    pub(super) created: SystemTime,
    /// A gzip file.
    pub(super) content: Bytes,
}

/// What is known about one sandbox.
#[derive(Debug, Default)]
pub(super) struct ObservedSandbox {
    pub(super) sessions: VecDeque<ObserveSession>,
    pub(super) reports: VecDeque<ObserveReport>,
}

impl ObservedSandbox {
    pub(super) fn active_session(&mut self, now: SystemTime) -> Option<&mut ObserveSession> {
        self.sessions.iter_mut().rev().find(|session| session.is_active(now))
    }

    /// The session with an id; without one, the last.
    pub(super) fn session_to_report(&self, id: Option<&str>) -> Option<&ObserveSession> {
        match id {
            Some(id) => self.sessions.iter().find(|session| session.id == id),
            None => self.sessions.back(),
        }
    }

    /// The report of the first attempt with a key.
    pub(super) fn report_of_key(&self, key: Option<&str>) -> Option<&ObserveReport> {
        let key = key?;
        self.reports.iter().find(|report| report.retry_key.as_deref() == Some(key))
    }

    pub(super) fn add_session(&mut self, session: ObserveSession) {
        push_bounded(&mut self.sessions, session, MAX_SESSIONS);
    }

    pub(super) fn add_report(&mut self, report: ObserveReport) {
        push_bounded(&mut self.reports, report, MAX_REPORTS);
    }
}

fn push_bounded<T>(queue: &mut VecDeque<T>, item: T, limit: usize) {
    if queue.len() >= limit {
        queue.pop_front();
    }
    queue.push_back(item);
}

#[derive(Debug, Default)]
pub(in crate::aio) struct ObserveRegistry(Mutex<ObservedSandboxes>);

#[derive(Debug)]
struct ObservedSandboxes {
    by_id: HashMap<SandboxId, Arc<Mutex<ObservedSandbox>>>,
    /// The next sandbox is added after a sweep if there are this many.
    sweep_count: usize,
}

impl Default for ObservedSandboxes {
    fn default() -> Self {
        Self { by_id: HashMap::new(), sweep_count: MIN_SWEEP_COUNT }
    }
}

impl ObserveRegistry {
    /// Reads what is known about a sandbox, or changes what is stored already. A sandbox that nothing is stored about
    /// takes no place.
    pub(super) fn with_known<T>(&self, id: &SandboxId, change: impl FnOnce(&mut ObservedSandbox) -> T) -> T {
        let known = self.lock_all().by_id.get(id).cloned();
        change_locked(&known.unwrap_or_default(), change)
    }

    /// Adds something to what is known about a sandbox. `exists` decides which other sandboxes are still remembered.
    pub(super) fn with_added<T>(
        &self,
        id: &SandboxId,
        exists: impl Fn(&SandboxId) -> bool,
        change: impl FnOnce(&mut ObservedSandbox) -> T,
    ) -> T {
        let known = self.lock_all().find_or_add(id, exists);
        change_locked(&known, change)
    }

    fn lock_all(&self) -> MutexGuard<'_, ObservedSandboxes> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn change_locked<T>(known: &Mutex<ObservedSandbox>, change: impl FnOnce(&mut ObservedSandbox) -> T) -> T {
    change(&mut known.lock().unwrap_or_else(PoisonError::into_inner))
}

impl ObservedSandboxes {
    fn find_or_add(
        &mut self,
        id: &SandboxId,
        exists: impl Fn(&SandboxId) -> bool,
    ) -> Arc<Mutex<ObservedSandbox>> {
        if let Some(known) = self.by_id.get(id) {
            return Arc::clone(known);
        }
        if self.by_id.len() >= self.sweep_count {
            self.by_id.retain(|id, _| exists(id));
            // As many must be added as are left, so that the average cost of adding one does not grow.
            self.sweep_count = MIN_SWEEP_COUNT.max(2 * self.by_id.len());
        }
        Arc::clone(self.by_id.entry(id.clone()).or_default())
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use super::*;

    #[test]
    fn sessions_are_bounded_and_end_at_their_time() {
        let at = |seconds| UNIX_EPOCH + Duration::from_secs(seconds);
        let mut observed = ObservedSandbox::default();
        for number in 0..MAX_SESSIONS + 2 {
            let (id, mode) = (number.to_string(), ObserveMode::Capture);
            let ends = Some(at(5));
            observed.add_session(ObserveSession { id, mode, retry_key: None, started: at(0), ends });
        }
        assert_eq!((observed.sessions.len(), observed.sessions[0].id.as_str()), (MAX_SESSIONS, "2"));
        assert_eq!(observed.active_session(at(4)).unwrap().id, "9");
        assert!(observed.active_session(at(5)).is_none());
    }

    fn numbered_id(number: u8) -> SandboxId {
        SandboxId::from_entropy([number; 20])
    }

    fn add_report(observed: &mut ObservedSandbox) {
        observed.add_report(ObserveReport {
            id: "r".to_owned(),
            session: None,
            retry_key: None,
            reason: String::new(),
            created: UNIX_EPOCH,
            content: Bytes::new(),
        });
    }

    #[test]
    fn change_of_one_sandbox_does_not_lock_another() {
        let registry = ObserveRegistry::default();
        let (one, two) = (numbered_id(1), numbered_id(2));
        registry.with_added(
            &one,
            |_| true,
            |_| {
                registry.with_added(&two, |_| true, add_report);
                assert_eq!(registry.with_known(&two, |observed| observed.reports.len()), 1);
            },
        );
    }

    #[test]
    fn ended_sandboxes_are_dropped_only_when_others_are_added() {
        let registry = ObserveRegistry::default();
        let count = || registry.lock_all().by_id.len();
        // `from_entropy` distinguishes 26 first letters and 36 further ones.
        let ids: Vec<_> = (0..=2 * MIN_SWEEP_COUNT)
            .map(|number| {
                let (tens, ones) = (u8::try_from(number / 10).unwrap(), u8::try_from(number % 10).unwrap());
                let mut entropy = [0; 20];
                entropy[..2].copy_from_slice(&[tens, ones]);
                SandboxId::from_entropy(entropy)
            })
            .collect();
        let (first, others) = ids.split_at(MIN_SWEEP_COUNT);
        let no_sweep = |_: &SandboxId| -> bool { panic!("no sweep is due") };
        for id in first {
            registry.with_added(id, no_sweep, add_report);
        }
        registry.with_known(&others[0], |_| ());
        registry.with_added(&first[0], no_sweep, add_report);
        assert_eq!(count(), MIN_SWEEP_COUNT);
        // All of them still exist, so the next sweep is due when there are twice as many.
        registry.with_added(&others[0], |_| true, add_report);
        for id in &others[1..MIN_SWEEP_COUNT] {
            registry.with_added(id, no_sweep, add_report);
        }
        registry.with_added(&others[MIN_SWEEP_COUNT], |id| *id == first[0], add_report);
        assert_eq!(count(), 2);
    }
}
