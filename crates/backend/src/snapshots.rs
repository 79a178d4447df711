//! Saved files of sandboxes, for backends that offer them.

use domain::{Bytes, SandboxId, SnapshotId};

use crate::BackendError;

/// The snapshots of a backend. Whether this host supports them is said by `BackendCapabilities::snapshot`.
#[async_trait::async_trait]
pub trait Snapshots: Send + Sync {
    /// Saves the files of a sandbox at one moment. The commands of a running sandbox are frozen meanwhile and
    /// always thawed afterwards, even if the snapshot fails; a stopped sandbox stays stopped. A second call
    /// for the same snapshot returns the first one.
    async fn create_snapshot(
        &self,
        id: &SandboxId,
        snapshot: &SnapshotId,
    ) -> Result<SnapshotContent, BackendError>;
    /// Deletes a snapshot; sandboxes created from it keep their files. A missing snapshot is not an error.
    async fn delete_snapshot(&self, snapshot: &SnapshotId) -> Result<(), BackendError>;
    /// Lists all snapshots that this backend has or is creating.
    async fn list_snapshots(&self) -> Result<Vec<FoundSnapshot>, BackendError>;
}

/// The content of a snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SnapshotContent {
    /// The image beneath the files, after aliases were resolved.
    pub image: String,
    /// The number of bytes above the image.
    pub size: Bytes,
    /// The disk limit of the sandbox.
    pub disk: Bytes,
}

/// A snapshot that a backend finds at start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundSnapshot {
    pub id: SnapshotId,
    pub stage: SnapshotStage,
}

/// The progress of a snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SnapshotStage {
    Complete(SnapshotContent),
    /// It is being created; bytes done and bytes in total, if they are copied.
    Making(Option<(Bytes, Bytes)>),
}
