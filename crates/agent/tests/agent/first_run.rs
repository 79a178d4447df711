//! Sessions that are opened for a run, by one request.

use wire::process::{
    ExitReason, MissingDirectory, OpenSession, RunInSession, SessionSharing, UserIdentity, WorkingDirectory,
};
use wire::shared_session::OpenAndRun;
use wire::{AgentReply, AgentRequest, FaultKind, FaultOperation};

use crate::client::TestConnection;
use crate::harness::{TestAgent, with_both_tree_modes};
use crate::shared_sessions::{anonymous, close, named, run_in, shared};

fn open_and_run(open: OpenSession, run: RunInSession) -> AgentRequest {
    AgentRequest::OpenAndRun(OpenAndRun { open, run })
}

fn limited(name: &str) -> OpenSession {
    shared(name, SessionSharing { max_sessions: Some(2), ..SessionSharing::default() })
}

impl TestAgent {
    /// Opens a session for a run that has the name of the session.
    fn begin_first(&self, open: OpenSession, text: &str) -> TestConnection {
        let run = run_in(&open.session, &open.session, text);
        let mut talk = self.send_request(open_and_run(open, run));
        assert!(matches!(talk.reply(), AgentReply::Started { pid: 1.. }));
        talk
    }
}

#[test]
fn session_of_a_first_run_is_kept() {
    with_both_tree_modes(|agent| {
        let output = agent.begin_first(anonymous("s"), "cd /usr; x=1; echo hi; exit 3").output();
        assert_eq!((output.stdout().as_str(), output.exit()), ("hi\n", ExitReason::Code(3)));
        let status = agent.sessions().remove(0);
        let shared = status.shared.unwrap();
        assert_eq!((status.busy, shared.runs, shared.exit), (false, 1, Some(ExitReason::Code(3))));
        assert_eq!(agent.run_in(run_in("s", "r2", "echo $x; pwd")).stdout(), "1\n/usr\n");
        let run = RunInSession { detached: true, ..run_in("t", "r3", "echo later") };
        assert!(matches!(agent.reply(open_and_run(anonymous("t"), run)), AgentReply::Started { .. }));
        assert_eq!(agent.follow("r3", 0).output().stdout(), "later\n");
        assert_eq!(agent.session_names(), ["s", "t"]);
    });
}

#[test]
fn first_runs_take_the_place_of_idle_sessions_only() {
    with_both_tree_modes(|agent| {
        agent.begin_first(limited("old"), "true").output();
        let busy = ["a", "b"].map(|name| agent.begin_first(limited(name), "sleep 1000"));
        assert_eq!(agent.session_names(), ["a", "b"]);
        let fault = agent.fault(open_and_run(limited("c"), run_in("c", "c", "true")));
        assert_eq!((fault.kind, fault.operation), (FaultKind::Busy, FaultOperation::OpenSession));
        assert_eq!(agent.session_names(), ["a", "b"]);
        drop(busy);
    });
}

#[test]
fn refused_first_run_leaves_a_session_only_if_its_directory_is_missing() {
    with_both_tree_modes(|agent| {
        let directory = |path: &str| {
            Some(WorkingDirectory { path: path.to_owned(), missing: MissingDirectory::Fail, expand: false })
        };
        let strict = RunInSession { directory: directory("/no/such/dir"), ..run_in("s", "r1", "true") };
        assert_eq!(agent.fault(open_and_run(anonymous("s"), strict)).kind, FaultKind::NotFound);
        assert_eq!(agent.run_in(run_in("s", "r2", "echo on")).stdout(), "on\n");
        assert_eq!(agent.reply(close("s", 7)), AgentReply::Ok);
        // That it was closed later than the request decides, and so do the checks of either part.
        let again = open_and_run(anonymous("s"), run_in("s", "r3", "true"));
        assert_eq!(agent.fault(again).kind, FaultKind::NotFound);
        let stranger =
            OpenSession { identity: UserIdentity::User("nobody-here".to_owned()), ..anonymous("u") };
        agent.fault(open_and_run(stranger, run_in("u", "r4", "true")));
        for (open, run) in [
            (named("n"), run_in("n", "r5", "true")),
            (anonymous("n"), run_in("other", "r5", "true")),
            (OpenSession { sharing: None, ..anonymous("n") }, run_in("n", "r5", "true")),
            (anonymous("n"), RunInSession { beside: true, ..run_in("n", "r5", "true") }),
            (anonymous("n"), run_in("n", "r5", "a\0b")),
            (anonymous("n"), run_in("n", "no/name", "true")),
        ] {
            assert_eq!(agent.fault(open_and_run(open, run)).kind, FaultKind::Invalid);
        }
        assert_eq!(agent.session_names(), [""; 0]);
        agent.begin_first(anonymous("twice"), "true").output();
        let twice = open_and_run(anonymous("twice"), run_in("twice", "r6", "true"));
        assert_eq!(agent.fault(twice).kind, FaultKind::AlreadyExists);
    });
}
