//! Create, pause, resume, label, destroy; limits; what happens when somebody dies.

use std::collections::BTreeMap;

use backend::Condition;
use domain::process::Process;
use domain::{Cause, Exit, Labels, Owner, Phase};
use wire::Request;

use super::pretend::{Pretend, encoded, fault, running};
use super::{Bench, plain, with_entrypoint};
use crate::clock::Clock;
use crate::{Create, ErrorKind, Filter, Outcome, ServiceError};

#[tokio::test]
async fn a_created_sandbox_runs_and_says_what_is_in_force() {
    let bench = Bench::new().await;
    let made = bench.create().await;
    assert_eq!(made.phase, Phase::Running);
    assert_eq!(made.in_force.image, "real host");
    assert_eq!(bench.service.get(&bench.owner, &made.id).unwrap().phase, Phase::Running);
    assert_eq!(bench.service.counts(), BTreeMap::from([("running", 1)]));
}

#[tokio::test]
async fn a_foreign_owner_finds_nothing() {
    let bench = Bench::new().await;
    let made = bench.create().await;
    let stranger = Owner::named("stranger");
    for error in [
        bench.service.get(&stranger, &made.id).unwrap_err(),
        bench.service.pause(&stranger, &made.id).await.unwrap_err(),
        bench.service.destroy(&stranger, &made.id).await.unwrap_err(),
        bench.service.launch(&stranger, &made.id, Process::shell("true")).await.err().unwrap(),
    ] {
        assert_eq!(error.kind(), ErrorKind::NotFound);
    }
    assert_eq!(bench.backend.condition(&made.id), Some(Condition::Alive));
}

#[tokio::test]
async fn a_create_that_fails_leaves_nothing() {
    for step in ["create", "dial"] {
        let bench = Bench::new().await;
        bench.backend.fail(step, 1);
        bench.service.create(&bench.owner, plain()).await.unwrap_err();
        assert_eq!(bench.backend.count(), 0, "{step}");
        assert_eq!(bench.all().total, 0, "{step}");
        let (backend, state) = bench.crash().await;
        assert_eq!(Bench::with(backend, state, Clock::host()).await.all().total, 0, "{step}");
    }
}

/// Makes the store refuse something, as another program that has the file open could.
fn store_refuses(bench: &Bench, what: &str) {
    let store = rusqlite::Connection::open(bench.state.path().join("coracle.db")).unwrap();
    let trigger =
        format!("CREATE TRIGGER no_{what} BEFORE {what} ON sandboxes BEGIN SELECT RAISE(ABORT, 'no'); END");
    store.execute_batch(&trigger).unwrap();
}

fn store_accepts(bench: &Bench, what: &str) {
    let store = rusqlite::Connection::open(bench.state.path().join("coracle.db")).unwrap();
    store.execute_batch(&format!("DROP TRIGGER no_{what}")).unwrap();
}

#[tokio::test]
async fn without_a_note_nothing_is_made_and_what_runs_goes_on() {
    let bench = Bench::new().await;
    store_refuses(&bench, "insert");
    bench.service.create(&bench.owner, plain()).await.unwrap_err();
    assert!(!bench.backend.was_asked_to("create asked"));
    assert_eq!(bench.all().total, 0);
    store_accepts(&bench, "insert");
    let made = bench.create().await;
    store_refuses(&bench, "insert");
    bench.service.launch(&bench.owner, &made.id, Process::shell("true")).await.unwrap();
}

#[tokio::test]
async fn a_store_that_refuses_does_not_keep_a_sandbox_alive() {
    let bench = Bench::new().await;
    let made = bench.create().await;
    store_refuses(&bench, "update");
    store_refuses(&bench, "delete");
    assert_eq!(bench.service.destroy(&bench.owner, &made.id).await.unwrap(), Outcome::Done);
    assert_eq!((bench.backend.count(), bench.all().total), (0, 0));
    store_accepts(&bench, "delete");
    bench.service.create(&bench.owner, plain()).await.expect_err("it could not be found again");
    assert_eq!((bench.backend.count(), bench.all().total), (0, 0));
    store_accepts(&bench, "update");
    let other = bench.create().await;
    let (backend, state) = bench.crash().await;
    let found = Bench::with(backend, state, Clock::host()).await.all();
    assert_eq!(found.items.len(), 1, "the row of the first went with the next write");
    assert_eq!(found.items[0].id, other.id);
}

