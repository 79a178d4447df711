//! Ends commands: SIGTERM first, SIGKILL after a grace period.

use std::time::Duration;

use domain::{JournalOffset, Owner, ProcessId, SandboxId};

use crate::{ErrorKind, OutputEvent, Service, ServiceError, SignalTarget};

/// How long a command may take to end after a signal.
const TERMINATION_GRACE: Duration = Duration::from_secs(3);
const SIGTERM: i32 = 15;
const SIGKILL: i32 = 9;

impl Service {
    /// Sends SIGTERM to the group of a process and kills everything that it started if it does not end in time.
    pub async fn terminate_process(
        &self,
        owner: &Owner,
        id: &SandboxId,
        process: &ProcessId,
    ) -> Result<(), ServiceError> {
        let ended = self.watch_process_end(owner, id, process).await?;
        self.signal_process(owner, id, process, SIGTERM, SignalTarget::Group).await?;
        match tokio::time::timeout(TERMINATION_GRACE, ended).await {
            Ok(()) => Ok(()),
            Err(_elapsed) => self.kill_process(owner, id, process).await,
        }
    }

    /// Kills everything that a process has started and waits for its end, for a limited time.
    pub async fn kill_process(
        &self,
        owner: &Owner,
        id: &SandboxId,
        process: &ProcessId,
    ) -> Result<(), ServiceError> {
        let ended = self.watch_process_end(owner, id, process).await?;
        let killed = self.signal_process(owner, id, process, SIGKILL, SignalTarget::Tree).await;
        // A process that ended meanwhile can no longer be signalled.
        let gone = matches!(&killed, Err(error) if matches!(error.kind(), ErrorKind::NoProcess | ErrorKind::Invalid));
        if !gone {
            killed?;
        }
        if tokio::time::timeout(TERMINATION_GRACE, ended).await.is_err() {
            tracing::warn!(%process, "killed process has not ended yet; no longer waiting for it");
        }
        Ok(())
    }

    /// Returns a future that resolves when a process has ended.
    async fn watch_process_end(
        &self,
        owner: &Owner,
        id: &SandboxId,
        process: &ProcessId,
    ) -> Result<impl Future<Output = ()> + use<>, ServiceError> {
        let written = self.process_status(owner, id, process).await?.written;
        let mut following = self.follow_output(owner, id, process, JournalOffset(written)).await?;
        Ok(async move { while !matches!(following.next().await, Ok(OutputEvent::Ended(_)) | Err(_)) {} })
    }
}
