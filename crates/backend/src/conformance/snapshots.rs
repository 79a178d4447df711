//! Checks of snapshots, for backends that support them and for those that reject them.

use domain::{SandboxId, SnapshotId, Spec};

use super::{Made, Subject, fresh_id};
use crate::{BackendError, FoundSnapshot, SharedBackend, Stage};

/// A process that runs until its sandbox ends.
const LASTING: &str = "decade01decade01decade01decade01";

/// Whether the backend supports snapshots. A backend that does not must reject them.
async fn takes_snapshots(backend: &SharedBackend) -> bool {
    let offered = backend.probe().await.expect("the host can be probed").snapshot;
    if !offered {
        let made = Made::plain(backend).await;
        let refused = backend.snapshot(&made.id, &fresh_snapshot()).await;
        assert!(matches!(refused, Err(BackendError::Unsupported { .. })), "{refused:?}");
        assert_eq!(backend.snapshots().await.expect("snapshots can be listed"), []);
        made.destroy().await;
    }
    offered
}

pub(super) fn fresh_snapshot() -> SnapshotId {
    let mut entropy = [0; 16];
    entropy.copy_from_slice(&fresh_id().as_str().as_bytes()[..16]);
    SnapshotId::from_entropy(entropy)
}

pub(super) async fn restored(backend: &SharedBackend, snapshot: &SnapshotId) -> Made {
    let spec = Spec { snapshot: Some(snapshot.clone()), ..Spec::plain() };
    Made::of(backend, &spec).await
}

async fn found(backend: &SharedBackend, snapshot: &SnapshotId) -> Option<FoundSnapshot> {
    let all = backend.snapshots().await.expect("snapshots can be listed");
    all.into_iter().find(|found| found.id == *snapshot)
}

pub(super) async fn snapshot_saves_files_and_commands_continue(subject: &dyn Subject) {
    let backend = subject.open().await;
    if !takes_snapshots(&backend).await {
        return;
    }
    let made = Made::plain(&backend).await;
    let mut lasting = made.start(LASTING, "while :; do echo on; sleep 0.01; done").await;
    lasting.output().await;
    made.run("echo then > /root/file").await;
    let snapshot = fresh_snapshot();
    let kept = backend.snapshot(&made.id, &snapshot).await.expect("a snapshot can be taken");
    assert_eq!(kept.image, "host");
    let again = backend.snapshot(&made.id, &snapshot).await.expect("an existing snapshot can be taken again");
    assert_eq!(again, kept, "taking a snapshot twice returns the first");
    assert_eq!(found(&backend, &snapshot).await.map(|found| found.stage), Some(Stage::Complete(kept)));
    let before = made.written(LASTING).await;
    made.follow(LASTING, before).await.output().await;
    made.run("echo later > /root/file").await;
    let copy = restored(&backend, &snapshot).await;
    assert_eq!(copy.run("cat /root/file").await.output, "then\n");
    assert_eq!(made.run("cat /root/file").await.output, "later\n");
    copy.destroy().await;
    made.destroy().await;
    backend.forget_snapshot(&snapshot).await.expect("a snapshot can be deleted");
}

pub(super) async fn snapshot_and_sandbox_outlive_each_other(subject: &dyn Subject) {
    let backend = subject.open().await;
    if !takes_snapshots(&backend).await {
        return;
    }
    let made = Made::plain(&backend).await;
    made.run("echo kept > /root/file").await;
    let snapshot = fresh_snapshot();
    backend.snapshot(&made.id, &snapshot).await.expect("a snapshot can be taken");
    made.destroy().await;
    drop(backend);
    let backend = subject.open().await;
    assert!(found(&backend, &snapshot).await.is_some(), "a reopened backend has lost the snapshot");
    let copy = restored(&backend, &snapshot).await;
    for _ in 0..2 {
        backend.forget_snapshot(&snapshot).await.expect("a missing snapshot can be deleted");
    }
    assert_eq!(found(&backend, &snapshot).await, None);
    assert_eq!(copy.run("cat /root/file").await.output, "kept\n");
    copy.destroy().await;
}

pub(super) async fn failed_snapshot_or_restore_leaves_nothing_behind(subject: &dyn Subject) {
    let backend = subject.open().await;
    if !takes_snapshots(&backend).await {
        return;
    }
    let (id, snapshot): (SandboxId, _) = (fresh_id(), fresh_snapshot());
    let refused = backend.snapshot(&id, &snapshot).await;
    assert!(matches!(refused, Err(BackendError::Gone)), "a snapshot of a missing sandbox: {refused:?}");
    assert_eq!(found(&backend, &snapshot).await, None);
    let spec = Spec { snapshot: Some(snapshot), ..Spec::plain() };
    let refused = backend.create(&id, &spec).await;
    assert!(matches!(refused, Err(BackendError::NoImage { .. })), "from a missing snapshot: {refused:?}");
    assert_eq!(super::found(&backend, &id).await, None, "a failed create left something behind");
}
