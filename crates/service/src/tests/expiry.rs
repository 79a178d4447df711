//! Time: expiry, renewal, idleness, and clocks that are set.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use domain::process::ProcessSpec;
use domain::{EndCause, JournalOffset, Phase, ProcessId};
use tokio::time::Instant;

use super::{TestBench, plain};
use crate::clock::{Clock, ClockReading};
use crate::{CreateSandboxRequest, ErrorKind, Sandbox};
use testkit::fake_backend::{FakeBackend, running};

/// A clock that follows tokio's, so that pausing one pauses the other, and whose wall time can be set.
#[derive(Clone)]
pub(super) struct ManualClock {
    start: Instant,
    set_by: Arc<AtomicI64>,
}

const BOOT: Duration = Duration::from_secs(5000);

impl ManualClock {
    pub(super) fn new() -> Self {
        Self { start: Instant::now(), set_by: Arc::default() }
    }

    pub(super) fn clock(&self) -> Clock {
        let hands = self.clone();
        Clock::new(move || hands.now())
    }

    fn now(&self) -> ClockReading {
        let boot = BOOT + self.start.elapsed();
        let noon = 1_800_000_000 + self.set_by.load(Ordering::Relaxed);
        let noon = Duration::from_secs(noon.unsigned_abs());
        ClockReading { wall: UNIX_EPOCH + noon + self.start.elapsed(), boot }
    }

    fn since(&self, time: SystemTime) -> Duration {
        let noon = Duration::from_secs(1_800_000_000);
        time.duration_since(UNIX_EPOCH + noon).unwrap()
    }
}

async fn bench(hands: &ManualClock) -> TestBench {
    TestBench::with(FakeBackend::new(), tempfile::tempdir().unwrap(), hands.clock()).await
}

async fn create(bench: &TestBench, timeout: Option<u64>, idle_timeout: Option<u64>) -> Sandbox {
    let seconds = |count: Option<u64>| count.map(Duration::from_secs);
    let request =
        CreateSandboxRequest { timeout: seconds(timeout), idle_timeout: seconds(idle_timeout), ..plain() };
    bench.service.create_sandbox(&bench.owner, request).await.unwrap()
}

/// When the sandbox began to end, in seconds since the test began. Tokio's clock is paused meanwhile.
async fn ending(bench: &TestBench, hands: &ManualClock, sandbox: &Sandbox) -> u64 {
    tokio::time::pause();
    let ending = bench.until(sandbox, |phase| matches!(phase, Phase::Stopping | Phase::Stopped)).await;
    tokio::time::resume();
    hands.since(ending.phase_since).as_secs()
}

/// Setting up the service takes real time.
fn check_due(ended: u64, due: u64) {
    assert!((due..due + 10).contains(&ended), "{ended} is not {due}");
}

#[tokio::test]
async fn sandbox_ends_when_its_timeout_is_over() {
    let hands = ManualClock::new();
    let bench = bench(&hands).await;
    let longer = create(&bench, Some(900), None).await;
    let made = create(&bench, Some(600), None).await;
    check_due(ending(&bench, &hands, &made).await, 600);
    check_due(ending(&bench, &hands, &longer).await, 900);
}

#[tokio::test]
async fn renew_moves_the_expiry_later_or_sooner() {
    let hands = ManualClock::new();
    let bench = bench(&hands).await;
    for (timeout, after) in [(600, 70), (60, 90)] {
        let made = create(&bench, Some(timeout), None).await;
        let expires = hands.now().wall + Duration::from_secs(after);
        let renewed = bench.sandbox(&made.id).renew_expiry(expires).await.unwrap();
        assert_eq!(renewed.expires, Some(crate::clock::truncate_to_micros(expires)));
        let ended = ending(&bench, &hands, &made).await;
        let due = hands.since(expires).as_secs();
        check_due(ended, due);
    }
}

#[tokio::test]
async fn renew_needs_a_future_time_and_an_expiring_sandbox() {
    let hands = ManualClock::new();
    let bench = bench(&hands).await;
    let (expiring, never) = (create(&bench, Some(600), None).await, create(&bench, None, None).await);
    let now = hands.now().wall;
    let error = bench.sandbox(&expiring.id).renew_expiry(now).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    let later = now + Duration::from_secs(60);
    let error = bench.sandbox(&never.id).renew_expiry(later).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Conflict { phase: Phase::Running });
}

