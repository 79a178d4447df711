//! Acquire by key. The numbers refer to the acceptance list of the protocols that need it.

use std::sync::Arc;
use std::time::Duration;

use backend::FoundCondition;
use domain::{EndCause, Owner, Phase, SandboxKey};
use futures_util::future::join_all;
use tempfile::TempDir;
use tokio::task::JoinHandle;
use wire::process::{ExitReason, ProcessStatus};

use super::revival::replacing;
use super::{TestBench, config, operators_quota, plain};
use crate::clock::Clock;
use crate::sandboxes::detached_creates::MAX_DETACHED_PER_OWNER;
use crate::{AcquiredSandbox, ErrorKind, KeyLiveness, Outcome, Service, ServiceConfig, ServiceError};
use testkit::fake_backend::{FakeBackend, ended, running};

impl TestBench {
    /// A service with these limits; released sandboxes are parked, others after an hour.
    pub(super) async fn limited(soft: usize, hard: usize) -> Self {
        let (backend, state) = (FakeBackend::new(), tempfile::tempdir().unwrap());
        let park_after = Duration::from_secs(3600);
        let config =
            ServiceConfig { sandboxes: hard, soft_sandboxes: Some(soft), park_after, ..config(&state) };
        Self::configured(config, backend, state).await
    }

    pub(super) async fn configured(config: ServiceConfig, backend: Arc<FakeBackend>, state: TempDir) -> Self {
        let service = Service::start_with_clock(config, backend.clone(), Clock::from_host()).await.unwrap();
        Self { service, backend, state, owner: Owner::operator() }
    }

    pub(super) fn key(&self, name: &str) -> SandboxKey {
        SandboxKey::new(&self.owner, "test", name).unwrap()
    }

    pub(super) async fn acquire(&self, name: &str) -> AcquiredSandbox {
        self.service.acquire(&self.key(name), plain()).await.unwrap()
    }

    /// A task that asks for the sandbox of a key and can be aborted.
    fn asking(&self, name: &str) -> JoinHandle<Result<AcquiredSandbox, ServiceError>> {
        let (service, key) = (self.service.clone(), self.key(name));
        tokio::spawn(async move { service.acquire(&key, plain()).await })
    }

    pub(super) fn release(&self, name: &str) -> Outcome {
        self.service.release_key(&self.key(name))
    }

    pub(super) async fn restarted(self) -> Self {
        let (backend, state) = self.crash().await;
        Self::with(backend, state, Clock::from_host()).await
    }
}

#[tokio::test]
async fn liveness_of_a_key_is_that_of_its_agent() {
    let bench = TestBench::new().await;
    let key = bench.key("a");
    let probe = || bench.service.probe_key(&key);
    assert_eq!(probe().await, KeyLiveness::Absent);
    assert_eq!(bench.backend.count(), 0, "nothing is created");
    let id = bench.acquire("a").await.sandbox.id;
    assert_eq!(probe().await, KeyLiveness::Alive);
    // An agent that answers nothing; the turn of the key is held by a caller that waits for it.
    bench.backend.set_script(|request| matches!(request, wire::AgentRequest::Ping).then(Vec::new));
    let slot = bench.service.0.lifecycle.names.guard_key(&key);
    let turn = slot.turn.lock().await;
    assert_eq!(probe().await, KeyLiveness::NotAlive);
    drop(turn);
    bench.backend.set_script(|_| None);
    assert_eq!(bench.service.find_by_key(&key).unwrap().id, id);
    assert_eq!(probe().await, KeyLiveness::Alive);
}

#[tokio::test]
async fn same_key_leads_to_the_same_sandbox() {
    let bench = TestBench::new().await;
    let first = bench.acquire("a").await;
    let again = bench.acquire("a").await;
    assert_eq!((first.fresh, again.fresh), (true, false));
    assert_eq!(first.sandbox.id, again.sandbox.id);
    assert_ne!(bench.acquire("b").await.sandbox.id, first.sandbox.id);
    assert_eq!(bench.service.find_by_key(&bench.key("a")).unwrap().id, first.sandbox.id);
}

#[tokio::test]
async fn n66_same_name_of_another_owner_or_space_is_another_key() {
    let bench = TestBench::new().await;
    let ours = bench.acquire("a").await.sandbox;
    let stranger = Owner::from_valid_name("stranger");
    for key in [
        SandboxKey::new(&stranger, "test", "a").unwrap(),
        SandboxKey::new(&bench.owner, "other", "a").unwrap(),
    ] {
        let other = bench.service.acquire(&key, plain()).await.unwrap();
        assert!(other.fresh && other.sandbox.id != ours.id);
    }
    assert_eq!(bench.acquire("a").await.sandbox.id, ours.id);
}

