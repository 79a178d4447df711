//! The settings that a sandbox made from a snapshot inherits, and those that its caller may set instead.

use std::time::Duration;

use domain::{
    Bytes, GuestSettings, GuestUser, ImageDefaults, MilliCpus, NetworkAccess, OnDeath, ResourceLimits,
    SandboxKey, SandboxSpec, Snapshot, SnapshotId, SnapshotState,
};

use super::{TestBench, config, operators_quota, plain};
use crate::clock::Clock;
use crate::{
    CreateSandboxRequest, DefaultedPart, ImageSource, NAME_KEY_SPACE, OwnerQuota, Sandbox, SandboxUsage,
    Service, ServiceError,
};

const HOUR: Duration = Duration::from_secs(3600);

fn guest() -> GuestSettings {
    let user = GuestUser { name: "agent".to_owned(), uid: 1000, gid: 1000, home: "/srv/agent".to_owned() };
    GuestSettings {
        users: vec![user],
        default_user: "agent".to_owned(),
        image_defaults: ImageDefaults::Ignored,
        ..GuestSettings::root_only()
    }
}

/// A request in which the caller set everything.
fn confined() -> CreateSandboxRequest {
    let resources = ResourceLimits {
        memory: Some(Bytes::from_mib(300)),
        cpus: Some(MilliCpus(250)),
        pids: Some(50),
        disk: Some(Bytes::from_mib(64)),
    };
    let env = [("TOKEN", "secret value"), ("FILE", "/its/own")];
    let spec = SandboxSpec {
        resources,
        network: NetworkAccess::Off,
        env: env.map(|(name, value)| (name.to_owned(), value.to_owned())).into(),
        env_file: Some("/its/own".to_owned()),
        guest: guest(),
        on_death: Some(OnDeath::Replace),
        ..SandboxSpec::with_defaults()
    };
    CreateSandboxRequest {
        spec,
        labels: [("team".to_owned(), "blue".to_owned())].into(),
        notes: vec![7],
        timeout: Some(HOUR),
        idle_timeout: Some(Duration::from_secs(90)),
        ..plain()
    }
}

/// A request that names only the snapshot; the front filled in weaker defaults.
fn unnamed(snapshot: &SnapshotId) -> CreateSandboxRequest {
    let spec = SandboxSpec {
        network: NetworkAccess::On,
        env: [("FILE".to_owned(), "/usual".to_owned())].into(),
        env_file: Some("/usual".to_owned()),
        ..SandboxSpec::with_defaults()
    };
    let defaulted =
        vec![DefaultedPart::Network, DefaultedPart::Guest, DefaultedPart::EnvironmentFile("FILE")];
    let source = ImageSource::Snapshot(snapshot.clone());
    CreateSandboxRequest { source, spec, defaulted, ..plain() }
}

pub(super) async fn snapshot_of(bench: &TestBench, sandbox: &Sandbox) -> Snapshot {
    let begun = bench.sandbox(&sandbox.id).snapshots().take_snapshot(None).await.unwrap();
    loop {
        let snapshot = bench.service.find_snapshot(&bench.owner, &begun.id).unwrap();
        if snapshot.state == SnapshotState::Ready {
            return snapshot;
        }
        tokio::task::yield_now().await;
    }
}

fn check_inherited(bench: &TestBench, made: &Sandbox) {
    let parent = confined();
    assert_eq!(made.spec.network, NetworkAccess::Off);
    let disk = Some(Bytes::from_mib(100));
    assert_eq!(made.spec.resources, ResourceLimits { disk, ..parent.spec.resources }, "the snapshot's disk");
    assert_eq!((&made.spec.env, &made.spec.env_file), (&parent.spec.env, &parent.spec.env_file));
    assert_eq!((&made.spec.guest, &made.labels), (&guest(), &parent.labels));
    assert_eq!(made.spec.on_death, Some(OnDeath::Replace));
    assert_eq!(made.expires, Some(made.created + HOUR));
    assert_eq!(bench.handle(made).idle_timeout, parent.idle_timeout);
}

