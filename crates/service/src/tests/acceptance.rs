//! Facts about the core that pools and session managers of other protocols rely on. A number `n…` is that of the AIO
//! acceptance list; `box` is the chapter on get-or-create of the Box protocol. More of them are in `acquire` and
//! `expiry`.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use domain::{EndCause, Phase, SandboxId};
use futures_util::future::join_all;

use super::restart::snapshot_of;
use super::{TestBench, config, plain};
use crate::clock::Clock;
use crate::{CreateSandboxRequest, ErrorKind, Outcome, Service, ServiceConfig, ServiceError};
use testkit::fake_backend::FakeBackend;

/// Blocks creates until permits are added.
fn shut(backend: &FakeBackend) {
    backend.gate.forget_permits(usize::MAX >> 3);
}

async fn asked(backend: &FakeBackend, call: &str, times: usize) {
    while backend.times_asked_to(call) < times {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn n47_shutdown_removes_everything_once_and_continues_after_an_error() {
    let bench = TestBench::new().await;
    for name in ["a", "b", "c"] {
        bench.acquire(name).await;
    }
    bench.create().await;
    bench.backend.fail("destroy", 1);
    assert_eq!(bench.service.remove_all_sandboxes().await, 1);
    assert_eq!((bench.backend.times_asked_to("destroy"), bench.backend.count()), (4, 1));
    assert_eq!(bench.service.remove_all_sandboxes().await, 0);
    assert_eq!(
        (bench.backend.count(), bench.all().total, bench.service.0.lifecycle.names.count()),
        (0, 0, 0)
    );
}

#[tokio::test]
async fn n48_release_succeeds_even_if_the_sandbox_is_gone() {
    let bench = TestBench::new().await;
    let made = bench.acquire("a").await.sandbox;
    bench.backend.remove_sandbox(&made.id);
    assert_eq!(bench.release("a"), Outcome::Done);
}

#[tokio::test]
async fn n49_destroy_needs_no_answer_from_the_agent() {
    let bench = TestBench::new().await;
    let made = bench.create().await;
    bench.backend.set_script(|_| Some(Vec::new()));
    bench.sandbox(&made.id).destroy().await.unwrap();
    assert_eq!(bench.backend.count(), 0);
}

#[tokio::test]
async fn n52_acquire_asks_a_living_agent_once() {
    let bench = TestBench::new().await;
    let made = bench.acquire("a").await.sandbox;
    let asked = bench.backend.times_asked_to("dial");
    assert_eq!(bench.acquire("a").await.sandbox.id, made.id);
    assert_eq!(bench.backend.times_asked_to("dial"), asked + 1);
}

#[tokio::test]
async fn n53_get_shows_dead_sandboxes_and_changes_nothing() {
    let bench = TestBench::new().await;
    let made = bench.acquire("a").await.sandbox;
    bench.backend.kill(&made.id, EndCause::AgentDied);
    bench.until(&made, |phase| matches!(phase, Phase::Failed(_))).await;
    let asked = bench.backend.times_asked_to("dial");
    for _ in 0..2 {
        let shown = bench.sandbox(&made.id).current_state();
        assert_eq!(shown.phase, Phase::Failed(EndCause::AgentDied));
        assert_eq!(
            bench.service.find_by_key(&bench.key("a")).unwrap().id,
            made.id,
            "its key still leads to it"
        );
    }
    assert_eq!(bench.backend.times_asked_to("dial"), asked);
}

#[tokio::test]
async fn n50_n56_n57_get_asks_neither_backend_nor_agent() {
    let bench = TestBench::new().await;
    let made = bench.create().await;
    bench.backend.remove_sandbox(&made.id);
    let asked = bench.backend.times_asked_to("dial");
    assert_eq!(bench.sandbox(&made.id).current_state().phase, Phase::Running);
    let unknown = SandboxId::from_entropy([9; 20]);
    let error = bench.service.sandbox(&bench.owner, &unknown).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert_eq!(bench.backend.times_asked_to("dial"), asked);
}

#[tokio::test]
async fn n51_get_does_not_use_the_store() {
    let bench = TestBench::new().await;
    let made = bench.acquire("a").await.sandbox;
    let store = rusqlite::Connection::open(bench.state.path().join("coracle.db")).unwrap();
    store.execute_batch("DROP TABLE sandboxes").unwrap();
    bench.service.create_sandbox(&bench.owner, plain()).await.expect_err("the store cannot be used");
    assert_eq!(bench.sandbox(&made.id).current_state().phase, Phase::Running);
    assert_eq!(bench.service.find_by_key(&bench.key("a")).unwrap().id, made.id);
}

#[tokio::test]
async fn n55_nothing_leads_to_a_dead_sandbox_any_more() {
    let bench = TestBench::new().await;
    let dead = bench.acquire("a").await.sandbox;
    bench.backend.remove_sandbox(&dead.id);
    let new = bench.acquire("a").await.sandbox;
    bench.wait_until_gone(&dead).await;
    assert_eq!(bench.service.find_by_key(&bench.key("a")).unwrap().id, new.id);
    assert_eq!((bench.service.0.lifecycle.names.count(), bench.all().total), (1, 1));
    assert!(bench.service.sandbox(&bench.owner, &dead.id).is_err());
}

#[tokio::test]
async fn n58_probing_one_agent_delays_no_other_request() {
    let bench = TestBench::new().await;
    let slow = bench.acquire("slow").await.sandbox;
    let pings = Arc::new(AtomicUsize::new(0));
    let seen = Arc::clone(&pings);
    // The first request waits; all others are answered.
    bench.backend.set_script(move |request| {
        let first = matches!(request, wire::AgentRequest::Ping) && seen.fetch_add(1, Ordering::SeqCst) == 0;
        first.then(Vec::new)
    });
    let (service, key) = (bench.service.clone(), bench.key("slow"));
    let waiting = tokio::spawn(async move { service.acquire(&key, plain()).await });
    while pings.load(Ordering::SeqCst) == 0 {
        tokio::task::yield_now().await;
    }
    assert!(bench.acquire("other").await.fresh);
    assert_eq!(bench.acquire("slow").await.sandbox.id, slow.id, "not even for the same key");
    assert!(bench.service.sandbox(&bench.owner, &slow.id).is_ok() && bench.all().total == 2);
    assert!(!waiting.is_finished());
    assert_eq!(waiting.await.unwrap().unwrap().sandbox.id, slow.id);
}

#[tokio::test]
async fn n63_late_death_notice_does_not_affect_the_successor() {
    let bench = TestBench::new().await;
    let dead = bench.acquire("a").await.sandbox;
    bench.backend.remove_sandbox(&dead.id);
    let new = bench.acquire("a").await.sandbox;
    bench.wait_until_gone(&dead).await;
    bench.backend.deaths.0.send(backend::SandboxDeath { id: dead.id, cause: EndCause::AgentDied }).unwrap();
    let other = bench.create().await;
    bench.backend.kill(&other.id, EndCause::AgentDied);
    bench.until(&other, |phase| matches!(phase, Phase::Failed(_))).await;
    assert_eq!(bench.sandbox(&new.id).current_state().phase, Phase::Running);
    assert_eq!(bench.acquire("a").await.sandbox.id, new.id);
}

#[tokio::test]
async fn n64_a_parked_sandbox_that_died_is_not_handed_out() {
    let bench = TestBench::new().await;
    let dead = bench.acquire("a").await.sandbox;
    bench.release("a");
    bench.backend.remove_sandbox(&dead.id);
    let new = bench.acquire("a").await;
    assert!(new.fresh && new.sandbox.id != dead.id);
}

#[tokio::test]
async fn n65_keys_are_compared_whole() {
    let bench = TestBench::new().await;
    let names: Vec<String> = (0..10).map(|n| format!("{}{n}", "x".repeat(100))).collect();
    let mut ids: Vec<SandboxId> = join_all(names.iter().map(|name| bench.acquire(name)))
        .await
        .into_iter()
        .map(|it| it.sandbox.id)
        .collect();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), names.len());
}