#[tokio::test]
async fn an_entrypoint_that_is_not_there_is_the_callers_mistake() {
    let bench = Bench::new().await;
    bench.backend.answers(|request| {
        let missing = wire::Frame::message(&wire::Reply::Fault(fault(wire::FaultKind::NotFound)));
        matches!(request, Request::Start(_)).then(|| encoded(&[missing]))
    });
    let error = bench.service.create(&bench.owner, with_entrypoint()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert_eq!(bench.backend.count(), 0);
}

#[tokio::test]
async fn a_create_whose_client_has_gone_is_undone() {
    let bench = Bench::new().await;
    bench.backend.gate.forget_permits(usize::MAX >> 3);
    let service = bench.service.clone();
    let owner = bench.owner.clone();
    let asking = tokio::spawn(async move { service.create(&owner, plain()).await });
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
async fn past_the_limit_a_create_is_refused_and_room_is_found_again() {
    let bench = Bench::new().await;
    let mut made = Vec::new();
    for _ in 0..20 {
        made.push(bench.create().await);
    }
    let error = bench.service.create(&bench.owner, plain()).await.unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Exhausted { .. }), "{error}");
    bench.service.destroy(&bench.owner, &made[0].id).await.unwrap();
    bench.create().await;
}

#[tokio::test]
async fn pausing_and_resuming_twice_is_already_so() {
    let bench = Bench::new().await;
    let (service, owner, id) = (&bench.service, &bench.owner, &bench.create().await.id);
    assert_eq!(service.resume(owner, id).await.unwrap(), Outcome::AlreadySo.into());
    assert_eq!(service.pause(owner, id).await.unwrap(), Outcome::Done);
    assert_eq!(service.pause(owner, id).await.unwrap(), Outcome::AlreadySo);
    assert_eq!(bench.backend.condition(id), Some(Condition::Frozen));
    let error = service.launch(owner, id, Process::shell("true")).await.err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Conflict { phase: Phase::Paused });
    assert_eq!(service.resume(owner, id).await.unwrap(), Outcome::Done.into());
    service.launch(owner, id, Process::shell("true")).await.unwrap();
}

#[tokio::test]
async fn a_pause_that_fails_leaves_it_running() {
    let bench = Bench::new().await;
    let made = bench.create().await;
    bench.backend.fail("pause", 1);
    bench.service.pause(&bench.owner, &made.id).await.unwrap_err();
    assert_eq!(bench.service.get(&bench.owner, &made.id).unwrap().phase, Phase::Running);
}

#[tokio::test]
async fn a_pause_that_the_host_does_not_support_leaves_it_running() {
    let bench = Bench::new().await;
    let made = bench.create().await;
    bench.backend.refuse_to_pause();
    let error = bench.service.pause(&bench.owner, &made.id).await.unwrap_err();
    assert_eq!((error.kind(), error.hint()), (ErrorKind::Unsupported, Some("use another host")));
    assert_eq!(bench.service.get(&bench.owner, &made.id).unwrap().phase, Phase::Running);
}

#[tokio::test]
async fn a_pause_that_cannot_be_undone_can_be_resumed() {
    let bench = Bench::new().await;
    let made = bench.create().await;
    bench.backend.fail("pause", 1);
    bench.backend.fail("resume", 1);
    bench.service.pause(&bench.owner, &made.id).await.unwrap_err();
    assert_eq!(bench.service.get(&bench.owner, &made.id).unwrap().phase, Phase::Paused);
    bench.service.resume(&bench.owner, &made.id).await.unwrap();
    assert_eq!(bench.service.get(&bench.owner, &made.id).unwrap().phase, Phase::Running);
}

