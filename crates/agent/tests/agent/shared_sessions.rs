//! Sessions that several callers may open.

use std::time::{Duration, Instant};

use wire::process::{
    ExitReason, OpenSession, RunInSession, SessionSharing, SessionStatus, SignalTarget, UserIdentity,
};
use wire::{AgentReply, AgentRequest, FaultKind};

use crate::harness::{TestAgent, TreeMode, with_both_tree_modes};
use crate::sessions::{run, session};

pub(crate) fn shared(name: &str, sharing: SessionSharing) -> OpenSession {
    OpenSession { session: name.to_owned(), sharing: Some(sharing), ..session() }
}

pub(crate) fn named(name: &str) -> OpenSession {
    shared(name, SessionSharing { name: Some(format!("{name} ü")), ..SessionSharing::default() })
}

pub(crate) fn anonymous(name: &str) -> OpenSession {
    shared(name, SessionSharing::default())
}

pub(crate) fn run_in(session: &str, process: &str, text: &str) -> RunInSession {
    RunInSession { session: session.to_owned(), ..run(process, text) }
}

pub(crate) fn close(name: &str, requested: u64) -> AgentRequest {
    AgentRequest::CloseSession { session: name.to_owned(), requested_ns: Some(requested), grace_ms: None }
}

impl TestAgent {
    pub(crate) fn open_shared(&self, open: OpenSession) -> SessionStatus {
        match self.reply(AgentRequest::OpenSession(open)) {
            AgentReply::Session(status) => status,
            other => panic!("expected a session, got {other:?}"),
        }
    }

    pub(crate) fn session_names(&self) -> Vec<String> {
        self.sessions().into_iter().map(|status| status.session).collect()
    }
}

#[test]
fn session_is_opened_once_and_found_again() {
    with_both_tree_modes(|agent| {
        let mut opening: Vec<_> =
            (0..5).map(|_| agent.send_request(AgentRequest::OpenSession(named("s")))).collect();
        for talk in &mut opening {
            assert!(matches!(talk.reply(), AgentReply::Session(status) if status.session == "s"));
        }
        let output = agent.run_in(run_in("s", "r1", "cd /usr; x=1; exit 3"));
        assert_eq!(output.exit(), ExitReason::Code(3));
        let found = agent.open_shared(named("s")).shared.unwrap();
        assert_eq!((found.name.as_deref(), found.directory.as_deref()), (Some("s ü"), Some("/usr")));
        assert_eq!((found.run.as_deref(), found.exit), (Some("r1"), Some(ExitReason::Code(3))));
        assert!(found.opened_ms <= found.used_ms && found.command.is_none(), "{found:?}");
        assert_eq!(agent.run_in(run_in("s", "r2", "echo $x")).stdout(), "1\n");
        assert_eq!(agent.session_names(), ["s"]);
    });
}

#[test]
fn session_shows_the_run_in_progress() {
    with_both_tree_modes(|agent| {
        agent.open_shared(named("s"));
        let mut talk = agent.begin(run_in("s", "r1", "echo on; sleep 1000"));
        assert_eq!(talk.read_text(3), "on\n");
        let found = agent.open_shared(named("s"));
        let shown = found.shared.unwrap();
        assert!(found.busy);
        assert_eq!(
            (shown.run.as_deref(), shown.command.as_deref()),
            (Some("r1"), Some("echo on; sleep 1000"))
        );
    });
}

#[test]
fn closed_session_is_opened_again_only_by_a_later_request() {
    with_both_tree_modes(|agent| {
        let at = |requested_ns| shared("s", SessionSharing { requested_ns, ..SessionSharing::default() });
        agent.open_shared(at(5));
        assert_eq!(agent.reply(close("s", 7)), AgentReply::Ok);
        assert_eq!(agent.fault(AgentRequest::OpenSession(at(6))).kind, FaultKind::NotFound);
        assert_eq!(agent.session_names(), [""; 0]);
        // The request to close it may also arrive before the one to open it.
        assert_eq!(agent.fault(close("t", 7)).kind, FaultKind::NotFound);
        let early = shared("t", SessionSharing { requested_ns: 6, ..SessionSharing::default() });
        assert_eq!(agent.fault(AgentRequest::OpenSession(early)).kind, FaultKind::NotFound);
        agent.open_shared(at(8));
        assert_eq!(agent.fault(close("s", 7)).kind, FaultKind::NotFound);
        assert_eq!(agent.session_names(), ["s"], "it was opened after that request to close it");
    });
}

