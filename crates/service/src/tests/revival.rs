//! Dead sandboxes that are requested again: restarts, replacements, and their cost while dead.

use std::sync::atomic::Ordering;
use std::time::Duration;

use backend::FoundCondition;
use domain::volume::{
    MissingVolume, MountAccess, MountSource, MountSpec, VolumeClaim, VolumeLifetime, VolumeName,
};
use domain::{
    Bytes, EndCause, Entrypoint, FilesState, MilliCpus, NetworkAccess, OnDeath, Owner, Phase, ResourceLimits,
    SandboxKey, SandboxLimits, SandboxSpec,
};
use futures_util::future::join_all;

use super::{TestBench, config, operators_quota, plain, with_entrypoint};
use crate::clock::Clock;
use crate::sandboxes::driver::DriverCommand;
use crate::{
    CreateSandboxRequest, DefaultedPart, ErrorKind, ImageSource, Outcome, OwnerQuota, RETRY_KEY_SPACE,
    ResumeOutcome, RevivalKind, Sandbox, SandboxRevival, ServiceConfig, ServiceError,
};
use testkit::fake_backend::FakeBackend;

const RESTARTED: Option<SandboxRevival> =
    Some(SandboxRevival { how: RevivalKind::Restarted, cause: EndCause::AgentDied });

pub(super) fn replacing() -> CreateSandboxRequest {
    CreateSandboxRequest {
        spec: SandboxSpec { on_death: Some(OnDeath::Replace), ..SandboxSpec::with_defaults() },
        ..plain()
    }
}

impl TestBench {
    pub(super) async fn died(&self, sandbox: &Sandbox) {
        self.backend.kill(&sandbox.id, EndCause::AgentDied);
        self.until(sandbox, |phase| matches!(phase, Phase::Failed(_))).await;
        // It is stopped in the same step; another command waits for that.
        self.sandbox(&sandbox.id).patch_labels(Default::default()).await.unwrap();
    }

    async fn made_and_died(&self, name: &str) -> Sandbox {
        let made = self.acquire(name).await.sandbox;
        self.died(&made).await;
        made
    }
}

#[tokio::test]
async fn dead_sandbox_keeps_its_files_and_restarts_under_its_name() {
    let bench = TestBench::new().await;
    let made = bench.made_and_died("a").await;
    assert_eq!(bench.backend.condition(&made.id), Some(FoundCondition::Dead));
    assert!(!bench.backend.was_asked_to("destroy"));
    let again = bench.acquire("a").await;
    assert_eq!((&again.sandbox.id, again.fresh, again.revival), (&made.id, false, RESTARTED));
    assert_eq!(again.sandbox.phase, Phase::Running);
    assert_eq!(bench.backend.times_asked_to("create"), 1);
    let later = bench.acquire("a").await;
    assert_eq!((later.sandbox.id, later.revival), (made.id, None));
}

#[tokio::test]
async fn restart_runs_the_entrypoint_again_and_publishes_events() {
    let bench = TestBench::new().await;
    let made = bench.service.create_sandbox(&bench.owner, with_entrypoint()).await.unwrap();
    bench.died(&made).await;
    let resumed = bench.sandbox(&made.id).restart().await.unwrap();
    assert_eq!(resumed, ResumeOutcome { outcome: Outcome::Done, revival: RESTARTED });
    let events = bench.sandbox(&made.id).lifecycle_events(10);
    let seen: Vec<_> = events.iter().map(|event| (event.phase.name(), event.cause)).collect();
    let died = Some(EndCause::AgentDied);
    let expected =
        [("starting", None), ("running", None), ("failed", died), ("starting", died), ("running", None)];
    assert_eq!(seen, expected);
    bench.backend.entrypoint_end.send_replace(Some(wire::process::ExitReason::Code(0)));
    bench.until(&made, |phase| matches!(phase, Phase::Exited(_))).await;
}