#[tokio::test]
async fn concurrent_acquires_make_one_sandbox() {
    let bench = TestBench::new().await;
    let all = join_all((0..50).map(|_| bench.acquire("a"))).await;
    assert_eq!(all.iter().filter(|acquired| acquired.fresh).count(), 1);
    assert!(all.iter().all(|acquired| acquired.sandbox.id == all[0].sandbox.id));
    assert_eq!(bench.backend.count(), 1);
}

#[tokio::test]
async fn keys_survive_a_restart() {
    let bench = TestBench::new().await;
    let made = bench.acquire("a").await.sandbox;
    let bench = bench.restarted().await;
    let again = bench.acquire("a").await;
    assert_eq!((again.sandbox.id, again.fresh), (made.id, false));
}

#[tokio::test]
async fn n60_n61_a_dead_sandbox_is_replaced_under_its_key() {
    let bench = TestBench::new().await;
    let dead = bench.service.acquire(&bench.key("a"), replacing()).await.unwrap().sandbox;
    bench.backend.kill(&dead.id, EndCause::AgentDied);
    bench.until(&dead, |phase| matches!(phase, Phase::Failed(_))).await;
    let new = bench.acquire("a").await;
    assert!(new.fresh && new.sandbox.id != dead.id);
    bench.wait_until_gone(&dead).await;
    assert_eq!((bench.all().total, bench.backend.count()), (1, 1));
    let bench = bench.restarted().await;
    assert_eq!(bench.acquire("a").await.sandbox.id, new.sandbox.id);
}

#[tokio::test]
async fn n54_unreported_death_is_noticed_at_the_next_use_and_leaves_nothing() {
    let bench = TestBench::new().await;
    let request = crate::CreateSandboxRequest { idle_timeout: Some(Duration::from_secs(3600)), ..plain() };
    let dead = bench.service.acquire(&bench.key("a"), request).await.unwrap().sandbox;
    bench.backend.remove_sandbox(&dead.id);
    // What is left open would be inherited.
    let never_idle = crate::CreateSandboxRequest { idle_timeout: Some(Duration::ZERO), ..plain() };
    let new = bench.service.acquire(&bench.key("a"), never_idle).await.unwrap();
    assert!(new.fresh && new.sandbox.id != dead.id);
    bench.wait_until_gone(&dead).await;
    bench.until_count(1).await;
    assert!(!bench.has(&dead));
    assert_eq!(bench.service.find_by_key(&bench.key("a")).unwrap().id, new.sandbox.id);
    assert_eq!(bench.service.0.lifecycle.schedule.count(), 0, "no idle check is scheduled");
    assert_eq!(bench.backend.times_asked_to("destroy"), 1);
    let bench = bench.restarted().await;
    assert!(!bench.has(&dead));
    assert_eq!(bench.backend.times_asked_to("destroy"), 1);
}

#[tokio::test]
async fn n59_failed_removal_does_not_keep_the_dead_sandbox_under_its_key() {
    let bench = TestBench::new().await;
    let dead = bench.service.acquire(&bench.key("a"), replacing()).await.unwrap().sandbox;
    bench.backend.fail("destroy", 1000);
    bench.backend.kill(&dead.id, EndCause::AgentDied);
    bench.until(&dead, |phase| matches!(phase, Phase::Failed(_))).await;
    let new = bench.acquire("a").await;
    assert!(new.fresh);
    assert_eq!(bench.acquire("a").await.sandbox.id, new.sandbox.id);
    // If the server dies now, the next one does not treat the dead sandbox as the key's.
    let bench = bench.restarted().await;
    assert_eq!(bench.acquire("a").await.sandbox.id, new.sandbox.id);
}

#[tokio::test]
async fn n62_an_agent_that_cannot_be_asked_is_kept() {
    let bench = TestBench::new().await;
    let made = bench.acquire("a").await.sandbox;
    bench.backend.fail("dial", 1);
    let again = bench.acquire("a").await;
    assert_eq!((again.sandbox.id, again.fresh), (made.id, false));
}

#[tokio::test]
async fn n46_a_destroyed_sandbox_leaves_its_key_free() {
    let bench = TestBench::new().await;
    let first = bench.acquire("a").await.sandbox;
    bench.sandbox(&first.id).destroy().await.unwrap();
    assert!(bench.service.find_by_key(&bench.key("a")).is_none());
    assert_eq!(bench.service.0.lifecycle.names.count(), 0);
    assert!(bench.acquire("a").await.fresh);
}

