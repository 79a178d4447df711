//! Ends commands: SIGTERM first, SIGKILL after a grace period.

use std::time::Duration;

use domain::{JournalOffset, ProcessId};

use crate::{ErrorKind, OutputEvent, SandboxProcesses, ServiceError, SignalTarget};

/// How long a command may take to end after a signal.
const TERMINATION_GRACE: Duration = Duration::from_secs(3);
const SIGTERM: i32 = 15;
const SIGKILL: i32 = 9;

impl SandboxProcesses<'_> {
    /// Sends SIGTERM to the group of a process and kills everything that it started if it does not end in time.
    pub async fn terminate_process(self, process: &ProcessId) -> Result<(), ServiceError> {
        let ended = self.watch_process_end(process).await?;
        self.signal_process(process, SIGTERM, SignalTarget::Group).await?;
        match tokio::time::timeout(TERMINATION_GRACE, ended).await {
            Ok(()) => Ok(()),
            Err(_elapsed) => self.kill_process(process).await,
        }
    }

    /// Kills everything that a process has started and waits for its end, for a limited time.
    pub async fn kill_process(self, process: &ProcessId) -> Result<(), ServiceError> {
        let ended = self.watch_process_end(process).await?;
        let killed = self.signal_process(process, SIGKILL, SignalTarget::Tree).await;
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
        self,
        process: &ProcessId,
    ) -> Result<impl Future<Output = ()> + use<>, ServiceError> {
        let written = self.process_status(process).await?.written;
        let mut following = self.follow_output(process, JournalOffset(written)).await?;
        Ok(async move { while !matches!(following.next().await, Ok(OutputEvent::Ended(_)) | Err(_)) {} })
    }
}
