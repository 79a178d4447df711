//! Sessions that several callers open under one name, as the next fronts will use them: the service with a real agent.

use std::time::Duration;

use domain::process::ExitReason;
use domain::{
    Backpressure, JournalOffset, Language, OutputRetention, Owner, ProcessId, SessionId, SessionName,
    UserIdentity,
};
use service::{
    BusyPolicy, ContextOpening, NamedContextRequest, OpenContextRequest, OpenSessionRequest, OutputEvent,
    RequestTime, RunShell, SandboxRef, ServiceError, SessionRunRequest, SessionStatus, SharedSessionRequest,
    WaitLimits, WaitOutcome, session_of_name,
};

use testkit::fake_backend::FakeBackend;
use testkit::unjailed_agent::example_program;

use crate::setup::{create_without_front, start_with, start_with_agents};

fn name(text: &str) -> SessionName {
    SessionName::parse(text).unwrap()
}

fn request(name: Option<SessionName>) -> SharedSessionRequest {
    SharedSessionRequest {
        name,
        open: OpenSessionRequest {
            identity: UserIdentity::Default,
            directory: None,
            env: Default::default(),
            terminal: None,
            isolation: None,
        },
        text_terminal: false,
        commands: None,
        max_sessions: None,
        idle_limit: None,
        note: None,
        requested: RequestTime::now(),
    }
}

async fn open(sandbox: &SandboxRef, name: Option<SessionName>) -> SessionStatus {
    sandbox.sessions().open_shared_session(request(name)).await.unwrap()
}

fn run_request(text: &str) -> SessionRunRequest {
    SessionRunRequest {
        text: text.to_owned(),
        directory: None,
        deadline: None,
        retention: OutputRetention { first: 1 << 20, last: 1 << 20 },
        backpressure: Backpressure::Off,
        busy: BusyPolicy::Queue,
        env: Default::default(),
        shell: RunShell::Shell,
    }
}

/// Runs text to its end and returns its output and exit.
async fn run(sandbox: &SandboxRef, session: &SessionId, text: &str) -> (ProcessId, String, ExitReason) {
    let run = run_request(text);
    let mut following = sandbox.sessions().run_in_session(session, run).await.unwrap();
    let mut printed = Vec::new();
    let limits = WaitLimits { soft: Some(Duration::from_secs(30)), quiet: None };
    let outcome = following.wait(limits, |event| {
        if let OutputEvent::Output { bytes, .. } = event {
            printed.extend_from_slice(&bytes);
        }
    });
    let WaitOutcome::Ended(ended) = outcome.await.unwrap() else { panic!("the run did not end") };
    (following.process.clone(), String::from_utf8(printed).unwrap(), ended.exit)
}

#[tokio::test]
async fn named_session_is_opened_once_and_keeps_its_state() {
    let server = start_with_agents().await;
    let owner = Owner::operator();
    let id = create_without_front(&server, &owner).await.id;
    let sandbox = server.service.sandbox(&owner, &id).unwrap();
    let chosen = name("sub-agent/1 ü");
    let opening = (0..8).map(|_| open(&sandbox, Some(chosen.clone())));
    let opened = futures_util::future::join_all(opening).await;
    let session = session_of_name(&chosen);
    assert!(opened.iter().all(|status| status.session == session), "{opened:?}");
    assert_eq!(sandbox.sessions().list_sessions().await.unwrap().len(), 1);

    let (process, printed, exit) = run(&sandbox, &session, "cd /usr; x=1; echo out; exit 3").await;
    assert_eq!((printed.as_str(), exit), ("out\n", ExitReason::Code(3)));
    let status = open(&sandbox, Some(chosen.clone())).await;
    let used = status.shared.unwrap();
    assert_eq!((used.name, used.directory.as_deref()), (Some(chosen.clone()), Some("/usr")));
    assert_eq!((used.run, used.last_exit, used.command), (Some(process), Some(ExitReason::Code(3)), None));
    assert_eq!(run(&sandbox, &session, "echo $x").await.1, "1\n", "the session continues after `exit`");
}

#[tokio::test]
async fn request_to_open_that_was_overtaken_by_a_close_has_no_effect() {
    let server = start_with_agents().await;
    let owner = Owner::operator();
    let id = create_without_front(&server, &owner).await.id;
    let sandbox = server.service.sandbox(&owner, &id).unwrap();
    let overtaken = request(Some(name("a")));
    let session = open(&sandbox, Some(name("a"))).await.session;
    sandbox.sessions().close_shared_session(&session, RequestTime::now()).await.unwrap();
    let error = sandbox.sessions().open_shared_session(overtaken).await.unwrap_err();
    assert!(matches!(&error, ServiceError::NoSession(missing) if *missing == session), "{error}");
    assert_eq!(sandbox.sessions().list_sessions().await.unwrap(), []);
    open(&sandbox, Some(name("a"))).await;
    assert_eq!(sandbox.sessions().list_sessions().await.unwrap().len(), 1);
}

