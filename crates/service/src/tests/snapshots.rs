//! Snapshots: their states, their owners, restarts, and the sandboxes made from them.

use std::collections::BTreeSet;
use std::sync::Arc;

use domain::{Bytes, Owner, ResourceLimits, SandboxId, SandboxSpec, Snapshot, SnapshotId, SnapshotState};

use super::{TestBench, config, operators_quota, plain};
use crate::clock::Clock;
use crate::{
    CreateSandboxRequest, ErrorKind, ImageSource, OwnerQuota, Sandbox, Service, ServiceError, SnapshotFilter,
    SnapshotPage,
};
use testkit::fake_backend::FakeBackend;

impl TestBench {
    async fn take(&self, id: &SandboxId) -> Result<Snapshot, ServiceError> {
        self.service.sandbox(&self.owner, id).unwrap().snapshots().take_snapshot(Some("n".to_owned())).await
    }

    async fn ready(&self, id: &SandboxId) -> Snapshot {
        let begun = self.take(id).await.unwrap();
        self.settled(&begun.id).await
    }

    /// Waits until the snapshot is no longer being taken.
    async fn settled(&self, id: &SnapshotId) -> Snapshot {
        loop {
            let snapshot = self.service.find_snapshot(&self.owner, id).unwrap();
            if !matches!(snapshot.state, SnapshotState::Creating(_)) {
                return snapshot;
            }
            tokio::task::yield_now().await;
        }
    }

    async fn restore(&self, id: &SnapshotId, resources: ResourceLimits) -> Result<Sandbox, ServiceError> {
        let spec = SandboxSpec { resources, ..SandboxSpec::with_defaults() };
        let request = CreateSandboxRequest { source: ImageSource::Snapshot(id.clone()), spec, ..plain() };
        self.service.create_sandbox(&self.owner, request).await
    }

    fn kept(&self, filter: impl Fn(&SnapshotState) -> bool + Sync, offset: usize) -> SnapshotPage {
        let filter = SnapshotFilter { sandbox: None, name: None, state: &filter, offset, limit: 2 };
        self.service.list_snapshots(&self.owner, &filter)
    }
}

async fn restarted(bench: TestBench) -> TestBench {
    let (backend, state) = bench.crash().await;
    TestBench::with(backend, state, Clock::from_host()).await
}

#[tokio::test]
async fn snapshot_becomes_ready_and_outlives_its_sandbox() {
    let bench = TestBench::new().await;
    let source = bench.create().await;
    let begun = bench.take(&source.id).await.unwrap();
    assert_eq!((begun.state, begun.name.as_deref()), (SnapshotState::Creating(None), Some("n")));
    let ready = bench.settled(&begun.id).await;
    assert_eq!((&ready.state, ready.size), (&SnapshotState::Ready, Bytes::from_mib(10)));
    bench.sandbox(&source.id).destroy().await.unwrap();
    let bench = restarted(bench).await;
    assert_eq!(bench.service.find_snapshot(&bench.owner, &ready.id).unwrap(), ready);
    let made = bench.restore(&ready.id, ResourceLimits::default()).await.unwrap();
    assert_eq!(
        made.spec.resources.disk,
        Some(Bytes::from_mib(100)),
        "the disk is as large as that of the source"
    );
    assert_eq!((made.spec.image.as_str(), made.spec.snapshot), ("real host", Some(ready.id)));
}

