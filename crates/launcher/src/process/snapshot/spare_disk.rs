//! A copy of the snapshot that was restored last, made before the next sandbox from it is requested.
//!
//! Copying a subvolume waits until btrfs has committed a transaction. That takes most of the time by which a
//! restore is slower than a create, so it is done in advance, like the other parts of a sandbox that can be prepared:
//!
//! ```text
//! restore ─► the snapshot is wanted ─► idle: copy by a disk task ─► complete ─► the next restore takes it
//!                                            └─► taken by a restore, which waits for the task
//! ```
//! The copy shares all extents with the snapshot. It is removed with the snapshot, when another snapshot is restored, when the
//! launcher stops, and at its next start after a crash, like every volume that belongs to no sandbox. Images of ext4
//! are not copied in advance, because a copy may take as much space as the snapshot.

use std::io;
use std::os::fd::OwnedFd;

use domain::SnapshotId;
use linux::spawn::SingleThread;

use super::super::disk_task::DiskTask;
use super::super::{LauncherRights, RootState};
use crate::volumes::{PreparedVolume, VolumeKind};

/// The copy that is kept in advance, and the snapshot of which one is wanted.
#[derive(Debug, Default)]
pub(in crate::process) struct SpareDisk {
    /// The snapshot that was restored last; `None` if it was removed or could not be copied.
    wanted: Option<SnapshotId>,
    copy: Option<SnapshotCopy>,
}

#[derive(Debug)]
pub(in crate::process) struct SnapshotCopy {
    snapshot: SnapshotId,
    pub disk: PreparedVolume,
    /// The task that makes the copy; `None` if it is complete.
    pub disk_task: Option<DiskTask>,
    /// Whether the snapshot is being removed, so that the copy must not be used.
    is_cancelled: bool,
}

impl LauncherRights {
    /// Returns the descriptor that is readable when the copy in progress has finished.
    pub(in crate::process) fn spare_disk_report(&self) -> Option<&OwnedFd> {
        let Self::Root(root) = self else { return None };
        let copy = root.snapshots.spare.copy.as_ref()?;
        copy.disk_task.as_ref().map(|task| &task.report)
    }

    /// Begins to copy the snapshot that was restored last, unless a copy exists. Returns whether it has begun one.
    pub(in crate::process) fn start_spare_copy(&mut self, thread: &SingleThread) -> io::Result<bool> {
        match self {
            Self::Root(root) if root.lacks_spare_disk() => root.start_spare_copy(thread).map(|()| true),
            Self::Root(_) | Self::User { .. } => Ok(false),
        }
    }

    /// Keeps the copy whose task has finished, or removes it if it failed or is no longer wanted.
    pub(in crate::process) fn finish_spare_copy(&mut self) {
        if let Self::Root(root) = self {
            root.finish_spare_copy();
        }
    }
}

impl RootState {
    /// Takes the copy of this snapshot, which may be incomplete. Another one will be made.
    pub(in crate::process) fn take_spare_disk(&mut self, snapshot: &SnapshotId) -> Option<SnapshotCopy> {
        if self.volumes.kind() != VolumeKind::Btrfs {
            return None;
        }
        let spare = &mut self.snapshots.spare;
        spare.wanted = Some(snapshot.clone());
        spare.copy.take_if(|copy| copy.snapshot == *snapshot && !copy.is_cancelled)
    }

    /// Whether a copy should be made now.
    pub(in crate::process) fn lacks_spare_disk(&self) -> bool {
        let SpareDisk { wanted, copy } = &self.snapshots.spare;
        match (wanted, copy) {
            (None, _) => false,
            (Some(_), None) => true,
            (Some(wanted), Some(copy)) => copy.snapshot != *wanted && copy.disk_task.is_none(),
        }
    }

    fn start_spare_copy(&mut self, thread: &SingleThread) -> io::Result<()> {
        self.discard_spare_disk();
        // After an error no copy is wanted until the next restore.
        let Some(snapshot) = self.snapshots.spare.wanted.take() else { return Ok(()) };
        let (disk, copying) = self.volumes.plan_restore(&snapshot).map_err(io::Error::other)?;
        match self.snapshots.disk_task_runner.start(thread, move || copying.run()) {
            Ok(task) => {
                let disk_task = Some(task);
                let copy = SnapshotCopy { snapshot: snapshot.clone(), disk, disk_task, is_cancelled: false };
                self.snapshots.spare = SpareDisk { wanted: Some(snapshot), copy: Some(copy) };
                Ok(())
            }
            Err(error) => {
                self.discard_disk(disk);
                Err(error)
            }
        }
    }

    fn finish_spare_copy(&mut self) {
        let Some(copy) = self.snapshots.spare.copy.take() else { return };
        let SnapshotCopy { snapshot, disk, disk_task, is_cancelled } = copy;
        let copied = disk_task.map_or(Ok(()), DiskTask::wait_outcome);
        let is_wanted = self.snapshots.spare.wanted.as_ref() == Some(&snapshot) && !is_cancelled;
        match copied {
            Ok(()) if is_wanted => {
                let copy = SnapshotCopy { snapshot, disk, disk_task: None, is_cancelled };
                self.snapshots.spare.copy = Some(copy);
            }
            Ok(()) => self.discard_disk(disk),
            Err(error) => {
                if is_wanted {
                    tracing::warn!(%snapshot, %error, "failed to copy a snapshot in advance; the next restore copies it");
                    self.snapshots.spare.wanted = None;
                }
                self.discard_disk(disk);
            }
        }
    }

    /// Removes the copy of a snapshot that is about to be removed. One in progress is cancelled, and removed when its
    /// task has ended.
    pub(in crate::process) fn forget_spare_disk(&mut self, snapshot: &SnapshotId) {
        let spare = &mut self.snapshots.spare;
        spare.wanted.take_if(|wanted| wanted == snapshot);
        let Some(copy) = spare.copy.take_if(|copy| copy.snapshot == *snapshot) else { return };
        match &copy.disk_task {
            Some(task) => {
                task.cancel();
                spare.copy = Some(SnapshotCopy { is_cancelled: true, ..copy });
            }
            None => self.discard_disk(copy.disk),
        }
    }

    /// Removes the copy, and waits for its task if that has not ended.
    pub(in crate::process) fn discard_spare_disk(&mut self) {
        let Some(copy) = self.snapshots.spare.copy.take() else { return };
        if let Some(task) = copy.disk_task {
            task.cancel();
            // Whether it succeeded does not matter: the copy is not used.
            task.wait_outcome().ok();
        }
        self.discard_disk(copy.disk);
    }
}
