//! The checks about snapshots, which a backend takes or refuses.

use domain::{SandboxId, SnapshotId, Spec};

use super::{Made, Subject, fresh_id};
use crate::{BackendError, FoundSnapshot, SharedBackend, Stage};

/// A process that goes on until its sandbox ends.
const LASTING: &str = "decade01decade01decade01decade01";

/// Whether the backend takes snapshots. One that does not must say so when it is asked.
async fn takes_snapshots(backend: &SharedBackend) -> bool {
    let offered = backend.probe().await.expect("the host can be probed").snapshot;
    if !offered {
        let made = Made::plain(backend).await;
        let refused = backend.snapshot(&made.id, &fresh_snapshot()).await;
        assert!(matches!(refused, Err(BackendError::Unsupported { .. })), "{refused:?}");
        assert_eq!(backend.snapshots().await.expect("there are none"), []);
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

pub(super) async fn a_snapshot_keeps_the_files_of_one_moment_and_commands_go_on(subject: &dyn Subject) {
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
    let again = backend.snapshot(&made.id, &snapshot).await.expect("it is there already");
    assert_eq!(again, kept, "asking twice takes one");
    assert_eq!(found(&backend, &snapshot).await.map(|found| found.stage), Some(Stage::Complete(kept)));
    let before = made.written(LASTING).await;
    made.follow(LASTING, before).await.output().await;
    made.run("echo later > /root/file").await;
    let copy = restored(&backend, &snapshot).await;
    assert_eq!(copy.run("cat /root/file").await.output, "then\n");
    assert_eq!(made.run("cat /root/file").await.output, "later\n");
    copy.destroy().await;
    made.destroy().await;
    backend.forget_snapshot(&snapshot).await.expect("a snapshot can be dropped");
}

pub(super) async fn a_snapshot_outlives_its_sandbox_and_a_sandbox_its_snapshot(subject: &dyn Subject) {
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
    assert!(found(&backend, &snapshot).await.is_some(), "a backend that was opened anew has lost it");
    let copy = restored(&backend, &snapshot).await;
    for _ in 0..2 {
        backend.forget_snapshot(&snapshot).await.expect("what is gone already can be dropped");
    }
    assert_eq!(found(&backend, &snapshot).await, None);
    assert_eq!(copy.run("cat /root/file").await.output, "kept\n");
    copy.destroy().await;
}

pub(super) async fn what_cannot_be_kept_or_restored_is_refused_and_leaves_nothing(subject: &dyn Subject) {
    let backend = subject.open().await;
    if !takes_snapshots(&backend).await {
        return;
    }
    let (nobody, snapshot): (SandboxId, _) = (fresh_id(), fresh_snapshot());
    let refused = backend.snapshot(&nobody, &snapshot).await;
    assert!(matches!(refused, Err(BackendError::Gone)), "a snapshot of nothing: {refused:?}");
    assert_eq!(found(&backend, &snapshot).await, None);
    let spec = Spec { snapshot: Some(snapshot), ..Spec::plain() };
    let refused = backend.create(&nobody, &spec).await;
    assert!(matches!(refused, Err(BackendError::NoImage { .. })), "from a snapshot that is not: {refused:?}");
    assert_eq!(super::found(&backend, &nobody).await, None, "a refused create left something");
}