#[tokio::test]
async fn acquire_resumes_a_paused_sandbox() {
    let bench = TestBench::new().await;
    let made = bench.acquire("a").await.sandbox;
    bench.sandbox(&made.id).pause().await.unwrap();
    let again = bench.acquire("a").await;
    assert_eq!((again.sandbox.id, again.sandbox.phase), (made.id.clone(), Phase::Running));
    assert_eq!(bench.backend.condition(&made.id), Some(FoundCondition::Alive));
}

#[tokio::test]
async fn paused_sandbox_that_fails_to_resume_is_kept() {
    let bench = TestBench::new().await;
    let made = bench.acquire("a").await.sandbox;
    bench.sandbox(&made.id).pause().await.unwrap();
    bench.backend.fail("resume", 1);
    let error = bench.service.acquire(&bench.key("a"), plain()).await.unwrap_err();
    assert!(matches!(error, ServiceError::Backend { action: "resume", .. }), "{error:?}");
    let again = bench.acquire("a").await;
    assert_eq!((again.sandbox.id, again.fresh), (made.id, false));
}

#[tokio::test]
async fn paused_sandbox_that_is_gone_is_replaced_whatever_resume_returns() {
    for failures in [0, 1] {
        let bench = TestBench::new().await;
        let made = bench.acquire("a").await.sandbox;
        bench.sandbox(&made.id).pause().await.unwrap();
        bench.backend.remove_sandbox(&made.id);
        bench.backend.fail("resume", failures);
        let again = bench.acquire("a").await;
        assert!(again.fresh && again.sandbox.id != made.id);
        bench.wait_until_gone(&made).await;
        assert_eq!((bench.all().total, bench.backend.count()), (1, 1));
    }
}

#[tokio::test]
async fn n71_cancelled_waiter_passes_the_turn_to_the_next() {
    let bench = TestBench::new().await;
    bench.backend.gate.forget_permits(usize::MAX >> 3);
    let first = bench.asking("a");
    while bench.all().total == 0 {
        tokio::task::yield_now().await;
    }
    let mut waiter = Box::pin(bench.acquire("a"));
    assert!(futures_util::poll!(&mut waiter).is_pending());
    let successor = bench.acquire("a");
    drop(waiter);
    bench.backend.gate.add_permits(100);
    let (first, successor) = (first.await.unwrap().unwrap(), successor.await);
    assert_eq!((successor.sandbox.id, successor.fresh), (first.sandbox.id, false));
    assert_eq!(bench.backend.count(), 1);
}

#[tokio::test]
async fn retry_after_a_cancelled_acquire_gets_the_sandbox_begun_before() {
    let bench = TestBench::new().await;
    bench.backend.gate.forget_permits(usize::MAX >> 3);
    for _ in 0..5 {
        let asking = bench.asking("a");
        while bench.all().total == 0 {
            tokio::task::yield_now().await;
        }
        asking.abort();
        asking.await.unwrap_err();
    }
    let begun = bench.all().items.remove(0);
    bench.backend.gate.add_permits(100);
    let found = bench.acquire("a").await;
    assert_eq!((found.sandbox.id, found.fresh), (begun.id, false));
    assert_eq!((bench.backend.times_asked_to("create"), bench.all().total), (1, 1));
}

#[tokio::test]
async fn creates_without_callers_are_bounded() {
    let bench = TestBench::limited(200, 200).await;
    bench.backend.gate.forget_permits(usize::MAX >> 3);
    let detach = async |number: usize| {
        let asking = bench.asking(&format!("k{number}"));
        while bench.all().total == number && !asking.is_finished() {
            tokio::task::yield_now().await;
        }
        asking.abort();
        asking.await
    };
    let mut number = 0;
    let refused = loop {
        match detach(number).await {
            Ok(answer) => break answer.unwrap_err(),
            Err(_cancelled) => number += 1,
        }
    };
    assert_eq!(number, MAX_DETACHED_PER_OWNER);
    assert!(matches!(refused.kind(), ErrorKind::Exhausted { .. }), "{refused}");
    // A create under a key of one of them waits for it and is not refused.
    let waiting = bench.asking("k0");
    bench.backend.gate.add_permits(1000);
    assert!(!waiting.await.unwrap().unwrap().fresh);
    bench.acquire("after").await;
}

#[tokio::test]
async fn a_create_that_fails_leaves_no_key() {
    let bench = TestBench::new().await;
    bench.backend.fail("create", 1);
    bench.service.acquire(&bench.key("a"), plain()).await.unwrap_err();
    assert_eq!((bench.service.0.lifecycle.names.count(), bench.backend.count()), (0, 0));
    assert!(bench.acquire("a").await.fresh);
}

