//! Pools: filling, taking, binding, crashing.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use domain::{
    Bytes, EndCause, MountAccess, MountSource, MountSpec, NetworkAccess, Owner, Phase, PoolCapacity,
    PoolSpec, RefillRate, ResourceLimits, SandboxId, SandboxKey, SandboxSpec,
};
use futures_util::future::join_all;
use tempfile::TempDir;
use wire::AgentRequest;

use super::restart::snapshot_of;
use super::{TestBench, config, operators_quota, plain, with_entrypoint};
use crate::clock::Clock;
use crate::{
    CreateSandboxRequest, ErrorKind, ImageSource, OwnerQuota, PoolSource, Sandbox, ServiceConfig,
    ServiceError,
};
use testkit::fake_backend::{ABSENT_IMAGE, FakeBackend};

fn pool(name: &str, level: usize) -> PoolSpec {
    PoolSpec {
        name: name.to_owned(),
        template: SandboxSpec::with_defaults(),
        capacity: PoolCapacity::with_level(level),
        refill: RefillRate { per_second: 1000, at_once: 4 },
    }
}

fn of(pool: &str) -> CreateSandboxRequest {
    CreateSandboxRequest { source: ImageSource::Pool(pool.to_owned()), ..plain() }
}

/// Pools are filled at their own rate, so time must pass between two checks.
async fn a_moment() {
    tokio::time::sleep(Duration::from_millis(1)).await;
}

impl TestBench {
    /// A service with these pools and this sandbox limit, with its warm sandboxes ready.
    async fn pooled(pools: Vec<PoolSpec>, sandboxes: usize) -> Self {
        let (backend, state) = (FakeBackend::new(), tempfile::tempdir().unwrap());
        let bench = Self::over(pools, sandboxes, backend, state).await;
        for pool in bench.service.0.config().pools.clone() {
            bench.until_warm(&pool.name, pool.capacity.level.min(sandboxes)).await;
        }
        bench
    }

    pub(super) async fn over(
        pools: Vec<PoolSpec>,
        sandboxes: usize,
        backend: Arc<FakeBackend>,
        state: TempDir,
    ) -> Self {
        let config = ServiceConfig { pools, sandboxes, ..config(&state) };
        Self::configured(config, backend, state).await
    }

    fn warm(&self, pool: &str) -> usize {
        self.service.find_pool(pool).unwrap().warm
    }

    pub(super) async fn until_warm(&self, pool: &str, count: usize) {
        while self.warm(pool) != count {
            a_moment().await;
        }
    }

    async fn until_population(&self, count: usize) {
        while self.backend.count() != count {
            a_moment().await;
        }
    }

    async fn make(&self, request: CreateSandboxRequest) -> Sandbox {
        self.service.create_sandbox(&self.owner, request).await.unwrap()
    }
}

#[tokio::test]
async fn pool_is_filled_hidden_and_refilled() {
    let bench = TestBench::pooled(vec![pool("p", 3)], 20).await;
    let warm: BTreeSet<SandboxId> = bench.backend.ids().into_iter().collect();
    assert_eq!((warm.len(), bench.all().total, bench.service.count_by_phase().len()), (3, 0, 0));
    for id in &warm {
        for owner in [bench.owner.clone(), Owner::unclaimed()] {
            assert!(matches!(bench.service.sandbox(&owner, id), Err(ServiceError::NoSandbox(_))));
        }
    }
    let made = bench.create().await;
    assert!(warm.contains(&made.id), "a sandbox was made although a warm one was ready");
    assert_eq!((made.pool.as_deref(), made.phase), (Some("p"), Phase::Running));
    bench.until_population(4).await;
    bench.until_warm("p", 3).await;
    assert_eq!(bench.all().total, 1);
    let report = bench.service.find_pool("p").unwrap();
    assert_eq!((report.taken, report.claims, report.cold), (1, 1, 0));
}

