//! A malicious agent, or one of an older server, that answers about shared sessions.

use std::sync::{Arc, Mutex};
use std::time::{Duration, UNIX_EPOCH};

use domain::process::ExitReason;
use domain::{Backpressure, OutputRetention, ProcessId, SessionId, SessionName, UserIdentity};
use wire::process::{ProcessStatus, SessionStatus, SharedSessionStatus};
use wire::shared_session::{IdleLimit, SharedSessionKind as WireKind};
use wire::{AgentReply, AgentRequest, FaultKind, Frame};

use super::TestBench;
use crate::{
    BusyPolicy, CommandSessionSpec, ErrorKind, IdleLimitUpdate, OpenSessionRequest, OutputEvent, RequestTime,
    RunShell, SandboxRef, SandboxSessions, ServiceError, SessionRunRequest, SharedSessionKind,
    SharedSessionRequest, SharedSessionUpdate, draw_session_id, session_of_name,
};
use testkit::fake_backend::{encoded, fault, running};

fn name() -> SessionName {
    SessionName::parse("a name").unwrap()
}

fn session() -> SessionId {
    session_of_name(&name())
}

fn request(commands: Option<CommandSessionSpec>) -> SharedSessionRequest {
    SharedSessionRequest {
        name: Some(name()),
        open: OpenSessionRequest {
            identity: UserIdentity::Default,
            directory: None,
            env: Default::default(),
            terminal: None,
            isolation: None,
        },
        text_terminal: false,
        commands,
        max_sessions: None,
        idle_limit: None,
        note: None,
        requested: RequestTime::now(),
    }
}

fn commands() -> SharedSessionRequest {
    request(Some(CommandSessionSpec::default()))
}

fn shared(kind: Option<WireKind>) -> SharedSessionStatus {
    let status = serde_json::json!({"opened_ms": 1, "used_ms": 2});
    SharedSessionStatus { kind, ..serde_json::from_value(status).unwrap() }
}

fn status(session: &str, shared: Option<SharedSessionStatus>) -> AgentReply {
    let status = serde_json::json!({"session": session, "busy": false, "terminal": false});
    AgentReply::Session(SessionStatus { shared, ..serde_json::from_value(status).unwrap() })
}

/// A sandbox whose agent gives this answer to every request.
async fn answering(reply: AgentReply) -> (TestBench, SandboxRef) {
    let bench = TestBench::new().await;
    let made = bench.create().await;
    bench.backend.set_script(move |_| Some(encoded(&[Frame::from_message(&reply)])));
    let sandbox = bench.sandbox(&made.id);
    (bench, sandbox)
}

/// Asks for the session in every way that is answered with its status.
async fn ask_for_status(sandbox: &SandboxRef) -> [Result<crate::SessionStatus, ServiceError>; 3] {
    let sessions = sandbox.sessions();
    [
        sessions.open_shared_session(commands()).await,
        sessions.shared_session(&session()).await,
        sessions.update_shared_session(&session(), SharedSessionUpdate::default()).await,
    ]
}

#[tokio::test]
async fn texts_of_a_session_are_bounded() {
    let process = ProcessId::from_entropy([1; 16]);
    let id = Some(process.as_str().to_owned());
    let reply = SharedSessionStatus {
        name: Some("n".repeat(257)),
        used_ms: u64::MAX,
        directory: Some("d".repeat(4097)),
        run: id.clone(),
        command: Some("ü".repeat(100_000)),
        exit: Some(wire::process::ExitReason::Code(i32::MIN)),
        last_run: id,
        runs: u64::MAX,
        idle_ms: Some(u64::MAX),
        note: Some("x".repeat(1025)),
        ..shared(Some(WireKind::Commands))
    };
    let (_bench, sandbox) = answering(status(session().as_str(), Some(reply))).await;
    for answer in ask_for_status(&sandbox).await {
        let shown = answer.unwrap().shared.unwrap();
        assert_eq!((&shown.name, &shown.directory, &shown.note), (&None, &None, &None));
        assert_eq!(shown.command.unwrap().len(), 4096);
        assert!(shown.used < UNIX_EPOCH + Duration::from_secs(10_000 * 366 * 86_400));
        assert_eq!((shown.run.as_ref(), shown.last_run.as_ref()), (Some(&process), Some(&process)));
        assert_eq!((shown.runs, shown.last_exit), (u64::MAX, Some(ExitReason::Code(i32::MIN))));
    }
}