#[tokio::test]
async fn settings_the_caller_leaves_open_are_inherited() {
    let bench = TestBench::new().await;
    let source = bench.service.create_sandbox(&bench.owner, confined()).await.unwrap();
    // A later expiry is not the time to live that the sandbox was created with.
    let later = source.created + 2 * HOUR;
    bench.sandbox(&source.id).renew_expiry(later).await.unwrap();
    let snapshot = snapshot_of(&bench, &source).await;
    let made = bench.service.create_sandbox(&bench.owner, unnamed(&snapshot.id)).await.unwrap();
    check_inherited(&bench, &made);
    let key = SandboxKey::new(&bench.owner, NAME_KEY_SPACE, "fork").unwrap();
    let acquired = bench.service.acquire(&key, unnamed(&snapshot.id)).await.unwrap();
    check_inherited(&bench, &acquired.sandbox);
    // A fork of a fork inherits the same, also after a restart.
    let again = snapshot_of(&bench, &made).await;
    let (backend, state) = bench.crash().await;
    let bench = TestBench::with(backend, state, Clock::from_host()).await;
    let second = bench.service.create_sandbox(&bench.owner, unnamed(&again.id)).await.unwrap();
    check_inherited(&bench, &second);
    assert_eq!(bench.service.find_snapshot(&bench.owner, &again.id).unwrap(), again);
}

#[tokio::test]
async fn settings_the_caller_gives_win() {
    let bench = TestBench::new().await;
    let source = bench.service.create_sandbox(&bench.owner, confined()).await.unwrap();
    let snapshot = snapshot_of(&bench, &source).await;
    let mut request = unnamed(&snapshot.id);
    request.defaulted.clear();
    request.spec.resources = ResourceLimits { memory: Some(Bytes::from_mib(1)), ..ResourceLimits::default() };
    request.labels = [("team", "red"), ("more", "x")].map(|(k, v)| (k.to_owned(), v.to_owned())).into();
    request.timeout = Some(Duration::ZERO);
    request.idle_timeout = Some(Duration::ZERO);
    request.spec.on_death = Some(OnDeath::Restart);
    let made = bench.service.create_sandbox(&bench.owner, request.clone()).await.unwrap();
    assert_eq!((made.spec.network, made.expires), (NetworkAccess::On, None));
    let limits = &made.spec.resources;
    assert_eq!((limits.memory, limits.pids), (Some(Bytes::from_mib(1)), Some(50)));
    assert_eq!(
        (made.spec.env_file.as_deref(), &made.spec.guest),
        (Some("/usual"), &GuestSettings::root_only())
    );
    assert_eq!((made.spec.env["FILE"].as_str(), made.spec.env["TOKEN"].as_str()), ("/usual", "secret value"));
    assert_eq!(made.labels, request.labels);
    assert_eq!(made.spec.on_death, Some(OnDeath::Restart));
    assert_eq!(bench.handle(&made).idle_timeout, None);
}

#[tokio::test]
async fn replacement_keeps_the_network_that_was_named_over_that_of_its_snapshot() {
    let bench = TestBench::new().await;
    let open = CreateSandboxRequest {
        spec: SandboxSpec { network: NetworkAccess::On, ..SandboxSpec::with_defaults() },
        ..plain()
    };
    let parent = bench.service.create_sandbox(&bench.owner, open).await.unwrap();
    let snapshot = snapshot_of(&bench, &parent).await;
    let key = SandboxKey::new(&bench.owner, NAME_KEY_SPACE, "k").unwrap();
    let spec = SandboxSpec {
        network: NetworkAccess::Off,
        on_death: Some(OnDeath::Replace),
        ..SandboxSpec::with_defaults()
    };
    let source = ImageSource::Snapshot(snapshot.id.clone());
    let request = CreateSandboxRequest { source, spec, ..plain() };
    let made = bench.service.acquire(&key, request).await.unwrap().sandbox;
    assert_eq!(made.spec.network, NetworkAccess::Off);
    bench.died(&made).await;
    let spec = SandboxSpec { network: NetworkAccess::On, ..SandboxSpec::with_defaults() };
    let by_name = CreateSandboxRequest {
        spec,
        defaulted: vec![DefaultedPart::Network, DefaultedPart::Image],
        ..plain()
    };
    let again = bench.service.acquire(&key, by_name).await.unwrap().sandbox;
    assert_eq!(again.spec.snapshot, Some(snapshot.id));
    assert_eq!(again.spec.network, NetworkAccess::Off);
}