#[tokio::test]
async fn concurrent_acquires_restart_a_dead_sandbox_once() {
    let bench = TestBench::new().await;
    let made = bench.made_and_died("a").await;
    let all = join_all((0..30).map(|_| bench.acquire("a"))).await;
    assert!(all.iter().all(|acquired| acquired.sandbox.id == made.id && !acquired.fresh));
    assert_eq!(all.iter().filter(|acquired| acquired.revival.is_some()).count(), 1);
    assert_eq!(bench.backend.times_asked_to("restart"), 1);
}

#[tokio::test]
async fn unreported_death_is_noticed_by_the_next_acquire() {
    let bench = TestBench::new().await;
    let made = bench.acquire("a").await.sandbox;
    bench.backend.put_sandbox(&made.id, FoundCondition::Dead);
    let again = bench.acquire("a").await;
    assert_eq!((again.sandbox.id, again.revival), (made.id.clone(), RESTARTED));
    // The death notice arrives late and belongs to its former life.
    bench.backend.deaths.0.send(backend::SandboxDeath { id: made.id.clone(), cause: EndCause::Oom }).unwrap();
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    assert_eq!(bench.sandbox(&made.id).current_state().phase, Phase::Running);
}

#[tokio::test]
async fn resume_restarts_a_dead_sandbox_and_other_requests_do_not() {
    let bench = TestBench::new().await;
    let made = bench.create().await;
    bench.died(&made).await;
    let denied = bench.sandbox(&made.id).processes().list_processes().await.unwrap_err();
    assert!(matches!(denied.kind(), ErrorKind::Conflict { .. }), "{denied:?}");
    assert!(denied.hint().is_some_and(|hint| hint.contains("restart")), "{denied:?}");
    assert!(!bench.backend.was_asked_to("restart asked"));
    let resumed = bench.sandbox(&made.id).resume().await.unwrap();
    assert_eq!(resumed.revival, RESTARTED);
    assert_eq!(bench.sandbox(&made.id).restart().await.unwrap(), Outcome::Unchanged.into());
    bench.sandbox(&made.id).processes().list_processes().await.unwrap();
}

#[tokio::test]
async fn resume_order_alone_does_not_restart_a_dead_sandbox() {
    let bench = TestBench::new().await;
    let made = bench.create().await;
    bench.died(&made).await;
    let handle = bench.handle(&made);
    let denied = bench.service.0.send_command(&handle, DriverCommand::Resume).await.unwrap_err();
    assert!(matches!(denied.kind(), ErrorKind::Conflict { .. }), "{denied:?}");
    assert!(!bench.backend.was_asked_to("restart asked"));
}

#[tokio::test]
async fn retry_key_never_restarts_a_sandbox() {
    let bench = TestBench::new().await;
    let key = SandboxKey::new(&bench.owner, RETRY_KEY_SPACE, "r").unwrap();
    let made = bench.service.acquire(&key, plain()).await.unwrap().sandbox;
    bench.died(&made).await;
    let again = bench.service.acquire(&key, plain()).await.unwrap();
    assert!(again.fresh && again.sandbox.id != made.id && again.revival.is_none());
    assert!(!bench.backend.was_asked_to("restart asked"));
}

#[tokio::test]
async fn replace_gives_a_successor_by_name_and_an_empty_disk_by_id() {
    let bench = TestBench::new().await;
    let key = bench.key("a");
    let made = bench.service.acquire(&key, replacing()).await.unwrap().sandbox;
    bench.died(&made).await;
    let again = bench.service.acquire(&key, replacing()).await.unwrap();
    assert!(again.fresh && again.sandbox.id != made.id);
    let replaced = Some(SandboxRevival { how: RevivalKind::Replaced, cause: EndCause::AgentDied });
    assert_eq!(again.revival, replaced);
    bench.wait_until_gone(&made).await;
    bench.died(&again.sandbox).await;
    let resumed = bench.sandbox(&again.sandbox.id).resume().await.unwrap();
    assert_eq!(resumed.revival, replaced);
    assert!(!bench.backend.was_asked_to("restart asked"));
    assert_eq!(bench.service.find_by_key(&key).unwrap().id, again.sandbox.id);
}

