//! Making an image from a sandbox or from a snapshot.
//!
//! For a sandbox, a snapshot is taken first, which is not recorded in the store: if this server dies, the next one
//! finds a snapshot that its store does not know, and removes it.

use std::sync::Arc;
use std::time::Duration;

use backend::{BackendError, ImageInfo};
use domain::{Bytes, Owner, SandboxId, Snapshot, SnapshotId, SnapshotState};
use tokio::sync::watch;

use super::making::forget_files;
use super::{SnapshotGuard, has_files};
use crate::core::{Core, io_error};
use crate::error::error_chain;
use crate::images::PullState;
use crate::tenancy::tokens::random_bytes;
use crate::{Service, ServiceError};

/// How long the snapshot may take where bytes have to be copied, and the image after it.
const COMMIT_TIMEOUT: Duration = Duration::from_secs(3600);

/// The source of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CommitSource {
    Sandbox(SandboxId),
    Snapshot(SnapshotId),
}

/// Protects the source of an image while the image is made.
enum CommitGuard {
    /// A snapshot taken for this image; it is in the index so that no other is taken at the same time.
    Taking(Box<Snapshot>),
    Kept(SnapshotGuard),
}

impl Service {
    /// Begins to make an image from the files of an owner's sandbox or snapshot. It continues if the client
    /// disconnects. Every owner can use the result, so only operators may call this.
    pub async fn commit_image(
        &self,
        owner: &Owner,
        source: CommitSource,
        name: &str,
    ) -> Result<watch::Receiver<PullState>, ServiceError> {
        let begun = self.0.begin_commit(owner, source, name).await;
        begun.inspect_err(self.0.record_failure("commit", owner, None))
    }
}

impl Core {
    async fn begin_commit(
        self: &Arc<Self>,
        owner: &Owner,
        source: CommitSource,
        name: &str,
    ) -> Result<watch::Receiver<PullState>, ServiceError> {
        let (snapshot, held) = match source {
            CommitSource::Sandbox(id) => {
                let snapshot = self.reserve_commit(owner, &id).await?;
                (snapshot.id.clone(), CommitGuard::Taking(Box::new(snapshot)))
            }
            CommitSource::Snapshot(id) => {
                let (_, using) = self.catalog.snapshots.start_using(self, owner, &id)?;
                (id, CommitGuard::Kept(using))
            }
        };
        let (progress, state) = watch::channel(PullState::Unpacking);
        let (core, name) = (Arc::clone(self), name.to_owned());
        self.tasks.spawn(async move {
            let made = tokio::select! {
                made = core.run_commit(&snapshot, &held, &name) => made,
                () = core.tasks.cancelled() => Err(ServiceError::Stopping),
            };
            core.release_commit(held).await;
            progress.send_replace(commit_state(made, &name));
        });
        Ok(state)
    }

    /// Reserves the entry of the snapshot that is taken of a sandbox to make an image from.
    async fn reserve_commit(&self, owner: &Owner, id: &SandboxId) -> Result<Snapshot, ServiceError> {
        let handle = self.find_sandbox(owner, id)?;
        if !self.host.capabilities.snapshot {
            return Err(self.snapshots_unsupported(id));
        }
        if !has_files(&handle) {
            let needs = "an image needs a sandbox that runs, one that died and kept its files, or a snapshot";
            return Err(ServiceError::NotASource { id: id.clone(), phase: handle.phase(), needs });
        }
        let snapshot = Snapshot {
            id: SnapshotId::from_entropy(random_bytes().map_err(io_error("draw a random id"))?),
            owner: owner.clone(),
            sandbox: id.clone(),
            name: None,
            state: SnapshotState::Creating(None),
            created: self.clock.now().wall,
            image: handle.current_state().in_force.image,
            size: self.host.usage_of(id).await?.disk.unwrap_or(Bytes(handle.cost.disk)),
            disk: Bytes(0),
            settings: None,
        };
        self.reserve_snapshot(snapshot.clone())?;
        Ok(snapshot)
    }

    async fn run_commit(
        &self,
        snapshot: &SnapshotId,
        held: &CommitGuard,
        name: &str,
    ) -> Result<ImageInfo, ServiceError> {
        if let CommitGuard::Taking(own) = held {
            let taking = async {
                self.host.backend.required_snapshots()?.create_snapshot(&own.sandbox, snapshot).await
            };
            self.host.ask_backend("take a snapshot of", &own.sandbox, COMMIT_TIMEOUT, taking).await?;
        }
        let committing = self.backend_images("make an image")?.commit_snapshot(snapshot, name);
        let made = tokio::time::timeout(COMMIT_TIMEOUT, committing).await.unwrap_or_else(|_elapsed| {
            let message = "the backend took too long".to_owned();
            Err(BackendError::Unsupported { message, hint: None })
        });
        made.map_err(|source| self.image_error("make an image", source))
    }

    async fn release_commit(&self, held: CommitGuard) {
        match held {
            CommitGuard::Kept(using) => drop(using),
            CommitGuard::Taking(own) => {
                forget_files(self, &own.id).await;
                self.catalog.snapshots.remove(&own.id);
            }
        }
    }
}

fn commit_state(made: Result<ImageInfo, ServiceError>, name: &str) -> PullState {
    match made {
        Ok(image) => {
            tracing::info!(
                image = image.name,
                "image made from a sandbox or snapshot; every owner can use it"
            );
            PullState::Done(image)
        }
        Err(error) => {
            tracing::warn!(image = name, error = %error_chain(&error), "failed to make an image from a sandbox or snapshot");
            let hint = error.hint().map(str::to_owned);
            PullState::Failed { message: error_chain(&error), hint }
        }
    }
}
