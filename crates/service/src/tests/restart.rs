//! How a new server takes over the sandboxes of the old one.

use std::time::Duration;

use backend::FoundCondition;
use domain::{EndCause, ExitReason, Phase, SandboxId};

use super::{TestBench, plain, with_entrypoint};
use crate::clock::{Clock, ClockReading};
use crate::{CreateSandboxRequest, ServiceError};
use testkit::fake_backend::{encoded, fault};

async fn restarted(bench: TestBench) -> TestBench {
    let (backend, state) = bench.crash().await;
    TestBench::with(backend, state, Clock::from_host()).await
}

#[tokio::test]
async fn living_sandbox_is_adopted_unchanged() {
    let bench = TestBench::new().await;
    let request =
        CreateSandboxRequest { notes: vec![1, 0, 255], timeout: Some(Duration::from_secs(600)), ..plain() };
    let before = bench.service.create_sandbox(&bench.owner, request).await.unwrap();
    let token = bench.sandbox(&before.id).ports().access_token("exec");
    let bench = restarted(bench).await;
    let after = bench.sandbox(&before.id).current_state();
    assert_eq!(format!("{after:?}"), format!("{before:?}"));
    assert_eq!(bench.sandbox(&before.id).ports().access_token("exec").expose(), token.expose());
    bench.sandbox(&before.id).destroy().await.unwrap();
    assert_eq!(restarted(bench).await.all().total, 0);
}

#[tokio::test]
async fn frozen_sandbox_is_adopted_as_paused_and_can_be_resumed() {
    let bench = TestBench::new().await;
    let made = bench.create().await;
    bench.sandbox(&made.id).pause().await.unwrap();
    let bench = restarted(bench).await;
    assert_eq!(bench.sandbox(&made.id).current_state().phase, Phase::Paused);
    bench.sandbox(&made.id).resume().await.unwrap();
    assert_eq!(bench.backend.condition(&made.id), Some(FoundCondition::Alive));
}

#[tokio::test]
async fn vanished_sandbox_is_reported_as_failed_and_stays_so() {
    let bench = TestBench::new().await;
    let made = bench.create().await;
    bench.backend.remove_sandbox(&made.id);
    let bench = restarted(bench).await;
    let found = bench.sandbox(&made.id).current_state();
    assert_eq!(found.phase, Phase::Failed(EndCause::AgentDied));
    let bench = restarted(bench).await;
    let again = bench.sandbox(&made.id).current_state();
    assert_eq!((again.phase, again.phase_since), (found.phase, found.phase_since));
}

#[tokio::test]
async fn sandbox_that_died_meanwhile_is_stopped_and_keeps_its_files() {
    let bench = TestBench::new().await;
    let made = bench.create().await;
    bench.backend.put_sandbox(&made.id, FoundCondition::Dead);
    let bench = restarted(bench).await;
    bench.until(&made, |phase| phase == Phase::Failed(EndCause::AgentDied)).await;
    bench.sandbox(&made.id).patch_labels(Default::default()).await.unwrap();
    while !bench.backend.was_asked_to("stop") {
        tokio::task::yield_now().await;
    }
    assert_eq!((bench.all().total, bench.backend.count()), (1, 1));
}

#[tokio::test]
async fn unknown_sandbox_is_destroyed_and_a_known_one_keeps_its_files() {
    let bench = TestBench::new().await;
    let half = bench.create().await;
    bench.backend.put_sandbox(&half.id, FoundCondition::Half);
    let stranger = SandboxId::from_entropy([9; 20]);
    bench.backend.put_sandbox(&stranger, FoundCondition::Alive);
    let bench = restarted(bench).await;
    assert_eq!(bench.backend.ids(), std::slice::from_ref(&half.id));
    let found = bench.sandbox(&half.id).current_state();
    assert_eq!((found.phase, found.files), (Phase::Failed(EndCause::AgentDied), domain::FilesState::Kept));
}

#[tokio::test]
async fn unknown_sandbox_that_cannot_be_destroyed_does_not_prevent_the_start() {
    let bench = TestBench::new().await;
    bench.backend.put_sandbox(&SandboxId::from_entropy([9; 20]), FoundCondition::Alive);
    bench.backend.fail("destroy", 1);
    let bench = restarted(bench).await;
    bench.create().await;
}