#[tokio::test]
async fn warm_sandbox_has_no_events_before_it_is_taken() {
    let bench = TestBench::pooled(vec![pool("p", 2)], 20).await;
    assert_eq!(bench.service.follow_events(None, Some(0)).take_ready(), []);
    let made = bench.create().await;
    let items = bench.service.follow_events(None, Some(0)).take_ready();
    let phases: Vec<Phase> = items
        .iter()
        .map(|item| match item {
            crate::FeedItem::Event(event) => {
                assert_eq!((&event.owner, &event.sandbox), (&bench.owner, &made.id));
                event.phase
            }
            crate::FeedItem::Operator(_) | crate::FeedItem::Missed { .. } => panic!("{item:?}"),
        })
        .collect();
    assert_eq!(phases, [Phase::Starting, Phase::Running]);
}

#[tokio::test]
async fn everything_requested_is_bound_to_a_warm_sandbox() {
    let bench = TestBench::pooled(vec![pool("p", 1)], 20).await;
    let given = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&given);
    bench.backend.set_script(move |request| {
        match request {
            AgentRequest::Adopt { env, .. } => seen.lock().unwrap().push(format!("{env:?}")),
            AgentRequest::Start(start) => seen.lock().unwrap().push(format!("{:?}", start.command)),
            _ => {}
        }
        None
    });
    let mut request =
        CreateSandboxRequest { timeout: Some(Duration::from_secs(60)), notes: vec![7], ..with_entrypoint() };
    request.labels.insert("team".to_owned(), "a".to_owned());
    request.spec.env = BTreeMap::from([("TOKEN".to_owned(), "x".to_owned())]);
    request.spec.resources.memory = Some(Bytes::from_mib(64));
    let owner = Owner::from_valid_name("tenant");
    let made = bench.service.create_sandbox(&owner, request.clone()).await.unwrap();
    assert_eq!((made.pool.as_deref(), &made.owner, made.origin.as_str()), (Some("p"), &owner, "test"));
    assert_eq!((&made.labels, &made.spec, &made.notes), (&request.labels, &request.spec, &request.notes));
    assert_eq!(made.expires.unwrap().duration_since(made.created).unwrap(), Duration::from_secs(60));
    let memory = made.in_force.measures.iter().find(|measure| measure.name() == "memory");
    assert!(memory.is_some_and(|memory| memory.words() == "64Mi by fake"), "{:?}", made.in_force);
    let given = given.lock().unwrap().join(" ");
    assert!(given.contains("TOKEN") && given.contains("serve"), "{given}");
}

#[tokio::test]
async fn network_and_mounts_are_added_late_but_no_network_is_removed() {
    let mut connected = pool("connected", 1);
    connected.template.network = NetworkAccess::On;
    connected.template.image = "other".to_owned();
    let bench = TestBench::pooled(vec![pool("p", 1), connected], 20).await;
    let mut request = plain();
    request.spec.network = NetworkAccess::On;
    request.spec.mounts = vec![MountSpec {
        source: MountSource::Host("/srv".into()),
        target: "/data".to_owned(),
        access: MountAccess::ReadOnly,
        sub_path: None,
    }];
    let made = bench.make(request).await;
    assert_eq!(made.pool.as_deref(), Some("p"));
    for (name, value) in [
        ("network", "on, by fake"),
        ("mount /data", "directory of the host, read-only, nosuid, nodev"),
        ("pool", "p"),
    ] {
        let measure = made.in_force.measures.iter().find(|measure| measure.name() == name);
        assert!(measure.is_some_and(|found| found.words() == value), "{name}: {:?}", made.in_force);
    }
    let without = bench.make(of("connected")).await;
    assert_eq!((without.pool, without.spec.network), (None, NetworkAccess::Off));
    assert_eq!(bench.service.find_pool("connected").unwrap().cold, 1);
}

/// Checks whether a request for a network mode gets a warm sandbox that was made with the mode `there`, on a host that
/// has a network or has none.
async fn check_network(there: NetworkAccess, wanted: NetworkAccess, host: bool, expected: bool) {
    let (backend, state) = (FakeBackend::new(), tempfile::tempdir().unwrap());
    backend.network.store(host, Ordering::Relaxed);
    let mut warm = pool("p", 1);
    warm.template.network = there;
    let bench = TestBench::over(vec![warm], 20, backend, state).await;
    bench.until_warm("p", 1).await;
    let mut request = plain();
    request.spec.network = wanted;
    let made = bench.make(request).await;
    let words = format!("{there:?} and {wanted:?}, host {host}");
    assert_eq!((made.pool.is_some(), made.spec.network), (expected, wanted), "{words}");
    assert_eq!(bench.backend.was_asked_to("connect"), expected && there != wanted, "{words}");
}