#[tokio::test]
async fn detached_runs_are_queued_and_their_output_is_kept() {
    let server = start_with_agents().await;
    let owner = Owner::operator();
    let id = create_without_front(&server, &owner).await.id;
    let sandbox = server.service.sandbox(&owner, &id).unwrap();
    let session = open(&sandbox, Some(name("a"))).await.session;
    let text = ["x=1; sleep 0.2", "x=$x-2", "echo $x-3"];
    let mut last = None;
    for text in text {
        last = Some(sandbox.sessions().start_detached_run(&session, run_request(text)).await.unwrap());
    }
    let mut following = sandbox.processes().follow_output(&last.unwrap(), JournalOffset(0)).await.unwrap();
    let limits = WaitLimits { soft: Some(Duration::from_secs(30)), quiet: None };
    let mut printed = Vec::new();
    let outcome = following.wait(limits, |event| {
        if let OutputEvent::Output { bytes, .. } = event {
            printed.extend_from_slice(&bytes);
        }
    });
    assert!(matches!(outcome.await.unwrap(), WaitOutcome::Ended(_)));
    assert_eq!(printed, b"1-2-3\n");
}

#[tokio::test]
async fn too_many_busy_sessions_are_an_error_of_their_own() {
    let server = start_with_agents().await;
    let owner = Owner::operator();
    let id = create_without_front(&server, &owner).await.id;
    let sandbox = server.service.sandbox(&owner, &id).unwrap();
    let session = open(&sandbox, Some(name("a"))).await.session;
    let busy = sandbox.sessions().run_in_session(&session, run_request("sleep 600")).await.unwrap();
    let limited = SharedSessionRequest { max_sessions: Some(1), ..request(None) };
    let error = sandbox.sessions().open_shared_session(limited).await.unwrap_err();
    assert!(matches!(error, ServiceError::TooManySessions(_)), "{error}");
    drop(busy);
}

#[tokio::test]
async fn runs_of_sessions_without_a_name_never_mix() {
    let backend = FakeBackend::with_agents(example_program("bare-agent"));
    let server = start_with(backend, |config| config.commands_per_sandbox = 64, |_| {}).await;
    let owner = Owner::operator();
    let id = create_without_front(&server, &owner).await.id;
    let sandbox = server.service.sandbox(&owner, &id).unwrap();
    let calls = (0..20).map(|number| {
        let sandbox = &sandbox;
        async move {
            let session = open(sandbox, None).await.session;
            let (_, printed, _) = run(sandbox, &session, &format!("x={number}; echo $x")).await;
            let (_, again, _) = run(sandbox, &session, "echo again $x").await;
            (printed, again)
        }
    });
    for (number, outputs) in futures_util::future::join_all(calls).await.into_iter().enumerate() {
        assert_eq!(outputs, (format!("{number}\n"), format!("again {number}\n")));
    }
}

#[tokio::test]
async fn named_context_does_not_count_among_shared_sessions() {
    let server = start_with_agents().await;
    let owner = Owner::operator();
    let id = create_without_front(&server, &owner).await.id;
    let sandbox = server.service.sandbox(&owner, &id).unwrap();
    let context = NamedContextRequest {
        name: name("code"),
        open: OpenContextRequest::new(Language::parse("python").unwrap()),
        idle_limit: Some(Duration::from_secs(60)),
        note: Some("kept".to_owned()),
    };
    for expected in [ContextOpening::Opened, ContextOpening::Found] {
        assert_eq!(sandbox.contexts().open_named_context(context.clone()).await.unwrap(), expected);
    }
    // Each shell takes the only place of the one before it, and leaves the context alone.
    for shell in ["one", "two"] {
        let request = SharedSessionRequest { max_sessions: Some(1), ..request(Some(name(shell))) };
        sandbox.sessions().open_shared_session(request).await.unwrap();
    }
    let sessions = sandbox.sessions().list_sessions().await.unwrap();
    let shared: Vec<_> =
        sessions.iter().filter_map(|session| session.shared.as_ref()?.name.clone()).collect();
    assert_eq!(shared, [name("two")]);
    let contexts = sandbox.contexts().list_named_contexts().await.unwrap();
    let [found] = contexts.as_slice() else { panic!("{contexts:?}") };
    assert_eq!((&found.name, found.note.as_deref()), (&name("code"), Some("kept")));
    assert_eq!(found.idle_limit, Some(Duration::from_secs(60)));
}