#[tokio::test]
async fn note_of_a_session_is_returned() {
    let note = Some("x".repeat(1024));
    let reply = SharedSessionStatus { note: note.clone(), ..shared(Some(WireKind::Commands)) };
    let (_bench, sandbox) = answering(status(session().as_str(), Some(reply))).await;
    for answer in ask_for_status(&sandbox).await {
        let shown = answer.unwrap().shared.unwrap();
        assert_eq!((shown.kind, shown.note), (SharedSessionKind::Commands, note.clone()));
    }
}

#[tokio::test]
async fn status_of_another_session_is_refused() {
    let other = SessionId::from_entropy([7; 16]);
    let wrong_run = SharedSessionStatus { last_run: Some("../etc".to_owned()), ..shared(None) };
    for reply in [
        status(other.as_str(), Some(shared(Some(WireKind::Commands)))),
        status("../etc", Some(shared(Some(WireKind::Commands)))),
        status(session().as_str(), Some(wrong_run)),
        AgentReply::Ok,
        AgentReply::Sessions(Vec::new()),
    ] {
        let (_bench, sandbox) = answering(reply.clone()).await;
        for answer in ask_for_status(&sandbox).await {
            assert_eq!(answer.unwrap_err().kind(), ErrorKind::Internal, "{reply:?}");
        }
    }
}

#[tokio::test]
async fn session_of_another_kind_than_requested_is_refused() {
    let (_bench, sandbox) =
        answering(status(session().as_str(), Some(shared(Some(WireKind::Commands))))).await;
    let error = sandbox.sessions().open_shared_session(request(None)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Internal);
    for reply in [Some(shared(None)), Some(shared(Some(WireKind::Terminal))), None] {
        let (_bench, sandbox) = answering(status(session().as_str(), reply)).await;
        let error = sandbox.sessions().open_shared_session(commands()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Internal);
    }
}

#[tokio::test]
async fn session_of_a_single_caller_is_not_found_as_a_shared_one() {
    let (_bench, sandbox) = answering(status(session().as_str(), None)).await;
    let error = sandbox.sessions().shared_session(&session()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoSession);
}

fn run(session: &SessionId, number: u8) -> ProcessStatus {
    ProcessStatus {
        session: Some(session.as_str().to_owned()),
        ..running(ProcessId::from_entropy([number; 16]).as_str())
    }
}

#[tokio::test]
async fn runs_of_a_session_are_bounded_and_its_own() {
    let many = |count: usize| vec![run(&session(), 1); count];
    let other = SessionId::from_entropy([7; 16]);
    for (runs, accepted) in [
        (Vec::new(), true),
        (many(SandboxSessions::MAX_SESSION_RUNS), true),
        (many(SandboxSessions::MAX_SESSION_RUNS + 1), false),
        (vec![run(&session(), 1), run(&other, 2)], false),
        (vec![running(ProcessId::from_entropy([1; 16]).as_str())], false),
        (vec![ProcessStatus { process: "../etc".to_owned(), ..run(&session(), 1) }], false),
    ] {
        let count = runs.len();
        let (_bench, sandbox) = answering(AgentReply::Statuses(runs)).await;
        match sandbox.sessions().session_runs(&session()).await {
            Ok(runs) => assert!(accepted && runs.len() == count),
            Err(error) => assert!(!accepted && error.kind() == ErrorKind::Internal, "{error}"),
        }
    }
    let long = "ü".repeat(50_000);
    let long = ProcessStatus { command: long.clone(), tag: Some(long), ..run(&session(), 1) };
    let (_bench, sandbox) = answering(AgentReply::Statuses(vec![long])).await;
    let runs = sandbox.sessions().session_runs(&session()).await.unwrap();
    assert_eq!((runs[0].command.len(), runs[0].tag.as_ref().unwrap().len()), (4096, 4096));
}

