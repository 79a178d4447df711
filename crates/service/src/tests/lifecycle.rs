//! Create, pause, resume, label, destroy; limits; deaths.

use std::collections::BTreeMap;
use std::sync::Arc;

use backend::FoundCondition;
use domain::process::ProcessSpec;
use domain::{EndCause, ExitReason, Labels, Owner, Phase};
use wire::AgentRequest;

use super::{TestBench, plain, with_entrypoint};
use crate::clock::Clock;
use crate::{CreateSandboxRequest, ErrorKind, Outcome, SandboxFilter, ServiceError};
use testkit::fake_backend::{FakeBackend, encoded, fault, running};

#[tokio::test]
async fn created_sandbox_runs_and_reports_its_image() {
    let bench = TestBench::new().await;
    let made = bench.create().await;
    assert_eq!(made.phase, Phase::Running);
    assert_eq!(made.in_force.image, "real host");
    assert_eq!(bench.sandbox(&made.id).current_state().phase, Phase::Running);
    assert_eq!(bench.service.count_by_phase(), BTreeMap::from([("running", 1)]));
}

#[tokio::test]
async fn sandbox_of_another_owner_is_not_found() {
    let bench = TestBench::new().await;
    let made = bench.create().await;
    let stranger = Owner::from_valid_name("stranger");
    for error in [
        bench.service.sandbox(&stranger, &made.id).unwrap_err(),
        bench.service.sandbox_of(Some(&stranger), &made.id).unwrap_err(),
    ] {
        assert!(matches!(error, ServiceError::NoSandbox(_)), "{error}");
    }
    assert_eq!(bench.service.sandbox_of(None, &made.id).unwrap().owner(), &bench.owner);
}

#[tokio::test]
async fn a_create_that_fails_leaves_nothing() {
    for step in ["create", "dial"] {
        let bench = TestBench::new().await;
        bench.backend.fail(step, 1);
        bench.service.create_sandbox(&bench.owner, plain()).await.unwrap_err();
        assert_eq!(bench.backend.count(), 0, "{step}");
        assert_eq!(bench.all().total, 0, "{step}");
        let (backend, state) = bench.crash().await;
        assert_eq!(TestBench::with(backend, state, Clock::from_host()).await.all().total, 0, "{step}");
    }
}

/// Makes the store refuse an operation, as another program that has the file open could.
fn store_refuses(bench: &TestBench, what: &str) {
    let store = rusqlite::Connection::open(bench.state.path().join("coracle.db")).unwrap();
    let trigger =
        format!("CREATE TRIGGER no_{what} BEFORE {what} ON sandboxes BEGIN SELECT RAISE(ABORT, 'no'); END");
    store.execute_batch(&trigger).unwrap();
}

fn store_accepts(bench: &TestBench, what: &str) {
    let store = rusqlite::Connection::open(bench.state.path().join("coracle.db")).unwrap();
    store.execute_batch(&format!("DROP TRIGGER no_{what}")).unwrap();
}

#[tokio::test]
async fn failed_store_write_prevents_a_create_but_not_a_launch() {
    let bench = TestBench::new().await;
    store_refuses(&bench, "insert");
    bench.service.create_sandbox(&bench.owner, plain()).await.unwrap_err();
    assert!(!bench.backend.was_asked_to("create asked"));
    assert_eq!(bench.all().total, 0);
    store_accepts(&bench, "insert");
    let made = bench.create().await;
    store_refuses(&bench, "insert");
    bench.sandbox(&made.id).processes().launch_process(ProcessSpec::from_shell_text("true")).await.unwrap();
}

#[tokio::test]
async fn n99_failing_store_does_not_keep_a_sandbox_alive() {
    let bench = TestBench::new().await;
    let made = bench.create().await;
    store_refuses(&bench, "update");
    store_refuses(&bench, "delete");
    assert_eq!(bench.sandbox(&made.id).destroy().await.unwrap(), Outcome::Done);
    assert_eq!((bench.backend.count(), bench.all().total), (0, 0));
    store_accepts(&bench, "delete");
    bench
        .service
        .create_sandbox(&bench.owner, plain())
        .await
        .expect_err("a sandbox that cannot be recorded must not be created");
    assert_eq!((bench.backend.count(), bench.all().total), (0, 0));
    store_accepts(&bench, "update");
    let other = bench.create().await;
    let (backend, state) = bench.crash().await;
    let found = TestBench::with(backend, state, Clock::from_host()).await.all();
    assert_eq!(found.items.len(), 1, "the row of the first was deleted with the next write");
    assert_eq!(found.items[0].id, other.id);
}

