//! Removing the sandbox of a key, and replacing one that has crashed.

use std::time::Duration;

use domain::{EndCause, Phase, SandboxId};
use futures_util::future::join_all;

use super::TestBench;
use super::revival::replacing;
use crate::sandboxes::driver::DriverCommand;
use crate::store::Store;
use crate::{AcquiredSandbox, KeyRemoval, Sandbox, ServiceError};

const LONG: Duration = Duration::from_secs(3600);

impl TestBench {
    async fn acquire_replacing(&self, name: &str) -> AcquiredSandbox {
        self.service.acquire(&self.key(name), replacing()).await.unwrap()
    }

    async fn remove(&self, name: &str, limit: Duration) -> Result<KeyRemoval, ServiceError> {
        self.service.remove_by_key(&self.key(name), limit).await
    }

    /// Keeps the driver of a sandbox busy until the gate of volumes is opened.
    pub(super) async fn occupy_driver(&self, sandbox: &Sandbox) {
        self.backend.volume_gate.forget_permits(usize::MAX);
        let (core, handle) = (self.service.0.clone(), self.handle(sandbox));
        tokio::spawn(async move {
            core.send_command(&handle, |answer| DriverCommand::Attach(Vec::new(), answer)).await
        });
        while !self.backend.was_asked_to("attach") {
            tokio::task::yield_now().await;
        }
    }

    /// What the next server would find if this one died now.
    fn stored_phases(&self) -> Vec<Phase> {
        let (_store, stored) = Store::open(&self.state.path().join("coracle.db")).unwrap();
        stored.records.iter().map(|record| record.sandbox.phase).collect()
    }

    async fn replace(&self, name: &str, crashed: &SandboxId) -> Option<AcquiredSandbox> {
        self.service.replace_crashed(&self.key(name), crashed, replacing()).await.unwrap()
    }
}

#[tokio::test]
async fn removal_frees_the_key_and_is_idempotent() {
    let bench = TestBench::new().await;
    let made = bench.acquire_replacing("a").await.sandbox;
    assert_eq!(bench.remove("a", LONG).await.unwrap(), KeyRemoval::Done);
    assert_eq!(bench.remove("a", LONG).await.unwrap(), KeyRemoval::Absent);
    assert_eq!(bench.backend.count(), 0);
    let next = bench.acquire_replacing("a").await;
    assert!(next.fresh && next.revival.is_none() && next.sandbox.id != made.id);
}

#[tokio::test(start_paused = true)]
async fn key_of_a_sandbox_that_resists_removal_is_free_in_time() {
    let bench = TestBench::new().await;
    bench.backend.destroy_gate.forget_permits(usize::MAX);
    let made = bench.acquire_replacing("a").await.sandbox;
    let limit = Duration::from_secs(10);
    assert_eq!(bench.remove("a", limit).await.unwrap(), KeyRemoval::Continues);
    assert!(bench.service.sandbox_of_key(&bench.key("a")).is_none());
    let next = bench.acquire_replacing("a").await;
    assert_ne!(next.sandbox.id, made.id);
    bench.backend.destroy_gate.add_permits(1);
    bench.wait_until_gone(&made).await;
    assert_eq!(bench.service.sandbox_of_key(&bench.key("a")).unwrap().id(), &next.sandbox.id);
}

#[tokio::test]
async fn removal_that_outlasts_its_caller_is_recorded_before_its_response() {
    let bench = TestBench::new().await;
    let made = bench.acquire_replacing("a").await.sandbox;
    bench.occupy_driver(&made).await;
    assert_eq!(bench.remove("a", Duration::from_millis(20)).await.unwrap(), KeyRemoval::Continues);
    assert_eq!(bench.stored_phases(), [Phase::Stopping], "the next server would keep the sandbox");
    bench.backend.volume_gate.add_permits(1);
    bench.wait_until_gone(&made).await;
}

#[tokio::test]
async fn removal_during_a_create_is_recorded_before_its_response() {
    let bench = TestBench::new().await;
    bench.backend.gate.forget_permits(usize::MAX);
    let (service, key) = (bench.service.clone(), bench.key("a"));
    let create = tokio::spawn(async move { service.acquire(&key, replacing()).await });
    while !bench.backend.was_asked_to("create asked") {
        tokio::task::yield_now().await;
    }
    assert_eq!(bench.remove("a", Duration::from_millis(20)).await.unwrap(), KeyRemoval::Continues);
    assert_eq!(bench.stored_phases(), [Phase::Stopping], "the next server would keep the sandbox");
    bench.backend.gate.add_permits(1);
    create.await.unwrap().unwrap();
    bench.backend.until_empty().await;
}