#[tokio::test]
async fn agent_that_does_not_know_command_sessions_is_reported_as_such() {
    let (_bench, sandbox) = answering(AgentReply::Fault(fault(FaultKind::Unsupported))).await;
    for answer in ask_for_status(&sandbox).await {
        assert_eq!(answer.unwrap_err().kind(), ErrorKind::Unsupported);
    }
    let error = sandbox.sessions().session_runs(&session()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
}

#[tokio::test]
async fn shell_of_an_older_agent_has_a_kind() {
    let (_bench, sandbox) = answering(status(session().as_str(), Some(shared(None)))).await;
    let shown = sandbox.sessions().open_shared_session(request(None)).await.unwrap().shared.unwrap();
    assert_eq!((shown.kind, shown.runs, shown.note), (SharedSessionKind::PipeShell, 0, None));
}

#[tokio::test]
async fn session_that_exists_as_another_kind_is_reported_with_the_reason() {
    let mut exists = fault(FaultKind::AlreadyExists);
    exists.subject = format!("{}: it is a shell on pipes", session().as_str());
    let (_bench, sandbox) = answering(AgentReply::Fault(exists)).await;
    let error = sandbox.sessions().open_shared_session(commands()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Taken);
    assert!(error.to_string().ends_with("already exists: it is a shell on pipes"), "{error}");
}

#[tokio::test]
async fn update_changes_only_named_fields() {
    let bench = TestBench::new().await;
    let made = bench.create().await;
    bench.backend.set_script(|request| {
        let AgentRequest::UpdateSession(update) = request else { return None };
        let mut shared = shared(Some(WireKind::Pipes));
        shared.note = update.note.clone().or(Some("kept".to_owned()));
        shared.idle_ms = match update.idle {
            Some(IdleLimit::Milliseconds(limit)) => Some(limit),
            Some(IdleLimit::Never) => None,
            None => Some(1),
        };
        Some(encoded(&[Frame::from_message(&status(&update.session, Some(shared)))]))
    });
    let sandbox = bench.sandbox(&made.id);
    let update = async |note: Option<&str>, idle_limit| {
        let update = SharedSessionUpdate { note: note.map(str::to_owned), idle_limit };
        let updated = sandbox.sessions().update_shared_session(&session(), update).await;
        updated.map(|status| status.shared.map(|shared| (shared.note.unwrap(), shared.idle_limit)).unwrap())
    };
    let millis = |millis| Some(Duration::from_millis(millis));
    assert_eq!(update(None, IdleLimitUpdate::Keep).await.unwrap(), ("kept".to_owned(), millis(1)));
    assert_eq!(update(Some("new"), IdleLimitUpdate::Never).await.unwrap(), ("new".to_owned(), None));
    let after = IdleLimitUpdate::After(Duration::from_secs(2));
    assert_eq!(update(None, after).await.unwrap(), ("kept".to_owned(), millis(2000)));
    let long = "x".repeat(SharedSessionRequest::MAX_NOTE_BYTES + 1);
    let error = update(Some(&long), IdleLimitUpdate::Keep).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
}

#[tokio::test]
async fn invalid_requests_for_sessions_are_refused_before_they_are_sent() {
    let (_bench, sandbox) = answering(AgentReply::Ok).await;
    let script = |script: String| request(Some(CommandSessionSpec { script: Some(script) }));
    let long_note = "x".repeat(SharedSessionRequest::MAX_NOTE_BYTES + 1);
    for wrong in [
        SharedSessionRequest { note: Some(long_note), ..request(None) },
        SharedSessionRequest { text_terminal: true, ..commands() },
        script(String::new()),
        script("a\0b".to_owned()),
        script("x".repeat(CommandSessionSpec::MAX_SCRIPT_BYTES + 1)),
    ] {
        let error = sandbox.sessions().open_shared_session(wrong).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
    }
}

fn first_run() -> SessionRunRequest {
    SessionRunRequest {
        text: "true".to_owned(),
        directory: None,
        deadline: None,
        retention: OutputRetention::default(),
        backpressure: Backpressure::Off,
        busy: BusyPolicy::Queue,
        env: Default::default(),
        shell: RunShell::Shell,
    }
}

fn without_a_name() -> SharedSessionRequest {
    SharedSessionRequest { name: None, ..request(None) }
}

/// The answers of an agent to a run that ends at once.
fn ended_run() -> Vec<u8> {
    let ended = serde_json::json!({"exit": {"code": 0}, "written": 0, "ended_ms": 2, "duration_ms": 1});
    let ended = AgentReply::Ended(serde_json::from_value(ended).unwrap());
    encoded(&[Frame::from_message(&AgentReply::Started { pid: 7 }), Frame::from_message(&ended)])
}

#[tokio::test]
async fn older_agent_gets_two_requests_for_a_first_run_and_is_asked_for_one_only_once() {
    let bench = TestBench::new().await;
    let made = bench.create().await;
    let kinds: Arc<Mutex<Vec<&'static str>>> = Arc::default();
    let seen = Arc::clone(&kinds);
    bench.backend.set_script(move |request| {
        let (kind, answer) = match request {
            AgentRequest::OpenAndRun(_) => {
                let unknown = AgentReply::Fault(fault(FaultKind::Unsupported));
                ("open_and_run", encoded(&[Frame::from_message(&unknown)]))
            }
            AgentRequest::OpenSession(open) => {
                let opened = status(&open.session, Some(shared(Some(WireKind::Pipes))));
                ("open_session", encoded(&[Frame::from_message(&opened)]))
            }
            AgentRequest::Run(_) => ("run", ended_run()),
            _ => return None,
        };
        seen.lock().unwrap().push(kind);
        Some(answer)
    });
    let sandbox = bench.sandbox(&made.id);
    let sessions = sandbox.sessions();
    let session = draw_session_id().unwrap();
    let mut output = sessions.run_in_new_session(&session, without_a_name(), first_run()).await.unwrap();
    assert!(matches!(output.next().await.unwrap(), OutputEvent::Ended(_)));
    sessions.start_detached_in_new_session(&session, without_a_name(), first_run()).await.unwrap();
    let expected = ["open_and_run", "open_session", "run", "open_session", "run"];
    assert_eq!(*kinds.lock().unwrap(), expected);
}

/// A queued run would wait for its turn without a limit, but a new session has no other runs.
#[tokio::test]
async fn older_agent_is_not_asked_to_queue_a_first_run() {
    let bench = TestBench::new().await;
    let made = bench.create().await;
    let queued: Arc<Mutex<Option<bool>>> = Arc::default();
    let seen = Arc::clone(&queued);
    bench.backend.set_script(move |request| match request {
        AgentRequest::OpenAndRun(_) => {
            let unknown = AgentReply::Fault(fault(FaultKind::Unsupported));
            Some(encoded(&[Frame::from_message(&unknown)]))
        }
        AgentRequest::OpenSession(open) => {
            let opened = status(&open.session, Some(shared(Some(WireKind::Pipes))));
            Some(encoded(&[Frame::from_message(&opened)]))
        }
        AgentRequest::Run(run) => {
            *seen.lock().unwrap() = Some(run.queue);
            Some(ended_run())
        }
        _ => None,
    });
    let session = draw_session_id().unwrap();
    let sandbox = bench.sandbox(&made.id);
    let run = sandbox.sessions().run_in_new_session(&session, without_a_name(), first_run());
    assert!(run.await.is_ok());
    assert_eq!(*queued.lock().unwrap(), Some(false));
}

#[tokio::test]
async fn faults_of_a_first_run_say_what_has_failed() {
    let session = draw_session_id().unwrap();
    let fault = |kind, operation: &str| wire::Fault {
        kind,
        errno: None,
        operation: operation.into(),
        subject: session.as_str().to_owned(),
    };
    for (fault, expected) in [
        (fault(FaultKind::Busy, "open session"), "TooManySessions"),
        (fault(FaultKind::Busy, "start"), "TooManyCommands"),
        (fault(FaultKind::NotFound, "find session"), "NoSession"),
        (fault(FaultKind::NotADirectory, "change directory"), "File"),
    ] {
        let (_bench, sandbox) = answering(AgentReply::Fault(fault)).await;
        let answer = sandbox.sessions().run_in_new_session(&session, without_a_name(), first_run()).await;
        let error = format!("{:?}", answer.err().unwrap());
        assert!(error.starts_with(expected), "{error}");
    }
    let (_bench, sandbox) = answering(AgentReply::Ok).await;
    for wrong in [request(None), SharedSessionRequest { name: None, ..commands() }] {
        let answer = sandbox.sessions().run_in_new_session(&session, wrong, first_run()).await;
        assert_eq!(answer.err().unwrap().kind(), ErrorKind::Invalid);
    }
    let answer = sandbox.sessions().run_in_new_session(&session, without_a_name(), first_run()).await;
    assert_eq!(answer.err().unwrap().kind(), ErrorKind::Internal, "no run has started");
}
