//! Contexts, with an agent whose answers each test defines.

use domain::{ContextId, Language, StreamKind};
use tokio::sync::mpsc;
use wire::process::{ExitReason, KernelProgram, OpenKernel, SessionStatus};
use wire::{AgentReply, AgentRequest, Fault, FaultKind, FaultOperation, Frame, StreamTag};

use super::TestBench;
use crate::exec::contexts::MAX_CONTEXTS;
use crate::{
    CodeEvent, DisconnectPolicy, ErrorKind, OpenContextRequest, RunCodeRequest, ServiceError,
    default_context_id,
};
use testkit::fake_backend::{encoded, ended, fault, running};

fn python() -> Language {
    Language::parse("python").unwrap()
}

fn session(context: &str, kernel: Option<&str>) -> SessionStatus {
    let status = serde_json::json!({"session": context, "busy": false, "terminal": false, "kernel": kernel});
    serde_json::from_value(status).unwrap()
}

fn reply(reply: &AgentReply) -> Vec<u8> {
    encoded(&[Frame::from_message(reply)])
}

fn output(text: &str) -> Frame {
    Frame::Output { stream: StreamTag::KernelEvent, offset: 0, bytes: text.as_bytes().to_vec().into() }
}

/// A context that the agent knows, with a run whose kernel reports `reported`.
async fn bench_with(reported: &'static str) -> (TestBench, ContextId, mpsc::UnboundedReceiver<AgentRequest>) {
    let bench = TestBench::new().await;
    let (context, (asked, requests)) = (ContextId::from_entropy([7; 16]), mpsc::unbounded_channel());
    let name = context.clone();
    bench.backend.set_script(move |request| {
        asked.send(request.clone()).ok();
        match request {
            AgentRequest::Sessions => {
                Some(reply(&AgentReply::Sessions(vec![session(name.as_str(), Some("python"))])))
            }
            AgentRequest::Run(run) => {
                let started = Frame::from_message(&AgentReply::Started { pid: 1 });
                let end = Frame::from_message(&AgentReply::Ended(wire::process::ProcessEnd {
                    written: reported.len() as u64,
                    ..ended(ExitReason::Code(0))
                }));
                let whole = [started, output(reported), end];
                // A run without text never ends.
                let frames = if run.text.is_empty() { &whole[..1] } else { &whole[..] };
                Some(encoded(frames))
            }
            AgentRequest::Processes => {
                let run = wire::process::ProcessStatus {
                    session: Some(name.as_str().to_owned()),
                    ..running("0123456789abcdef0123456789abcdef")
                };
                Some(reply(&AgentReply::Statuses(vec![run])))
            }
            AgentRequest::Signal(_) => Some(reply(&AgentReply::Ok)),
            _ => None,
        }
    });
    (bench, context, requests)
}

#[tokio::test]
async fn kernel_events_are_parsed_and_none_are_dropped() {
    let (bench, context, mut requests) =
        bench_with("{\"count\":1}\n{\"result\":{\"text/plain\":\"4\"}}\nx\n").await;
    let made = bench.create().await;
    let run = RunCodeRequest::new("2 + 2");
    let mut running = bench.sandbox(&made.id).contexts().run_code(&context, run).await.unwrap();
    assert_eq!(running.next().await.unwrap(), CodeEvent::Count(1));
    assert!(matches!(running.next().await.unwrap(), CodeEvent::Result(forms) if forms["text/plain"] == "4"));
    assert_eq!(running.next().await.unwrap(), CodeEvent::Garbled);
    assert!(matches!(running.next().await.unwrap(), CodeEvent::Ended(_)));
    drop(running);
    while let Ok(request) = requests.try_recv() {
        match request {
            AgentRequest::Run(run) => assert!(run.retention.lossless && run.follow && !run.queue),
            AgentRequest::Signal(_) => panic!("the run has ended, so no interrupt is expected"),
            _ => {}
        }
    }
}

#[tokio::test]
async fn unread_code_is_interrupted_if_requested() {
    for unread in [DisconnectPolicy::Keep, DisconnectPolicy::Interrupt] {
        let (bench, context, mut requests) = bench_with("").await;
        let made = bench.create().await;
        let run = RunCodeRequest { unread, ..RunCodeRequest::new("") };
        drop(bench.sandbox(&made.id).contexts().run_code(&context, run).await.unwrap());
        if unread == DisconnectPolicy::Interrupt {
            let mut run = None;
            let signal = loop {
                match requests.recv().await.expect("the agent is there") {
                    AgentRequest::Run(begun) => run = Some(begun.process),
                    AgentRequest::Signal(signal) => break signal,
                    _ => {}
                }
            };
            assert_eq!((signal.signal, signal.reach), (2, wire::process::SignalTarget::Group));
            assert_eq!(Some(signal.process), run, "the context may run other code by now");
        }
        // The agent receives this request after everything that the drop has sent.
        bench.sandbox(&made.id).contexts().list_contexts().await.unwrap();
        while let Ok(request) = requests.try_recv() {
            assert!(!matches!(request, AgentRequest::Signal(_)), "{unread:?}: {request:?}");
        }
    }
}

