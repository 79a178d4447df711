//! Waits that do not kill, with an agent that prints on demand.

use std::sync::Arc;
use std::time::Duration;

use domain::{ProcessId, SandboxId};
use tokio::io::{AsyncWriteExt, DuplexStream};
use wire::process::ExitReason;
use wire::{AgentReply, Frame, Greeting, StreamTag};

use crate::agent::client::{AgentClient, OperationConnection};
use crate::clock::Clock;
use crate::exec::command_slots::CommandSlots;
use crate::exec::output_stream::{OutputStream, ReadPosition};
use crate::sandboxes::activity::SandboxActivity;
use crate::{WaitLimits, WaitOutcome};
use testkit::fake_backend::FakeBackend;

const SECOND: Duration = Duration::from_secs(1);

async fn followed() -> (OutputStream, DuplexStream) {
    let (ours, mut theirs) = tokio::io::duplex(1 << 20);
    send(&mut theirs, Frame::from_message(&Greeting { version: wire::VERSION })).await;
    let agent = AgentClient::new(FakeBackend::new(), SandboxId::from_entropy([1; 20]));
    let activity = SandboxActivity::new(Clock::from_host());
    let process = ProcessId::from_entropy([1; 16]);
    let connection =
        OperationConnection::from_stream(Box::new(ours), Arc::new(tokio::sync::Semaphore::new(1)));
    let position = ReadPosition::starting_at(0, 0);
    (
        OutputStream::new(process, agent, connection, position, CommandSlots::new(1), activity.start_use()),
        theirs,
    )
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
    let limits = WaitLimits { soft: None, quiet: Some(2 * SECOND) };
    let mut seen = 0;
    let (waited, mut agent) = tokio::join!(following.wait(limits, |_| seen += 1), printing);
    assert_eq!(waited.unwrap(), WaitOutcome::TooQuiet);
    assert_eq!(seen, 5, "each output restarts the quiet limit");
    // The process still runs, and the same reader sees its end.
    let ended = wire::process::ProcessEnd {
        exit: ExitReason::Code(3),
        written: 5,
        ended_ms: 0,
        duration_ms: 0,
        user_ms: 0,
        system_ms: 0,
        max_rss_kib: 0,
        interrupted: false,
        signalled: None,
    };
    send(&mut agent, Frame::from_message(&AgentReply::Ended(ended))).await;
    let waited = following.wait(limits, |_| {}).await.unwrap();
    assert!(matches!(waited, WaitOutcome::Ended(ended) if ended.exit == domain::ExitReason::Code(3)));
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
    let limits = WaitLimits { soft: Some(SECOND * 7 / 2), quiet: Some(2 * SECOND) };
    let mut seen = 0;
    let waiting = following.wait(limits, |_| seen += 1);
    let waited = tokio::select! {
        waited = waiting => waited.unwrap(),
        () = printing => panic!("the wait went past its limit"),
    };
    assert_eq!((waited, seen), (WaitOutcome::TooLong, 3));
}
