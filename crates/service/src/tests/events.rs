//! The feed of lifecycle events.

use std::time::SystemTime;

use domain::{EndCause, Owner, Phase, SandboxId};

use super::{TestBench, plain};
use crate::clock::Clock;
use crate::{FeedItem, FeedReader, LifecycleEvent};

async fn next(events: &mut FeedReader, count: usize) -> Vec<LifecycleEvent> {
    let mut found = Vec::new();
    while found.len() < count {
        for item in events.next_batch().await.expect("the server runs") {
            match item {
                FeedItem::Event(event) => found.push(event),
                FeedItem::Operator(event) => panic!("{event:?}"),
                FeedItem::Missed { after, through } => panic!("missed {after} to {through}"),
            }
        }
    }
    found
}

#[tokio::test]
async fn every_phase_change_has_an_event_with_its_cause() {
    let bench = TestBench::new().await;
    let mut events = bench.service.follow_events(None, None);
    let made = bench.create().await;
    bench.sandbox(&made.id).pause().await.unwrap();
    bench.sandbox(&made.id).resume().await.unwrap();
    bench.backend.kill(&made.id, EndCause::Oom);
    bench.until(&made, |phase| matches!(phase, Phase::Failed(_))).await;
    bench.sandbox(&made.id).destroy().await.unwrap();
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
            (Phase::Failed(EndCause::Oom), Some(EndCause::Oom)),
            (Phase::Stopping, None),
            (Phase::Stopped, Some(EndCause::Destroyed)),
        ]
    );
    assert!(items.iter().all(|event| event.sandbox == made.id && event.owner == bench.owner));
    assert!(items.is_sorted_by(|one, two| one.id < two.id));
}

#[tokio::test]
async fn owner_sees_only_its_own_events() {
    let bench = TestBench::new().await;
    let other = Owner::from_valid_name("other");
    let mut theirs = bench.service.follow_events(Some(other.clone()), None);
    bench.create().await;
    let made = bench.service.create_sandbox(&other, plain()).await.unwrap();
    let items = next(&mut theirs, 2).await;
    assert!(items.iter().all(|event| event.sandbox == made.id), "{items:?}");
}

#[tokio::test]
async fn reader_continues_at_its_position_after_a_restart() {
    let bench = TestBench::new().await;
    let mut events = bench.service.follow_events(None, Some(0));
    let made = bench.create().await;
    let seen = next(&mut events, 1).await.remove(0);
    let (backend, state) = bench.crash().await;
    let bench = TestBench::with(backend, state, Clock::from_host()).await;
    let mut events = bench.service.follow_events(None, Some(seen.id));
    let items = next(&mut events, 1).await;
    assert_eq!(items.iter().map(|event| event.phase).collect::<Vec<_>>(), [Phase::Running]);
    assert!(items.iter().all(|event| event.sandbox == made.id && event.id > seen.id));
}

#[tokio::test]
async fn server_restart_publishes_only_changed_phases() {
    let bench = TestBench::new().await;
    let (lives, dies) = (bench.create().await, bench.create().await);
    bench.backend.remove_sandbox(&dies.id);
    let bench = bench.restarted().await.restarted().await;
    for sandbox in [&lives, &dies] {
        bench.sandbox(&sandbox.id).destroy().await.unwrap();
    }
    let items = bench.service.follow_events(None, Some(0)).take_ready();
    let phases = |sandbox: &crate::Sandbox| -> Vec<Phase> {
        let own = items.iter().filter_map(|item| match item {
            FeedItem::Event(event) if event.sandbox == sandbox.id => Some(event.phase),
            _ => None,
        });
        own.collect()
    };
    let died = Phase::Failed(EndCause::AgentDied);
    assert_eq!(phases(&lives), [Phase::Starting, Phase::Running, Phase::Stopping, Phase::Stopped]);
    assert_eq!(phases(&dies), [Phase::Starting, Phase::Running, died, Phase::Stopping, Phase::Stopped]);
}

#[tokio::test]
async fn reader_after_an_unknown_event_number_begins_now() {
    let bench = TestBench::new().await;
    bench.create().await;
    let mut events = bench.service.follow_events(None, Some(99_999_999));
    assert_eq!(events.take_ready(), []);
    let made = bench.create().await;
    let items = next(&mut events, 2).await;
    assert!(items.iter().all(|event| event.sandbox == made.id), "{items:?}");
}

#[tokio::test]
async fn events_of_others_do_not_hide_an_owners_own() {
    let bench = TestBench::new().await;
    let other = Owner::from_valid_name("other");
    for _ in 0..300 {
        let id = SandboxId::from_entropy([1; 20]);
        bench.service.0.telemetry.events.publish_phase(
            SystemTime::UNIX_EPOCH,
            &bench.owner,
            &id,
            Phase::Running,
            None,
        );
    }
    let made = bench.service.create_sandbox(&other, plain()).await.unwrap();
    let items = bench.service.follow_events(Some(other), Some(0)).take_ready();
    assert!(matches!(&items[..], [FeedItem::Event(event), ..] if event.sandbox == made.id), "{items:?}");
}