#[test]
fn oldest_idle_session_without_a_name_is_closed_first() {
    with_both_tree_modes(|agent| {
        let most = |open: OpenSession| {
            let sharing = SessionSharing { max_sessions: Some(3), ..open.sharing.unwrap() };
            OpenSession { sharing: Some(sharing), ..open }
        };
        agent.open_shared(most(named("name")));
        agent.open_shared(most(anonymous("busy")));
        let mut busy = agent.begin(run_in("busy", "r1", "echo on; sleep 1000"));
        assert_eq!(busy.read_text(3), "on\n");
        agent.open_shared(most(anonymous("old")));
        agent.open_shared(most(anonymous("new")));
        assert_eq!(agent.session_names(), ["busy", "name", "new"]);
        agent.open_shared(most(named("other")));
        assert_eq!(agent.session_names(), ["busy", "name", "other"]);
        agent.open_shared(most(anonymous("last")));
        assert_eq!(
            agent.session_names(),
            ["busy", "last", "other"],
            "a name is closed if nothing else is idle"
        );
        let mut talks = Vec::new();
        for name in ["last", "other"] {
            let mut talk = agent.begin(run_in(name, name, "echo on; sleep 1000"));
            assert_eq!(talk.read_text(3), "on\n");
            talks.push(talk);
        }
        assert_eq!(agent.fault(AgentRequest::OpenSession(most(anonymous("full")))).kind, FaultKind::Busy);
    });
}

#[test]
fn shared_sessions_with_a_limit_do_not_count_among_others() {
    // More than are evicted below: those count until their shells have ended.
    let agent = TestAgent::with_config(TreeMode::Runners, |config| config.max_processes = 6);
    let limited = |name: &str| {
        let sharing = SessionSharing { max_sessions: Some(5), ..SessionSharing::default() };
        shared(name, sharing)
    };
    for number in 0..9 {
        agent.open_shared(limited(&format!("s{number}")));
    }
    assert_eq!(agent.session_names(), ["s4", "s5", "s6", "s7", "s8"]);
    for name in ["a", "b", "c", "d", "e", "f"] {
        agent.open_shared(anonymous(name));
    }
    assert_eq!(agent.fault(AgentRequest::OpenSession(anonymous("g"))).kind, FaultKind::Busy);
    agent.open_shared(limited("s9"));
}

#[test]
fn runs_of_a_session_that_made_room_are_forgotten() {
    let agent = TestAgent::with_trees(TreeMode::Runners);
    let limited = |name: &str| {
        let sharing = SessionSharing { max_sessions: Some(2), ..SessionSharing::default() };
        shared(name, sharing)
    };
    for name in ["old", "kept"] {
        agent.open_shared(limited(name));
        let output = agent.run_in(run_in(name, &format!("run-{name}"), "echo hi"));
        assert_eq!(output.stdout(), "hi\n");
    }
    agent.open_shared(limited("new"));
    assert_eq!(agent.session_names(), ["kept", "new"]);
    let status = |process: &str| AgentRequest::Status { process: process.to_owned() };
    assert_eq!(agent.fault(status("run-old")).kind, FaultKind::NotFound);
    assert_eq!(agent.follow("run-kept", 0).output().stdout(), "hi\n");
}

#[test]
fn many_idle_sessions_have_few_shells_and_keep_their_state() {
    with_both_tree_modes(|agent| {
        const SESSIONS: usize = 20;
        for number in 0..SESSIONS {
            let name = format!("s{number}");
            agent.open_shared(anonymous(&name));
            let text = format!("x={number}; f() {{ echo f{number}; }}; cd /usr");
            assert_eq!(agent.run_in(run_in(&name, &format!("a{number}"), &text)).exit(), ExitReason::Code(0));
        }
        let begun = Instant::now();
        while agent.sessions().iter().filter(|status| status.pid.is_some()).count() > 8 {
            assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", agent.sessions());
        }
        for number in 0..SESSIONS {
            let output =
                agent.run_in(run_in(&format!("s{number}"), &format!("b{number}"), "echo $x; f; pwd"));
            assert_eq!(output.stdout(), format!("{number}\nf{number}\n/usr\n"));
        }
    });
}

#[test]
fn idle_session_is_closed_after_its_own_limit() {
    with_both_tree_modes(|agent| {
        let limited = SessionSharing { idle_ms: Some(3000), ..SessionSharing::default() };
        agent.open_shared(anonymous("kept"));
        agent.open_shared(shared("s", limited));
        let output = agent.run_in(run_in("s", "r1", "sleep 3.2; echo ran"));
        assert_eq!(output.stdout(), "ran\n", "a run does not count as idle");
        let begun = Instant::now();
        while agent.session_names() != ["kept"] {
            assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", agent.sessions());
        }
    });
}

#[test]
fn detached_runs_are_answered_at_once_and_run_in_their_order() {
    with_both_tree_modes(|agent| {
        agent.open_shared(named("s"));
        let directory = tempfile::tempdir().unwrap();
        let flag = directory.path().join("flag");
        let text = format!("until [ -e {} ]; do sleep 0.01; done; x=1", flag.display());
        for (process, text) in [("r1", text.as_str()), ("r2", "x=$x-2; echo $x"), ("r3", "echo $x-3")] {
            let run = RunInSession { queue: true, detached: true, ..run_in("s", process, text) };
            assert!(matches!(agent.reply(AgentRequest::Run(run)), AgentReply::Started { .. }));
        }
        let mut third = agent.follow("r3", 0);
        std::fs::write(flag, "").unwrap();
        assert_eq!(third.read_text(6), "1-2-3\n");
        assert_eq!(third.output().exit(), ExitReason::Code(0));
        assert_eq!(agent.follow("r2", 0).output().stdout(), "1-2\n");
    });
}

