//! The part of the launcher's loop that waits for errands: snapshots and disks made from them.
//!
//! While a snapshot is taken, requests for its sandbox that would conflict with it wait until it is
//! finished. A request to remove the sandbox or the snapshot cancels it.

use std::os::fd::OwnedFd;

use super::protocol::{Answer, Ask, FoundKept, Question, Refusal};
use super::serve::{Client, Loop, failed, tell};
use super::snapshot::{Restoring, Taking, Wished};
use crate::jail::plan::JailPlan;

/// An errand, the client that waits for it, and the requests that are handled when it has finished.
pub(super) struct Job {
    client: Client,
    number: u64,
    work: Work,
    waiting: Vec<(Client, Ask)>,
}

enum Work {
    Snapshot(Box<Taking>),
    Restore(Box<Restoring>),
}

impl Job {
    pub(super) fn report(&self) -> &OwnedFd {
        match &self.work {
            Work::Snapshot(taking) => &taking.errand.report,
            Work::Restore(restoring) => &restoring.errand.report,
        }
    }

    /// Whether a request has to wait for the end of this job.
    fn stands_in_the_way_of(&self, question: &Question) -> bool {
        match (&self.work, question) {
            (
                Work::Snapshot(taking),
                Question::Snapshot { id, .. }
                | Question::Freeze { id, .. }
                | Question::Connect { id, .. }
                | Question::Stop { id }
                | Question::Destroy { id },
            ) => taking.id == *id,
            (Work::Snapshot(taking), Question::Resize(resize)) => taking.id == resize.id,
            // A disk is not given to a sandbox while it is being copied.
            (Work::Snapshot(taking), Question::Create(plan)) => taking.id == plan.id,
            (Work::Snapshot(taking), Question::ForgetSnapshot { snapshot }) => taking.snapshot == *snapshot,
            (Work::Restore(restoring), Question::Destroy { id } | Question::Stop { id }) => {
                restoring.plan.id == *id
            }
            (Work::Restore(restoring), Question::Create(plan)) => restoring.plan.id == plan.id,
            _ => false,
        }
    }

    fn cancel(&self) {
        match &self.work {
            Work::Snapshot(taking) => taking.errand.cancel(),
            Work::Restore(restoring) => restoring.errand.cancel(),
        }
    }
}

impl Loop {
    /// Queues a request if it conflicts with a job.
    pub(super) fn put_off(&mut self, client: Client, ask: Ask) -> Option<(Client, Ask)> {
        let Some(job) = self.jobs.iter_mut().find(|job| job.stands_in_the_way_of(&ask.question)) else {
            return Some((client, ask));
        };
        if matches!(ask.question, Question::Destroy { .. } | Question::ForgetSnapshot { .. }) {
            job.cancel();
        }
        job.waiting.push((client, ask));
        None
    }

    pub(super) fn snapshot(&mut self, client: Client, number: u64, id: &str, snapshot: &str) {
        match self.launcher.begin_snapshot(id, snapshot) {
            Ok(Wished::Taking(taking)) => {
                let work = Work::Snapshot(Box::new(taking));
                self.jobs.push(Job { client, number, work, waiting: Vec::new() });
            }
            Ok(Wished::Known(record)) => tell(&client, number, Ok(Answer::Kept(record.into())), None),
            Err(refusal) => tell(&client, number, Err(refusal), None),
        }
    }

    pub(super) fn restore(&mut self, client: Client, number: u64, plan: Box<JailPlan>) {
        match self.launcher.begin_restore(plan) {
            Ok(restoring) => {
                let work = Work::Restore(Box::new(restoring));
                self.jobs.push(Job { client, number, work, waiting: Vec::new() });
            }
            Err(refusal) => tell(&client, number, Err(refusal), None),
        }
    }

    pub(super) fn forget(&mut self, snapshot: &str) -> Result<Answer, Refusal> {
        let forgotten = self.launcher.forget_snapshot(snapshot);
        forgotten.map(|()| Answer::Done).map_err(|error| failed("forget", &error))
    }

    pub(super) fn found_snapshots(&self) -> Result<Answer, Refusal> {
        let mut all = self.launcher.snapshots().map_err(|error| failed("list", &error))?;
        for job in &self.jobs {
            let Work::Snapshot(taking) = &job.work else { continue };
            if all.iter().all(|found| found.id != taking.snapshot) {
                let (id, copied) = (taking.snapshot.clone(), taking.progress());
                all.push(FoundKept { id, kept: None, copied });
            }
        }
        Ok(Answer::Snapshots(all))
    }

    /// Ends all errands, so that no sandbox stays frozen when the launcher is gone.
    pub(super) fn abandon_jobs(&mut self) {
        for mut job in std::mem::take(&mut self.jobs) {
            job.cancel();
            job.waiting.clear();
            self.jobs.push(job);
            self.finish(self.jobs.len() - 1);
        }
    }

    /// Sends the response for a job whose errand has finished, and handles the requests that waited.
    pub(super) fn finish(&mut self, index: usize) {
        let Job { client, number, work, waiting } = self.jobs.swap_remove(index);
        match work {
            Work::Snapshot(taking) => {
                let taken = self.launcher.conclude_snapshot(*taking);
                tell(&client, number, taken.map(|record| Answer::Kept(record.into())), None);
            }
            Work::Restore(restoring) => match self.launcher.conclude_restore(*restoring) {
                Ok(plan) => {
                    self.create(client, number, *plan);
                    self.launcher.discard_restored();
                }
                Err(refusal) => tell(&client, number, Err(refusal), None),
            },
        }
        for (client, ask) in waiting {
            self.answer(client, ask, None);
        }
    }
}