/// A sandbox for which the caller named everything.
fn confined(on_death: Option<OnDeath>) -> CreateSandboxRequest {
    let claim = VolumeClaim {
        name: VolumeName::parse("data").unwrap(),
        absent: MissingVolume::Make { size: None, lifetime: VolumeLifetime::WithSandboxes },
    };
    let mount = MountSpec {
        source: MountSource::Claim(claim),
        target: "/data".to_owned(),
        access: MountAccess::ReadWrite,
        sub_path: None,
    };
    let resources = ResourceLimits {
        memory: Some(Bytes::from_mib(300)),
        cpus: Some(MilliCpus(250)),
        pids: Some(50),
        disk: Some(Bytes::from_mib(64)),
    };
    let spec = SandboxSpec {
        resources,
        network: NetworkAccess::Off,
        mounts: vec![mount],
        env: [("TOKEN".to_owned(), "secret value".to_owned())].into(),
        entrypoint: Entrypoint::Argv(vec!["serve".to_owned()]),
        on_death,
        ..SandboxSpec::with_defaults()
    };
    CreateSandboxRequest {
        source: ImageSource::from_name("tools"),
        spec,
        labels: [("team".to_owned(), "blue".to_owned())].into(),
        notes: vec![7],
        timeout: Some(Duration::from_secs(3600)),
        idle_timeout: Some(Duration::from_secs(90)),
        ..plain()
    }
}

/// A request by name alone: what the front filled in is weaker.
fn by_name_alone() -> CreateSandboxRequest {
    let spec = SandboxSpec { network: NetworkAccess::On, ..SandboxSpec::with_defaults() };
    let defaulted = vec![DefaultedPart::Image, DefaultedPart::Network, DefaultedPart::Guest];
    CreateSandboxRequest { spec, defaulted, merge_notes: |_, former| former.notes.clone(), ..plain() }
}

fn successor_is_as_confined(bench: &TestBench, former: &Sandbox, successor: &Sandbox) {
    assert_ne!(successor.id, former.id);
    assert_eq!(successor.spec, former.spec, "limits, network, volumes, variables, entrypoint, image");
    assert_eq!((&successor.labels, &successor.notes), (&former.labels, &former.notes));
    assert_eq!(successor.expires, Some(successor.created + Duration::from_secs(3600)));
    assert_eq!(bench.handle(successor).idle_timeout, Some(Duration::from_secs(90)));
}

fn first_event(bench: &TestBench, sandbox: &Sandbox) -> (&'static str, Option<&'static str>) {
    let events = bench.sandbox(&sandbox.id).lifecycle_events(10);
    (events[0].phase.name(), events[0].revival_kind().map(RevivalKind::name))
}

#[tokio::test]
async fn a_replacement_by_name_is_confined_as_its_predecessor() {
    let bench = TestBench::new().await;
    let key = bench.key("a");
    let request = confined(Some(OnDeath::Replace));
    let made = bench.service.acquire(&key, request).await.unwrap().sandbox;
    assert_eq!(first_event(&bench, &made), ("starting", None));
    bench.died(&made).await;
    let again = bench.service.acquire(&key, by_name_alone()).await.unwrap();
    assert_eq!(again.revival.map(|revival| revival.how), Some(RevivalKind::Replaced));
    successor_is_as_confined(&bench, &made, &again.sandbox);
    assert_eq!(first_event(&bench, &again.sandbox), ("starting", Some("replace")));
}

