//! The sessions and reports of all sandboxes.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use bytes::Bytes;
use domain::SandboxId;
use service::{SandboxRef, Service};

/// How many sessions of one sandbox are remembered, and how many reports; the oldest is dropped for a new one.
const MAX_SESSIONS: usize = 8;
const MAX_REPORTS: usize = 8;
/// When there are this many sandboxes, those that have ended are looked for and dropped.
const SWEEP_THRESHOLD: usize = 64;

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
pub(in crate::aio) struct ObserveRegistry(Mutex<HashMap<SandboxId, Arc<Mutex<ObservedSandbox>>>>);

impl ObserveRegistry {
    /// Reads or changes what is known about a sandbox. Sandboxes that nothing is stored about take no place.
    pub(super) fn with_sandbox<T>(
        &self,
        service: &Service,
        sandbox: &SandboxRef,
        change: impl FnOnce(&mut ObservedSandbox) -> T,
    ) -> T {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if all.len() >= SWEEP_THRESHOLD {
            all.retain(|id, _| service.sandbox_of(None, id).is_ok());
        }
        let known = all.get(sandbox.id()).cloned().unwrap_or_default();
        let mut observed = known.lock().unwrap_or_else(PoisonError::into_inner);
        let result = change(&mut observed);
        if !observed.sessions.is_empty() || !observed.reports.is_empty() {
            all.insert(sandbox.id().clone(), known.clone());
        }
        result
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
}