#[tokio::test]
async fn what_is_destroyed_is_not_found() {
    let bench = Bench::new().await;
    let made = bench.create().await;
    assert_eq!(bench.service.destroy(&bench.owner, &made.id).await.unwrap(), Outcome::Done);
    assert_eq!(bench.backend.count(), 0);
    let error = bench.service.destroy(&bench.owner, &made.id).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert_eq!(bench.service.counts(), BTreeMap::new());
}

#[tokio::test]
async fn many_who_destroy_at_once_all_see_it_gone() {
    let bench = Bench::new().await;
    let made = bench.create().await;
    let destroying = (0..8).map(|_| bench.service.destroy(&bench.owner, &made.id));
    let outcomes = futures_util::future::join_all(destroying).await;
    let done = outcomes.iter().filter(|outcome| matches!(outcome, Ok(Outcome::Done))).count();
    assert_eq!(done, 1);
    assert!(outcomes.iter().all(Result::is_ok));
}

#[tokio::test(start_paused = true)]
async fn a_destroy_that_fails_is_tried_again_until_it_succeeds() {
    let bench = Bench::new().await;
    let made = bench.create().await;
    bench.backend.fail("destroy", 3);
    let handle = bench.handle(&made);
    bench.service.destroy(&bench.owner, &made.id).await.unwrap_err();
    handle.state.clone().wait_for(|sandbox| sandbox.phase == Phase::Stopped).await.unwrap();
    assert_eq!(bench.backend.count(), 0);
}

#[tokio::test]
async fn a_death_stays_visible_with_its_cause_and_keeps_only_the_files() {
    let bench = Bench::new().await;
    let made = bench.create().await;
    bench.backend.kill(&made.id, Cause::Oom);
    bench.until(&made, |phase| phase == Phase::Failed(Cause::Oom)).await;
    let error = bench.service.launch(&bench.owner, &made.id, Process::shell("true")).await.err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Conflict { phase: Phase::Failed(Cause::Oom) });
    // An order is obeyed when the death has been dealt with.
    bench.service.patch_labels(&bench.owner, &made.id, Default::default()).await.unwrap();
    assert_eq!((bench.backend.times_asked_to("stop"), bench.backend.count()), (1, 1));
    assert_eq!(bench.service.destroy(&bench.owner, &made.id).await.unwrap(), Outcome::Done);
    assert_eq!(bench.backend.count(), 0);
}

#[tokio::test]
async fn the_end_of_the_entrypoint_is_a_phase_in_which_files_can_be_read() {
    let bench = Bench::new().await;
    let made = bench.service.create(&bench.owner, with_entrypoint()).await.unwrap();
    assert_eq!(made.phase, Phase::Running);
    bench.backend.entrypoint_end.send_replace(Some(wire::process::Exit::Code(3)));
    bench.until(&made, |phase| phase == Phase::Exited(Exit::Code(3))).await;
    bench.service.processes(&bench.owner, &made.id).await.unwrap();
    let error = bench.service.pause(&bench.owner, &made.id).await.unwrap_err();
    assert!(matches!(error, ServiceError::Denied { .. }));
}

#[tokio::test]
async fn commands_past_the_limit_are_refused_until_one_has_ended() {
    let bench = Bench::new().await;
    let made = bench.create().await;
    let mut launched = Vec::new();
    for _ in 0..3 {
        launched.push(bench.service.launch(&bench.owner, &made.id, Process::shell("true")).await.unwrap());
    }
    bench.backend.knows(launched.iter().map(|following| running(following.process.as_str())).collect());
    let error = bench.service.launch(&bench.owner, &made.id, Process::shell("true")).await.err().unwrap();
    assert!(matches!(error.kind(), ErrorKind::Exhausted { .. }), "{error}");
    bench.backend.knows(Vec::new());
    bench.service.launch(&bench.owner, &made.id, Process::shell("true")).await.unwrap();
}

