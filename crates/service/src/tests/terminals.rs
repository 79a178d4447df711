//! Terminals, with an agent that reports one shell as running until it is killed.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use testkit::fake_backend::{encoded, ended, fault, running};
use wire::process::ExitReason;
use wire::{AgentReply, AgentRequest, FaultKind, Frame};

use super::TestBench;
use crate::{CreateTerminalRequest, ErrorKind, Sandbox, ServiceError, TerminalMode, TerminalSession};

fn reply(reply: &AgentReply) -> Vec<u8> {
    encoded(&[Frame::from_message(reply)])
}

/// A sandbox whose agent starts any shell and counts them.
async fn bench_with_shells() -> (TestBench, Sandbox, Arc<AtomicUsize>) {
    let bench = TestBench::new().await;
    let sandbox = bench.create().await;
    let started = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&started);
    bench.backend.set_script(move |request| match request {
        AgentRequest::Start(_) => {
            count.fetch_add(1, Ordering::Relaxed);
            Some(reply(&AgentReply::Started { pid: 1 }))
        }
        AgentRequest::Status { process } => Some(reply(&AgentReply::Status(running(process)))),
        AgentRequest::Follow { process, .. } => Some(encoded(&[
            Frame::from_message(&AgentReply::Status(running(process))),
            Frame::from_message(&AgentReply::Ended(ended(ExitReason::Signal(9)))),
        ])),
        AgentRequest::Signal(_) | AgentRequest::Forget { .. } => Some(reply(&AgentReply::Ok)),
        AgentRequest::Processes => Some(reply(&AgentReply::Statuses(Vec::new()))),
        _ => None,
    });
    (bench, sandbox, started)
}

async fn new_terminal(bench: &TestBench, sandbox: &Sandbox) -> Arc<TerminalSession> {
    let request = CreateTerminalRequest::default();
    bench.sandbox(&sandbox.id).terminals().create_terminal(request).await.unwrap()
}

async fn open(bench: &TestBench, sandbox: &Sandbox, terminal: &TerminalSession) -> Result<(), ServiceError> {
    let opened =
        bench.sandbox(&sandbox.id).terminals().open_terminal(terminal, TerminalMode::Terminal, 0).await;
    opened.map(drop)
}

#[tokio::test]
async fn client_that_found_a_terminal_before_its_delete_starts_no_shell() {
    let (bench, sandbox, started) = bench_with_shells().await;
    for opened_before in [false, true] {
        let terminal = new_terminal(&bench, &sandbox).await;
        let before = started.load(Ordering::Relaxed);
        if opened_before {
            open(&bench, &sandbox, &terminal).await.unwrap();
            assert_eq!(started.load(Ordering::Relaxed), before + 1);
        }
        let attachment = terminal.attach_client(false).unwrap();
        let count = started.load(Ordering::Relaxed);
        bench.sandbox(&sandbox.id).terminals().delete_terminal(&terminal.name).await.unwrap();
        let error = open(&bench, &sandbox, attachment.terminal()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NoSession, "{error}");
        assert_eq!(started.load(Ordering::Relaxed), count);
        let again = bench.sandbox(&sandbox.id).terminals().terminal_status(&terminal.name).await;
        assert!(matches!(again, Err(ServiceError::NoTerminal(_))), "{again:?}");
    }
}

#[tokio::test]
async fn terminal_whose_shell_cannot_be_killed_is_kept() {
    let (bench, sandbox, _) = bench_with_shells().await;
    let terminal = new_terminal(&bench, &sandbox).await;
    open(&bench, &sandbox, &terminal).await.unwrap();
    bench.backend.set_script(|request| match request {
        AgentRequest::Status { .. } => Some(reply(&AgentReply::Fault(fault(FaultKind::Other)))),
        _ => None,
    });
    bench.sandbox(&sandbox.id).terminals().delete_terminal(&terminal.name).await.unwrap_err();
    let found = bench.sandbox(&sandbox.id).terminals().find_terminal(&terminal.name).await.unwrap();
    assert!(Arc::ptr_eq(&found, &terminal));
}

#[tokio::test]
async fn number_of_terminals_is_limited() {
    let (bench, sandbox, _) = bench_with_shells().await;
    let mut limit = 0;
    let error = loop {
        match bench.sandbox(&sandbox.id).terminals().create_terminal(CreateTerminalRequest::default()).await {
            Ok(_) => limit += 1,
            Err(error) => break error,
        }
        assert!(limit < 1000);
    };
    assert!(matches!(error.kind(), ErrorKind::Exhausted { .. }), "{error}");
    assert!(error.to_string().contains(&format!("({limit})")), "{error}");
}