#[tokio::test(start_paused = true)]
async fn removal_that_was_begun_is_finished() {
    let bench = TestBench::new().await;
    let made = bench.create().await;
    bench.backend.fail("destroy", 3);
    bench.sandbox(&made.id).destroy().await.unwrap_err();
    let bench = restarted(bench).await;
    bench.backend.until_empty().await;
}

#[tokio::test]
async fn sandbox_that_expired_while_the_server_was_down_is_destroyed() {
    let bench = TestBench::new().await;
    let request = CreateSandboxRequest { timeout: Some(Duration::from_secs(600)), ..plain() };
    bench.service.create_sandbox(&bench.owner, request).await.unwrap();
    let (backend, state) = bench.crash().await;
    let host = Clock::from_host();
    let later = Clock::new(move || host.now().after(Duration::from_secs(601)).unwrap());
    let bench = TestBench::with(backend, state, later).await;
    assert_eq!((bench.all().total, bench.backend.count()), (0, 0));
}

#[tokio::test]
async fn wall_clock_set_while_the_server_was_down_ends_nothing() {
    let bench = TestBench::new().await;
    let request = CreateSandboxRequest { timeout: Some(Duration::from_secs(600)), ..plain() };
    let made = bench.service.create_sandbox(&bench.owner, request).await.unwrap();
    let (backend, state) = bench.crash().await;
    let host = Clock::from_host();
    let set = Clock::new(move || {
        let now = host.now();
        ClockReading { wall: now.wall + Duration::from_secs(86_400), boot: now.boot }
    });
    let bench = TestBench::with(backend, state, set).await;
    assert_eq!(bench.sandbox(&made.id).current_state().phase, Phase::Running);
}

#[tokio::test]
async fn entrypoint_that_ended_meanwhile_is_noticed() {
    let bench = TestBench::new().await;
    let made = bench.service.create_sandbox(&bench.owner, with_entrypoint()).await.unwrap();
    let (backend, state) = bench.crash().await;
    backend.entrypoint_end.send_replace(Some(wire::process::ExitReason::Code(0)));
    let bench = TestBench::with(backend, state, Clock::from_host()).await;
    bench.until(&made, |phase| phase == Phase::Exited(ExitReason::Code(0))).await;
}

#[tokio::test]
async fn start_cut_off_before_its_entrypoint_is_undone() {
    let bench = TestBench::new().await;
    bench.backend.gate.forget_permits(usize::MAX >> 3);
    let service = bench.service.clone();
    let owner = bench.owner.clone();
    let asking = tokio::spawn(async move { service.create_sandbox(&owner, with_entrypoint()).await });
    let started = loop {
        if let Some(sandbox) = bench.all().items.pop() {
            break sandbox;
        }
        tokio::task::yield_now().await;
    };
    // The old server dies here: the row says "starting", the sandbox exists, nothing runs in it.
    let copy = snapshot_of(&bench);
    bench.backend.gate.add_permits(1);
    asking.await.unwrap().unwrap();
    let (backend, _state) = bench.crash().await;
    backend.set_script(|request| {
        let unknown = wire::Frame::from_message(&wire::AgentReply::Fault(fault(wire::FaultKind::NotFound)));
        matches!(request, wire::AgentRequest::Status { .. }).then(|| encoded(&[unknown]))
    });
    let bench = TestBench::with(backend, copy, Clock::from_host()).await;
    let error = bench.service.sandbox(&bench.owner, &started.id).unwrap_err();
    assert!(matches!(error, ServiceError::NoSandbox(_)));
    assert_eq!(bench.backend.count(), 0);
}

#[tokio::test]
async fn sandbox_that_was_handed_over_is_never_forgotten() {
    let bench = TestBench::new().await;
    for _ in 0..20 {
        let made = bench.create().await;
        // Server and agent die at the moment in which the client gets its answer.
        let copy = snapshot_of(&bench);
        let backend = testkit::fake_backend::FakeBackend::new();
        let later = TestBench::with(backend, copy, Clock::from_host()).await;
        let found = later.sandbox(&made.id).current_state();
        assert_eq!(found.phase, Phase::Failed(EndCause::AgentDied));
    }
}

/// The state directory as a crash at this moment would leave it.
pub(super) fn snapshot_of(bench: &TestBench) -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(bench.state.path()).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), copy.path().join(entry.file_name())).unwrap();
    }
    copy
}