#[tokio::test]
async fn n45_released_sandbox_stays_until_its_room_is_needed() {
    let bench = TestBench::limited(2, 10).await;
    let first = bench.acquire("a").await.sandbox;
    assert_eq!((bench.release("a"), bench.release("a")), (Outcome::Done, Outcome::Unchanged));
    assert_eq!(bench.release("unknown"), Outcome::Unchanged);
    assert_eq!(bench.acquire("b").await.sandbox.phase, Phase::Running);
    let again = bench.acquire("a").await;
    assert_eq!((again.sandbox.id, again.fresh), (first.id, false));
}

#[tokio::test]
async fn n67_only_the_longest_parked_sandbox_is_evicted() {
    let bench = TestBench::limited(3, 10).await;
    let held = bench.acquire("held").await.sandbox;
    let old = bench.acquire("old").await.sandbox;
    let young = bench.acquire("young").await.sandbox;
    bench.release("young");
    bench.release("old");
    bench.handle(&young).activity.touch();
    bench.acquire("new").await;
    let left = |sandbox: &crate::Sandbox| bench.service.sandbox(&bench.owner, &sandbox.id).is_ok();
    assert!(left(&held) && !left(&old) && left(&young));
    // A plain sandbox evicts the other parked one; then none is parked, and the soft limit is exceeded.
    bench.create().await;
    assert!(left(&held) && !left(&young));
    bench.create().await;
    assert_eq!(bench.backend.count(), 4);
}

#[tokio::test]
async fn sandbox_that_runs_something_is_never_evicted() {
    let bench = TestBench::limited(1, 10).await;
    let busy = bench.acquire("busy").await.sandbox;
    bench.release("busy");
    let command = running("00000000000000000000000000000000");
    let over = ProcessStatus { ended: Some(ended(ExitReason::Code(0))), ..command.clone() };
    bench.backend.set_processes(vec![command]);
    bench.acquire("new").await;
    assert!(bench.service.sandbox(&bench.owner, &busy.id).is_ok());
    // A process that a command left running counts as well.
    bench.backend.set_processes(vec![ProcessStatus { left: true, ..over.clone() }]);
    bench.acquire("newer").await;
    assert!(bench.service.sandbox(&bench.owner, &busy.id).is_ok());
    bench.backend.set_processes(vec![over]);
    bench.acquire("another").await;
    assert!(bench.service.sandbox(&bench.owner, &busy.id).is_err());
}

#[tokio::test]
async fn silent_agent_delays_no_create_and_is_not_asked_again_at_once() {
    let bench = TestBench::limited(1, 10).await;
    let silent = bench.acquire("silent").await.sandbox;
    bench.release("silent");
    bench.backend.set_script(|request| matches!(request, wire::AgentRequest::Processes).then(Vec::new));
    let made = tokio::time::timeout(Duration::from_secs(20), bench.create()).await;
    assert!(made.is_ok(), "the create waited for the silent agent");
    assert!(bench.service.sandbox(&bench.owner, &silent.id).is_ok(), "the silent sandbox is treated as busy");
    assert_eq!(bench.release("silent"), Outcome::Done, "it counts as held again");
}

#[tokio::test]
async fn hard_limit_refuses_unless_a_sandbox_is_parked() {
    let bench = TestBench::limited(2, 2).await;
    bench.acquire("a").await;
    bench.acquire("b").await;
    let error = bench.service.acquire(&bench.key("c"), plain()).await.unwrap_err();
    assert!(matches!(error, ServiceError::TooManySandboxes { .. }));
    assert!(matches!(error.kind(), ErrorKind::Exhausted { .. }));
    assert_eq!(bench.acquire("a").await.sandbox.phase, Phase::Running, "existing sandboxes are still found");
    bench.release("b");
    assert!(bench.acquire("c").await.fresh);
    assert_eq!(bench.backend.count(), 2);
}

#[tokio::test]
async fn n92_acquire_during_eviction_gets_a_new_sandbox() {
    let bench = TestBench::limited(1, 10).await;
    let old = bench.acquire("a").await.sandbox;
    bench.release("a");
    let handle = bench.handle(&old);
    assert!(handle.lease.close_if_parked(&handle.activity, Duration::MAX, Duration::ZERO));
    let new = bench.acquire("a").await;
    assert!(new.fresh && new.sandbox.id != old.id);
}

