//! Contexts, with an agent whose answers each test defines.

use domain::{ContextId, Language, Stream};
use tokio::sync::mpsc;
use wire::process::{Exit, OpenKernel, Program, SessionStatus};
use wire::{Fault, FaultKind, Frame, Reply, Request, StreamTag};

use super::Bench;
use super::pretend::{encoded, ended, fault, running};
use crate::contexts::MOST_CONTEXTS;
use crate::{CodeEvent, ErrorKind, OpenContext, RunCode, ServiceError, Unread, default_context};

fn python() -> Language {
    Language::parse("python").unwrap()
}

fn session(context: &str, kernel: Option<&str>) -> SessionStatus {
    let status = serde_json::json!({"session": context, "busy": false, "terminal": false, "kernel": kernel});
    serde_json::from_value(status).unwrap()
}

fn reply(reply: &Reply) -> Vec<u8> {
    encoded(&[Frame::message(reply)])
}

fn output(text: &str) -> Frame {
    Frame::Output { stream: StreamTag::Tell, offset: 0, bytes: text.as_bytes().to_vec().into() }
}

/// A context that the agent knows, with a run whose kernel reports `reported`.
async fn bench_with(reported: &'static str) -> (Bench, ContextId, mpsc::UnboundedReceiver<Request>) {
    let bench = Bench::new().await;
    let (context, (asked, requests)) = (ContextId::from_entropy([7; 16]), mpsc::unbounded_channel());
    let name = context.clone();
    bench.backend.answers(move |request| {
        asked.send(request.clone()).ok();
        match request {
            Request::Sessions => Some(reply(&Reply::Sessions(vec![session(name.as_str(), Some("python"))]))),
            Request::Run(run) => {
                let started = Frame::message(&Reply::Started { pid: 1 });
                let end = Frame::message(&Reply::Ended(wire::process::Ended {
                    written: reported.len() as u64,
                    ..ended(Exit::Code(0))
                }));
                let whole = [started, output(reported), end];
                // A run without text never ends.
                let frames = if run.text.is_empty() { &whole[..1] } else { &whole[..] };
                Some(encoded(frames))
            }
            Request::Processes => {
                let run = wire::process::ProcessStatus {
                    session: Some(name.as_str().to_owned()),
                    ..running("0123456789abcdef0123456789abcdef")
                };
                Some(reply(&Reply::Statuses(vec![run])))
            }
            Request::Signal(_) => Some(reply(&Reply::Ok)),
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
    let run = RunCode::new("2 + 2");
    let mut running = bench.service.run_code(&bench.owner, &made.id, &context, run).await.unwrap();
    assert_eq!(running.next().await.unwrap(), CodeEvent::Count(1));
    assert!(matches!(running.next().await.unwrap(), CodeEvent::Result(forms) if forms["text/plain"] == "4"));
    assert_eq!(running.next().await.unwrap(), CodeEvent::Garbled);
    assert!(matches!(running.next().await.unwrap(), CodeEvent::Ended(_)));
    drop(running);
    while let Ok(request) = requests.try_recv() {
        match request {
            Request::Run(run) => assert!(run.retention.hold && run.follow && !run.queue),
            Request::Signal(_) => panic!("the run has ended, so no interrupt is expected"),
            _ => {}
        }
    }
}

#[tokio::test]
async fn unread_code_is_interrupted_if_requested() {
    for unread in [Unread::Keep, Unread::Interrupt] {
        let (bench, context, mut requests) = bench_with("").await;
        let made = bench.create().await;
        let run = RunCode { unread, ..RunCode::new("") };
        drop(bench.service.run_code(&bench.owner, &made.id, &context, run).await.unwrap());
        if unread == Unread::Interrupt {
            let mut run = None;
            let signal = loop {
                match requests.recv().await.expect("the agent is there") {
                    Request::Run(begun) => run = Some(begun.process),
                    Request::Signal(signal) => break signal,
                    _ => {}
                }
            };
            assert_eq!((signal.signal, signal.reach), (2, wire::process::Reach::Group));
            assert_eq!(Some(signal.process), run, "the context may run other code by now");
        }
        // The agent receives this request after everything that the drop has sent.
        bench.service.contexts(&bench.owner, &made.id).await.unwrap();
        while let Ok(request) = requests.try_recv() {
            assert!(!matches!(request, Request::Signal(_)), "{unread:?}: {request:?}");
        }
    }
}

#[tokio::test]
async fn sessions_without_kernels_are_not_listed_as_contexts() {
    let bench = Bench::new().await;
    let made = bench.create().await;
    let ours = ContextId::from_entropy([1; 16]);
    let sessions = vec![
        session(ours.as_str(), Some("python")),
        session(ContextId::from_entropy([2; 16]).as_str(), None),
        session("not-one-of-ours", Some("python")),
        session(ContextId::from_entropy([3; 16]).as_str(), Some("no such\nlanguage")),
    ];
    bench.backend.answers(move |request| {
        matches!(request, Request::Sessions).then(|| reply(&Reply::Sessions(sessions.clone())))
    });
    let listed = bench.service.contexts(&bench.owner, &made.id).await.unwrap();
    assert_eq!(listed.iter().map(|context| &context.id).collect::<Vec<_>>(), [&ours]);
    let other = ContextId::from_entropy([2; 16]);
    let refused = bench.service.close_context(&bench.owner, &made.id, &other).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::NoSession, "a shell is not closed as a context");
}

#[tokio::test]
async fn contexts_are_limited_and_a_failure_names_the_cause() {
    let bench = Bench::new().await;
    let made = bench.create().await;
    let open = || bench.service.open_context(&bench.owner, &made.id, OpenContext::new(python()));
    let fault = |kind, operation: &str, subject: &str| Fault {
        operation: operation.to_owned(),
        subject: subject.to_owned(),
        ..fault(kind)
    };
    for (answer, words) in [
        (fault(FaultKind::NotFound, "exec", "python3"), "`python3` was not found"),
        (fault(FaultKind::Permission, "exec", "python3"), "`python3` cannot be executed"),
        (fault(FaultKind::Other, "start kernel", "too old"), "too old"),
    ] {
        bench.backend.answers(move |request| match request {
            Request::Sessions => Some(reply(&Reply::Sessions(Vec::new()))),
            Request::OpenKernel(OpenKernel { kernel, .. }) => {
                assert!(matches!(&kernel.program, Program::Argv(words) if words[0] == "python3"));
                Some(reply(&Reply::Fault(answer.clone())))
            }
            _ => None,
        });
        let error = open().await.unwrap_err();
        assert!(
            matches!(&error, ServiceError::NoKernel { .. }) && error.to_string().contains(words),
            "{error}"
        );
    }
    let many: Vec<SessionStatus> = (0..MOST_CONTEXTS)
        .map(|number| {
            let entropy = [u8::try_from(number).unwrap(); 16];
            session(ContextId::from_entropy(entropy).as_str(), Some("bash"))
        })
        .collect();
    bench.backend.answers(move |request| {
        matches!(request, Request::Sessions).then(|| reply(&Reply::Sessions(many.clone())))
    });
    assert!(matches!(open().await.unwrap_err(), ServiceError::TooManyContexts { .. }));
}

#[tokio::test]
async fn agent_without_kernel_support_is_reported_as_unsupported() {
    let bench = Bench::new().await;
    let made = bench.create().await;
    bench.backend.answers(|request| match request {
        Request::Sessions => Some(reply(&Reply::Sessions(Vec::new()))),
        Request::Run(run) => {
            let fault = Fault { subject: run.session.clone(), ..fault(FaultKind::NotFound) };
            Some(reply(&Reply::Fault(fault)))
        }
        _ => None,
    });
    let run = bench.service.run_default(&bench.owner, &made.id, &python(), RunCode::new("1")).await;
    assert_eq!(run.err().unwrap().kind(), ErrorKind::Unsupported);
}

#[tokio::test]
async fn default_context_opened_by_another_request_is_used() {
    let bench = Bench::new().await;
    let made = bench.create().await;
    let opened = std::sync::atomic::AtomicBool::new(false);
    bench.backend.answers(move |request| match request {
        Request::Sessions => Some(reply(&Reply::Sessions(Vec::new()))),
        // Another client opens it between our first run and our own attempt.
        Request::OpenKernel(request) => {
            assert_eq!(request.open.session, default_context(&python()).as_str());
            opened.store(true, std::sync::atomic::Ordering::SeqCst);
            Some(reply(&Reply::Fault(fault(FaultKind::AlreadyExists))))
        }
        Request::Run(run) if !opened.load(std::sync::atomic::Ordering::SeqCst) => {
            let fault = Fault { subject: run.session.clone(), ..fault(FaultKind::NotFound) };
            Some(reply(&Reply::Fault(fault)))
        }
        Request::Run(_) => {
            let output = Frame::Output { stream: StreamTag::Stdout, offset: 0, bytes: b"hi".to_vec().into() };
            Some(encoded(&[Frame::message(&Reply::Started { pid: 1 }), output]))
        }
        _ => None,
    });
    let run = bench.service.run_default(&bench.owner, &made.id, &python(), RunCode::new("1")).await;
    let event = run.unwrap().next().await.unwrap();
    assert_eq!(event, CodeEvent::Output { stream: Stream::Stdout, bytes: b"hi".to_vec().into() });
}
