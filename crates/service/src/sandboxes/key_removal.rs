//! Removing the sandbox of a key, and replacing one that has crashed.
//!
//! Both take the key's turn, so that a removal waits for a create that is in progress, and a sandbox that was removed is
//! not replaced by a request that still saw it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use domain::{Phase, SandboxId, SandboxKey};

use crate::core::Core;
use crate::error::error_chain;
use crate::sandboxes::driver::DriverCommand;
use crate::sandboxes::registry::SandboxHandle;
use crate::{AcquiredSandbox, CreateSandboxRequest, KeyRemoval, ServiceError};

impl Core {
    /// Removes the sandbox of a key. The removal continues if it takes longer than `limit` or its caller disconnects, also
    /// in the next server. Afterwards the key is free in any case.
    pub(crate) async fn remove_by_key(
        self: &Arc<Self>,
        key: &SandboxKey,
        limit: Duration,
    ) -> Result<KeyRemoval, ServiceError> {
        let (core, own_key) = (Arc::clone(self), key.clone());
        let in_turn = Arc::new(AtomicBool::new(false));
        let has_turn = Arc::clone(&in_turn);
        let work = self.tasks.spawn(async move { core.remove_in_turn(&own_key, &has_turn).await });
        let removed = match tokio::time::timeout(limit, work).await {
            Ok(finished) => finished.unwrap_or(Err(ServiceError::Stopping)),
            Err(_elapsed) => {
                if !in_turn.load(Ordering::Acquire) {
                    self.retire_starting(key).await;
                }
                Ok(KeyRemoval::Continues)
            }
        };
        if !matches!(removed, Ok(KeyRemoval::Done | KeyRemoval::Absent)) {
            self.forget_removed(key);
        }
        removed
    }

    async fn remove_in_turn(
        self: Arc<Self>,
        key: &SandboxKey,
        in_turn: &AtomicBool,
    ) -> Result<KeyRemoval, ServiceError> {
        let guard = self.lifecycle.names.guard_key(key);
        let turn = guard.turn.lock().await;
        in_turn.store(true, Ordering::Release);
        let found = guard.sandbox().and_then(|id| self.lifecycle.registry.find(&id));
        let Some(handle) = found else { return Ok(KeyRemoval::Absent) };
        // From here on no caller gets this sandbox, even if its driver is busy.
        handle.lease.close_for_removal();
        self.retire_in_store(&handle).await;
        // The next caller need not wait until everything is removed.
        drop(turn);
        drop(guard);
        match self.send_command(&handle, DriverCommand::Destroy).await {
            Ok(_) | Err(ServiceError::NoSandbox(_)) => Ok(KeyRemoval::Done),
            Err(error) => {
                tracing::warn!(sandbox = %handle.id, error = %error_chain(&error), "failed to remove the sandbox of a key; its driver retries");
                Err(error)
            }
        }
    }

    /// Records that the sandbox of a create in progress is to be removed: the removal waits for the create, and a crash
    /// meanwhile must not leave the sandbox to the next server.
    async fn retire_starting(&self, key: &SandboxKey) {
        for handle in self.lifecycle.registry.all() {
            if handle.key.as_ref() == Some(key) && handle.phase() == Phase::Starting {
                self.retire_in_store(&handle).await;
            }
        }
    }

    /// The driver may be busy for longer than the caller waits, so it is not the one to record the intent.
    async fn retire_in_store(&self, handle: &SandboxHandle) {
        if let Err(error) = self.store.retire_sandbox(&handle.id).await {
            tracing::warn!(sandbox = %handle.id, error = %error_chain(&error), "failed to record that a sandbox is to be removed; removing it anyway");
        }
    }

    /// Frees a key whose sandbox is still being removed.
    fn forget_removed(&self, key: &SandboxKey) {
        let Some(id) = self.lifecycle.names.find_sandbox(key) else { return };
        if self.lifecycle.registry.find(&id).is_none_or(|handle| handle.lease.is_closed_for_removal()) {
            self.lifecycle.names.forget_sandbox(key, &id);
        }
    }

    /// Makes the successor of a crashed sandbox; `None` if the key no longer leads to that sandbox, or it did not crash.
    pub(crate) async fn replace_crashed(
        self: &Arc<Self>,
        key: &SandboxKey,
        crashed: &SandboxId,
        request: CreateSandboxRequest,
    ) -> Result<Option<AcquiredSandbox>, ServiceError> {
        let guard = self.lifecycle.names.guard_key(key);
        let turn = Arc::clone(&guard.turn).lock_owned().await;
        let former = guard.sandbox().and_then(|id| self.lifecycle.registry.find(&id));
        let is_crashed = |handle: &Arc<SandboxHandle>| {
            handle.id == *crashed && matches!(handle.phase(), Phase::Failed(_)) && !handle.lease.is_closed()
        };
        if !former.as_ref().is_some_and(is_crashed) {
            return Ok(None);
        }
        self.make_in_turn(key, guard, turn, request).await.map(Some)
    }
}