#[tokio::test]
async fn snapshot_needs_a_running_sandbox_and_is_taken_one_at_a_time() {
    let bench = TestBench::new().await;
    let source = bench.create().await;
    bench.sandbox(&source.id).pause().await.unwrap();
    assert!(matches!(bench.take(&source.id).await, Err(ServiceError::NotASource { .. })));
    bench.sandbox(&source.id).resume().await.unwrap();
    let permits = bench.backend.snapshot_gate.forget_permits(usize::MAX);
    let first = bench.take(&source.id).await.unwrap();
    assert!(matches!(bench.take(&source.id).await, Err(ServiceError::SnapshotInProgress(_))));
    assert!(matches!(
        bench.restore(&first.id, ResourceLimits::default()).await,
        Err(ServiceError::SnapshotNotReady { .. })
    ));
    let deleted = bench.service.delete_snapshot(&bench.owner, &first.id).await;
    assert!(matches!(deleted, Err(ServiceError::SnapshotUnfinished(_))));
    bench.backend.snapshot_gate.add_permits(permits);
    assert_eq!(bench.settled(&first.id).await.state, SnapshotState::Ready);
    bench.ready(&source.id).await;
}

#[tokio::test]
async fn failed_snapshot_reports_the_cause_and_leaves_nothing() {
    let bench = TestBench::new().await;
    let source = bench.create().await;
    bench.backend.fail("snapshot", 1);
    let begun = bench.take(&source.id).await.unwrap();
    let failed = bench.settled(&begun.id).await;
    let SnapshotState::Failed(why) = &failed.state else { panic!("{failed:?}") };
    assert!(why.contains("the test requested this failure"), "{why}");
    assert!(bench.backend.was_asked_to("forget"));
    assert_eq!(bench.service.recent_errors(None).first().map(|trouble| trouble.operation), Some("snapshot"));
    let bench = restarted(bench).await;
    assert_eq!(bench.service.find_snapshot(&bench.owner, &failed.id).unwrap(), failed);
    bench.service.delete_snapshot(&bench.owner, &failed.id).await.unwrap();
    assert_eq!(restarted(bench).await.kept(|_| true, 0).total, 0);
}

