//! Takes snapshots, and reconciles them after a restart.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use backend::{BackendError, FoundSnapshot, SnapshotContent, SnapshotStage};
use domain::{Bytes, Snapshot, SnapshotId, SnapshotState};
use tokio::sync::oneshot;

use super::{FORGET_TIMEOUT, has_files};
use crate::ServiceError;
use crate::core::Core;
use crate::error::error_chain;
use crate::reconcile::{SnapshotPlan, plan_snapshot};
use crate::telemetry::service_metrics;

/// How long taking a snapshot may last where bytes have to be copied.
const SNAPSHOT_TIMEOUT: Duration = Duration::from_secs(3600);
/// The first delay and the interval at which progress is queried.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(1);

/// Records a new snapshot, confirms that to the caller, and takes it.
pub(super) async fn make_snapshot(
    core: Arc<Core>,
    snapshot: Snapshot,
    noted: oneshot::Sender<Result<(), ServiceError>>,
) {
    if let Err(source) = core.store.put_snapshot(&snapshot).await {
        core.catalog.snapshots.remove(&snapshot.id);
        // The caller may have disconnected; nothing was made.
        noted.send(Err(ServiceError::Store { action: "record the new snapshot", source })).ok();
        return;
    }
    // The snapshot is taken even if the caller does not wait for the answer.
    noted.send(Ok(())).ok();
    finish_snapshot(core, snapshot).await;
}

/// Takes a snapshot that is recorded. If the server stops meanwhile, the next one continues.
async fn finish_snapshot(core: Arc<Core>, mut snapshot: Snapshot) {
    let made = tokio::select! {
        made = take_with_progress(&core, &snapshot) => made,
        () = core.tasks.cancelled() => return,
    };
    match made {
        Ok(kept) => mark_ready(&mut snapshot, kept),
        Err(error) => {
            core.record_failure("snapshot", &snapshot.owner, Some(&snapshot.sandbox))(&error);
            tracing::warn!(snapshot = %snapshot.id, error = %error_chain(&error), "failed to take snapshot; removing its remains");
            snapshot.state = SnapshotState::Failed(error.message_for(&snapshot.owner));
            snapshot.size = Bytes(0);
            forget_files(&core, &snapshot.id).await;
        }
    }
    store_final_state(&core, snapshot).await;
}

/// Waits until the snapshot is taken, and publishes its progress meanwhile.
async fn take_with_progress(core: &Core, snapshot: &Snapshot) -> Result<SnapshotContent, ServiceError> {
    let snapshots = core.host.backend.required_snapshots();
    let taking = async { snapshots?.create_snapshot(&snapshot.sandbox, &snapshot.id).await };
    let mut taking = std::pin::pin!(core.host.ask_backend(
        "take a snapshot of",
        &snapshot.sandbox,
        SNAPSHOT_TIMEOUT,
        taking
    ));
    loop {
        tokio::select! {
            taken = &mut taking => return taken,
            () = tokio::time::sleep(PROGRESS_INTERVAL) => {}
        }
        let Ok(all) = list_snapshots(core).await else { continue };
        let found = all.into_iter().find(|found| found.id == snapshot.id);
        if let Some(SnapshotStage::Making(Some((done, total)))) = found.map(|found| found.stage) {
            let progress = Some(format!("{done} of {total} copied"));
            core.catalog
                .snapshots
                .put(Snapshot { state: SnapshotState::Creating(progress), ..snapshot.clone() });
        }
    }
}

fn mark_ready(snapshot: &mut Snapshot, kept: SnapshotContent) {
    tracing::info!(snapshot = %snapshot.id, sandbox = %snapshot.sandbox, "snapshot taken");
    service_metrics::count_snapshot();
    snapshot.state = SnapshotState::Ready;
    snapshot.image = kept.image;
    snapshot.size = kept.size;
    snapshot.disk = kept.disk;
}

/// Stores the final state of a snapshot. If that fails, the next start determines the state again.
async fn store_final_state(core: &Core, snapshot: Snapshot) {
    if let Err(error) = core.store.put_snapshot(&snapshot).await {
        tracing::warn!(snapshot = %snapshot.id, error = %error_chain(&error), "failed to store the state of a snapshot; the next start determines it again");
    }
    core.catalog.snapshots.put(snapshot);
}

