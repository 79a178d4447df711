//! The part of the launcher's loop that waits for disk tasks: snapshots and disks made from them.
//!
//! While a snapshot is taken, requests for its sandbox that would conflict with it wait until it is
//! finished. A request to remove the sandbox or the snapshot cancels it.

use std::os::fd::OwnedFd;

use domain::{SandboxId, SnapshotId};

use super::Launcher;
use super::serve::{LauncherLoop, send_response, step_error};
use super::snapshot::{PendingRestore, PendingSnapshot, RestoreStart, SnapshotStart};
use crate::client_connection::ClientSocket;
use crate::jail::plan::JailPlan;
use crate::protocol::{LauncherOp, LauncherRequest, OpError, OpResult, SnapshotListing};

/// A disk task, the client that waits for it, and the requests that are handled when it has finished.
pub(super) struct DiskTaskInProgress {
    client: ClientSocket,
    number: u64,
    work: DiskWork,
    waiting: Vec<(ClientSocket, LauncherRequest)>,
}

enum DiskWork {
    Snapshot(Box<PendingSnapshot>),
    Restore(Box<PendingRestore>),
}

impl DiskTaskInProgress {
    pub(super) fn report_pipe(&self) -> &OwnedFd {
        match &self.work {
            DiskWork::Snapshot(taking) => &taking.disk_task.report,
            DiskWork::Restore(restoring) => &restoring.disk_task.report,
        }
    }

    /// Whether a request has to wait for the end of this job.
    fn conflicts_with(&self, op: &LauncherOp) -> bool {
        match (&self.work, op) {
            (
                DiskWork::Snapshot(taking),
                LauncherOp::Snapshot { id, .. }
                | LauncherOp::Freeze { id, .. }
                | LauncherOp::Connect { id, .. }
                | LauncherOp::Stop { id }
                | LauncherOp::Destroy { id },
            ) => taking.id == *id,
            (DiskWork::Snapshot(taking), LauncherOp::Resize(resize)) => taking.id == resize.id,
            // A disk is not given to a sandbox while it is being copied.
            (DiskWork::Snapshot(taking), LauncherOp::Create(plan)) => taking.id == plan.id,
            (DiskWork::Snapshot(taking), LauncherOp::ForgetSnapshot { snapshot }) => {
                taking.snapshot == *snapshot
            }
            (DiskWork::Restore(restoring), LauncherOp::Destroy { id } | LauncherOp::Stop { id }) => {
                restoring.plan.id == *id
            }
            (DiskWork::Restore(restoring), LauncherOp::Create(plan)) => restoring.plan.id == plan.id,
            _ => false,
        }
    }

    fn cancel(&self) {
        match &self.work {
            DiskWork::Snapshot(taking) => taking.disk_task.cancel(),
            DiskWork::Restore(restoring) => restoring.disk_task.cancel(),
        }
    }
}

impl LauncherLoop {
    /// Queues a request if it conflicts with a job.
    pub(super) fn queue_if_conflicting(
        &mut self,
        client: ClientSocket,
        request: LauncherRequest,
    ) -> Option<(ClientSocket, LauncherRequest)> {
        let Some(job) = self.disk_tasks.iter_mut().find(|job| job.conflicts_with(&request.op)) else {
            return Some((client, request));
        };
        if matches!(request.op, LauncherOp::Destroy { .. } | LauncherOp::ForgetSnapshot { .. }) {
            job.cancel();
        }
        job.waiting.push((client, request));
        None
    }

    pub(super) fn start_snapshot(
        &mut self,
        client: ClientSocket,
        number: u64,
        id: &SandboxId,
        snapshot: &SnapshotId,
    ) {
        match self.launcher.begin_snapshot(id, snapshot) {
            Ok(SnapshotStart::Taking(taking)) => {
                let work = DiskWork::Snapshot(Box::new(taking));
                self.disk_tasks.push(DiskTaskInProgress { client, number, work, waiting: Vec::new() });
            }
            Ok(SnapshotStart::Known(record)) => {
                send_response(&client, number, Ok(OpResult::Kept(record.into())), None)
            }
            Err(refusal) => send_response(&client, number, Err(refusal), None),
        }
    }

    pub(super) fn start_restore(&mut self, client: ClientSocket, number: u64, plan: Box<JailPlan>) {
        let Launcher { thread, rights, .. } = &mut self.launcher;
        match rights.begin_restore(thread, plan) {
            Ok(RestoreStart::Ready(plan)) => self.start_restored_create(client, number, *plan),
            Ok(RestoreStart::Copying(restoring)) => {
                let work = DiskWork::Restore(Box::new(restoring));
                self.disk_tasks.push(DiskTaskInProgress { client, number, work, waiting: Vec::new() });
            }
            Err(refusal) => send_response(&client, number, Err(refusal), None),
        }
    }

    /// Starts to make a sandbox with the disk that was restored for it.
    fn start_restored_create(&mut self, client: ClientSocket, number: u64, plan: JailPlan) {
        self.start_create(client, number, plan);
        self.launcher.rights.discard_restored_disk();
    }

    pub(super) fn forget_snapshot(&mut self, snapshot: &SnapshotId) -> Result<OpResult, OpError> {
        let forgotten = self.launcher.rights.forget_snapshot(snapshot);
        forgotten.map(|()| OpResult::Done).map_err(|error| step_error("forget", &error))
    }

    pub(super) fn list_snapshots(&self) -> Result<OpResult, OpError> {
        let mut all = self.launcher.rights.list_snapshots().map_err(|error| step_error("list", &error))?;
        for job in &self.disk_tasks {
            let DiskWork::Snapshot(taking) = &job.work else { continue };
            if all.iter().all(|found| found.id != taking.snapshot) {
                let (id, copied) = (taking.snapshot.clone(), taking.progress());
                all.push(SnapshotListing { id, kept: None, copied });
            }
        }
        Ok(OpResult::Snapshots(all))
    }

    /// Ends all disk tasks, so that no sandbox stays frozen when the launcher is gone.
    pub(super) fn cancel_disk_tasks(&mut self) {
        for mut job in std::mem::take(&mut self.disk_tasks) {
            job.cancel();
            job.waiting.clear();
            self.disk_tasks.push(job);
            self.finish_disk_task(self.disk_tasks.len() - 1);
        }
    }

    /// Sends the response for a job whose disk task has finished, and handles the requests that waited.
    pub(super) fn finish_disk_task(&mut self, index: usize) {
        let DiskTaskInProgress { client, number, work, waiting } = self.disk_tasks.swap_remove(index);
        match work {
            DiskWork::Snapshot(taking) => {
                let taken = self.launcher.rights.conclude_snapshot(*taking);
                send_response(&client, number, taken.map(|record| OpResult::Kept(record.into())), None);
            }
            DiskWork::Restore(restoring) => match self.launcher.rights.conclude_restore(*restoring) {
                Ok(plan) => self.start_restored_create(client, number, *plan),
                Err(refusal) => send_response(&client, number, Err(refusal), None),
            },
        }
        for (client, ask) in waiting {
            self.handle_request(client, ask, None);
        }
    }
}