#[tokio::test]
async fn warm_sandbox_is_taken_if_it_has_or_can_get_the_network() {
    use NetworkAccess::{Auto, Off, On};
    for host in [true, false] {
        for same in [Off, On, Auto] {
            check_network(same, same, host, true).await;
        }
        for there in [Off, On] {
            check_network(there, Auto, host, true).await;
        }
        for there in [Off, Auto] {
            check_network(there, On, host, host).await;
        }
        for there in [On, Auto] {
            check_network(there, Off, host, false).await;
        }
    }
}

#[tokio::test]
async fn sandbox_with_template_limits_is_not_resized() {
    let bench = TestBench::pooled(vec![pool("p", 1)], 20).await;
    bench.create().await;
    assert!(!bench.backend.was_asked_to("resize"));
}

#[tokio::test]
async fn burst_beyond_the_pool_gives_distinct_sandboxes() {
    let bench = TestBench::pooled(vec![pool("p", 5)], 100).await;
    let made = join_all((0..40).map(|_| bench.create())).await;
    let ids: BTreeSet<&SandboxId> = made.iter().map(|sandbox| &sandbox.id).collect();
    assert_eq!((ids.len(), bench.all().total), (40, 40));
    let warm = made.iter().filter(|sandbox| sandbox.pool.is_some()).count();
    assert!(warm >= 5, "only {warm} were taken");
    bench.until_warm("p", 5).await;
    let report = bench.service.find_pool("p").unwrap();
    assert_eq!((report.claims + report.cold, report.taken), (40, warm));
    assert_eq!(bench.backend.count(), 45);
}

#[tokio::test]
async fn pool_is_found_by_its_name_or_by_its_image() {
    let mut small = pool("small", 2);
    small.template.resources =
        ResourceLimits { memory: Some(Bytes::from_mib(64)), ..ResourceLimits::default() };
    small.template.image = "other".to_owned();
    let bench = TestBench::pooled(vec![pool("p", 2), small], 20).await;
    let image = |image: &str| CreateSandboxRequest { source: ImageSource::from_name(image), ..plain() };
    let by_alias = bench.make(image("alias of other")).await;
    assert_eq!(by_alias.pool.as_deref(), Some("small"));
    assert_eq!(
        by_alias.in_force.stand_in.as_deref(),
        Some("image `real other` stands in for `alias of other`")
    );
    assert_eq!(by_alias.spec.resources, ResourceLimits::default(), "the pool's limits are not a default");
    assert_eq!(bench.make(image("third")).await.pool, None);
    let mut guest = plain();
    guest.spec.guest.default_directory = "/home".to_owned();
    assert_eq!(bench.make(guest.clone()).await.pool, None);
    let named = bench.make(of("small")).await;
    assert_eq!((named.pool.as_deref(), named.spec.image.as_str()), (Some("small"), "other"));
    assert_eq!(named.spec.resources.memory, Some(Bytes::from_mib(64)));
    assert_eq!(named.in_force.stand_in, None, "the pool names the image itself");
    let error = bench.service.create_sandbox(&bench.owner, of("none")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoPool);
}

#[tokio::test]
async fn pools_of_one_image_are_told_apart_by_their_guests() {
    let mut other = pool("other-guest", 1);
    other.template.guest.default_user = "agent".to_owned();
    let guest = other.template.guest.clone();
    let bench = TestBench::pooled(vec![pool("p", 1), other], 20).await;
    let mut request = plain();
    request.spec.guest = guest;
    assert_eq!(bench.make(request).await.pool.as_deref(), Some("other-guest"));
    assert_eq!(bench.make(plain()).await.pool.as_deref(), Some("p"));
}

