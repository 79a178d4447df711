//! Snapshots: the launcher takes and keeps them.

use backend::{BackendError, FoundSnapshot, SnapshotContent, Snapshots};
use domain::{Bytes, SandboxId, SnapshotId};

use super::{LocalBackend, unexpected_response};
use crate::launcher::protocol::{LauncherOp, OpResult, SnapshotListing, StoredSnapshot};

#[async_trait::async_trait]
impl Snapshots for LocalBackend {
    async fn create_snapshot(
        &self,
        id: &SandboxId,
        snapshot: &SnapshotId,
    ) -> Result<SnapshotContent, BackendError> {
        let (id, snapshot) = (id.clone(), snapshot.clone());
        match self.request_result(LauncherOp::Snapshot { id, snapshot }).await? {
            OpResult::Kept(kept) => Ok(kept.into()),
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
        Some(kept) => backend::SnapshotStage::Complete(kept.into()),
        None => backend::SnapshotStage::Making(found.copied.map(|(done, total)| (Bytes(done), Bytes(total)))),
    };
    FoundSnapshot { id: found.id, stage }
}

impl From<StoredSnapshot> for SnapshotContent {
    fn from(kept: StoredSnapshot) -> Self {
        Self { image: kept.image, size: Bytes(kept.size), disk: Bytes(kept.disk) }
    }
}
