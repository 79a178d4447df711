//! Snapshots: the files of a sandbox at one moment, kept to make other sandboxes from.
//!
//! ```text
//! create ─► Creating ─► Ready ─► Deleting ─► removed
//!               └─► Failed ──────┘
//! ```
//! The row is written before anything is made and deleted after everything is removed, so that a start knows what was
//! intended. A snapshot is taken in a separate task, even if its client disconnects.

mod commit;
mod index;
mod inheritance;
mod making;

use std::sync::Arc;
use std::time::Duration;

use domain::{Bytes, FilesState, Owner, Phase, SandboxId, Snapshot, SnapshotId, SnapshotState};
use tokio::sync::oneshot;

use crate::core::{Core, io_error};
use crate::sandboxes::registry::SandboxHandle;
use crate::tenancy::tokens::random_bytes;
use crate::{CreateSandboxRequest, Outcome, SandboxRef, Service, ServiceError};

pub use commit::CommitSource;
pub(crate) use index::{SnapshotGuard, SnapshotIndex};
pub(crate) use making::reconcile_snapshots;

/// How long a backend may take to drop a snapshot.
const FORGET_TIMEOUT: Duration = Duration::from_secs(60);
/// The longest name that a client may give.
const MAX_NAME_BYTES: usize = 256;

/// Selects the snapshots that match all given fields.
pub struct SnapshotFilter<'a> {
    pub sandbox: Option<&'a str>,
    pub name: Option<&'a str>,
    pub state: &'a (dyn Fn(&SnapshotState) -> bool + Sync),
    pub offset: usize,
    pub limit: usize,
}

/// One page of a list of snapshots.
#[derive(Clone, Debug)]
pub struct SnapshotPage {
    pub items: Vec<Snapshot>,
    /// The number of snapshots that pass the filter, on all pages.
    pub total: usize,
}

/// Takes snapshots of one sandbox.
#[derive(Clone, Copy)]
pub struct SandboxSnapshots<'a>(pub(crate) &'a SandboxRef);

impl SandboxSnapshots<'_> {
    /// Begins to take a snapshot of a sandbox that runs or has died. It becomes ready, or fails, a moment later.
    pub async fn take_snapshot(self, name: Option<String>) -> Result<Snapshot, ServiceError> {
        let begun = self.0.core.begin_snapshot(&self.0.handle, name).await;
        begun.inspect_err(self.0.record_failure("snapshot"))
    }
}

impl Service {
    pub fn find_snapshot(&self, owner: &Owner, id: &SnapshotId) -> Result<Snapshot, ServiceError> {
        self.0.catalog.snapshots.find(owner, id).ok_or_else(|| ServiceError::NoSnapshot(id.clone()))
    }

    /// Lists snapshots, newest first.
    pub fn list_snapshots(&self, owner: &Owner, filter: &SnapshotFilter<'_>) -> SnapshotPage {
        self.0.catalog.snapshots.list(owner, filter)
    }

    /// Returns when the snapshot is removed. Sandboxes that were made from it keep their files.
    pub async fn delete_snapshot(&self, owner: &Owner, id: &SnapshotId) -> Result<Outcome, ServiceError> {
        let deleted = self.0.delete_snapshot(owner, id).await;
        deleted.inspect_err(self.0.record_failure("delete a snapshot", owner, None))
    }
}

impl Core {
    async fn begin_snapshot(
        self: &Arc<Self>,
        handle: &SandboxHandle,
        name: Option<String>,
    ) -> Result<Snapshot, ServiceError> {
        let (owner, id) = (&handle.owner, &handle.id);
        if !self.host.capabilities.snapshot {
            return Err(self.snapshots_unsupported(id));
        }
        if !has_files(handle) {
            let needs = "a snapshot needs a sandbox that runs, or that died and kept its files";
            return Err(ServiceError::NotASource { id: id.clone(), phase: handle.phase(), needs });
        }
        if name.as_ref().is_some_and(|name| name.is_empty() || name.len() > MAX_NAME_BYTES) {
            let message = format!("a snapshot name must have 1 to {MAX_NAME_BYTES} bytes");
            return Err(ServiceError::Invalid(message));
        }
        // The expected size is reserved until the snapshot is taken.
        let usage = self.host.usage_of(id).await?;
        let size = usage.disk.unwrap_or(Bytes(handle.cost.disk));
        let snapshot = Snapshot {
            id: SnapshotId::from_entropy(random_bytes().map_err(io_error("draw a random id"))?),
            owner: owner.clone(),
            sandbox: id.clone(),
            name,
            state: SnapshotState::Creating(None),
            created: self.clock.now().wall,
            image: handle.current_state().in_force.image,
            size,
            disk: Bytes(0),
            settings: Some(inheritance::record_settings(handle, &usage)),
        };
        self.reserve_snapshot(snapshot.clone())?;
        let (noted, wait) = oneshot::channel();
        // From here on it is taken even if the client does not wait for the answer.
        self.tasks.spawn(making::make_snapshot(Arc::clone(self), snapshot.clone(), noted));
        wait.await.unwrap_or(Err(ServiceError::Stopping)).map(|()| snapshot)
    }