#[tokio::test]
async fn a_successor_of_lost_files_is_confined_as_its_predecessor() {
    let backend = FakeBackend::new();
    backend.restarts.store(false, Ordering::Relaxed);
    let bench = TestBench::with(backend, tempfile::tempdir().unwrap(), Clock::from_host()).await;
    let key = bench.key("a");
    let made = bench.service.acquire(&key, confined(None)).await.unwrap().sandbox;
    bench.died(&made).await;
    let again = bench.service.acquire(&key, by_name_alone()).await.unwrap();
    assert_eq!(again.revival.map(|revival| revival.how), Some(RevivalKind::FilesLost));
    successor_is_as_confined(&bench, &made, &again.sandbox);
    assert_eq!(first_event(&bench, &again.sandbox), ("starting", Some("files-lost")));
    let bench = bench.restarted().await;
    assert_eq!(first_event(&bench, &again.sandbox), ("starting", Some("files-lost")), "it is kept");
}

#[tokio::test]
async fn refused_replacement_leaves_the_settings_to_the_next_one() {
    let backend = FakeBackend::new();
    backend.restarts.store(false, Ordering::Relaxed);
    let bench = TestBench::with(backend, tempfile::tempdir().unwrap(), Clock::from_host()).await;
    let key = bench.key("a");
    let made = bench.service.acquire(&key, confined(Some(OnDeath::Replace))).await.unwrap().sandbox;
    bench.died(&made).await;
    let mut impossible = by_name_alone();
    impossible.spec.on_death = Some(OnDeath::Restart);
    let refused = bench.service.acquire(&key, impossible).await;
    assert!(matches!(refused, Err(ServiceError::NoRestarts)), "{refused:?}");
    let again = bench.service.acquire(&key, by_name_alone()).await.unwrap();
    assert_eq!(again.revival.map(|revival| revival.how), Some(RevivalKind::Replaced));
    successor_is_as_confined(&bench, &made, &again.sandbox);
}

#[tokio::test]
async fn settings_given_by_the_caller_of_a_replacement_win() {
    let bench = TestBench::new().await;
    let key = bench.key("a");
    let request = confined(Some(OnDeath::Replace));
    let made = bench.service.acquire(&key, request).await.unwrap().sandbox;
    bench.died(&made).await;
    let mut request = confined(Some(OnDeath::Restart));
    request.spec.mounts[0].access = MountAccess::ReadOnly;
    request.spec.resources =
        ResourceLimits { memory: Some(Bytes::from_mib(100)), ..ResourceLimits::default() };
    request.source = ImageSource::from_name("other");
    request.spec.entrypoint = Entrypoint::FromImage;
    request.timeout = Some(Duration::ZERO);
    let again = bench.service.acquire(&key, request).await.unwrap().sandbox;
    let limits = &again.spec.resources;
    assert_eq!((limits.memory, limits.pids), (Some(Bytes::from_mib(100)), Some(50)));
    assert_eq!((again.spec.image.as_str(), again.spec.entrypoint), ("other", Entrypoint::FromImage));
    assert_eq!((again.spec.mounts.len(), again.spec.mounts[0].access), (1, MountAccess::ReadOnly));
    assert_eq!((again.spec.on_death, again.expires), (Some(OnDeath::Restart), None));
}

#[tokio::test]
async fn lost_in_memory_files_are_reported() {
    let backend = FakeBackend::new();
    backend.restarts.store(false, Ordering::Relaxed);
    let bench = TestBench::with(backend, tempfile::tempdir().unwrap(), Clock::from_host()).await;
    let named = CreateSandboxRequest {
        spec: SandboxSpec { on_death: Some(OnDeath::Restart), ..SandboxSpec::with_defaults() },
        ..plain()
    };
    let refused = bench.service.create_sandbox(&bench.owner, named).await.unwrap_err();
    assert!(matches!(refused, ServiceError::NoRestarts), "{refused:?}");
    let made = bench.made_and_died("a").await;
    assert_eq!(bench.sandbox(&made.id).current_state().files, FilesState::Lost);
    let refused = bench.sandbox(&made.id).restart().await.unwrap_err();
    assert!(matches!(refused, ServiceError::FilesLost { .. }), "{refused:?}");
    assert!(refused.hint().is_some_and(|hint| hint.contains("create --key")), "{refused:?}");
    let denied = bench.sandbox(&made.id).processes().list_processes().await.unwrap_err();
    assert!(matches!(denied.kind(), ErrorKind::Conflict { .. }), "{denied:?}");
    assert!(denied.to_string().contains("its files are lost"), "{denied}");
    assert_eq!(denied.hint(), refused.hint(), "a restart would be refused");
    let again = bench.acquire("a").await;
    let lost = Some(SandboxRevival { how: RevivalKind::FilesLost, cause: EndCause::AgentDied });
    assert_eq!((again.fresh, again.revival), (true, lost));
    assert_eq!(bench.backend.count(), 1);
}