#[tokio::test]
async fn missing_entrypoint_is_an_invalid_request() {
    let bench = TestBench::new().await;
    bench.backend.set_script(|request| {
        let missing = wire::Frame::from_message(&wire::AgentReply::Fault(fault(wire::FaultKind::NotFound)));
        matches!(request, AgentRequest::Start(_)).then(|| encoded(&[missing]))
    });
    let error = bench.service.create_sandbox(&bench.owner, with_entrypoint()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert_eq!(bench.backend.count(), 0);
}

#[tokio::test]
async fn create_of_a_disconnected_client_is_undone() {
    let bench = TestBench::new().await;
    bench.backend.gate.forget_permits(usize::MAX >> 3);
    let service = bench.service.clone();
    let owner = bench.owner.clone();
    let asking = tokio::spawn(async move { service.create_sandbox(&owner, plain()).await });
    let sandbox = loop {
        if let Some(sandbox) = bench.all().items.pop() {
            break sandbox;
        }
        tokio::task::yield_now().await;
    };
    let handle = bench.handle(&sandbox);
    asking.abort();
    assert!(asking.await.unwrap_err().is_cancelled());
    bench.backend.gate.add_permits(1);
    handle.state.clone().wait_for(|sandbox| sandbox.phase == Phase::Stopped).await.unwrap();
    assert_eq!(bench.backend.count(), 0);
    assert_eq!(bench.all().total, 0);
}

#[tokio::test]
async fn create_past_the_limit_is_refused_until_there_is_room() {
    let bench = TestBench::new().await;
    let mut made = Vec::new();
    for _ in 0..20 {
        made.push(bench.create().await);
    }
    let error = bench.service.create_sandbox(&bench.owner, plain()).await.unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Exhausted { .. }), "{error}");
    bench.sandbox(&made[0].id).destroy().await.unwrap();
    bench.create().await;
}

#[tokio::test]
async fn pause_and_resume_twice_return_unchanged() {
    let bench = TestBench::new().await;
    let (service, owner, id) = (&bench.service, &bench.owner, &bench.create().await.id);
    assert_eq!(service.sandbox(owner, id).unwrap().resume().await.unwrap(), Outcome::Unchanged.into());
    assert_eq!(service.sandbox(owner, id).unwrap().pause().await.unwrap(), Outcome::Done);
    assert_eq!(service.sandbox(owner, id).unwrap().pause().await.unwrap(), Outcome::Unchanged);
    assert_eq!(bench.backend.condition(id), Some(FoundCondition::Frozen));
    let error = service
        .sandbox(owner, id)
        .unwrap()
        .processes()
        .launch_process(ProcessSpec::from_shell_text("true"))
        .await
        .err()
        .unwrap();
    assert_eq!(error.kind(), ErrorKind::Conflict { phase: Phase::Paused });
    assert_eq!(service.sandbox(owner, id).unwrap().resume().await.unwrap(), Outcome::Done.into());
    service
        .sandbox(owner, id)
        .unwrap()
        .processes()
        .launch_process(ProcessSpec::from_shell_text("true"))
        .await
        .unwrap();
}

#[tokio::test]
async fn failed_pause_leaves_the_sandbox_running() {
    let bench = TestBench::new().await;
    let made = bench.create().await;
    bench.backend.fail("pause", 1);
    bench.sandbox(&made.id).pause().await.unwrap_err();
    assert_eq!(bench.sandbox(&made.id).current_state().phase, Phase::Running);
}

#[tokio::test]
async fn unsupported_pause_leaves_the_sandbox_running() {
    let bench = TestBench::new().await;
    let made = bench.create().await;
    bench.backend.refuse_to_pause();
    let error = bench.sandbox(&made.id).pause().await.unwrap_err();
    assert_eq!((error.kind(), error.hint()), (ErrorKind::Unsupported, Some("use another host")));
    assert_eq!(bench.sandbox(&made.id).current_state().phase, Phase::Running);
}

#[tokio::test]
async fn failed_pause_that_cannot_be_undone_leaves_a_sandbox_that_can_be_resumed() {
    let bench = TestBench::new().await;
    let made = bench.create().await;
    bench.backend.fail("pause", 1);
    bench.backend.fail("resume", 1);
    bench.sandbox(&made.id).pause().await.unwrap_err();
    assert_eq!(bench.sandbox(&made.id).current_state().phase, Phase::Paused);
    bench.sandbox(&made.id).resume().await.unwrap();
    assert_eq!(bench.sandbox(&made.id).current_state().phase, Phase::Running);
}

#[tokio::test]
async fn destroyed_sandbox_is_not_found() {
    let bench = TestBench::new().await;
    let made = bench.create().await;
    assert_eq!(bench.sandbox(&made.id).destroy().await.unwrap(), Outcome::Done);
    assert_eq!(bench.backend.count(), 0);
    let error = bench.service.sandbox(&bench.owner, &made.id).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert_eq!(bench.service.count_by_phase(), BTreeMap::new());
}

