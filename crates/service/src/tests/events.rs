//! The feed of lifecycle events.

use std::time::SystemTime;

use domain::{Cause, Owner, Phase, SandboxId};

use super::{Bench, plain};
use crate::clock::Clock;
use crate::{Events, LifeEvent, Told};

async fn next(events: &mut Events, count: usize) -> Vec<LifeEvent> {
    let mut found = Vec::new();
    while found.len() < count {
        for item in events.next().await.expect("the server runs") {
            match item {
                Told::Event(event) => found.push(event),
                Told::Operator(event) => panic!("{event:?}"),
                Told::Missed { after, through } => panic!("missed {after} to {through}"),
            }
        }
    }
    found
}

#[tokio::test]
async fn every_phase_change_has_an_event_with_its_cause() {
    let bench = Bench::new().await;
    let mut events = bench.service.events(None, None);
    let made = bench.create().await;
    bench.service.pause(&bench.owner, &made.id).await.unwrap();
    bench.service.resume(&bench.owner, &made.id).await.unwrap();
    bench.backend.kill(&made.id, Cause::Oom);
    bench.until(&made, |phase| matches!(phase, Phase::Failed(_))).await;
    bench.service.destroy(&bench.owner, &made.id).await.unwrap();
    let items = next(&mut events, 9).await;
    let phases: Vec<_> = items.iter().map(|event| (event.phase, event.cause)).collect();
    assert_eq!(
        phases,
        [
            (Phase::Starting, None),
            (Phase::Running, None),
            (Phase::Pausing, None),
            (Phase::Paused, None),
            (Phase::Resuming, None),
            (Phase::Running, None),
            (Phase::Failed(Cause::Oom), Some(Cause::Oom)),
            (Phase::Stopping, None),
            (Phase::Stopped, Some(Cause::Destroyed)),
        ]
    );
    assert!(items.iter().all(|event| event.sandbox == made.id && event.owner == bench.owner));
    assert!(items.is_sorted_by(|one, two| one.id < two.id));
}

#[tokio::test]
async fn owner_sees_only_its_own_events() {
    let bench = Bench::new().await;
    let other = Owner::named("other");
    let mut theirs = bench.service.events(Some(other.clone()), None);
    bench.create().await;
    let made = bench.service.create(&other, plain()).await.unwrap();
    let items = next(&mut theirs, 2).await;
    assert!(items.iter().all(|event| event.sandbox == made.id), "{items:?}");
}

#[tokio::test]
async fn reader_continues_at_its_position_after_a_restart() {
    let bench = Bench::new().await;
    let mut events = bench.service.events(None, Some(0));
    let made = bench.create().await;
    let seen = next(&mut events, 1).await.remove(0);
    let (backend, state) = bench.crash().await;
    let bench = Bench::with(backend, state, Clock::host()).await;
    let mut events = bench.service.events(None, Some(seen.id));
    let items = next(&mut events, 1).await;
    assert_eq!(items.iter().map(|event| event.phase).collect::<Vec<_>>(), [Phase::Running]);
    assert!(items.iter().all(|event| event.sandbox == made.id && event.id > seen.id));
}

#[tokio::test]
async fn server_restart_publishes_only_changed_phases() {
    let bench = Bench::new().await;
    let (lives, dies) = (bench.create().await, bench.create().await);
    bench.backend.take_away(&dies.id);
    let bench = bench.restarted().await.restarted().await;
    for sandbox in [&lives, &dies] {
        bench.service.destroy(&bench.owner, &sandbox.id).await.unwrap();
    }
    let items = bench.service.events(None, Some(0)).ready();
    let phases = |sandbox: &crate::Sandbox| -> Vec<Phase> {
        let own = items.iter().filter_map(|item| match item {
            Told::Event(event) if event.sandbox == sandbox.id => Some(event.phase),
            _ => None,
        });
        own.collect()
    };
    let died = Phase::Failed(Cause::AgentDied);
    assert_eq!(phases(&lives), [Phase::Starting, Phase::Running, Phase::Stopping, Phase::Stopped]);
    assert_eq!(phases(&dies), [Phase::Starting, Phase::Running, died, Phase::Stopping, Phase::Stopped]);
}

#[tokio::test]
async fn reader_after_an_unknown_event_number_begins_now() {
    let bench = Bench::new().await;
    bench.create().await;
    let mut events = bench.service.events(None, Some(99_999_999));
    assert_eq!(events.ready(), []);
    let made = bench.create().await;
    let items = next(&mut events, 2).await;
    assert!(items.iter().all(|event| event.sandbox == made.id), "{items:?}");
}

#[tokio::test]
async fn events_of_others_do_not_hide_an_owners_own() {
    let bench = Bench::new().await;
    let other = Owner::named("other");
    for _ in 0..300 {
        let id = SandboxId::from_entropy([1; 20]);
        bench.service.0.events.tell(SystemTime::UNIX_EPOCH, &bench.owner, &id, Phase::Running, None);
    }
    let made = bench.service.create(&other, plain()).await.unwrap();
    let items = bench.service.events(Some(other), Some(0)).ready();
    assert!(matches!(&items[..], [Told::Event(event), ..] if event.sandbox == made.id), "{items:?}");
}