#[tokio::test]
async fn failed_restart_leaves_a_dead_sandbox_with_its_files() {
    let bench = TestBench::new().await;
    let made = bench.made_and_died("a").await;
    bench.backend.fail("restart", 1);
    let error = bench.service.acquire(&bench.key("a"), plain()).await.unwrap_err();
    assert!(matches!(error, ServiceError::Backend { action: "restart", .. }), "{error:?}");
    let dead = bench.sandbox(&made.id).current_state();
    assert_eq!((dead.phase, dead.files), (Phase::Failed(EndCause::AgentDied), FilesState::Kept));
    assert_eq!(bench.acquire("a").await.sandbox.id, made.id);
}

#[tokio::test]
async fn server_crash_during_a_restart_leaves_the_sandbox_restartable() {
    let bench = TestBench::new().await;
    let made = bench.made_and_died("a").await;
    bench.backend.gate.forget_permits(usize::MAX >> 3);
    let (service, key) = (bench.service.clone(), bench.key("a"));
    let asking = tokio::spawn(async move { service.acquire(&key, plain()).await });
    bench.until(&made, |phase| phase == Phase::Starting).await;
    // The old server dies here: the row says "failed", and the sandbox is started nevertheless.
    let copy = super::restart::snapshot_of(&bench);
    bench.backend.gate.add_permits(1);
    asking.await.unwrap().unwrap();
    let (backend, _state) = bench.crash().await;
    backend.gate.add_permits(100);
    let bench = TestBench::with(backend, copy, Clock::from_host()).await;
    bench.sandbox(&made.id).patch_labels(Default::default()).await.unwrap();
    let again = bench.acquire("a").await;
    assert_eq!((again.sandbox.id, again.revival), (made.id, RESTARTED));
    assert_eq!(bench.backend.count(), 1);
}

#[tokio::test]
async fn dead_sandbox_survives_a_server_restart_with_name_and_files() {
    let bench = TestBench::new().await;
    let made = bench.made_and_died("a").await;
    let bench = bench.restarted().await;
    let found = bench.sandbox(&made.id).current_state();
    assert_eq!((found.phase, found.files), (Phase::Failed(EndCause::AgentDied), FilesState::Kept));
    assert_eq!(bench.acquire("a").await.revival, RESTARTED);
    let bench = bench.restarted().await;
    let found = bench.sandbox(&made.id).current_state();
    assert_eq!(found.phase, Phase::Running);
}

#[tokio::test]
async fn expired_or_destroyed_dead_sandbox_leaves_no_files() {
    let bench = TestBench::new().await;
    let made = bench.made_and_died("a").await;
    bench.sandbox(&made.id).destroy().await.unwrap();
    assert_eq!(bench.backend.count(), 0);
    let request = CreateSandboxRequest { timeout: Some(Duration::from_millis(50)), ..plain() };
    let made = bench.service.create_sandbox(&bench.owner, request).await.unwrap();
    bench.died(&made).await;
    bench.wait_until_gone(&made).await;
    assert_eq!(bench.backend.count(), 0);
}

#[tokio::test]
async fn a_dead_sandbox_can_be_snapshotted() {
    let bench = TestBench::new().await;
    let made = bench.create().await;
    bench.died(&made).await;
    bench.sandbox(&made.id).snapshots().take_snapshot(None).await.unwrap();
}