#[tokio::test]
async fn concurrent_destroys_all_succeed() {
    let bench = TestBench::new().await;
    let made = bench.create().await;
    let sandbox = bench.sandbox(&made.id);
    let destroying = (0..8).map(|_| sandbox.destroy());
    let outcomes = futures_util::future::join_all(destroying).await;
    let done = outcomes.iter().filter(|outcome| matches!(outcome, Ok(Outcome::Done))).count();
    assert_eq!(done, 1);
    assert!(outcomes.iter().all(Result::is_ok));
}

#[tokio::test(start_paused = true)]
async fn failed_destroy_is_retried_until_it_succeeds() {
    let bench = TestBench::new().await;
    let made = bench.create().await;
    bench.backend.fail("destroy", 3);
    let handle = bench.handle(&made);
    bench.sandbox(&made.id).destroy().await.unwrap_err();
    handle.state.clone().wait_for(|sandbox| sandbox.phase == Phase::Stopped).await.unwrap();
    assert_eq!(bench.backend.count(), 0);
}

#[tokio::test]
async fn dead_sandbox_shows_its_cause_and_keeps_only_its_files() {
    let bench = TestBench::new().await;
    let made = bench.create().await;
    bench.backend.kill(&made.id, EndCause::Oom);
    bench.until(&made, |phase| phase == Phase::Failed(EndCause::Oom)).await;
    let error = bench
        .sandbox(&made.id)
        .processes()
        .launch_process(ProcessSpec::from_shell_text("true"))
        .await
        .err()
        .unwrap();
    assert_eq!(error.kind(), ErrorKind::Conflict { phase: Phase::Failed(EndCause::Oom) });
    // A command is carried out after the death has been handled.
    bench.sandbox(&made.id).patch_labels(Default::default()).await.unwrap();
    assert_eq!((bench.backend.times_asked_to("stop"), bench.backend.count()), (1, 1));
    assert_eq!(bench.sandbox(&made.id).destroy().await.unwrap(), Outcome::Done);
    assert_eq!(bench.backend.count(), 0);
}

#[tokio::test]
async fn sandbox_with_an_ended_entrypoint_can_still_be_used() {
    let bench = TestBench::new().await;
    let made = bench.service.create_sandbox(&bench.owner, with_entrypoint()).await.unwrap();
    assert_eq!(made.phase, Phase::Running);
    bench.backend.entrypoint_end.send_replace(Some(wire::process::ExitReason::Code(3)));
    bench.until(&made, |phase| phase == Phase::Exited(ExitReason::Code(3))).await;
    bench.sandbox(&made.id).processes().list_processes().await.unwrap();
    let error = bench.sandbox(&made.id).pause().await.unwrap_err();
    assert!(matches!(error, ServiceError::Denied { .. }));
}

#[tokio::test]
async fn commands_past_the_limit_are_refused_until_one_has_ended() {
    let bench = TestBench::new().await;
    let made = bench.create().await;
    let mut launched = Vec::new();
    for _ in 0..3 {
        launched.push(
            bench
                .sandbox(&made.id)
                .processes()
                .launch_process(ProcessSpec::from_shell_text("true"))
                .await
                .unwrap(),
        );
    }
    bench
        .backend
        .set_processes(launched.iter().map(|following| running(following.process.as_str())).collect());
    let error = bench
        .sandbox(&made.id)
        .processes()
        .launch_process(ProcessSpec::from_shell_text("true"))
        .await
        .err()
        .unwrap();
    assert!(matches!(error.kind(), ErrorKind::Exhausted { .. }), "{error}");
    bench.backend.set_processes(Vec::new());
    bench.sandbox(&made.id).processes().launch_process(ProcessSpec::from_shell_text("true")).await.unwrap();
}

#[tokio::test]
async fn labels_are_set_and_removed_and_filter_a_page() {
    let bench = TestBench::new().await;
    let labels = Labels::from([("team".to_owned(), "search".to_owned())]);
    let request = CreateSandboxRequest { labels: labels.clone(), ..plain() };
    let first = bench.service.create_sandbox(&bench.owner, request.clone()).await.unwrap();
    let second = bench.service.create_sandbox(&bench.owner, request).await.unwrap();
    bench.create().await;
    let every = |_: &Phase| true;
    let page = |offset, limit| {
        let filter = SandboxFilter { labels: labels.clone(), phase: &every, offset, limit };
        bench.service.list_sandboxes(&bench.owner, &filter)
    };
    assert_eq!(page(0, 1).items[0].id, second.id, "the newest comes first");
    assert_eq!((page(1, 5).items[0].id.clone(), page(1, 5).total), (first.id.clone(), 2));
    assert!(page(2, 5).items.is_empty());
    let patch = BTreeMap::from([("team".to_owned(), None), ("tier".to_owned(), Some("one".to_owned()))]);
    let patched = bench.sandbox(&first.id).patch_labels(patch).await.unwrap();
    assert_eq!(patched.labels, Labels::from([("tier".to_owned(), "one".to_owned())]));
    assert_eq!(page(0, 5).total, 1);
}