#[tokio::test]
async fn named_pool_that_does_not_fit_makes_a_new_sandbox() {
    let mut small = pool("small", 1);
    small.template.resources.memory = Some(Bytes::from_mib(64));
    small.template.image = "other".to_owned();
    let bench = TestBench::pooled(vec![small], 20).await;
    let mut guest = of("small");
    guest.spec.guest.default_directory = "/home".to_owned();
    let mut isolating = of("small");
    isolating.spec.isolated_sessions = domain::IsolatedSessions::On;
    for request in [guest, isolating] {
        let made = bench.make(request.clone()).await;
        assert_eq!((made.pool, made.spec.image.as_str()), (None, "other"));
        assert_eq!(made.spec.resources.memory, Some(Bytes::from_mib(64)), "the limits are the pool's");
        assert_eq!(
            (made.spec.guest, made.spec.isolated_sessions),
            (request.spec.guest, request.spec.isolated_sessions)
        );
    }
    let report = bench.service.find_pool("small").unwrap();
    assert_eq!((report.cold, report.claims, report.warm), (2, 0, 1));
}

#[tokio::test]
async fn empty_named_pool_makes_a_new_sandbox() {
    let mut empty = pool("p", 0);
    empty.template.image = "other".to_owned();
    let bench = TestBench::pooled(vec![empty], 20).await;
    let made = bench.make(of("p")).await;
    assert_eq!((made.pool, made.spec.image.as_str()), (None, "other"));
    assert_eq!(bench.service.find_pool("p").unwrap().cold, 1);
}

#[tokio::test]
async fn request_by_image_alias_is_counted_while_no_sandbox_is_warm() {
    let (backend, state) = (FakeBackend::new(), tempfile::tempdir().unwrap());
    backend.gate.forget_permits(usize::MAX >> 3);
    let mut other = pool("p", 1);
    other.template.image = "other".to_owned();
    let bench = TestBench::over(vec![other], 20, backend, state).await;
    while !bench.backend.was_asked_to("create asked") {
        a_moment().await;
    }
    let (service, owner) = (bench.service.clone(), bench.owner.clone());
    let mut request = plain();
    request.source = ImageSource::from_name("alias of other");
    let asking = tokio::spawn(async move { service.create_sandbox(&owner, request).await });
    while bench.all().total == 0 {
        a_moment().await;
    }
    assert_eq!(bench.service.find_pool("p").unwrap().cold, 1);
    bench.backend.gate.add_permits(100);
    assert_eq!(asking.await.unwrap().unwrap().pool, None);
}

#[tokio::test]
async fn sandbox_that_cannot_be_bound_is_removed_and_another_is_made() {
    let bench = TestBench::pooled(vec![pool("p", 1)], 20).await;
    let warm = bench.backend.ids().remove(0);
    bench.backend.fail("resize", 1);
    let mut request = plain();
    request.spec.resources.memory = Some(Bytes::from_mib(64));
    let made = bench.make(request).await;
    assert!(made.id != warm && made.pool.is_none());
    bench.until_warm("p", 1).await;
    assert!(!bench.backend.ids().contains(&warm), "a partly bound sandbox still exists");
    assert_eq!((bench.backend.count(), bench.service.find_pool("p").unwrap().cold), (2, 1));
}

#[tokio::test]
async fn warm_sandbox_with_a_used_agent_is_not_given_out() {
    let bench = TestBench::pooled(vec![pool("p", 1)], 20).await;
    bench.backend.set_script(|request| {
        let busy = wire::AgentReply::Fault(testkit::fake_backend::fault(wire::FaultKind::Busy));
        let busy = testkit::fake_backend::encoded(&[wire::Frame::from_message(&busy)]);
        matches!(request, AgentRequest::Adopt { .. }).then_some(busy)
    });
    assert_eq!(bench.create().await.pool, None);
}

#[tokio::test]
async fn warm_sandboxes_make_room_for_others_and_are_refilled() {
    let bench = TestBench::pooled(vec![pool("p", 4)], 4).await;
    let mut other = plain();
    other.source = ImageSource::from_name("other");
    let made = join_all((0..4).map(|_| bench.make(other.clone()))).await;
    assert_eq!((bench.warm("p"), bench.backend.count()), (0, 4));
    let error = bench.service.create_sandbox(&bench.owner, other).await.unwrap_err();
    assert!(matches!(error, ServiceError::TooManySandboxes { .. }), "{error:?}");
    bench.sandbox(&made[0].id).destroy().await.unwrap();
    bench.until_warm("p", 1).await;
    bench.until_population(4).await;
}

