//! Volumes that outlive sandboxes.

use std::time::Duration;

use domain::volume::{MissingVolume, VolumeClaim, VolumeLifetime};
use domain::{Bytes, MountAccess, MountSource, MountSpec, Owner, VolumeName};

use super::expiry::ManualClock;
use super::{TestBench, config, operators_quota, plain};
use crate::clock::Clock;
use crate::{CreateSandboxRequest, ErrorKind, MountFault, Outcome, OwnerQuota, ServiceConfig, ServiceError};
use testkit::fake_backend::FakeBackend;

fn name(text: &str) -> VolumeName {
    VolumeName::parse(text).unwrap()
}

fn claiming(text: &str, absent: MissingVolume) -> CreateSandboxRequest {
    let source = MountSource::Claim(VolumeClaim { name: name(text), absent });
    let mut request = plain();
    request.spec.mounts =
        vec![MountSpec { source, target: "/data".into(), access: MountAccess::ReadWrite, sub_path: None }];
    request
}

fn make(lifetime: VolumeLifetime) -> MissingVolume {
    MissingVolume::Make { size: Some(Bytes::from_mib(8)), lifetime }
}

async fn names(bench: &TestBench) -> Vec<String> {
    let volumes = bench.service.list_volumes(&bench.owner).await.unwrap();
    volumes.into_iter().map(|status| status.volume.name.to_string()).collect()
}

async fn until_names(bench: &TestBench, expected: &[&str]) {
    while names(bench).await != expected {
        tokio::task::yield_now().await;
    }
}