#[tokio::test]
async fn n82_failed_listing_is_retried_and_an_empty_one_changes_nothing() {
    let bench = TestBench::new().await.restarted().await;
    assert_eq!((bench.all().total, bench.backend.was_asked_to("destroy")), (0, false));
    let made = bench.acquire("a").await.sandbox;
    let (backend, state) = bench.crash().await;
    backend.fail("list", 1);
    let bench = TestBench::with(backend, state, Clock::from_host()).await;
    assert_eq!(bench.acquire("a").await.sandbox.id, made.id);
    assert_eq!(bench.backend.count(), 1);
}

#[tokio::test]
async fn server_that_cannot_list_sandboxes_does_not_start_and_loses_nothing() {
    let bench = TestBench::new().await;
    let made = bench.acquire("a").await.sandbox;
    let (backend, state) = bench.crash().await;
    backend.fail("list", 1000);
    assert!(Service::start_with_clock(config(&state), backend.clone(), Clock::from_host()).await.is_err());
    backend.fail("list", 0);
    let bench = TestBench::with(backend, state, Clock::from_host()).await;
    assert_eq!(bench.acquire("a").await.sandbox.id, made.id);
    assert_eq!(bench.backend.count(), 1);
}

#[tokio::test]
async fn n83_n84_every_living_sandbox_is_adopted_once_whatever_its_timeouts() {
    let bench = TestBench::new().await;
    let mut ids = Vec::new();
    for idle_timeout in [None, Some(Duration::from_secs(3600))] {
        let request = CreateSandboxRequest { idle_timeout, ..plain() };
        ids.push(bench.service.create_sandbox(&bench.owner, request).await.unwrap().id);
    }
    ids.push(bench.acquire("a").await.sandbox.id);
    let bench = bench.restarted().await.restarted().await;
    let mut found: Vec<_> = bench.all().items.into_iter().map(|sandbox| sandbox.id).collect();
    found.sort_unstable();
    ids.sort_unstable();
    assert_eq!((found, bench.backend.count()), (ids.clone(), ids.len()));
}