#[tokio::test]
async fn only_the_right_token_opens_a_sandbox() {
    let bench = TestBench::new().await;
    let made = bench.create().await;
    let (sandbox, other) = (bench.sandbox(&made.id), bench.create().await);
    let token = sandbox.ports().access_token("exec");
    assert!(sandbox.ports().accepts_token("exec", token.expose()));
    assert!(!sandbox.ports().accepts_token("egress", token.expose()));
    assert!(!sandbox.ports().accepts_token("exec", "x"));
    assert!(!bench.sandbox(&other.id).ports().accepts_token("exec", token.expose()));
}

#[tokio::test]
async fn handle_of_a_removed_sandbox_finds_nothing() {
    let bench = TestBench::new().await;
    let made = bench.create().await;
    let sandbox = bench.sandbox(&made.id);
    assert!(sandbox.check_usable().is_ok());
    sandbox.destroy().await.unwrap();
    let refused = [
        sandbox.check_usable().unwrap_err(),
        sandbox.processes().list_processes().await.unwrap_err(),
        sandbox.ports().reserve_port(80).await.unwrap_err(),
        sandbox.current_usage().await.unwrap_err(),
        sandbox.pause().await.unwrap_err(),
    ];
    for error in refused {
        assert!(matches!(error, ServiceError::NoSandbox(_)), "{error:?}");
    }
    assert_eq!(sandbox.destroy().await.unwrap(), Outcome::Unchanged);
}

#[tokio::test]
async fn failure_of_an_agent_is_explained_by_the_end_of_its_sandbox() {
    let bench = TestBench::new().await;
    let made = bench.create().await;
    let sandbox = bench.sandbox(&made.id);
    let failed = || sandbox.handle.agent.unexpected_reply();
    assert!(matches!(sandbox.explain_failure(failed()), ServiceError::Agent { .. }));
    sandbox.destroy().await.unwrap();
    assert!(matches!(sandbox.explain_failure(failed()), ServiceError::NoSandbox(_)));
}

#[tokio::test]
async fn notes_are_parsed_once_for_each_form() {
    let bench = TestBench::new().await;
    let request = CreateSandboxRequest { notes: vec![1, 2], ..plain() };
    let made = bench.service.create_sandbox(&bench.owner, request).await.unwrap();
    let length = bench.sandbox(&made.id).parsed_notes(|notes| notes.len());
    assert_eq!(*length, 2);
    assert!(Arc::ptr_eq(&length, &bench.sandbox(&made.id).parsed_notes(|_| 7_usize)));
    assert_eq!(*bench.sandbox(&made.id).parsed_notes(<[u8]>::to_vec), [1, 2]);
}

#[tokio::test]
async fn stopped_service_reports_stopping_and_leaves_sandboxes_alone() {
    let bench = TestBench::new().await;
    let made = bench.create().await;
    assert_eq!(bench.service.stop().await, 1);
    let error = bench.sandbox(&made.id).destroy().await.unwrap_err();
    assert!(matches!(error, ServiceError::Stopping), "{error}");
    assert_eq!(bench.backend.condition(&made.id), Some(FoundCondition::Alive));
}

#[tokio::test]
async fn timeout_longer_than_the_maximum_is_refused() {
    let bench = TestBench::with(FakeBackend::new(), tempfile::tempdir().unwrap(), Clock::from_host()).await;
    let request = CreateSandboxRequest { timeout: Some(std::time::Duration::from_secs(86_401)), ..plain() };
    let error = bench.service.create_sandbox(&bench.owner, request).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
}

#[tokio::test]
async fn size_of_labels_is_limited() {
    let bench = TestBench::new().await;
    let made = bench.create().await;
    let patch = |part: usize| {
        (0..1000).map(|n| (format!("{part}-{n}"), Some("v".repeat(60)))).collect::<BTreeMap<_, _>>()
    };
    let mut kept = Labels::new();
    let mut refused = None;
    for part in 0..20 {
        match bench.sandbox(&made.id).patch_labels(patch(part)).await {
            Ok(sandbox) => kept = sandbox.labels,
            Err(error) => refused = Some(error),
        }
    }
    assert_eq!(refused.expect("the size of labels is limited").kind(), ErrorKind::Invalid);
    assert_eq!(bench.sandbox(&made.id).current_state().labels, kept, "a refused patch changes nothing");
    // Removing labels is always possible.
    let fewer = kept.keys().take(10).map(|name| (name.clone(), None)).collect();
    let patched = bench.sandbox(&made.id).patch_labels(fewer).await.unwrap();
    assert_eq!(patched.labels.len(), kept.len() - 10);
}
