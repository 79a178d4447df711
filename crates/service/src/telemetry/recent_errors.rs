//! The most recent failed requests, for operators.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard};
use std::time::SystemTime;

use domain::{Owner, SandboxId};

use crate::ServiceError;
use crate::core::Core;
use crate::error::error_chain;
use crate::telemetry::service_metrics;

const MAX_RECENT_ERRORS: usize = 256;

/// A request that failed.
#[derive(Clone, Debug)]
pub struct RecentError {
    pub time: SystemTime,
    pub owner: Owner,
    pub sandbox: Option<SandboxId>,
    pub operation: &'static str,
    /// The kind of failure, in a word or two.
    pub kind: &'static str,
    pub message: String,
    /// The message shown to its owner, if that is not the operator.
    owner_message: String,
}

#[derive(Default)]
pub(crate) struct RecentErrors(Mutex<VecDeque<RecentError>>);

impl RecentErrors {
    /// Those of one owner, with the messages for that owner, or all, with the messages for the operator.
    pub(crate) fn list(&self, owner: Option<&Owner>) -> Vec<RecentError> {
        let troubles = self.lock();
        let newest = troubles.iter().rev().cloned();
        match owner {
            None => newest.collect(),
            Some(owner) => {
                let own = newest.filter(|trouble| trouble.owner == *owner);
                own.map(|trouble| RecentError { message: trouble.owner_message.clone(), ..trouble }).collect()
            }
        }
    }

    fn record_error(&self, error: RecentError) {
        let mut troubles = self.lock();
        if troubles.len() >= MAX_RECENT_ERRORS {
            troubles.pop_front();
        }
        troubles.push_back(error);
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<RecentError>> {
        self.0.lock().expect("no thread panics while recording an error")
    }
}

impl Core {
    /// Counts a failure on its way to the caller, and records it.
    pub(crate) fn record_failure(
        &self,
        operation: &'static str,
        owner: &Owner,
        sandbox: Option<&SandboxId>,
    ) -> impl Fn(&ServiceError) {
        move |error| {
            service_metrics::count_failure(operation, error);
            self.telemetry.recent_errors.record_error(RecentError {
                time: self.clock.now().wall,
                owner: owner.clone(),
                sandbox: sandbox.cloned(),
                operation,
                kind: error.kind().name(),
                message: error_chain(error),
                owner_message: error.message_for(owner),
            });
        }
    }
}