#[tokio::test]
async fn default_limits_in_force_are_recorded() {
    let bench = TestBench::new().await;
    let source = bench.create().await;
    bench.backend.set_usage(SandboxUsage {
        memory_limit: Some(Bytes::from_mib(512)),
        cpu_limit: Some(1500),
        pids_limit: Some(99),
        ..SandboxUsage::default()
    });
    let snapshot = snapshot_of(&bench, &source).await;
    let made = bench.service.create_sandbox(&bench.owner, unnamed(&snapshot.id)).await.unwrap();
    let limits = &made.spec.resources;
    let found = (limits.memory, limits.cpus, limits.pids);
    assert_eq!(found, (Some(Bytes::from_mib(512)), Some(MilliCpus(1500)), Some(99)));
    assert_eq!((made.expires, bench.handle(&made).idle_timeout), (None, None));
}

#[tokio::test]
async fn inherited_limits_count_in_the_quota() {
    let state = tempfile::tempdir().unwrap();
    let quota = OwnerQuota { memory: Some(Bytes::from_mib(500)), ..OwnerQuota::default() };
    let config = crate::ServiceConfig { quotas: operators_quota(quota), ..config(&state) };
    let backend = testkit::fake_backend::FakeBackend::new();
    let service = Service::start(config, backend.clone() as _).await.unwrap();
    let bench = TestBench { service, backend, state, owner: domain::Owner::operator() };
    let source = bench.service.create_sandbox(&bench.owner, confined()).await.unwrap();
    let snapshot = snapshot_of(&bench, &source).await;
    let refused = bench.service.create_sandbox(&bench.owner, unnamed(&snapshot.id)).await.unwrap_err();
    assert!(
        matches!(
            refused,
            ServiceError::OverQuota {
                excess: crate::tenancy::quota::QuotaExcess { what: crate::QuotaResource::Memory, .. },
                ..
            }
        ),
        "{refused}"
    );
}

#[tokio::test]
async fn inherited_timeout_is_cut_to_the_present_maximum() {
    let bench = TestBench::new().await;
    let source = bench.service.create_sandbox(&bench.owner, confined()).await.unwrap();
    let snapshot = snapshot_of(&bench, &source).await;
    let (backend, state) = bench.crash().await;
    let config = crate::ServiceConfig { max_timeout: Some(HOUR / 2), ..config(&state) };
    let service = Service::start(config, backend.clone() as _).await.unwrap();
    let bench = TestBench { service, backend, state, owner: domain::Owner::operator() };
    let made = bench.service.create_sandbox(&bench.owner, unnamed(&snapshot.id)).await.unwrap();
    assert_eq!(made.expires, Some(made.created + HOUR / 2));
}

#[tokio::test]
async fn snapshot_of_an_earlier_version_inherits_nothing() {
    let bench = TestBench::new().await;
    let source = bench.service.create_sandbox(&bench.owner, confined()).await.unwrap();
    let snapshot = snapshot_of(&bench, &source).await;
    let (backend, state) = bench.crash().await;
    let database = rusqlite::Connection::open(state.path().join("coracle.db")).unwrap();
    database.execute("UPDATE snapshots SET settings = NULL", []).unwrap();
    database.execute("UPDATE sandboxes SET timeout = NULL", []).unwrap();
    drop(database);
    let bench = TestBench::with(backend, state, Clock::from_host()).await;
    let request = unnamed(&snapshot.id);
    let made = bench.service.create_sandbox(&bench.owner, request.clone()).await.unwrap();
    assert_eq!((made.spec.network, made.expires, made.labels.len()), (NetworkAccess::On, None, 0));
    assert_eq!((made.spec.resources.memory, &made.spec.env), (None, &request.spec.env));
    // For a sandbox of an earlier version, the time to live is derived from its expiry.
    let again = snapshot_of(&bench, &source).await;
    assert_eq!(again.settings.unwrap().timeout, Some(HOUR));
}

#[tokio::test]
async fn values_of_variables_are_not_printed_with_a_snapshot() {
    let bench = TestBench::new().await;
    let source = bench.service.create_sandbox(&bench.owner, confined()).await.unwrap();
    let printed = format!("{:?}", snapshot_of(&bench, &source).await);
    assert!(printed.contains("TOKEN") && !printed.contains("secret value"), "{printed}");
}