async fn asked(backend: &FakeBackend, call: &str) {
    while !backend.was_asked_to(call) {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn claim_becomes_a_volume_that_outlives_its_sandbox() {
    let bench = TestBench::new().await;
    let one = bench
        .service
        .create_sandbox(&bench.owner, claiming("data", make(VolumeLifetime::Kept)))
        .await
        .unwrap();
    let other =
        bench.service.create_sandbox(&bench.owner, claiming("data", MissingVolume::Refuse)).await.unwrap();
    assert_eq!(one.spec.mounts[0].source, other.spec.mounts[0].source, "both have the same volume");
    assert!(matches!(one.spec.mounts[0].source, MountSource::Volume(_)));
    let in_use = bench.service.remove_volume(&bench.owner, &name("data")).await.unwrap_err();
    assert!(matches!(in_use, ServiceError::VolumeInUse { sandboxes: 2, .. }), "{in_use}");
    for sandbox in [one, other] {
        bench.sandbox(&sandbox.id).destroy().await.unwrap();
    }
    assert_eq!(names(&bench).await, ["data"]);
    bench.service.remove_volume(&bench.owner, &name("data")).await.unwrap();
    let gone = bench.service.remove_volume(&bench.owner, &name("data")).await.unwrap_err();
    assert_eq!(gone.kind(), ErrorKind::Mount(MountFault::NoVolume));
    let missing = bench
        .service
        .create_sandbox(&bench.owner, claiming("data", MissingVolume::Refuse))
        .await
        .unwrap_err();
    assert_eq!(missing.kind(), ErrorKind::Mount(MountFault::NoVolume));
    assert_eq!(bench.all().total, 0);
}

#[tokio::test]
async fn many_claims_of_one_name_make_one_volume() {
    let bench = TestBench::new().await;
    let create =
        || bench.service.create_sandbox(&bench.owner, claiming("data", make(VolumeLifetime::WithSandboxes)));
    let made = futures_util::future::join_all((0..8).map(|_| create())).await;
    let sources: Vec<MountSource> =
        made.iter().map(|made| made.as_ref().unwrap().spec.mounts[0].source.clone()).collect();
    assert!(sources.iter().all(|source| *source == sources[0]), "{sources:?}");
    for sandbox in made {
        assert_eq!(names(&bench).await, ["data"], "the volume was removed before the last of its sandboxes");
        bench.sandbox(&sandbox.unwrap().id).destroy().await.unwrap();
    }
    until_names(&bench, &[]).await;
}

#[tokio::test]
async fn failed_create_leaves_no_volume() {
    let bench = TestBench::new().await;
    bench.backend.fail("create", 1);
    bench
        .service
        .create_sandbox(&bench.owner, claiming("brief", make(VolumeLifetime::WithSandboxes)))
        .await
        .unwrap_err();
    until_names(&bench, &[]).await;
    bench.backend.fail("make volume", 1);
    bench
        .service
        .create_sandbox(&bench.owner, claiming("never", make(VolumeLifetime::Kept)))
        .await
        .unwrap_err();
    assert_eq!((names(&bench).await.len(), bench.all().total), (0, 0));
}

#[tokio::test]
async fn restart_restores_volumes_and_their_uses() {
    let bench = TestBench::new().await;
    let used = bench
        .service
        .create_sandbox(&bench.owner, claiming("brief", make(VolumeLifetime::WithSandboxes)))
        .await
        .unwrap();
    bench.service.create_volume(&bench.owner, &name("kept"), None).await.unwrap();
    bench.service.create_volume(&bench.owner, &name("lost"), None).await.unwrap();
    let lost = bench.service.find_volume(&bench.owner, &name("lost")).await.unwrap().volume;
    let (backend, state) = bench.crash().await;
    // One volume is missing in the backend, and one is only in the backend, as after a power loss.
    backend.forget_volume(&lost.id);
    let stranger = domain::Volume {
        id: domain::VolumeId::from_entropy([9; 20]),
        owner: Owner::operator(),
        name: name("stranger"),
        ..lost
    };
    backend.put_volume(stranger);
    let bench = TestBench::with(backend, state, Clock::from_host()).await;
    assert_eq!(names(&bench).await, ["brief", "kept", "stranger"]);
    assert!(
        !bench.backend.was_asked_to("remove volume"),
        "a volume that cannot be read now may be readable later"
    );
    let in_use = bench.service.remove_volume(&bench.owner, &name("brief")).await.unwrap_err();
    assert!(matches!(in_use, ServiceError::VolumeInUse { .. }), "{in_use}");
    bench.sandbox(&used.id).destroy().await.unwrap();
    until_names(&bench, &["kept", "stranger"]).await;
}

#[tokio::test]
async fn failed_removal_is_finished_after_a_restart() {
    let bench = TestBench::new().await;
    bench.service.create_volume(&bench.owner, &name("data"), None).await.unwrap();
    bench.backend.fail("remove volume", 1);
    bench.service.remove_volume(&bench.owner, &name("data")).await.unwrap_err();
    let claimed = bench
        .service
        .create_sandbox(&bench.owner, claiming("data", MissingVolume::Refuse))
        .await
        .unwrap_err();
    assert!(matches!(claimed, ServiceError::VolumeRemoving(_)), "{claimed}");
    let (backend, state) = bench.crash().await;
    let bench = TestBench::with(backend, state, Clock::from_host()).await;
    assert!(names(&bench).await.is_empty());
}

#[tokio::test]
async fn volumes_count_in_the_disk_quota_and_have_one_size() {
    let state = tempfile::tempdir().unwrap();
    let quota = OwnerQuota { disk: Some(Bytes::from_mib(100)), ..OwnerQuota::default() };
    let config = ServiceConfig { quotas: operators_quota(quota), ..config(&state) };
    let bench = TestBench::configured(config, FakeBackend::new(), state).await;
    let create = |size: u64| bench.service.create_volume(&bench.owner, &VOLUME, Some(Bytes::from_mib(size)));
    static VOLUME: std::sync::LazyLock<VolumeName> = std::sync::LazyLock::new(|| name("data"));
    assert!(matches!(create(101).await, Err(ServiceError::BeyondQuota { .. })));
    assert_eq!(create(60).await.unwrap().1, Outcome::Done);
    assert_eq!(create(60).await.unwrap().1, Outcome::Unchanged);
    assert!(matches!(create(50).await, Err(ServiceError::VolumeExists(_))));
    let mut request = plain();
    request.spec.resources.disk = Some(Bytes::from_mib(41));
    let over = bench.service.create_sandbox(&bench.owner, request.clone()).await.unwrap_err();
    assert!(
        matches!(
            over,
            ServiceError::OverQuota {
                excess: crate::tenancy::quota::QuotaExcess { what: crate::QuotaResource::Disk, .. },
                ..
            }
        ),
        "{over}"
    );
    request.spec.resources.disk = Some(Bytes::from_mib(40));
    bench.service.create_sandbox(&bench.owner, request).await.unwrap();
}

#[tokio::test]
async fn attached_volume_is_in_use_and_stored() {
    let bench = TestBench::new().await;
    let sandbox = bench.create().await;
    let mounts = claiming("data", make(VolumeLifetime::WithSandboxes)).spec.mounts;
    let attached = bench.sandbox(&sandbox.id).attach_mounts(mounts.clone()).await.unwrap();
    assert_eq!(attached.spec.mounts.len(), 1);
    let foreign = bench.service.sandbox(&Owner::from_valid_name("other"), &sandbox.id).unwrap_err();
    assert_eq!(foreign.kind(), ErrorKind::NotFound);
    let (backend, state) = bench.crash().await;
    let bench = TestBench::with(backend, state, Clock::from_host()).await;
    assert_eq!(
        bench.service.list_volumes(&bench.owner).await.unwrap()[0].sandboxes,
        std::slice::from_ref(&sandbox.id)
    );
    bench.backend.fail("attach", 1);
    let more = claiming("more", make(VolumeLifetime::WithSandboxes)).spec.mounts;
    bench.sandbox(&sandbox.id).attach_mounts(more).await.unwrap_err();
    until_names(&bench, &["data"]).await;
    bench.sandbox(&sandbox.id).destroy().await.unwrap();
    until_names(&bench, &[]).await;
}

#[tokio::test]
async fn volumes_per_owner_are_limited() {
    let bench = TestBench::new().await;
    for number in 0..3 {
        bench.service.create_volume(&bench.owner, &name(&format!("v{number}")), None).await.unwrap();
    }
    let refused = bench.service.create_volume(&bench.owner, &name("v3"), None).await.unwrap_err();
    assert!(matches!(refused, ServiceError::TooManyVolumes { limit: 3 }), "{refused}");
    assert!(matches!(refused.kind(), ErrorKind::Exhausted { .. }) && refused.hint().is_some());
    bench.service.create_volume(&bench.owner, &name("v0"), None).await.unwrap();
    bench.service.create_volume(&Owner::from_valid_name("other"), &name("v0"), None).await.unwrap();
    let listed = bench.service.list_volumes(&bench.owner).await.unwrap();
    assert_eq!(listed.iter().map(|status| status.used).collect::<Vec<_>>(), [Some(Bytes::from_mib(1)); 3]);
}

#[tokio::test]
async fn cancelled_create_does_not_use_the_volume_it_made() {
    for (lifetime, left) in [(VolumeLifetime::WithSandboxes, &[][..]), (VolumeLifetime::Kept, &["data"][..])]
    {
        let bench = TestBench::new().await;
        bench.backend.volume_gate.forget_permits(usize::MAX >> 3);
        let (service, owner) = (bench.service.clone(), bench.owner.clone());
        let asking =
            tokio::spawn(
                async move { service.create_sandbox(&owner, claiming("data", make(lifetime))).await },
            );
        asked(&bench.backend, "make volume asked").await;
        asking.abort();
        asking.await.unwrap_err();
        bench.backend.volume_gate.add_permits(100);
        asked(&bench.backend, "make volume").await;
        // The maker holds the turn until the volume exists.
        drop(bench.service.0.catalog.volumes.turn.lock().await);
        until_names(&bench, left).await;
        while bench
            .service
            .list_volumes(&bench.owner)
            .await
            .unwrap()
            .iter()
            .any(|it| !it.sandboxes.is_empty())
        {
            tokio::task::yield_now().await;
        }
    }
}

#[tokio::test]
async fn cancelled_attach_leaves_the_volume_in_use() {
    let bench = TestBench::new().await;
    let sandbox = bench.create().await;
    bench.service.create_volume(&bench.owner, &name("data"), None).await.unwrap();
    bench.backend.volume_gate.forget_permits(usize::MAX >> 3);
    let (service, owner, id) = (bench.service.clone(), bench.owner.clone(), sandbox.id.clone());
    let mounts = claiming("data", MissingVolume::Refuse).spec.mounts;
    let asking =
        tokio::spawn(async move { service.sandbox(&owner, &id).unwrap().attach_mounts(mounts).await });
    asked(&bench.backend, "attach").await;
    asking.abort();
    asking.await.unwrap_err();
    bench.backend.volume_gate.add_permits(100);
    let mut state = bench.handle(&sandbox).state.clone();
    state.wait_for(|sandbox| !sandbox.spec.mounts.is_empty()).await.unwrap();
    let in_use = bench.service.remove_volume(&bench.owner, &name("data")).await.unwrap_err();
    assert!(matches!(in_use, ServiceError::VolumeInUse { sandboxes: 1, .. }), "{in_use}");
}

#[tokio::test]
async fn claim_waits_for_the_removal_of_a_volume_of_its_name() {
    let bench = TestBench::new().await;
    let request = claiming("data", make(VolumeLifetime::WithSandboxes));
    let first = bench.service.create_sandbox(&bench.owner, request.clone()).await.unwrap();
    bench.backend.volume_gate.forget_permits(usize::MAX >> 3);
    bench.sandbox(&first.id).destroy().await.unwrap();
    asked(&bench.backend, "remove volume asked").await;
    let (sandbox, mut mounts) = (domain::SandboxId::from_entropy([1; 20]), request.spec.mounts);
    let core = &bench.service.0;
    let mut claiming = Box::pin(core.claim_volumes(&bench.owner, &sandbox, &mut mounts));
    assert!(futures_util::poll!(&mut claiming).is_pending(), "the claim did not wait");
    bench.backend.volume_gate.add_permits(100);
    let uses = claiming.await.unwrap();
    assert_ne!(mounts[0].source, first.spec.mounts[0].source);
    assert_eq!(bench.service.list_volumes(&bench.owner).await.unwrap()[0].sandboxes, [sandbox]);
    drop(uses);
    until_names(&bench, &[]).await;
}

/// How long the volumes of these tests are kept.
const KEPT: Duration = Duration::from_secs(600);

fn kept_after_use() -> CreateSandboxRequest {
    claiming("data", make(VolumeLifetime::AfterUse(KEPT)))
}

impl TestBench {
    async fn use_once(&self) {
        let sandbox = self.service.create_sandbox(&self.owner, kept_after_use()).await.unwrap();
        self.sandbox(&sandbox.id).destroy().await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn volume_is_removed_a_time_after_its_last_use() {
    let hands = ManualClock::new();
    let bench = TestBench::with(FakeBackend::new(), tempfile::tempdir().unwrap(), hands.clock()).await;
    bench.use_once().await;
    tokio::time::sleep(KEPT / 2).await;
    let sandbox = bench.service.create_sandbox(&bench.owner, kept_after_use()).await.unwrap();
    tokio::time::sleep(KEPT * 3).await;
    assert_eq!(names(&bench).await, ["data"], "it is in use");
    bench.sandbox(&sandbox.id).destroy().await.unwrap();
    tokio::time::sleep(KEPT - Duration::from_secs(60)).await;
    assert_eq!(names(&bench).await, ["data"], "its time has not passed");
    tokio::time::sleep(Duration::from_secs(120)).await;
    until_names(&bench, &[]).await;
    assert_eq!(bench.backend.times_asked_to("make volume"), 1);
    bench.use_once().await;
    assert_eq!(bench.backend.times_asked_to("make volume"), 2, "a new one has the name now");
}

#[tokio::test(start_paused = true)]
async fn time_after_the_last_use_continues_after_a_restart() {
    let hands = ManualClock::new();
    let bench = TestBench::with(FakeBackend::new(), tempfile::tempdir().unwrap(), hands.clock()).await;
    bench.use_once().await;
    tokio::time::sleep(KEPT / 2).await;
    let (backend, state) = bench.crash().await;
    let bench = TestBench::with(backend, state, hands.clock()).await;
    let status = bench.service.find_volume(&bench.owner, &name("data")).await.unwrap();
    assert_eq!(status.volume.lifetime, VolumeLifetime::AfterUse(KEPT));
    tokio::time::sleep(KEPT / 2 - Duration::from_secs(60)).await;
    assert_eq!(names(&bench).await, ["data"]);
    tokio::time::sleep(Duration::from_secs(120)).await;
    until_names(&bench, &[]).await;
}

#[tokio::test(start_paused = true)]
async fn earlier_use_does_not_count_after_a_crash_during_a_later_one() {
    let hands = ManualClock::new();
    let bench = TestBench::with(FakeBackend::new(), tempfile::tempdir().unwrap(), hands.clock()).await;
    bench.use_once().await;
    tokio::time::sleep(KEPT / 2).await;
    bench.service.create_sandbox(&bench.owner, kept_after_use()).await.unwrap();
    tokio::time::sleep(KEPT * 2).await;
    let (backend, state) = bench.crash().await;
    let bench = TestBench::with(backend, state, hands.clock()).await;
    tokio::time::sleep(KEPT * 2).await;
    assert_eq!(names(&bench).await, ["data"], "it is in use");
    for sandbox in bench.all().items {
        bench.sandbox(&sandbox.id).destroy().await.unwrap();
    }
    tokio::time::sleep(KEPT / 2).await;
    assert_eq!(names(&bench).await, ["data"]);
    tokio::time::sleep(KEPT).await;
    until_names(&bench, &[]).await;
}