#[test]
fn detached_run_that_waits_can_be_killed() {
    with_both_tree_modes(|agent| {
        agent.open_shared(named("s"));
        for process in ["r1", "r2"] {
            let run = RunInSession { queue: true, detached: true, ..run_in("s", process, "sleep 1000") };
            assert!(matches!(agent.reply(AgentRequest::Run(run)), AgentReply::Started { .. }));
        }
        assert_eq!(agent.signal("r2", 9, SignalTarget::Tree), AgentReply::Ok);
        assert_eq!(agent.follow("r2", 0).output().exit(), ExitReason::Signal(9));
        assert_eq!(agent.signal("r1", 9, SignalTarget::Tree), AgentReply::Ok);
        assert_eq!(agent.follow("r1", 0).output().exit(), ExitReason::Signal(9));
        assert_eq!(agent.run_in(run_in("s", "r3", "echo next")).stdout(), "next\n");
    });
}

#[test]
fn variables_of_one_run_end_with_it_also_in_a_new_shell() {
    with_both_tree_modes(|agent| {
        agent.open_shared(named("s"));
        let with = |process: &str, value: &str, text: &str| RunInSession {
            env: [("TOKEN".to_owned(), value.to_owned())].into(),
            ..run_in("s", process, text)
        };
        agent.run_in(run_in("s", "r0", "export TOKEN=own"));
        assert_eq!(agent.run_in(with("r1", "first", "echo $TOKEN; exit 3")).stdout(), "first\n");
        assert_eq!(agent.run_in(with("r2", "second", "echo $TOKEN; exit 3")).stdout(), "second\n");
        assert_eq!(agent.run_in(run_in("s", "r3", "echo $TOKEN")).stdout(), "own\n");
    });
}

/// Whatever its value, the sessions can be listed.
#[test]
fn directory_that_no_path_can_have_is_not_kept() {
    with_both_tree_modes(|agent| {
        agent.open_shared(named("s"));
        agent.run_in(run_in("s", "r1", "cd /usr"));
        let text = "PWD=$(head -c 900000 /dev/zero | tr '\\0' '\\1')";
        assert_eq!(agent.run_in(run_in("s", "r2", text)).exit(), ExitReason::Code(0));
        assert_eq!(agent.sessions()[0].shared.as_ref().unwrap().directory.as_deref(), Some("/usr"));
    });
}

#[test]
fn session_of_another_user_is_not_found_by_its_name() {
    with_both_tree_modes(|agent| {
        agent.open_shared(named("s"));
        let other = OpenSession { identity: UserIdentity::Ids { uid: 1, gid: 1 }, ..named("s") };
        assert_eq!(agent.fault(AgentRequest::OpenSession(other)).kind, FaultKind::AlreadyExists);
    });
}

/// Its caller was answered, so its process says that it never ran.
#[test]
fn detached_run_of_a_closed_session_ends_as_killed() {
    with_both_tree_modes(|agent| {
        agent.open_shared(named("s"));
        for process in ["r1", "r2"] {
            let run = RunInSession { queue: true, detached: true, ..run_in("s", process, "sleep 1000") };
            assert!(matches!(agent.reply(AgentRequest::Run(run)), AgentReply::Started { .. }));
        }
        assert_eq!(agent.reply(close("s", 1)), AgentReply::Ok);
        assert_eq!(agent.follow("r2", 0).output().exit(), ExitReason::Signal(9));
    });
}

#[test]
fn queued_run_whose_caller_has_gone_is_dropped() {
    with_both_tree_modes(|agent| {
        agent.open_shared(named("s"));
        let directory = tempfile::tempdir().unwrap();
        let flag = directory.path().join("flag");
        let text = format!("echo on; until [ -e {} ]; do sleep 0.01; done", flag.display());
        let mut first = agent.begin(run_in("s", "r1", &text));
        assert_eq!(first.read_text(3), "on\n");
        let queued = |process: &str, text: &str| RunInSession { queue: true, ..run_in("s", process, text) };
        let gone = agent.send_request(AgentRequest::Run(queued("r2", "x=from-r2")));
        drop(gone);
        let mut last = agent.send_request(AgentRequest::Run(queued("r3", "echo \"[$x]\"")));
        // The agent handles events in their order, so it knows of all of the above when it replies.
        agent.sessions();
        std::fs::write(flag, "").unwrap();
        assert_eq!(first.output().exit(), ExitReason::Code(0));
        assert!(matches!(last.reply(), AgentReply::Started { .. }));
        assert_eq!(last.output().stdout(), "[]\n");
    });
}