#[tokio::test]
async fn sessions_without_kernels_are_not_listed_as_contexts() {
    let bench = TestBench::new().await;
    let made = bench.create().await;
    let ours = ContextId::from_entropy([1; 16]);
    let sessions = vec![
        session(ours.as_str(), Some("python")),
        session(ContextId::from_entropy([2; 16]).as_str(), None),
        session("not-one-of-ours", Some("python")),
        session(ContextId::from_entropy([3; 16]).as_str(), Some("no such\nlanguage")),
    ];
    bench.backend.set_script(move |request| {
        matches!(request, AgentRequest::Sessions).then(|| reply(&AgentReply::Sessions(sessions.clone())))
    });
    let listed = bench.sandbox(&made.id).contexts().list_contexts().await.unwrap();
    assert_eq!(listed.iter().map(|context| &context.id).collect::<Vec<_>>(), [&ours]);
    let other = ContextId::from_entropy([2; 16]);
    let refused = bench.sandbox(&made.id).contexts().close_context(&other).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::NoSession, "a shell is not closed as a context");
}

#[tokio::test]
async fn contexts_are_limited_and_a_failure_names_the_cause() {
    let bench = TestBench::new().await;
    let made = bench.create().await;
    let sandbox = bench.sandbox(&made.id);
    let open = || sandbox.contexts().open_context(OpenContextRequest::new(python()));
    let fault = |kind, operation: &str, subject: &str| Fault {
        operation: operation.into(),
        subject: subject.to_owned(),
        ..fault(kind)
    };
    for (answer, words) in [
        (fault(FaultKind::NotFound, "exec", "python3"), "`python3` was not found"),
        (fault(FaultKind::Permission, "exec", "python3"), "`python3` cannot be executed"),
        (fault(FaultKind::Other, "start kernel", "too old"), "too old"),
    ] {
        bench.backend.set_script(move |request| match request {
            AgentRequest::Sessions => Some(reply(&AgentReply::Sessions(Vec::new()))),
            AgentRequest::OpenKernel(OpenKernel { kernel, .. }) => {
                assert!(matches!(&kernel.program, KernelProgram::Argv(words) if words[0] == "python3"));
                Some(reply(&AgentReply::Fault(answer.clone())))
            }
            _ => None,
        });
        let error = open().await.unwrap_err();
        assert!(
            matches!(&error, ServiceError::NoKernel { .. }) && error.to_string().contains(words),
            "{error}"
        );
    }
    let many: Vec<SessionStatus> = (0..MAX_CONTEXTS)
        .map(|number| {
            let entropy = [u8::try_from(number).unwrap(); 16];
            session(ContextId::from_entropy(entropy).as_str(), Some("bash"))
        })
        .collect();
    bench.backend.set_script(move |request| {
        matches!(request, AgentRequest::Sessions).then(|| reply(&AgentReply::Sessions(many.clone())))
    });
    assert!(matches!(open().await.unwrap_err(), ServiceError::TooManyContexts { .. }));
}

#[tokio::test]
async fn agent_without_kernel_support_is_reported_as_unsupported() {
    let bench = TestBench::new().await;
    let made = bench.create().await;
    bench.backend.set_script(|request| match request {
        AgentRequest::Sessions => Some(reply(&AgentReply::Sessions(Vec::new()))),
        AgentRequest::Run(run) => {
            let (operation, subject) = (FaultOperation::FindSession, run.session.clone());
            let fault = Fault { operation, subject, ..fault(FaultKind::NotFound) };
            Some(reply(&AgentReply::Fault(fault)))
        }
        _ => None,
    });
    let run =
        bench.sandbox(&made.id).contexts().run_in_default_context(&python(), RunCodeRequest::new("1")).await;
    assert_eq!(run.err().unwrap().kind(), ErrorKind::Unsupported);
}

#[tokio::test]
async fn default_context_opened_by_another_request_is_used() {
    let bench = TestBench::new().await;
    let made = bench.create().await;
    let opened = std::sync::atomic::AtomicBool::new(false);
    bench.backend.set_script(move |request| match request {
        AgentRequest::Sessions => Some(reply(&AgentReply::Sessions(Vec::new()))),
        // Another client opens it between our first run and our own attempt.
        AgentRequest::OpenKernel(request) => {
            assert_eq!(request.open.session, default_context_id(&python()).as_str());
            opened.store(true, std::sync::atomic::Ordering::SeqCst);
            Some(reply(&AgentReply::Fault(fault(FaultKind::AlreadyExists))))
        }
        AgentRequest::Run(run) if !opened.load(std::sync::atomic::Ordering::SeqCst) => {
            let (operation, subject) = (FaultOperation::FindSession, run.session.clone());
            let fault = Fault { operation, subject, ..fault(FaultKind::NotFound) };
            Some(reply(&AgentReply::Fault(fault)))
        }
        AgentRequest::Run(_) => {
            let output = Frame::Output { stream: StreamTag::Stdout, offset: 0, bytes: b"hi".to_vec().into() };
            Some(encoded(&[Frame::from_message(&AgentReply::Started { pid: 1 }), output]))
        }
        _ => None,
    });
    let run =
        bench.sandbox(&made.id).contexts().run_in_default_context(&python(), RunCodeRequest::new("1")).await;
    let event = run.unwrap().next().await.unwrap();
    assert_eq!(event, CodeEvent::Output { stream: StreamKind::Stdout, bytes: b"hi".to_vec().into() });
}