#[tokio::test]
async fn n95_key_is_free_after_its_sandbox_was_evicted() {
    let bench = TestBench::limited(1, 10).await;
    let old = bench.acquire("a").await.sandbox;
    bench.release("a");
    assert!(bench.service.0.evict_parked(None, None).await);
    assert!(bench.service.sandbox(&bench.owner, &old.id).is_err());
    assert_eq!((bench.service.0.lifecycle.names.count(), bench.backend.count()), (0, 0));
    let new = bench.acquire("a").await;
    assert!(new.fresh && new.sandbox.phase == Phase::Running);
}

#[tokio::test]
async fn n98_acquired_again_sandbox_is_no_longer_parked() {
    let bench = TestBench::limited(1, 10).await;
    let made = bench.acquire("a").await.sandbox;
    bench.release("a");
    assert_eq!(bench.acquire("a").await.sandbox.id, made.id);
    assert!(!bench.service.0.evict_parked(None, None).await);
    assert_eq!(bench.sandbox(&made.id).current_state().phase, Phase::Running);
}

#[tokio::test]
async fn n100_unresponsive_sandbox_is_removed_before_its_key_is_given_out() {
    let bench = TestBench::new().await;
    let pings = AtomicUsize::new(0);
    bench.backend.set_script(move |request| {
        let first = matches!(request, wire::AgentRequest::Ping) && pings.fetch_add(1, Ordering::SeqCst) == 0;
        first.then(Vec::new)
    });
    let acquire = || {
        let (service, key) = (bench.service.clone(), bench.key("a"));
        tokio::spawn(async move { service.acquire(&key, plain()).await })
    };
    let asking = acquire();
    asked(&bench.backend, "dial", 1).await;
    let unready = bench.all().items.remove(0);
    assert!(
        bench.service.find_by_key(&bench.key("a")).is_none(),
        "it was handed out before its agent answered"
    );
    let next = acquire();
    // Only the agent is waited for now, so the clock may be paused.
    tokio::time::pause();
    asking.await.unwrap().unwrap_err();
    tokio::time::resume();
    let made = next.await.unwrap().unwrap();
    assert!(made.fresh && made.sandbox.id != unready.id);
    let calls = bench.backend.calls();
    let position = |call: &str| calls.iter().position(|made| *made == call).unwrap();
    let second = calls.iter().skip(position("create") + 1).position(|call| *call == "create asked").unwrap();
    assert!(
        position("destroy") < position("create") + 1 + second,
        "two sandboxes existed at once: {calls:?}"
    );
    bench.until_count(1).await;
    assert_eq!((bench.backend.count(), bench.service.0.lifecycle.names.count()), (1, 1));
}

