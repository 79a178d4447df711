//! Taking a snapshot to its end, and what a start finds of those that were begun.

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

/// How long taking one may last where bytes have to be copied.
const MAKE: Duration = Duration::from_secs(3600);
/// After how long, and how often then, it is asked how far it has come.
const LOOK: Duration = Duration::from_secs(1);

/// Notes a new snapshot, says so, and takes it.
pub(super) async fn make(
    core: Arc<Core>,
    snapshot: Snapshot,
    noted: oneshot::Sender<Result<(), ServiceError>>,
) {
    if let Err(source) = core.store.keep_snapshot(&snapshot).await {
        core.snapshots.remove(&snapshot.id);
        // Whoever asked may have gone; nothing was made.
        noted.send(Err(ServiceError::Store { action: "note the new snapshot", source })).ok();
        return;
    }
    // It is taken all the same if nobody waits for the answer.
    noted.send(Ok(())).ok();
    finish(core, snapshot).await;
}

/// Takes a snapshot that is noted. A server that stops meanwhile leaves it to the next one.
async fn finish(core: Arc<Core>, mut snapshot: Snapshot) {
    let made = tokio::select! {
        made = watch(&core, &snapshot) => made,
        () = core.stop.cancelled() => return,
    };
    match made {
        Ok(kept) => complete(&mut snapshot, kept),
        Err(error) => {
            core.failed("snapshot", &snapshot.owner, Some(&snapshot.sandbox))(&error);
            tracing::warn!(snapshot = %snapshot.id, error = %chain(&error), "a snapshot was not taken");
            snapshot.state = SnapshotState::Failed(error.told_to(&snapshot.owner));
            snapshot.size = Bytes(0);
            forget(&core, &snapshot.id).await;
        }
    }
    settle_as(&core, snapshot).await;
}

/// Waits until it is taken, and says meanwhile how far it has come.
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
            let said = Some(format!("{done} of {total} are copied"));
            core.snapshots.put(Snapshot { state: SnapshotState::Creating(said), ..snapshot.clone() });
        }
    }
}

fn complete(snapshot: &mut Snapshot, kept: KeptFiles) {
    tracing::info!(snapshot = %snapshot.id, sandbox = %snapshot.sandbox, "a snapshot was taken");
    measure::snapshot_taken();
    snapshot.state = SnapshotState::Ready;
    snapshot.image = kept.image;
    snapshot.size = kept.size;
    snapshot.disk = kept.disk;
}

/// Keeps what became of a snapshot. Should the note be lost, the next start finds out anew.
async fn settle_as(core: &Core, snapshot: Snapshot) {
    if let Err(error) = core.store.keep_snapshot(&snapshot).await {
        tracing::warn!(snapshot = %snapshot.id, error = %chain(&error), "its state was not kept");
    }
    core.snapshots.put(snapshot);
}

/// Removes whatever the backend has of it; what cannot be removed now is found at the next start.
pub(super) async fn forget(core: &Core, id: &SnapshotId) {
    let forgotten = tokio::time::timeout(FORGET, core.backend.forget_snapshot(id)).await;
    match forgotten {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::warn!(snapshot = %id, error = %chain(&error), "remains are left"),
        Err(_elapsed) => tracing::warn!(snapshot = %id, "remains are left: the backend took too long"),
    }
}

/// Compares the snapshots that the store remembers with those that the backend has.
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
        tracing::warn!(snapshot = %stranger, "found a snapshot that nobody knows");
        forget(core, &stranger).await;
    }
    Ok(())
}

async fn settle_one(core: &Arc<Core>, mut snapshot: Snapshot, stage: Option<Stage>) {
    match (&snapshot.state, stage) {
        (SnapshotState::Deleting, _) => {
            core.snapshots.put(snapshot.clone());
            if let Err(error) = core.forget_snapshot(snapshot).await {
                tracing::warn!(error = %chain(&error), "a snapshot is deleted later");
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
                SnapshotState::Creating(_) => "its sandbox ended before it was taken".to_owned(),
                SnapshotState::Ready | SnapshotState::Deleting => "its files are gone".to_owned(),
            });
            settle_as(core, snapshot).await;
        }
    }
}

/// Whether the sandbox it is of has its files, so that it can still be taken.
fn runs(core: &Core, snapshot: &Snapshot) -> bool {
    core.registry.find(&snapshot.sandbox).is_some_and(|handle| has_files(&handle))
}