#[tokio::test]
async fn burst_up_to_the_hard_limit_is_never_refused_because_of_warm_sandboxes() {
    let bench = TestBench::pooled(vec![pool("p", 10)], 12).await;
    for _ in 0..5 {
        let made = join_all((0..12).map(|_| bench.create())).await;
        assert_eq!(bench.backend.count(), 12);
        let destroy = async |sandbox: &Sandbox| bench.sandbox(&sandbox.id).destroy().await.unwrap();
        join_all(made.iter().map(destroy)).await;
    }
    bench.until_warm("p", 10).await;
    bench.until_population(10).await;
}

#[tokio::test]
async fn request_over_quota_leaves_the_warm_sandbox_in_its_pool() {
    let (backend, state) = (FakeBackend::new(), tempfile::tempdir().unwrap());
    let quotas = operators_quota(OwnerQuota { sandboxes: Some(1), ..OwnerQuota::default() });
    let config = ServiceConfig { pools: vec![pool("p", 2)], quotas, ..config(&state) };
    let bench = TestBench::configured(config, backend, state).await;
    bench.until_warm("p", 2).await;
    bench.create().await;
    bench.until_warm("p", 2).await;
    let before: BTreeSet<_> = bench.backend.ids().into_iter().collect();
    let error = bench.service.create_sandbox(&bench.owner, plain()).await.unwrap_err();
    assert!(matches!(error, ServiceError::OverQuota { .. }), "{error:?}");
    let after: BTreeSet<_> = bench.backend.ids().into_iter().collect();
    assert_eq!((bench.warm("p"), after), (2, before));
}

#[tokio::test]
async fn key_leads_to_a_sandbox_that_was_warm() {
    let bench = TestBench::pooled(vec![pool("p", 2)], 20).await;
    let key = SandboxKey::new(&bench.owner, "test", "a").unwrap();
    let first = bench.service.acquire(&key, plain()).await.unwrap();
    assert!(first.fresh && first.sandbox.pool.is_some());
    let all = join_all((0..10).map(|_| bench.service.acquire(&key, plain()))).await;
    assert!(all.iter().all(|one| one.as_ref().unwrap().sandbox.id == first.sandbox.id));
    bench.until_warm("p", 2).await;
    let (backend, state) = bench.crash().await;
    let bench = TestBench::over(vec![pool("p", 2)], 20, backend, state).await;
    let again = bench.service.acquire(&key, plain()).await.unwrap();
    assert_eq!((again.fresh, again.sandbox.id), (false, first.sandbox.id));
}

#[tokio::test]
async fn warm_sandboxes_are_adopted_after_a_crash() {
    let bench = TestBench::pooled(vec![pool("p", 3)], 20).await;
    let taken = bench.create().await;
    bench.until_warm("p", 3).await;
    let before: BTreeSet<_> = bench.backend.ids().into_iter().collect();
    let (backend, state) = bench.crash().await;
    let made = backend.times_asked_to("create");
    let bench = TestBench::over(vec![pool("p", 3)], 20, backend, state).await;
    assert_eq!((bench.warm("p"), bench.backend.times_asked_to("create")), (3, made));
    assert_eq!(bench.service.find_pool("p").unwrap().taken, 1);
    assert_eq!(bench.sandbox(&taken.id).current_state().pool.as_deref(), Some("p"));
    let after: BTreeSet<_> = bench.backend.ids().into_iter().collect();
    assert_eq!(after, before);
    bench.create().await;
    assert_eq!(bench.all().total, 2);
}

#[tokio::test]
async fn warm_sandboxes_of_another_template_or_no_pool_are_removed() {
    let mut changed = pool("p", 2);
    changed.template.resources.memory = Some(Bytes::from_mib(64));
    for pools in [vec![changed], Vec::new()] {
        let bench = TestBench::pooled(vec![pool("p", 3)], 20).await;
        let before: BTreeSet<_> = bench.backend.ids().into_iter().collect();
        let (backend, state) = bench.crash().await;
        let expected = pools.iter().map(|pool| pool.capacity.level).sum();
        let bench = TestBench::over(pools, 20, backend, state).await;
        bench.until_population(expected).await;
        assert!(bench.backend.ids().iter().all(|id| !before.contains(id)));
    }
}