    fn snapshots_unsupported(&self, id: &SandboxId) -> ServiceError {
        let source = backend::BackendError::Unsupported {
            message: "disks are in memory on this server and end with their sandbox".to_owned(),
            hint: Some("run the server as root".to_owned()),
        };
        ServiceError::Backend {
            backend: self.host.backend.name(),
            action: "take a snapshot of",
            id: id.clone(),
            source: Box::new(source),
        }
    }

    /// Refuses a snapshot that would exceed the disk quota of its owner.
    fn reserve_snapshot(&self, snapshot: Snapshot) -> Result<(), ServiceError> {
        let owner = snapshot.owner.clone();
        let most = self.config().quotas.quota_of(&owner).disk;
        let left = || {
            let others = self
                .lifecycle
                .registry
                .disk_of(&owner)
                .saturating_add(self.catalog.volumes.total_bytes(&owner));
            most.map(|most| most.0.saturating_sub(others))
        };
        self.catalog.snapshots.add(snapshot, self.config().snapshots_per_owner, left)
    }

    async fn delete_snapshot(
        self: &Arc<Self>,
        owner: &Owner,
        id: &SnapshotId,
    ) -> Result<Outcome, ServiceError> {
        let snapshot = self.catalog.snapshots.begin_to_delete(owner, id)?;
        let core = Arc::clone(self);
        // It runs in a separate task, so that a client that disconnects does not leave it half deleted.
        let deleting = self.tasks.spawn(async move { core.forget_snapshot(snapshot).await });
        deleting.await.unwrap_or(Err(ServiceError::Stopping))
    }

    /// Removes the files, then the row. A failure is retried at the next delete or start.
    async fn forget_snapshot(&self, snapshot: Snapshot) -> Result<Outcome, ServiceError> {
        let noted = self.store.put_snapshot(&snapshot).await;
        noted
            .map_err(|source| ServiceError::Store { action: "record the deletion of a snapshot", source })?;
        let (id, sandbox) = (&snapshot.id, &snapshot.sandbox);
        let forget = async { self.host.backend.required_snapshots()?.delete_snapshot(id).await };
        self.host.ask_backend("delete a snapshot of", sandbox, FORGET_TIMEOUT, forget).await?;
        let deleted = self.store.delete_snapshot(id).await;
        deleted.map_err(|source| ServiceError::Store { action: "delete a snapshot", source })?;
        self.catalog.snapshots.remove(id);
        tracing::info!(snapshot = %id, "snapshot deleted");
        Ok(Outcome::Done)
    }

    /// Completes the request for a sandbox that is made from a snapshot: settings that the caller left open are
    /// inherited. The snapshot cannot be deleted until the returned value is dropped.
    pub(crate) fn apply_snapshot(
        self: &Arc<Self>,
        owner: &Owner,
        id: SnapshotId,
        request: &mut CreateSandboxRequest,
    ) -> Result<SnapshotGuard, ServiceError> {
        let (snapshot, using) = self.catalog.snapshots.start_using(self, owner, &id)?;
        let least = snapshot.size;
        if let Some(named) = request.spec.resources.disk.filter(|named| *named < least) {
            return Err(ServiceError::SnapshotTooLarge { id: id.clone(), disk: named, size: least });
        }
        request.spec.resources.disk.get_or_insert(snapshot.disk.max(least));
        (request.spec.image, request.spec.snapshot) = (snapshot.image, Some(id));
        if let Some(settings) = snapshot.settings {
            inheritance::inherit_settings(request, settings, self.config().max_timeout);
        }
        Ok(using)
    }
}

/// Whether a sandbox has files that a snapshot can be taken of now.
fn has_files(handle: &SandboxHandle) -> bool {
    match handle.phase() {
        Phase::Running => true,
        Phase::Failed(_) => handle.state.borrow().files == FilesState::Kept,
        Phase::Starting
        | Phase::Pausing
        | Phase::Paused
        | Phase::Resuming
        | Phase::Exited(_)
        | Phase::Stopping
        | Phase::Stopped => false,
    }
}