#[tokio::test]
async fn crashed_sandbox_that_is_destroyed_by_its_id_is_not_replaced() {
    let bench = TestBench::new().await;
    let made = bench.acquire_replacing("a").await.sandbox;
    bench.died(&made).await;
    let sandbox = bench.sandbox(&made.id);
    // The driver has the command, and has not acted on it yet.
    let (destroyed, replaced) = tokio::join!(sandbox.destroy(), async {
        assert!(bench.service.sandbox_of_key(&bench.key("a")).unwrap().is_being_removed());
        bench.replace("a", &made.id).await
    });
    destroyed.unwrap();
    assert!(replaced.is_none(), "a request revived a sandbox that was deleted");
    assert_eq!(bench.backend.count(), 0);
}

#[tokio::test(start_paused = true)]
async fn n93_sandbox_that_is_being_removed_says_so_until_it_is_gone() {
    let bench = TestBench::new().await;
    bench.backend.destroy_gate.forget_permits(usize::MAX);
    let made = bench.acquire_replacing("a").await.sandbox;
    let (service, key) = (bench.service.clone(), bench.key("a"));
    let removal = tokio::spawn(async move { service.remove_by_key(&key, LONG).await });
    bench.until(&made, |phase| phase == Phase::Stopping).await;
    for _ in 0..3 {
        assert!(bench.service.sandbox_of_key(&bench.key("a")).unwrap().is_being_removed());
        // A backend has a minute for a removal.
        tokio::time::advance(Duration::from_secs(10)).await;
    }
    bench.backend.destroy_gate.add_permits(1);
    assert_eq!(removal.await.unwrap().unwrap(), KeyRemoval::Done);
    assert!(bench.service.sandbox_of_key(&bench.key("a")).is_none());
}

#[tokio::test]
async fn n93_failed_removal_keeps_no_key() {
    let bench = TestBench::new().await;
    bench.acquire_replacing("a").await;
    bench.backend.fail("destroy", 1);
    bench.remove("a", LONG).await.unwrap_err();
    assert!(bench.service.sandbox_of_key(&bench.key("a")).is_none());
    assert!(bench.acquire_replacing("a").await.fresh);
}

#[tokio::test]
async fn removal_waits_for_a_create_in_progress() {
    let bench = TestBench::new().await;
    bench.backend.gate.forget_permits(usize::MAX);
    let (service, key) = (bench.service.clone(), bench.key("a"));
    let create = tokio::spawn(async move { service.acquire(&key, replacing()).await });
    while !bench.backend.was_asked_to("create asked") {
        tokio::task::yield_now().await;
    }
    let (service, key) = (bench.service.clone(), bench.key("a"));
    let removal = tokio::spawn(async move { service.remove_by_key(&key, LONG).await });
    bench.backend.gate.add_permits(1);
    create.await.unwrap().unwrap();
    assert_eq!(removal.await.unwrap().unwrap(), KeyRemoval::Done);
    assert_eq!(bench.backend.count(), 0);
}

#[tokio::test]
async fn crashed_sandbox_has_one_successor_for_all_callers() {
    let bench = TestBench::new().await;
    let made = bench.acquire_replacing("a").await.sandbox;
    bench.died(&made).await;
    let replaced = join_all((0..20).map(|_| bench.replace("a", &made.id))).await;
    let successors: Vec<_> = replaced.into_iter().flatten().collect();
    assert_eq!(successors.len(), 1);
    let successor = bench.service.sandbox_of_key(&bench.key("a")).unwrap();
    assert_eq!(successor.id(), &successors[0].sandbox.id);
    assert_eq!(bench.backend.times_asked_to("create"), 2);
    let events = successor.lifecycle_events(10);
    assert_eq!(events[0].cause, Some(EndCause::Replaced));
}

#[tokio::test]
async fn only_a_crashed_sandbox_is_replaced() {
    let bench = TestBench::new().await;
    let living = bench.acquire_replacing("a").await.sandbox;
    assert!(bench.replace("a", &living.id).await.is_none());
    bench.died(&living).await;
    bench.remove("a", LONG).await.unwrap();
    assert!(bench.replace("a", &living.id).await.is_none(), "it was removed");
    let next = bench.acquire_replacing("a").await.sandbox;
    bench.died(&next).await;
    assert!(bench.replace("a", &living.id).await.is_none(), "the key leads to another one");
    assert_eq!(bench.backend.times_asked_to("create"), 2);
}