#[tokio::test]
async fn sandbox_of_a_claim_cut_off_by_a_crash_is_removed() {
    let bench = TestBench::pooled(vec![pool("p", 1)], 20).await;
    let warm = bench.backend.ids().remove(0);
    bench.backend.resizes.forget_permits(usize::MAX >> 3);
    let (service, owner) = (bench.service.clone(), bench.owner.clone());
    let mut request = plain();
    request.spec.resources.memory = Some(Bytes::from_mib(64));
    let asking = tokio::spawn(async move { service.create_sandbox(&owner, request).await });
    while !bench.backend.was_asked_to("resize") {
        a_moment().await;
    }
    // The server dies here: the row has an owner, and not everything is bound.
    let copy = snapshot_of(&bench);
    bench.backend.resizes.add_permits(100);
    assert_eq!(asking.await.unwrap().unwrap().id, warm);
    let (backend, _state) = bench.crash().await;
    let bench = TestBench::over(vec![pool("p", 1)], 20, backend, copy).await;
    assert!(!bench.backend.ids().contains(&warm), "it is unknown what was bound to it");
    assert_eq!(bench.all().total, 0);
    bench.until_warm("p", 1).await;
    bench.until_population(1).await;
}

#[tokio::test]
async fn cancelled_claim_leaves_nothing() {
    let bench = TestBench::pooled(vec![pool("p", 1)], 20).await;
    bench.backend.resizes.forget_permits(usize::MAX >> 3);
    let (service, owner) = (bench.service.clone(), bench.owner.clone());
    let mut request = plain();
    request.spec.resources.memory = Some(Bytes::from_mib(64));
    let asking = tokio::spawn(async move { service.create_sandbox(&owner, request).await });
    while !bench.backend.was_asked_to("resize") {
        a_moment().await;
    }
    asking.abort();
    bench.backend.resizes.add_permits(100);
    bench.until_count(0).await;
    bench.until_warm("p", 1).await;
    bench.until_population(1).await;
}

#[tokio::test]
async fn dead_warm_sandbox_is_replaced() {
    let bench = TestBench::pooled(vec![pool("p", 2)], 20).await;
    let dead = bench.backend.ids().remove(0);
    bench.backend.kill(&dead, EndCause::AgentDied);
    while bench.backend.ids().contains(&dead) {
        a_moment().await;
    }
    bench.until_warm("p", 2).await;
    bench.until_population(2).await;
}

#[tokio::test(start_paused = true)]
async fn pool_that_cannot_be_filled_reports_it_and_retries() {
    let (backend, state) = (FakeBackend::new(), tempfile::tempdir().unwrap());
    backend.fail("create", 3);
    let bench = TestBench::over(vec![pool("p", 1)], 20, backend, state).await;
    while bench.service.find_pool("p").unwrap().trouble.is_none() {
        a_moment().await;
    }
    assert_eq!(bench.service.recent_errors(None)[0].operation, "fill pool");
    assert_eq!(bench.service.recent_errors(Some(&Owner::from_valid_name("tenant"))).len(), 0);
    while bench.warm("p") == 0 {
        a_moment().await;
    }
    assert!(bench.service.find_pool("p").unwrap().trouble.is_none());
    assert_eq!(bench.backend.count(), 1);
}

#[tokio::test(start_paused = true)]
async fn unremovable_warm_sandbox_keeps_its_room_until_removed() {
    let bench = TestBench::pooled(vec![pool("p", 2)], 2).await;
    bench.backend.fail("destroy", 3);
    let dead = bench.backend.ids().remove(0);
    bench.backend.kill(&dead, EndCause::AgentDied);
    bench.until_warm("p", 1).await;
    while bench.backend.ids().contains(&dead) {
        a_moment().await;
    }
    bench.until_warm("p", 2).await;
}