/// Removes the files that the backend has of a snapshot; if that fails, the next start finds them.
pub(super) async fn forget_files(core: &Core, id: &SnapshotId) {
    let forget = async { core.host.backend.required_snapshots()?.delete_snapshot(id).await };
    let forgotten = tokio::time::timeout(FORGET_TIMEOUT, forget).await;
    match forgotten {
        Ok(Ok(())) => {}
        Ok(Err(error)) => {
            tracing::warn!(snapshot = %id, error = %error_chain(&error), "failed to remove the files of a snapshot; the next start retries")
        }
        Err(_elapsed) => {
            tracing::warn!(snapshot = %id, "failed to remove the files of a snapshot in time; the next start retries")
        }
    }
}

/// Lists the snapshots of the backend; one that does not support them has none.
async fn list_snapshots(core: &Core) -> Result<Vec<FoundSnapshot>, BackendError> {
    match core.host.backend.snapshots() {
        Some(snapshots) => snapshots.list_snapshots().await,
        None => Ok(Vec::new()),
    }
}

/// Compares the snapshots in the store with those that the backend has.
pub(crate) async fn reconcile_snapshots(
    core: &Arc<Core>,
    remembered: Vec<Snapshot>,
) -> Result<(), ServiceError> {
    let found = list_snapshots(core).await.map_err(|source| ServiceError::Host {
        backend: core.host.backend.name(),
        action: "list its snapshots",
        source: Box::new(source),
    })?;
    let mut found: HashMap<_, _> = found.into_iter().map(|found| (found.id, found.stage)).collect();
    for snapshot in remembered {
        let stage = found.remove(&snapshot.id);
        reconcile_one(core, snapshot, stage).await;
    }
    for (id, stage) in found {
        if plan_snapshot(None, Some(&stage), false) == SnapshotPlan::RemoveUnknown {
            remove_unknown(core, &id).await;
        }
    }
    Ok(())
}

async fn reconcile_one(core: &Arc<Core>, mut snapshot: Snapshot, stage: Option<SnapshotStage>) {
    let can_be_taken = source_has_files(core, &snapshot);
    match plan_snapshot(Some(&snapshot.state), stage.as_ref(), can_be_taken) {
        SnapshotPlan::FinishDeletion => {
            core.catalog.snapshots.put(snapshot.clone());
            if let Err(error) = core.forget_snapshot(snapshot).await {
                tracing::warn!(error = %error_chain(&error), "failed to delete snapshot; the next start retries");
            }
        }
        SnapshotPlan::Keep => core.catalog.snapshots.put(snapshot),
        SnapshotPlan::MarkReady(kept) => {
            mark_ready(&mut snapshot, kept);
            store_final_state(core, snapshot).await;
        }
        SnapshotPlan::Take => {
            core.catalog.snapshots.put(snapshot.clone());
            core.tasks.spawn(finish_snapshot(Arc::clone(core), snapshot));
        }
        SnapshotPlan::Fail => {
            if stage.is_some() {
                forget_files(core, &snapshot.id).await;
            }
            fail_snapshot(core, snapshot).await;
        }
        SnapshotPlan::RemoveUnknown => remove_unknown(core, &snapshot.id).await,
    }
}

async fn remove_unknown(core: &Core, id: &SnapshotId) {
    tracing::warn!(snapshot = %id, "found a snapshot that is not in the store; removing it");
    forget_files(core, id).await;
}

async fn fail_snapshot(core: &Core, mut snapshot: Snapshot) {
    snapshot.size = Bytes(0);
    snapshot.state = SnapshotState::Failed(match &snapshot.state {
        SnapshotState::Failed(why) => why.clone(),
        SnapshotState::Creating(_) => "the sandbox ended before the snapshot was taken".to_owned(),
        SnapshotState::Ready | SnapshotState::Deleting => "the files of the snapshot are gone".to_owned(),
    });
    store_final_state(core, snapshot).await;
}

/// Whether the sandbox still has its files, so that the snapshot can still be taken.
fn source_has_files(core: &Core, snapshot: &Snapshot) -> bool {
    core.lifecycle.registry.find(&snapshot.sandbox).is_some_and(|handle| has_files(&handle))
}