#[tokio::test]
async fn renew_beyond_the_longest_timeout_is_refused() {
    const DAY: Duration = Duration::from_secs(86_400);
    let hands = ManualClock::new();
    let bench = bench(&hands).await;
    let made = create(&bench, Some(600), None).await;
    let sandbox = bench.sandbox(&made.id);
    let error = sandbox.renew_expiry(hands.now().wall + DAY + Duration::from_secs(60)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    assert_eq!(sandbox.current_state().expires, made.expires);
    sandbox.renew_expiry(hands.now().wall + DAY).await.unwrap();
    // The maximum was lowered: an earlier expiry is accepted although it is later than the new maximum.
    let config = crate::ServiceConfig { max_timeout: Some(DAY / 4), ..super::config(&bench.state) };
    bench.service.set_config(config);
    sandbox.renew_expiry(hands.now().wall + DAY / 2).await.unwrap();
    assert!(sandbox.renew_expiry(hands.now().wall + DAY).await.is_err());
}

#[tokio::test]
async fn access_renews_up_to_the_longest_timeout() {
    let bench = TestBench::new().await;
    let made = create(&bench, Some(600), None).await;
    let week = Duration::from_secs(7 * 86_400);
    bench.sandbox(&made.id).renew_on_access(week, Duration::ZERO).await;
    let expires = bench.sandbox(&made.id).current_state().expires.unwrap();
    let left = expires.duration_since(SystemTime::now()).unwrap().as_secs();
    assert!((86_300..=86_400).contains(&left), "{left}");
}

#[tokio::test]
async fn setting_the_wall_clock_moves_the_shown_expiry_but_not_the_end() {
    let hands = ManualClock::new();
    let bench = bench(&hands).await;
    let made = create(&bench, Some(600), None).await;
    hands.set_by.store(86_400, Ordering::Relaxed);
    let before = made.expires.unwrap();
    tokio::time::pause();
    let mut state = bench.handle(&made).state.clone();
    let shown = state.wait_for(|sandbox| sandbox.expires != Some(before)).await.unwrap().expires.unwrap();
    tokio::time::resume();
    let moved = shown.duration_since(before).unwrap();
    assert!(moved.as_secs().abs_diff(86_400) <= 1, "{moved:?}");
    check_due(ending(&bench, &hands, &made).await, 86_400 + 600);
}

#[tokio::test]
async fn n68_idle_sandbox_ends_and_one_in_use_does_not() {
    let hands = ManualClock::new();
    let bench = bench(&hands).await;
    let (idle, used) = (create(&bench, None, Some(120)).await, create(&bench, None, Some(120)).await);
    let process = ProcessId::from_entropy([1; 16]);
    let following =
        bench.sandbox(&used.id).processes().follow_output(&process, JournalOffset(0)).await.unwrap();
    check_due(ending(&bench, &hands, &idle).await, 120);
    tokio::time::pause();
    tokio::time::advance(Duration::from_secs(1000)).await;
    assert_eq!(bench.sandbox(&used.id).current_state().phase, Phase::Running);
    let closed = hands.since(hands.now().wall).as_secs();
    drop(following);
    tokio::time::resume();
    let ended = ending(&bench, &hands, &used).await;
    check_due(ended, closed + 120);
}

#[tokio::test]
async fn n68_released_sandbox_ends_too_and_a_zero_timeout_means_never() {
    let hands = ManualClock::new();
    let bench = bench(&hands).await;
    let never = [create(&bench, None, None).await, create(&bench, None, Some(0)).await];
    let request = CreateSandboxRequest { idle_timeout: Some(Duration::from_secs(120)), ..plain() };
    let released = bench.service.acquire(&bench.key("a"), request).await.unwrap().sandbox;
    bench.release("a");
    check_due(ending(&bench, &hands, &released).await, 120);
    let last = create(&bench, None, Some(1800)).await;
    ending(&bench, &hands, &last).await;
    for sandbox in never {
        assert_eq!(bench.sandbox(&sandbox.id).current_state().phase, Phase::Running);
    }
}

#[tokio::test]
async fn state_query_is_not_a_use_and_a_background_process_is() {
    let hands = ManualClock::new();
    let bench = bench(&hands).await;
    let made = create(&bench, None, Some(100)).await;
    let launched = bench
        .sandbox(&made.id)
        .processes()
        .launch_process(ProcessSpec::from_shell_text("sleep"))
        .await
        .unwrap();
    bench.backend.set_processes(vec![running(launched.process.as_str())]);
    drop(launched);
    tokio::time::pause();
    for _ in 0..20 {
        tokio::time::advance(Duration::from_secs(50)).await;
        bench.sandbox(&made.id).processes().list_processes().await.unwrap();
    }
    assert_eq!(bench.sandbox(&made.id).current_state().phase, Phase::Running);
    tokio::time::resume();
    bench.backend.set_processes(Vec::new());
    let last = hands.since(hands.now().wall).as_secs();
    let ended = ending(&bench, &hands, &made).await;
    assert!(ended < last + 110, "{ended} is later than {last} and 110 more");
}

#[tokio::test]
async fn a_paused_sandbox_is_not_ended_for_idleness_but_still_expires() {
    let hands = ManualClock::new();
    let bench = bench(&hands).await;
    let made = create(&bench, Some(1000), Some(100)).await;
    bench.sandbox(&made.id).pause().await.unwrap();
    check_due(ending(&bench, &hands, &made).await, 1000);
}

#[tokio::test]
async fn a_dead_sandbox_is_ended_for_idleness_too() {
    let hands = ManualClock::new();
    let bench = bench(&hands).await;
    let made = create(&bench, None, Some(120)).await;
    bench.backend.kill(&made.id, EndCause::AgentDied);
    bench.until(&made, |phase| matches!(phase, Phase::Failed(_))).await;
    check_due(ending(&bench, &hands, &made).await, 120);
}

#[tokio::test]
async fn n96_idle_sandbox_acquired_during_its_check_is_kept() {
    let hands = ManualClock::new();
    let bench = bench(&hands).await;
    let made = create(&bench, None, Some(120)).await;
    let (handle, looks) = (bench.handle(&made), Arc::new(AtomicI64::new(0)));
    let seen = looks.clone();
    bench.backend.set_script(move |request| {
        if matches!(request, wire::AgentRequest::Processes) && seen.fetch_add(1, Ordering::Relaxed) == 0 {
            assert!(handle.lease.take(&handle.activity));
        }
        None
    });
    check_due(ending(&bench, &hands, &made).await, 240);
    assert_eq!(looks.load(Ordering::Relaxed), 2);
}