#[tokio::test]
async fn client_pools_are_stored_and_changeable_and_configured_ones_are_not() {
    let bench = TestBench::pooled(vec![pool("fixed", 1)], 20).await;
    let service = &bench.service;
    let made = service.create_pool(pool("own", 2)).await.unwrap();
    assert_eq!((made.source, made.pool.name.as_str()), (PoolSource::Client, "own"));
    bench.until_warm("own", 2).await;
    for name in ["own", "fixed"] {
        let error = service.create_pool(pool(name, 1)).await.unwrap_err();
        assert!(matches!(error, ServiceError::PoolExists(_)), "{error:?}");
    }
    let wrong = service.create_pool(pool("A b", 1)).await.unwrap_err();
    assert_eq!(wrong.kind(), ErrorKind::Invalid);
    let five = PoolCapacity::with_level(5);
    assert_eq!(service.set_pool_capacity("fixed", five).await.unwrap_err().kind(), ErrorKind::Taken);
    assert_eq!(service.remove_pool("fixed").await.unwrap_err().kind(), ErrorKind::Taken);
    assert_eq!(service.set_pool_capacity("none", five).await.unwrap_err().kind(), ErrorKind::NoPool);
    service.set_pool_capacity("own", five).await.unwrap();
    bench.until_warm("own", 5).await;
    service.set_pool_capacity("own", PoolCapacity::with_level(1)).await.unwrap();
    bench.until_warm("own", 1).await;
    let (backend, state) = bench.crash().await;
    let bench = TestBench::over(Vec::new(), 20, backend, state).await;
    assert_eq!(bench.service.list_pools().len(), 1);
    assert_eq!((bench.warm("own"), bench.service.find_pool("own").unwrap().pool.capacity.level), (1, 1));
    bench.service.remove_pool("own").await.unwrap();
    assert_eq!((bench.service.list_pools().len(), bench.backend.count()), (0, 0));
    let (backend, state) = bench.crash().await;
    assert_eq!(TestBench::with(backend, state, Clock::from_host()).await.service.list_pools().len(), 0);
}

#[tokio::test]
async fn pool_maximum_counts_taken_sandboxes() {
    let mut bounded = pool("p", 2);
    bounded.capacity.most = 3;
    let bench = TestBench::pooled(vec![bounded], 20).await;
    let made = join_all((0..2).map(|_| bench.create())).await;
    bench.until_warm("p", 1).await;
    let cold = bench.create().await;
    bench.sandbox(&made[0].id).destroy().await.unwrap();
    bench.sandbox(&cold.id).destroy().await.unwrap();
    let report = bench.service.find_pool("p").unwrap();
    assert!(report.warm + report.taken <= 3, "{report:?}");
    bench.sandbox(&made[1].id).destroy().await.unwrap();
    bench.until_warm("p", 2).await;
    bench.until_population(2).await;
}

#[tokio::test]
async fn orderly_shutdown_removes_warm_sandboxes() {
    let bench = TestBench::pooled(vec![pool("p", 3)], 20).await;
    let taken = bench.create().await;
    bench.service.drain_pools().await;
    bench.service.stop().await;
    assert_eq!(bench.backend.ids(), [taken.id]);
}

#[tokio::test]
async fn create_does_not_wait_for_the_image_of_a_pool() {
    let (backend, state) = (FakeBackend::new(), tempfile::tempdir().unwrap());
    let mut absent = pool("p", 2);
    absent.template.image = ABSENT_IMAGE.to_owned();
    let bench = TestBench::over(vec![absent], 1, backend, state).await;
    while !bench.backend.was_asked_to("pull") {
        a_moment().await;
    }
    bench.create().await;
    let error = bench.service.create_sandbox(&bench.owner, plain()).await.unwrap_err();
    assert!(matches!(error, ServiceError::TooManySandboxes { .. }), "{error:?}");
}

#[tokio::test]
async fn warm_sandbox_returned_to_a_closed_pool_is_removed() {
    let bench = TestBench::pooled(Vec::new(), 20).await;
    bench.service.create_pool(pool("p", 1)).await.unwrap();
    bench.until_warm("p", 1).await;
    let taken = bench.service.0.reserve_warm(&of("p")).await.unwrap();
    bench.service.remove_pool("p").await.unwrap();
    drop(taken);
    bench.until_population(0).await;
}

#[tokio::test]
async fn dead_sandbox_is_evicted_before_a_warm_one() {
    let bench = TestBench::pooled(vec![pool("p", 1)], 2).await;
    let mut request = plain();
    request.source = ImageSource::from_name("another");
    let dead = bench.make(request.clone()).await;
    bench.backend.kill(&dead.id, EndCause::AgentDied);
    bench.until(&dead, |phase| matches!(phase, Phase::Failed(_))).await;
    bench.make(request).await;
    assert!(bench.service.sandbox(&bench.owner, &dead.id).is_err());
    assert_eq!(bench.warm("p"), 1);
}