#[tokio::test]
async fn n94_concurrent_acquire_and_eviction_never_return_a_dead_sandbox_or_two() {
    let bench = TestBench::limited(3, 100).await;
    let names: Vec<String> = (0..6).map(|n| format!("key {n}")).collect();
    for round in 0..20 {
        let picked = (0..30).map(|n| &names[(n + round) % names.len()]);
        let ids = join_all(picked.clone().map(|name| bench.acquire(name))).await;
        let all: Vec<_> = picked.zip(ids.into_iter().map(|acquired| acquired.sandbox.id)).collect();
        for (name, id) in &all {
            assert!(all.iter().all(|(other, found)| (other == name) == (found == id)), "{all:?}");
        }
        for name in &names {
            bench.release(name);
        }
    }
}

impl TestBench {
    /// Makes a sandbox die, and waits until that is known.
    async fn kill(&self, sandbox: &crate::Sandbox) {
        self.backend.kill(&sandbox.id, EndCause::AgentDied);
        self.until(sandbox, |phase| matches!(phase, Phase::Failed(_))).await;
    }

    pub(super) fn has(&self, sandbox: &crate::Sandbox) -> bool {
        self.service.sandbox(&self.owner, &sandbox.id).is_ok()
    }
}

#[tokio::test]
async fn dead_sandboxes_are_evicted_at_the_hard_limit_named_or_not() {
    let bench = TestBench::limited(3, 3).await;
    let released = bench.acquire("released").await.sandbox;
    bench.release("released");
    let all = [released, bench.acquire("held").await.sandbox, bench.create().await];
    for sandbox in &all {
        bench.kill(sandbox).await;
    }
    for name in ["a", "b", "c"] {
        assert!(bench.acquire(name).await.fresh);
    }
    assert!(all.iter().all(|dead| !bench.has(dead)));
    let error = bench.service.acquire(&bench.key("d"), plain()).await.unwrap_err();
    assert!(matches!(error, ServiceError::TooManySandboxes { limit: 3 }), "{error:?}");
}

#[tokio::test]
async fn living_sandbox_is_not_evicted_while_dead_ones_can_be() {
    let bench = TestBench::limited(4, 20).await;
    let parked = [bench.acquire("a").await.sandbox, bench.acquire("b").await.sandbox];
    let dead = [bench.create().await, bench.create().await];
    for sandbox in &dead {
        bench.kill(sandbox).await;
    }
    bench.release("a");
    bench.release("b");
    bench.create().await;
    assert!(parked.iter().all(|parked| bench.has(parked)));
    assert_eq!((bench.has(&dead[0]), bench.has(&dead[1])), (false, true), "the first dead goes first");
}

#[tokio::test]
async fn unremovable_dead_sandbox_does_not_cause_eviction_of_a_living_one() {
    let bench = TestBench::limited(2, 20).await;
    let parked = bench.acquire("a").await.sandbox;
    let dead = bench.create().await;
    bench.backend.fail("destroy", 1000);
    bench.kill(&dead).await;
    bench.release("a");
    bench.create().await;
    assert!(bench.has(&parked));
}

#[tokio::test]
async fn dead_sandboxes_of_an_owner_free_its_quota() {
    let (backend, state) = (FakeBackend::new(), tempfile::tempdir().unwrap());
    let quotas = operators_quota(crate::OwnerQuota { sandboxes: Some(2), ..crate::OwnerQuota::default() });
    let bench = TestBench::configured(ServiceConfig { quotas, ..config(&state) }, backend, state).await;
    let stranger = bench.service.create_sandbox(&Owner::from_valid_name("stranger"), plain()).await.unwrap();
    bench.kill(&stranger).await;
    for dead in [bench.create().await, bench.create().await] {
        bench.kill(&dead).await;
    }
    bench.create().await;
    bench.create().await;
    let error = bench.service.create_sandbox(&bench.owner, plain()).await.unwrap_err();
    assert!(
        matches!(
            error,
            ServiceError::OverQuota {
                excess: crate::tenancy::quota::QuotaExcess { what: crate::QuotaResource::Sandboxes, .. },
                ..
            }
        ),
        "{error:?}"
    );
    assert!(
        bench.service.sandbox(&Owner::from_valid_name("stranger"), &stranger.id).is_ok(),
        "the sandbox of another owner stays"
    );
}

#[tokio::test]
async fn parked_sandbox_with_unreported_death_counts_as_idle() {
    let bench = TestBench::limited(1, 1).await;
    let dead = bench.acquire("a").await.sandbox;
    bench.release("a");
    bench.backend.remove_sandbox(&dead.id);
    assert!(bench.acquire("b").await.fresh);
    assert!(!bench.has(&dead));
}