#[tokio::test]
async fn labels_are_set_and_removed_and_filter_a_page() {
    let bench = Bench::new().await;
    let labels = Labels::from([("team".to_owned(), "search".to_owned())]);
    let wish = Create { labels: labels.clone(), ..plain() };
    let first = bench.service.create(&bench.owner, wish.clone()).await.unwrap();
    let second = bench.service.create(&bench.owner, wish).await.unwrap();
    bench.create().await;
    let every = |_: &Phase| true;
    let page = |offset, limit| {
        let filter = Filter { labels: labels.clone(), phase: &every, offset, limit };
        bench.service.list(&bench.owner, &filter)
    };
    assert_eq!(page(0, 1).items[0].id, second.id, "the newest comes first");
    assert_eq!((page(1, 5).items[0].id.clone(), page(1, 5).total), (first.id.clone(), 2));
    assert!(page(2, 5).items.is_empty());
    let patch = BTreeMap::from([("team".to_owned(), None), ("tier".to_owned(), Some("one".to_owned()))]);
    let patched = bench.service.patch_labels(&bench.owner, &first.id, patch).await.unwrap();
    assert_eq!(patched.labels, Labels::from([("tier".to_owned(), "one".to_owned())]));
    assert_eq!(page(0, 5).total, 1);
}

#[tokio::test]
async fn only_the_right_token_leads_to_the_owner() {
    let bench = Bench::new().await;
    let made = bench.create().await;
    let token = bench.service.token(&made.id, "exec");
    let owner_by = |purpose, text: &str| bench.service.owner_by_token(&made.id, purpose, text);
    assert_eq!(owner_by("exec", token.expose()), Some(Owner::single()));
    assert_eq!(owner_by("egress", token.expose()), None);
    assert_eq!(owner_by("exec", "x"), None);
    bench.service.destroy(&bench.owner, &made.id).await.unwrap();
    assert_eq!(bench.service.owner_by_token(&made.id, "exec", token.expose()), None);
}

#[tokio::test]
async fn a_stopped_service_answers_that_it_is_stopping_and_leaves_sandboxes_alone() {
    let bench = Bench::new().await;
    let made = bench.create().await;
    assert_eq!(bench.service.stop().await, 1);
    let error = bench.service.destroy(&bench.owner, &made.id).await.unwrap_err();
    assert!(matches!(error, ServiceError::Stopping), "{error}");
    assert_eq!(bench.backend.condition(&made.id), Some(Condition::Alive));
}

#[tokio::test]
async fn a_timeout_longer_than_the_server_grants_is_refused() {
    let bench = Bench::with(Pretend::new(), tempfile::tempdir().unwrap(), Clock::host()).await;
    let wish = Create { timeout: Some(std::time::Duration::from_secs(86_401)), ..plain() };
    let error = bench.service.create(&bench.owner, wish).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
}

#[tokio::test]
async fn labels_do_not_grow_without_bound() {
    let bench = Bench::new().await;
    let made = bench.create().await;
    let patch = |part: usize| {
        (0..1000).map(|n| (format!("{part}-{n}"), Some("v".repeat(60)))).collect::<BTreeMap<_, _>>()
    };
    let mut kept = Labels::new();
    let mut refused = None;
    for part in 0..20 {
        match bench.service.patch_labels(&bench.owner, &made.id, patch(part)).await {
            Ok(sandbox) => kept = sandbox.labels,
            Err(error) => refused = Some(error),
        }
    }
    assert_eq!(refused.expect("there is a bound").kind(), ErrorKind::Invalid);
    assert_eq!(bench.service.get(&bench.owner, &made.id).unwrap().labels, kept, "nothing half done");
    // Taking some away is always possible.
    let fewer = kept.keys().take(10).map(|name| (name.clone(), None)).collect();
    let patched = bench.service.patch_labels(&bench.owner, &made.id, fewer).await.unwrap();
    assert_eq!(patched.labels.len(), kept.len() - 10);
}
