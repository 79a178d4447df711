//! Waits that do not kill, with an agent that prints on demand.

use std::sync::Arc;
use std::time::Duration;

use domain::{ProcessId, SandboxId};
use tokio::io::{AsyncWriteExt, DuplexStream};
use wire::process::Exit;
use wire::{Frame, Greeting, Reply, StreamTag};

use super::pretend::Pretend;
use crate::activity::Activity;
use crate::agent_client::{Agent, Connection};
use crate::clock::Clock;
use crate::commands::Commands;
use crate::following::{Following, Place};
use crate::{Patience, Waited};

const SECOND: Duration = Duration::from_secs(1);

async fn followed() -> (Following, DuplexStream) {
    let (ours, mut theirs) = tokio::io::duplex(1 << 20);
    send(&mut theirs, Frame::message(&Greeting { version: wire::VERSION })).await;
    let agent = Agent::new(Pretend::new(), SandboxId::from_entropy([1; 20]));
    let activity = Activity::new(Clock::host());
    let process = ProcessId::from_entropy([1; 16]);
    let connection = Connection::of(Box::new(ours), Arc::new(tokio::sync::Semaphore::new(1)));
    let position = Place::starting(0, 0);
    (Following::new(process, agent, connection, position, Commands::new(1), activity.begin()), theirs)
}

async fn send(agent: &mut DuplexStream, frame: Frame) {
    let mut bytes = Vec::new();
    frame.encode(&mut bytes);
    agent.write_all(&bytes).await.unwrap();
}

fn output(offset: u64) -> Frame {
    Frame::Output { stream: StreamTag::Stdout, offset, bytes: b"x"[..].into() }
}

#[tokio::test(start_paused = true)]
async fn silent_process_keeps_running_when_the_quiet_limit_is_reached() {
    let (mut following, mut agent) = followed().await;
    let printing = async {
        for offset in 0..5 {
            tokio::time::sleep(SECOND).await;
            send(&mut agent, output(offset)).await;
        }
        agent
    };
    let limits = Patience { soft: None, quiet: Some(2 * SECOND) };
    let mut seen = 0;
    let (waited, mut agent) = tokio::join!(following.wait(limits, |_| seen += 1), printing);
    assert_eq!(waited.unwrap(), Waited::TooQuiet);
    assert_eq!(seen, 5, "each output restarts the quiet limit");
    // The process still runs, and the same reader sees its end.
    let ended = wire::process::Ended {
        exit: Exit::Code(3),
        written: 5,
        ended_ms: 0,
        duration_ms: 0,
        user_ms: 0,
        system_ms: 0,
        max_rss_kib: 0,
    };
    send(&mut agent, Frame::message(&Reply::Ended(ended))).await;
    let waited = following.wait(limits, |_| {}).await.unwrap();
    assert!(matches!(waited, Waited::Ended(ended) if ended.exit == domain::Exit::Code(3)));
}

#[tokio::test(start_paused = true)]
async fn busy_process_keeps_running_when_the_soft_limit_is_reached() {
    let (mut following, mut agent) = followed().await;
    let printing = async {
        for offset in 0..10 {
            tokio::time::sleep(SECOND).await;
            send(&mut agent, output(offset)).await;
        }
    };
    let limits = Patience { soft: Some(SECOND * 7 / 2), quiet: Some(2 * SECOND) };
    let mut seen = 0;
    let waiting = following.wait(limits, |_| seen += 1);
    let waited = tokio::select! {
        waited = waiting => waited.unwrap(),
        () = printing => panic!("the wait went past its limit"),
    };
    assert_eq!((waited, seen), (Waited::TooLong, 3));
}