#[tokio::test]
async fn n100_next_server_does_not_adopt_a_sandbox_being_removed() {
    let bench = TestBench::new().await;
    bench.backend.set_script(|request| matches!(request, wire::AgentRequest::Ping).then(Vec::new));
    bench.backend.fail("destroy", 1000);
    let (service, key) = (bench.service.clone(), bench.key("a"));
    let asking = tokio::spawn(async move { service.acquire(&key, plain()).await });
    asked(&bench.backend, "dial", 1).await;
    tokio::time::pause();
    asking.await.unwrap().unwrap_err();
    tokio::time::resume();
    bench.backend.set_script(|_| None);
    let (backend, state) = bench.crash().await;
    assert_eq!(backend.count(), 1, "it could not be removed");
    backend.fail("destroy", 0);
    let bench = TestBench::with(backend, state, Clock::from_host()).await;
    assert_eq!((bench.all().total, bench.backend.count()), (0, 0));
    assert!(bench.service.find_by_key(&bench.key("a")).is_none());
}

#[tokio::test]
async fn n100_sandbox_that_is_not_being_removed_is_adopted() {
    let bench = TestBench::new().await;
    shut(&bench.backend);
    let (service, key) = (bench.service.clone(), bench.key("a"));
    let asking = tokio::spawn(async move { service.acquire(&key, plain()).await });
    asked(&bench.backend, "create asked", 1).await;
    // The server dies when the sandbox exists but is not yet recorded as running.
    let copy = snapshot_of(&bench);
    bench.backend.gate.add_permits(100);
    let made = asking.await.unwrap().unwrap().sandbox;
    let (backend, _state) = bench.crash().await;
    let bench = TestBench::with(backend, copy, Clock::from_host()).await;
    let found = bench.acquire("a").await;
    assert_eq!((found.sandbox.id, found.fresh), (made.id, false));
}

#[tokio::test]
async fn box_starts_of_different_keys_run_at_once() {
    let bench = TestBench::new().await;
    shut(&bench.backend);
    let acquire = |name: &str| {
        let (service, key) = (bench.service.clone(), bench.key(name));
        tokio::spawn(async move { service.acquire(&key, plain()).await })
    };
    let both = [acquire("a"), acquire("b")];
    asked(&bench.backend, "create asked", 2).await;
    bench.backend.gate.add_permits(2);
    for one in both {
        assert!(one.await.unwrap().unwrap().fresh);
    }
}