#[tokio::test]
async fn dead_sandbox_with_a_name_is_evicted_last() {
    let bench = TestBench::limited(3, 3).await;
    let named = bench.made_and_died("named").await;
    bench.acquire("parked").await;
    bench.release("parked");
    let unnamed = bench.create().await;
    bench.died(&unnamed).await;
    bench.acquire("b").await;
    assert!(!bench.has(&unnamed), "the dead sandbox without a name is evicted first");
    bench.acquire("c").await;
    assert!(
        bench.service.find_by_key(&bench.key("parked")).is_none(),
        "the parked sandbox is evicted second"
    );
    assert!(bench.has(&named));
    bench.acquire("d").await;
    assert!(!bench.has(&named), "the dead sandbox with a name is evicted last");
}

#[tokio::test]
async fn dead_sandboxes_of_another_owner_keep_their_files_at_the_limits() {
    for (soft, hard) in [(1, 20), (20, 2)] {
        let bench = TestBench::limited(soft, hard).await;
        let named = bench.made_and_died("work").await;
        let unnamed = bench.create().await;
        bench.died(&unnamed).await;
        let bob = Owner::from_valid_name("bob");
        let checked = bench.service.0.check_room_for(&bob, &ResourceLimits::default());
        let created = bench.service.create_sandbox(&bob, plain()).await;
        if hard == 2 {
            assert!(matches!(checked, Err(ServiceError::TooManySandboxes { limit: 2 })), "{checked:?}");
            let error = created.unwrap_err();
            assert!(matches!(error, ServiceError::TooManySandboxes { limit: 2 }), "{error:?}");
        } else {
            assert!(created.is_ok(), "{created:?}");
        }
        assert!(bench.has(&named) && bench.has(&unnamed), "limits {soft} and {hard}");
        assert_eq!(bench.acquire("work").await.sandbox.id, named.id);
    }
}

#[tokio::test]
async fn dead_sandbox_of_another_owner_is_evicted_if_its_files_are_lost() {
    let bench = TestBench::limited(20, 1).await;
    bench.backend.restarts.store(false, Ordering::Relaxed);
    let dead = bench.made_and_died("work").await;
    bench.service.create_sandbox(&Owner::from_valid_name("bob"), plain()).await.unwrap();
    assert!(!bench.has(&dead));
}

#[tokio::test]
async fn dead_sandbox_costs_a_slot_and_disk_but_no_memory_or_cpu() {
    let (backend, state) = (FakeBackend::new(), tempfile::tempdir().unwrap());
    let quota = OwnerQuota {
        sandboxes: Some(3),
        memory: Some(Bytes::from_mib(100)),
        cpus: Some(MilliCpus(2000)),
        ..OwnerQuota::default()
    };
    let usual = SandboxLimits { memory: Bytes::from_mib(60), cpus: MilliCpus(500), ..SandboxLimits::ZERO };
    let quotas = operators_quota(quota);
    let config = ServiceConfig { quotas, default_limits: usual, ..config(&state) };
    let bench = TestBench::configured(config, backend, state).await;
    let made = bench.made_and_died("a").await;
    // Its memory is free for another sandbox, which then prevents its restart until it is removed.
    let other = bench.create().await;
    let refused = bench.sandbox(&made.id).restart().await.unwrap_err();
    assert!(
        matches!(
            refused,
            ServiceError::OverQuota {
                excess: crate::tenancy::quota::QuotaExcess { what: crate::QuotaResource::Memory, .. },
                ..
            }
        ),
        "{refused:?}"
    );
    assert!(bench.has(&made), "it is not evicted to make room for itself");
    bench.sandbox(&other.id).destroy().await.unwrap();
    bench.sandbox(&made.id).restart().await.unwrap();
    bench.died(&made).await;
    let second = bench.made_and_died("b").await;
    let third = bench.made_and_died("c").await;
    assert!(bench.has(&second) && bench.has(&third));
    bench.acquire("d").await;
    assert!(!bench.has(&made), "dead sandboxes count, and the one dead longest is evicted");
}
