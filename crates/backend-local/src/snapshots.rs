//! Snapshots: the launcher takes and keeps them.

use backend::{BackendError, FoundSnapshot, SnapshotContent, Snapshots};
use domain::{Bytes, SandboxId, SnapshotId};
use launcher::protocol::{LauncherOp, OpResult, SnapshotListing, StoredSnapshot};

use crate::{LocalBackend, unexpected_response};

#[async_trait::async_trait]
impl Snapshots for LocalBackend {
    async fn create_snapshot(
        &self,
        id: &SandboxId,
        snapshot: &SnapshotId,
    ) -> Result<SnapshotContent, BackendError> {
        let (id, snapshot) = (id.clone(), snapshot.clone());
        match self.request_result(LauncherOp::Snapshot { id, snapshot }).await? {
            OpResult::Kept(kept) => Ok(snapshot_content(kept)),
            _ => Err(unexpected_response()),
        }
    }

    async fn delete_snapshot(&self, snapshot: &SnapshotId) -> Result<(), BackendError> {
        self.request_result(LauncherOp::ForgetSnapshot { snapshot: snapshot.clone() }).await.map(drop)
    }

    async fn list_snapshots(&self) -> Result<Vec<FoundSnapshot>, BackendError> {
        let OpResult::Snapshots(all) = self.request_result(LauncherOp::Snapshots).await? else {
            return Err(unexpected_response());
        };
        Ok(all.into_iter().map(found_snapshot).collect())
    }
}

fn found_snapshot(found: SnapshotListing) -> FoundSnapshot {
    let stage = match found.kept {
        Some(kept) => backend::SnapshotStage::Complete(snapshot_content(kept)),
        None => backend::SnapshotStage::Making(found.copied.map(|(done, total)| (Bytes(done), Bytes(total)))),
    };
    FoundSnapshot { id: found.id, stage }
}

fn snapshot_content(stored: StoredSnapshot) -> SnapshotContent {
    SnapshotContent { image: stored.image, size: Bytes(stored.size), disk: Bytes(stored.disk) }
}
