//! Checks of snapshots, for backends that support them and for those that reject them.

use domain::{SandboxId, SandboxSpec, SnapshotId};

use super::{BackendUnderTest, CheckOutcome, TestSandbox, fresh_id, plan_of, snapshots};
use crate::{BackendError, FoundSnapshot, SharedBackend, SnapshotStage};

/// A process that runs until its sandbox ends.
const LASTING_PROCESS: &str = "decade01decade01decade01decade01";

const NO_SNAPSHOTS: CheckOutcome =
    CheckOutcome::Skipped("snapshots are not supported here, and are rejected");

/// Whether the backend supports snapshots. A backend that does not must reject them.
async fn supports_snapshots(backend: &SharedBackend) -> bool {
    let offered = backend.probe().await.expect("the host can be probed").snapshot;
    if !offered {
        let made = TestSandbox::create_plain(backend).await;
        let refused = snapshots(backend).create_snapshot(&made.id, &fresh_snapshot_id()).await;
        assert!(matches!(refused, Err(BackendError::Unsupported { .. })), "{refused:?}");
        assert_eq!(snapshots(backend).list_snapshots().await.expect("snapshots can be listed"), []);
        made.destroy().await;
    }
    offered
}

pub(super) fn fresh_snapshot_id() -> SnapshotId {
    let mut entropy = [0; 16];
    entropy.copy_from_slice(&fresh_id().as_str().as_bytes()[..16]);
    SnapshotId::from_entropy(entropy)
}

pub(super) async fn create_from_snapshot(backend: &SharedBackend, snapshot: &SnapshotId) -> TestSandbox {
    let spec = SandboxSpec { snapshot: Some(snapshot.clone()), ..SandboxSpec::with_defaults() };
    TestSandbox::create_from_spec(backend, &spec).await
}

async fn find_snapshot(backend: &SharedBackend, snapshot: &SnapshotId) -> Option<FoundSnapshot> {
    let all = snapshots(backend).list_snapshots().await.expect("snapshots can be listed");
    all.into_iter().find(|found| found.id == *snapshot)
}

pub(super) async fn snapshot_saves_files_and_commands_continue(
    subject: &dyn BackendUnderTest,
) -> CheckOutcome {
    let backend = subject.open().await;
    if !supports_snapshots(&backend).await {
        return NO_SNAPSHOTS;
    }
    let made = TestSandbox::create_plain(&backend).await;
    let mut lasting = made.start_script(LASTING_PROCESS, "while :; do echo on; sleep 0.01; done").await;
    lasting.next_output().await;
    made.run_script("echo then > /root/file").await;
    let snapshot = fresh_snapshot_id();
    let kept =
        snapshots(&backend).create_snapshot(&made.id, &snapshot).await.expect("a snapshot can be taken");
    assert_eq!(kept.image, "host");
    let again = snapshots(&backend)
        .create_snapshot(&made.id, &snapshot)
        .await
        .expect("an existing snapshot can be taken again");
    assert_eq!(again, kept, "taking a snapshot twice returns the first");
    assert_eq!(
        find_snapshot(&backend, &snapshot).await.map(|found| found.stage),
        Some(SnapshotStage::Complete(kept))
    );
    let before = made.output_length(LASTING_PROCESS).await;
    made.follow_process(LASTING_PROCESS, before).await.next_output().await;
    made.run_script("echo later > /root/file").await;
    let copy = create_from_snapshot(&backend, &snapshot).await;
    assert_eq!(copy.run_script("cat /root/file").await.output, "then\n");
    assert_eq!(made.run_script("cat /root/file").await.output, "later\n");
    copy.destroy().await;
    made.destroy().await;
    snapshots(&backend).delete_snapshot(&snapshot).await.expect("a snapshot can be deleted");
    CheckOutcome::Passed
}

pub(super) async fn snapshot_and_sandbox_outlive_each_other(subject: &dyn BackendUnderTest) -> CheckOutcome {
    let backend = subject.open().await;
    if !supports_snapshots(&backend).await {
        return NO_SNAPSHOTS;
    }
    let made = TestSandbox::create_plain(&backend).await;
    made.run_script("echo kept > /root/file").await;
    let snapshot = fresh_snapshot_id();
    snapshots(&backend).create_snapshot(&made.id, &snapshot).await.expect("a snapshot can be taken");
    made.destroy().await;
    drop(backend);
    let backend = subject.open().await;
    assert!(find_snapshot(&backend, &snapshot).await.is_some(), "a reopened backend has lost the snapshot");
    let copy = create_from_snapshot(&backend, &snapshot).await;
    for _ in 0..2 {
        snapshots(&backend).delete_snapshot(&snapshot).await.expect("a missing snapshot can be deleted");
    }
    assert_eq!(find_snapshot(&backend, &snapshot).await, None);
    assert_eq!(copy.run_script("cat /root/file").await.output, "kept\n");
    copy.destroy().await;
    CheckOutcome::Passed
}

pub(super) async fn failed_snapshot_or_restore_leaves_nothing_behind(
    subject: &dyn BackendUnderTest,
) -> CheckOutcome {
    let backend = subject.open().await;
    if !supports_snapshots(&backend).await {
        return NO_SNAPSHOTS;
    }
    let (id, snapshot): (SandboxId, _) = (fresh_id(), fresh_snapshot_id());
    let refused = snapshots(&backend).create_snapshot(&id, &snapshot).await;
    assert!(matches!(refused, Err(BackendError::Gone)), "a snapshot of a missing sandbox: {refused:?}");
    assert_eq!(find_snapshot(&backend, &snapshot).await, None);
    let spec = SandboxSpec { snapshot: Some(snapshot), ..SandboxSpec::with_defaults() };
    let refused = backend.create(&id, &plan_of(&spec)).await;
    assert!(matches!(refused, Err(BackendError::NoImage { .. })), "from a missing snapshot: {refused:?}");
    assert_eq!(super::find_sandbox(&backend, &id).await, None, "a failed create left something behind");
    CheckOutcome::Passed
}
