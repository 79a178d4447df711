//! How much work with skills is done at once, and for how long. A sandbox answers as slowly as it likes.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use domain::Owner;
use http::StatusCode;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

use super::archive::ArchiveError;
use crate::aio::problem::AioProblem;

/// How long a request may take after its body was read.
const SKILLS_TIMEOUT: Duration = Duration::from_secs(60);
/// How long a request waits until there is memory for its archive.
const ARCHIVE_WAIT_TIMEOUT: Duration = Duration::from_secs(5);
/// How many archives are in memory at once.
const MAX_OPEN_ARCHIVES: usize = 4;
const MAX_REGISTRATIONS_OF_OWNER: usize = 1;
const MAX_SCANS_OF_OWNER: usize = 4;
/// After how many seconds a refused client may retry.
const RETRY_SECONDS: u64 = 1;

/// Work that is limited for each owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum SkillWork {
    Registration,
    /// Reads or removes all skills of a sandbox.
    Scan,
}

/// The limits of one server.
pub(in crate::aio) struct SkillLimits {
    in_progress: Mutex<HashMap<(Owner, SkillWork), usize>>,
    archives: Arc<Semaphore>,
}

/// Some work in progress; it ends when this is dropped.
pub(super) struct SkillPermit {
    limits: Arc<SkillLimits>,
    key: (Owner, SkillWork),
}

/// The right to hold an archive in memory. It is given back with its last clone.
#[derive(Clone)]
pub(super) struct ArchivePermit {
    _held: Arc<OwnedSemaphorePermit>,
}

impl Default for SkillLimits {
    fn default() -> Self {
        Self { in_progress: Mutex::default(), archives: Arc::new(Semaphore::new(MAX_OPEN_ARCHIVES)) }
    }
}

impl SkillLimits {
    /// Begins some work, or refuses it at once: an owner who waits must not hold requests of others.
    pub(super) fn begin_work(
        self: &Arc<Self>,
        owner: &Owner,
        work: SkillWork,
    ) -> Result<SkillPermit, AioProblem> {
        let key = (owner.clone(), work);
        let mut in_progress = self.in_progress.lock().unwrap_or_else(PoisonError::into_inner);
        let count = in_progress.entry(key.clone()).or_default();
        let (limit, things) = match work {
            SkillWork::Registration => (MAX_REGISTRATIONS_OF_OWNER, "registrations of skills"),
            SkillWork::Scan => (MAX_SCANS_OF_OWNER, "requests for all skills"),
        };
        if *count >= limit {
            return Err(refusal(format!("limit of {things} of one owner reached ({limit})")));
        }
        *count += 1;
        Ok(SkillPermit { limits: self.clone(), key })
    }

    pub(super) async fn take_archive(&self) -> Result<ArchivePermit, AioProblem> {
        let permit = tokio::time::timeout(ARCHIVE_WAIT_TIMEOUT, self.archives.clone().acquire_owned()).await;
        match permit {
            Ok(Ok(permit)) => Ok(ArchivePermit { _held: Arc::new(permit) }),
            _ => Err(refusal("too many archives are being registered".to_owned())),
        }
    }
}

impl Drop for SkillPermit {
    fn drop(&mut self) {
        let mut in_progress = self.limits.in_progress.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = in_progress.get_mut(&self.key) {
            *count -= 1;
            if *count == 0 {
                in_progress.remove(&self.key);
            }
        }
    }
}

impl ArchivePermit {
    /// Runs what takes processor time where it blocks no other request. It cannot be stopped, so it keeps the permit
    /// even if the request ends before.
    pub(super) async fn unpack_blocking<T: Send + 'static>(
        &self,
        unpack: impl FnOnce() -> Result<T, ArchiveError> + Send + 'static,
    ) -> Result<T, AioProblem> {
        let permit = self.clone();
        let unpacking = move || {
            let unpacked = unpack();
            drop(permit);
            unpacked
        };
        let unpacked = tokio::task::spawn_blocking(unpacking).await;
        let unpacked = unpacked.or(Err(ArchiveError::Malformed("it could not be unpacked".to_owned())))?;
        Ok(unpacked?)
    }
}

fn refusal(message: String) -> AioProblem {
    let problem = AioProblem::new(StatusCode::TOO_MANY_REQUESTS, message);
    AioProblem { retry_after: Some(RETRY_SECONDS), ..problem }
}

/// When a request that begins now must be finished.
pub(super) fn request_deadline() -> Instant {
    Instant::now() + SKILLS_TIMEOUT
}

/// Stops work that is not finished at its deadline.
pub(super) async fn finish_until<T>(
    deadline: Instant,
    work: impl Future<Output = Result<T, AioProblem>>,
) -> Result<T, AioProblem> {
    tokio::time::timeout_at(deadline, work).await.unwrap_or_else(|_elapsed| {
        let message = format!("not finished within {} seconds", SKILLS_TIMEOUT.as_secs());
        Err(AioProblem::new(StatusCode::GATEWAY_TIMEOUT, message))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn each_owner_has_its_own_limit() {
        let limits = Arc::new(SkillLimits::default());
        let (one, other) = (Owner::parse("one").unwrap(), Owner::parse("other").unwrap());
        let begin = |owner: &Owner, work| limits.begin_work(owner, work);
        let first = begin(&one, SkillWork::Registration).ok().unwrap();
        let refused = begin(&one, SkillWork::Registration).err().unwrap();
        assert_eq!((refused.status, refused.retry_after), (StatusCode::TOO_MANY_REQUESTS, Some(1)));
        let others = begin(&other, SkillWork::Registration).ok().unwrap();
        let scans: Vec<_> =
            (0..MAX_SCANS_OF_OWNER).map(|_| begin(&one, SkillWork::Scan).ok().unwrap()).collect();
        assert!(begin(&one, SkillWork::Scan).is_err());
        drop((first, others, scans));
        assert!(limits.in_progress.lock().unwrap().is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn slow_work_ends_at_its_deadline() {
        let stopped = finish_until(request_deadline(), std::future::pending::<Result<(), _>>()).await;
        assert_eq!(stopped.unwrap_err().status, StatusCode::GATEWAY_TIMEOUT);
        let limits = SkillLimits::default();
        let mut held = Vec::new();
        for _ in 0..MAX_OPEN_ARCHIVES {
            held.push(limits.take_archive().await.ok().unwrap());
        }
        let refused = limits.take_archive().await.err().unwrap();
        assert_eq!((refused.status, refused.retry_after), (StatusCode::TOO_MANY_REQUESTS, Some(1)));
    }

    #[tokio::test]
    async fn unpacking_keeps_its_permit_after_the_request_ended() {
        let limits = SkillLimits::default();
        let permit = limits.take_archive().await.ok().unwrap();
        let (proceed, wait) = std::sync::mpsc::channel::<()>();
        let (begun, has_begun) = tokio::sync::oneshot::channel();
        let unpacking = permit.unpack_blocking(move || {
            begun.send(()).ok();
            wait.recv().ok();
            Ok(())
        });
        tokio::select! {
            biased;
            _ = unpacking => panic!("the work has ended"),
            _ = has_begun => {}
        }
        drop(permit);
        assert_eq!(limits.archives.available_permits(), MAX_OPEN_ARCHIVES - 1);
        proceed.send(()).unwrap();
        // All permits are available again once the work has ended.
        let all = u32::try_from(MAX_OPEN_ARCHIVES).unwrap();
        let all = tokio::time::timeout(Duration::from_secs(10), limits.archives.acquire_many(all)).await;
        assert!(all.is_ok());
    }
}