#[tokio::test]
async fn box_delete_waits_for_a_start_in_progress() {
    let bench = TestBench::new().await;
    shut(&bench.backend);
    let (service, key) = (bench.service.clone(), bench.key("a"));
    let starting = tokio::spawn(async move { service.acquire(&key, plain()).await });
    asked(&bench.backend, "create asked", 1).await;
    let id = bench.all().items[0].id.clone();
    let (service, owner) = (bench.service.clone(), bench.owner.clone());
    let deleting = tokio::spawn(async move { service.sandbox(&owner, &id).unwrap().destroy().await });
    bench.backend.gate.add_permits(1);
    deleting.await.unwrap().unwrap();
    starting.await.unwrap().unwrap();
    assert_eq!((bench.backend.count(), bench.all().total), (0, 0));
    assert!(bench.service.find_by_key(&bench.key("a")).is_none());
}

#[tokio::test]
async fn box_starting_and_stopping_sandboxes_count() {
    let (backend, state) = (FakeBackend::new(), tempfile::tempdir().unwrap());
    let bench = TestBench::configured(ServiceConfig { sandboxes: 2, ..config(&state) }, backend, state).await;
    let closing = bench.create().await;
    bench.backend.fail("destroy", 1);
    bench.sandbox(&closing.id).destroy().await.unwrap_err();
    shut(&bench.backend);
    let (service, key) = (bench.service.clone(), bench.key("a"));
    let starting = tokio::spawn(async move { service.acquire(&key, plain()).await });
    asked(&bench.backend, "create asked", 2).await;
    let error = bench.service.acquire(&bench.key("b"), plain()).await.unwrap_err();
    assert!(matches!(error, ServiceError::TooManySandboxes { limit: 2 }), "{error:?}");
    bench.backend.gate.add_permits(1);
    starting.await.unwrap().unwrap();
}

#[tokio::test]
async fn box_acquire_returns_the_original_request_of_the_sandbox() {
    let bench = TestBench::new().await;
    let request = CreateSandboxRequest { notes: b"as it was made".to_vec(), ..plain() };
    bench.service.acquire(&bench.key("a"), request.clone()).await.unwrap();
    let mut other = CreateSandboxRequest { notes: b"as it is wanted now".to_vec(), ..request.clone() };
    other.source = crate::ImageSource::from_name("another");
    let found = bench.service.acquire(&bench.key("a"), other).await.unwrap();
    assert_eq!((found.fresh, found.sandbox.notes, found.sandbox.spec), (false, request.notes, request.spec));
}

#[tokio::test]
async fn box_sandbox_that_died_meanwhile_is_removed_and_made_again() {
    let bench = TestBench::new().await;
    let first = bench.service.acquire(&bench.key("a"), super::revival::replacing()).await.unwrap().sandbox;
    bench.backend.kill(&first.id, EndCause::Oom);
    bench.until(&first, |phase| phase == Phase::Failed(EndCause::Oom)).await;
    let next = bench.acquire("a").await;
    assert!(next.fresh && next.sandbox.id != first.id);
}

#[tokio::test]
async fn backend_without_optional_traits_refuses_their_requests_at_once() {
    let backend = FakeBackend::new();
    backend.optional_traits.store(false, Ordering::Relaxed);
    let bench = TestBench::with(backend, tempfile::tempdir().unwrap(), Clock::from_host()).await;
    let made = bench.create().await;
    let name = domain::VolumeName::parse("data").unwrap();
    let volume = bench.service.create_volume(&bench.owner, &name, None).await.map(drop);
    let snapshot = bench.sandbox(&made.id).snapshots().take_snapshot(None).await.map(drop);
    let mount = domain::MountSpec::from_host("/srv", "/srv", domain::MountAccess::ReadOnly);
    let attached = bench.sandbox(&made.id).attach_mounts(vec![mount]).await.map(drop);
    let images = bench.service.list_images().await.map(drop);
    for refused in [volume, snapshot, attached, images] {
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::Unsupported);
    }
    assert_eq!(bench.service.resolve_image("host").await.unwrap().name, "host");
    let optional = ["make volume asked", "snapshot asked", "attach", "host software"];
    assert!(!optional.iter().any(|call| bench.backend.was_asked_to(call)), "{:?}", bench.backend.calls());
}
