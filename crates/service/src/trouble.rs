//! The most recent failed requests, for operators.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard};
use std::time::SystemTime;

use domain::{Owner, SandboxId};

use crate::core::Core;
use crate::error::chain;
use crate::{ServiceError, measure};

const REMEMBERED: usize = 256;

/// A request that failed.
#[derive(Clone, Debug)]
pub struct Trouble {
    pub time: SystemTime,
    pub owner: Owner,
    pub sandbox: Option<SandboxId>,
    pub operation: &'static str,
    /// The kind of failure, in a word or two.
    pub kind: &'static str,
    pub message: String,
    /// The message shown to its owner, if that is not the operator.
    told: String,
}

#[derive(Default)]
pub(crate) struct Troubles(Mutex<VecDeque<Trouble>>);

impl Troubles {
    /// Those of one owner, with the messages for that owner, or all, with the messages for the operator.
    pub(crate) fn list(&self, owner: Option<&Owner>) -> Vec<Trouble> {
        let troubles = self.lock();
        let newest = troubles.iter().rev().cloned();
        match owner {
            None => newest.collect(),
            Some(owner) => {
                let own = newest.filter(|trouble| trouble.owner == *owner);
                own.map(|trouble| Trouble { message: trouble.told.clone(), ..trouble }).collect()
            }
        }
    }

    fn note(&self, trouble: Trouble) {
        let mut troubles = self.lock();
        if troubles.len() >= REMEMBERED {
            troubles.pop_front();
        }
        troubles.push_back(trouble);
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Trouble>> {
        self.0.lock().expect("no thread panics while recording an error")
    }
}

impl Core {
    /// Counts a failure on its way to the caller, and records it.
    pub(crate) fn failed(
        &self,
        operation: &'static str,
        owner: &Owner,
        sandbox: Option<&SandboxId>,
    ) -> impl Fn(&ServiceError) {
        move |error| {
            measure::failure(operation, error);
            self.troubles.note(Trouble {
                time: self.clock.now().wall,
                owner: owner.clone(),
                sandbox: sandbox.cloned(),
                operation,
                kind: error.kind().name(),
                message: chain(error),
                told: error.told_to(owner),
            });
        }
    }
}
