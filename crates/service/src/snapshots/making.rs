//! Takes snapshots, and reconciles them after a restart.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use backend::{KeptFiles, Stage};
use domain::{Bytes, Snapshot, SnapshotId, SnapshotState};
use tokio::sync::oneshot;

use super::{FORGET, has_files};
use crate::core::Core;
use crate::error::chain;
use crate::{ServiceError, measure};

/// How long taking a snapshot may last where bytes have to be copied.
const MAKE: Duration = Duration::from_secs(3600);
/// The first delay and the interval at which progress is queried.
const LOOK: Duration = Duration::from_secs(1);

/// Records a new snapshot, confirms that to the caller, and takes it.
pub(super) async fn make(
    core: Arc<Core>,
    snapshot: Snapshot,
    noted: oneshot::Sender<Result<(), ServiceError>>,
) {
    if let Err(source) = core.store.keep_snapshot(&snapshot).await {
        core.snapshots.remove(&snapshot.id);
        // The caller may have disconnected; nothing was made.
        noted.send(Err(ServiceError::Store { action: "record the new snapshot", source })).ok();
        return;
    }
    // The snapshot is taken even if the caller does not wait for the answer.
    noted.send(Ok(())).ok();
    finish(core, snapshot).await;
}

/// Takes a snapshot that is recorded. If the server stops meanwhile, the next one continues.
async fn finish(core: Arc<Core>, mut snapshot: Snapshot) {
    let made = tokio::select! {
        made = watch(&core, &snapshot) => made,
        () = core.stop.cancelled() => return,
    };
    match made {
        Ok(kept) => complete(&mut snapshot, kept),
        Err(error) => {
            core.failed("snapshot", &snapshot.owner, Some(&snapshot.sandbox))(&error);
            tracing::warn!(snapshot = %snapshot.id, error = %chain(&error), "failed to take snapshot; removing its remains");
            snapshot.state = SnapshotState::Failed(error.told_to(&snapshot.owner));
            snapshot.size = Bytes(0);
            forget(&core, &snapshot.id).await;
        }
    }
    settle_as(&core, snapshot).await;
}

/// Waits until the snapshot is taken, and publishes its progress meanwhile.
async fn watch(core: &Core, snapshot: &Snapshot) -> Result<KeptFiles, ServiceError> {
    let taking = core.backend.snapshot(&snapshot.sandbox, &snapshot.id);
    let mut taking = std::pin::pin!(core.ask_backend("take a snapshot of", &snapshot.sandbox, MAKE, taking));
    loop {
        tokio::select! {
            taken = &mut taking => return taken,
            () = tokio::time::sleep(LOOK) => {}
        }
        let Ok(all) = core.backend.snapshots().await else { continue };
        let found = all.into_iter().find(|found| found.id == snapshot.id);
        if let Some(Stage::Making(Some((done, total)))) = found.map(|found| found.stage) {
            let progress = Some(format!("{done} of {total} copied"));
            core.snapshots.put(Snapshot { state: SnapshotState::Creating(progress), ..snapshot.clone() });
        }
    }
}

fn complete(snapshot: &mut Snapshot, kept: KeptFiles) {
    tracing::info!(snapshot = %snapshot.id, sandbox = %snapshot.sandbox, "snapshot taken");
    measure::snapshot_taken();
    snapshot.state = SnapshotState::Ready;
    snapshot.image = kept.image;
    snapshot.size = kept.size;
    snapshot.disk = kept.disk;
}

/// Stores the final state of a snapshot. If that fails, the next start determines the state again.
async fn settle_as(core: &Core, snapshot: Snapshot) {
    if let Err(error) = core.store.keep_snapshot(&snapshot).await {
        tracing::warn!(snapshot = %snapshot.id, error = %chain(&error), "failed to store the state of a snapshot; the next start determines it again");
    }
    core.snapshots.put(snapshot);
}

/// Removes the files that the backend has of a snapshot; if that fails, the next start finds them.
pub(super) async fn forget(core: &Core, id: &SnapshotId) {
    let forgotten = tokio::time::timeout(FORGET, core.backend.forget_snapshot(id)).await;
    match forgotten {
        Ok(Ok(())) => {}
        Ok(Err(error)) => {
            tracing::warn!(snapshot = %id, error = %chain(&error), "failed to remove the files of a snapshot; the next start retries")
        }
        Err(_elapsed) => {
            tracing::warn!(snapshot = %id, "failed to remove the files of a snapshot in time; the next start retries")
        }
    }
}

/// Compares the snapshots in the store with those that the backend has.
pub(crate) async fn settle(core: &Arc<Core>, remembered: Vec<Snapshot>) -> Result<(), ServiceError> {
    let found = core.backend.snapshots().await.map_err(|source| ServiceError::Host {
        backend: core.backend.name(),
        action: "list its snapshots",
        source: Box::new(source),
    })?;
    let mut found: HashMap<_, _> = found.into_iter().map(|found| (found.id, found.stage)).collect();
    for snapshot in remembered {
        let stage = found.remove(&snapshot.id);
        settle_one(core, snapshot, stage).await;
    }
    for stranger in found.into_keys() {
        tracing::warn!(snapshot = %stranger, "found a snapshot that is not in the store; removing it");
        forget(core, &stranger).await;
    }
    Ok(())
}

async fn settle_one(core: &Arc<Core>, mut snapshot: Snapshot, stage: Option<Stage>) {
    match (&snapshot.state, stage) {
        (SnapshotState::Deleting, _) => {
            core.snapshots.put(snapshot.clone());
            if let Err(error) = core.forget_snapshot(snapshot).await {
                tracing::warn!(error = %chain(&error), "failed to delete snapshot; the next start retries");
            }
        }
        (SnapshotState::Ready, Some(Stage::Complete(_))) | (SnapshotState::Failed(_), None) => {
            core.snapshots.put(snapshot);
        }
        (SnapshotState::Creating(_), Some(Stage::Complete(kept))) => {
            complete(&mut snapshot, kept);
            settle_as(core, snapshot).await;
        }
        (SnapshotState::Creating(_), _) if runs(core, &snapshot) => {
            core.snapshots.put(snapshot.clone());
            core.tasks.spawn(finish(Arc::clone(core), snapshot));
        }
        (_, stage) => {
            if stage.is_some() {
                forget(core, &snapshot.id).await;
            }
            snapshot.size = Bytes(0);
            snapshot.state = SnapshotState::Failed(match &snapshot.state {
                SnapshotState::Failed(why) => why.clone(),
                SnapshotState::Creating(_) => "the sandbox ended before the snapshot was taken".to_owned(),
                SnapshotState::Ready | SnapshotState::Deleting => {
                    "the files of the snapshot are gone".to_owned()
                }
            });
            settle_as(core, snapshot).await;
        }
    }
}

/// Whether the sandbox still has its files, so that the snapshot can still be taken.
fn runs(core: &Core, snapshot: &Snapshot) -> bool {
    core.registry.find(&snapshot.sandbox).is_some_and(|handle| has_files(&handle))
}