#[tokio::test]
async fn snapshot_of_another_owner_is_not_found_by_any_call() {
    let bench = TestBench::new().await;
    let source = bench.create().await;
    let ready = bench.ready(&source.id).await;
    let other = TestBench { owner: Owner::from_valid_name("other"), ..bench };
    let kinds = [
        other.service.find_snapshot(&other.owner, &ready.id).unwrap_err().kind(),
        other.service.delete_snapshot(&other.owner, &ready.id).await.unwrap_err().kind(),
        other.restore(&ready.id, ResourceLimits::default()).await.unwrap_err().kind(),
    ];
    assert_eq!(kinds, [ErrorKind::NoSnapshot; 3]);
    assert_eq!(other.service.sandbox(&other.owner, &source.id).unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(other.kept(|_| true, 0).total, 0);
}

#[tokio::test]
async fn lists_are_filtered_and_paged_newest_first() {
    let bench = TestBench::new().await;
    let (one, two) = (bench.create().await, bench.create().await);
    let oldest = bench.ready(&one.id).await;
    bench.ready(&two.id).await;
    let newest = bench.ready(&one.id).await;
    let first = bench.kept(|_| true, 0);
    assert_eq!((first.total, first.items.len(), &first.items[0].id), (3, 2, &newest.id));
    assert_eq!(bench.kept(|_| true, 2).items[0].id, oldest.id);
    assert_eq!(bench.kept(|state| *state != SnapshotState::Ready, 0).total, 0);
    let all = |_: &SnapshotState| true;
    let mut filter =
        SnapshotFilter { sandbox: Some(one.id.as_str()), name: None, state: &all, offset: 0, limit: 9 };
    assert_eq!(bench.service.list_snapshots(&bench.owner, &filter).total, 2);
    filter.name = Some("another");
    assert_eq!(bench.service.list_snapshots(&bench.owner, &filter).total, 0);
}

#[tokio::test]
async fn snapshots_per_owner_are_limited() {
    let bench = TestBench::new().await;
    let source = bench.create().await;
    for _ in 0..3 {
        bench.ready(&source.id).await;
    }
    let refused = bench.take(&source.id).await.unwrap_err();
    assert!(matches!(refused, ServiceError::TooManySnapshots { limit: 3 }), "{refused}");
    assert!(matches!(refused.kind(), ErrorKind::Exhausted { .. }) && refused.hint().is_some());
}

#[tokio::test]
async fn snapshot_sizes_count_in_the_disk_quota() {
    let quota = OwnerQuota { disk: Some(Bytes::from_mib(25)), ..OwnerQuota::default() };
    let state = tempfile::tempdir().unwrap();
    let quotas = operators_quota(quota);
    let config = crate::ServiceConfig { quotas, ..config(&state) };
    let backend = FakeBackend::new();
    let service = Service::start(config, Arc::clone(&backend) as _).await.unwrap();
    let bench = TestBench { service, backend, state, owner: Owner::operator() };
    let sized = |mib| {
        let resources = ResourceLimits { disk: Some(Bytes::from_mib(mib)), ..ResourceLimits::default() };
        CreateSandboxRequest { spec: SandboxSpec { resources, ..SandboxSpec::with_defaults() }, ..plain() }
    };
    let source = bench.service.create_sandbox(&bench.owner, sized(10)).await.unwrap();
    bench.ready(&source.id).await;
    let refused = bench.service.create_sandbox(&bench.owner, sized(6)).await.unwrap_err();
    assert!(
        matches!(
            refused,
            ServiceError::OverQuota {
                excess: crate::tenancy::quota::QuotaExcess { what: crate::QuotaResource::Disk, .. },
                ..
            }
        ),
        "{refused}"
    );
    bench.service.create_sandbox(&bench.owner, sized(5)).await.unwrap();
}

#[tokio::test]
async fn disk_too_small_for_the_snapshot_is_refused() {
    let bench = TestBench::new().await;
    let source = bench.create().await;
    let ready = bench.ready(&source.id).await;
    let disk = |mib| ResourceLimits { disk: Some(Bytes::from_mib(mib)), ..ResourceLimits::default() };
    assert!(matches!(bench.restore(&ready.id, disk(9)).await, Err(ServiceError::SnapshotTooLarge { .. })));
    let made = bench.restore(&ready.id, disk(10)).await.unwrap();
    assert_eq!(made.spec.resources.disk, Some(Bytes::from_mib(10)));
}

#[tokio::test]
async fn snapshot_in_use_by_a_create_cannot_be_deleted() {
    let bench = Arc::new(TestBench::new().await);
    let source = bench.create().await;
    let ready = bench.ready(&source.id).await;
    let permits = bench.backend.gate.forget_permits(usize::MAX);
    let making = tokio::spawn({
        let (bench, id) = (Arc::clone(&bench), ready.id.clone());
        async move { bench.restore(&id, ResourceLimits::default()).await.map(drop) }
    });
    bench.until_count(2).await;
    let deleted = bench.service.delete_snapshot(&bench.owner, &ready.id).await;
    assert!(matches!(deleted, Err(ServiceError::SnapshotInUse(_))));
    bench.backend.gate.add_permits(permits);
    making.await.unwrap().unwrap();
    bench.service.delete_snapshot(&bench.owner, &ready.id).await.unwrap();
    assert_eq!(bench.backend.snapshot_ids(), BTreeSet::new());
}

#[tokio::test]
async fn snapshot_that_was_begun_is_finished_after_a_restart() {
    let bench = TestBench::new().await;
    let source = bench.create().await;
    let permits = bench.backend.snapshot_gate.forget_permits(usize::MAX);
    let begun = bench.take(&source.id).await.unwrap();
    let bench = restarted(bench).await;
    let seen = bench.service.find_snapshot(&bench.owner, &begun.id).unwrap();
    assert_eq!(seen.state, SnapshotState::Creating(None), "the snapshot does not become failed");
    bench.backend.snapshot_gate.add_permits(permits);
    assert_eq!(bench.settled(&begun.id).await.state, SnapshotState::Ready);
}

#[tokio::test]
async fn snapshot_that_was_taken_but_not_recorded_is_ready_after_a_restart() {
    let bench = TestBench::new().await;
    let source = bench.create().await;
    bench.backend.snapshot_gate.forget_permits(usize::MAX);
    let begun = bench.take(&source.id).await.unwrap();
    bench.backend.put_snapshot(&begun.id);
    bench.backend.remove_sandbox(&source.id);
    let bench = restarted(bench).await;
    assert_eq!(bench.service.find_snapshot(&bench.owner, &begun.id).unwrap().state, SnapshotState::Ready);
}

#[tokio::test]
async fn snapshot_whose_sandbox_ended_before_it_was_taken_fails() {
    let bench = TestBench::new().await;
    let source = bench.create().await;
    bench.backend.snapshot_gate.forget_permits(usize::MAX);
    let begun = bench.take(&source.id).await.unwrap();
    bench.backend.remove_sandbox(&source.id);
    let bench = restarted(bench).await;
    let state = bench.service.find_snapshot(&bench.owner, &begun.id).unwrap().state;
    assert!(matches!(state, SnapshotState::Failed(_)), "{state:?}");
}

#[tokio::test]
async fn restart_removes_unknown_snapshots_and_finishes_deletions() {
    let bench = TestBench::new().await;
    let source = bench.create().await;
    let (doomed, lost) = (bench.ready(&source.id).await, bench.ready(&source.id).await);
    bench.backend.fail("forget", 1);
    bench.service.delete_snapshot(&bench.owner, &doomed.id).await.unwrap_err();
    let state = bench.service.find_snapshot(&bench.owner, &doomed.id).unwrap().state;
    assert_eq!(state, SnapshotState::Deleting);
    bench.backend.put_snapshot(&SnapshotId::from_entropy([7; 16]));
    backend::Snapshots::delete_snapshot(&*bench.backend, &lost.id).await.unwrap();
    let bench = restarted(bench).await;
    assert_eq!(bench.backend.snapshot_ids(), BTreeSet::new());
    assert_eq!(
        bench.service.find_snapshot(&bench.owner, &doomed.id).unwrap_err().kind(),
        ErrorKind::NoSnapshot
    );
    let state = bench.service.find_snapshot(&bench.owner, &lost.id).unwrap().state;
    assert!(matches!(state, SnapshotState::Failed(_)), "the files of the snapshot are gone: {state:?}");
}

fn on_quota(mib: u64, state: &tempfile::TempDir) -> crate::ServiceConfig {
    let quota = OwnerQuota { disk: Some(Bytes::from_mib(mib)), ..OwnerQuota::default() };
    crate::ServiceConfig { quotas: operators_quota(quota), ..config(state) }
}

fn of_ten() -> CreateSandboxRequest {
    let resources = ResourceLimits { disk: Some(Bytes::from_mib(10)), ..ResourceLimits::default() };
    CreateSandboxRequest { spec: SandboxSpec { resources, ..SandboxSpec::with_defaults() }, ..plain() }
}

#[tokio::test]
async fn snapshot_being_taken_counts_and_a_failed_one_frees_its_quota() {
    let state = tempfile::tempdir().unwrap();
    let bench = TestBench::configured(on_quota(35, &state), FakeBackend::new(), state).await;
    let one = bench.service.create_sandbox(&bench.owner, of_ten()).await.unwrap();
    let two = bench.service.create_sandbox(&bench.owner, of_ten()).await.unwrap();
    let permits = bench.backend.snapshot_gate.forget_permits(usize::MAX);
    let begun = bench.take(&one.id).await.unwrap();
    let refused = bench.take(&two.id).await.unwrap_err();
    assert!(
        matches!(
            refused,
            ServiceError::OverQuota {
                excess: crate::tenancy::quota::QuotaExcess { what: crate::QuotaResource::Disk, .. },
                ..
            }
        ),
        "{refused}"
    );
    bench.backend.fail("snapshot", 1);
    bench.backend.snapshot_gate.add_permits(permits);
    assert!(matches!(bench.settled(&begun.id).await.state, SnapshotState::Failed(_)));
    assert_eq!(bench.ready(&two.id).await.state, SnapshotState::Ready);
}

#[tokio::test]
async fn volumes_reduce_the_quota_left_for_snapshots() {
    let state = tempfile::tempdir().unwrap();
    let bench = TestBench::configured(on_quota(30, &state), FakeBackend::new(), state).await;
    let source = bench.service.create_sandbox(&bench.owner, of_ten()).await.unwrap();
    let name = domain::VolumeName::parse("data").unwrap();
    bench.service.create_volume(&bench.owner, &name, Some(Bytes::from_mib(11))).await.unwrap();
    let refused = bench.take(&source.id).await.unwrap_err();
    assert!(
        matches!(
            refused,
            ServiceError::OverQuota {
                excess: crate::tenancy::quota::QuotaExcess { what: crate::QuotaResource::Disk, .. },
                ..
            }
        ),
        "{refused}"
    );
    bench.service.remove_volume(&bench.owner, &name).await.unwrap();
    bench.ready(&source.id).await;
}

/// A create from a snapshot of a dead sandbox, as `coracle cp` does to read its files, when there is no room for both.
async fn check_source_is_spared(change: impl FnOnce(&mut crate::ServiceConfig), named: bool) {
    let state = tempfile::tempdir().unwrap();
    let mut config = config(&state);
    change(&mut config);
    let bench = TestBench::configured(config, FakeBackend::new(), state).await;
    let source = if named {
        bench.service.acquire(&bench.key("a"), of_ten()).await.unwrap().sandbox
    } else {
        bench.service.create_sandbox(&bench.owner, of_ten()).await.unwrap()
    };
    bench.died(&source).await;
    let ready = bench.ready(&source.id).await;
    let refused = bench.restore(&ready.id, ResourceLimits::default()).await.unwrap_err();
    assert!(matches!(refused.kind(), ErrorKind::Exhausted { .. }), "{refused}");
    assert!(bench.has(&source), "the source of the snapshot is not evicted: {refused}");
    bench.service.delete_snapshot(&bench.owner, &ready.id).await.unwrap();
    let mut as_large = of_ten();
    as_large.spec.resources.disk = Some(Bytes::from_mib(100));
    bench.service.create_sandbox(&bench.owner, as_large).await.unwrap();
    assert!(!bench.has(&source), "it is evicted for any other sandbox");
}

#[tokio::test]
async fn source_of_a_snapshot_is_not_evicted_for_a_sandbox_made_from_it() {
    let quota_of_one = || OwnerQuota { sandboxes: Some(1), ..OwnerQuota::default() };
    let quota_of_disk = || OwnerQuota { disk: Some(Bytes::from_mib(105)), ..OwnerQuota::default() };
    for named in [true, false] {
        check_source_is_spared(|config| config.quotas = operators_quota(quota_of_one()), named).await;
        check_source_is_spared(|config| config.quotas = operators_quota(quota_of_disk()), named).await;
        check_source_is_spared(|config| config.sandboxes = 1, named).await;
    }
}

#[tokio::test]
async fn source_of_a_snapshot_survives_a_create_from_it_at_the_soft_limit() {
    let bench = TestBench::limited(1, 20).await;
    let dead = bench.create().await;
    bench.died(&dead).await;
    let ready = bench.ready(&dead.id).await;
    bench.restore(&ready.id, ResourceLimits::default()).await.unwrap();
    assert!(bench.has(&dead));
    let parked = bench.acquire("parked").await.sandbox;
    assert!(!bench.has(&dead), "it is evicted for any other sandbox");
    let ready = bench.ready(&parked.id).await;
    bench.release("parked");
    bench.restore(&ready.id, ResourceLimits::default()).await.unwrap();
    assert!(bench.has(&parked));
    bench.create().await;
    assert!(!bench.has(&parked), "it is evicted for any other sandbox");
}
