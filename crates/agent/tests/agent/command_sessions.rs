//! Sessions without a shell, and what is stored with any shared session.

use std::path::Path;
use std::time::{Duration, Instant};

use wire::process::{
    ExitReason, MissingDirectory, OpenSession, ProcessStatus, RunInSession, SessionSharing, SessionStatus,
    SharedSessionStatus, SignalTarget, TerminalSize, UserIdentity, WorkingDirectory,
};
use wire::shared_session::{IdleLimit, MAX_SESSION_RUNS, OpenCommands, SharedSessionKind, UpdateSession};
use wire::{AgentReply, AgentRequest, Fault, FaultKind, Frame, StreamTag};

use crate::client::shell;
use crate::harness::{TestAgent, TreeMode, with_both_tree_modes};
use crate::shared_sessions::{anonymous, close, named, run_in, shared};

fn commands(open: OpenSession) -> OpenCommands {
    OpenCommands { open, script: None }
}

fn directory(path: &str) -> Option<WorkingDirectory> {
    Some(WorkingDirectory { path: path.to_owned(), missing: MissingDirectory::Fail, expand: false })
}

fn run_at(process: &str, path: &str, text: &str) -> RunInSession {
    RunInSession { directory: directory(path), ..run_in("s", process, text) }
}

fn detached(process: &str, text: &str) -> RunInSession {
    RunInSession { queue: true, detached: true, ..run_in("s", process, text) }
}

/// A command that prints `on` and then waits until the file exists.
fn wait_for_file(flag: &Path) -> String {
    format!("echo on; until [ -e {} ]; do sleep 0.01; done", flag.display())
}

impl TestAgent {
    fn open_commands(&self, open: OpenCommands) -> SharedSessionStatus {
        match self.reply(AgentRequest::OpenCommands(open)) {
            AgentReply::Session(status) => status.shared.unwrap(),
            other => panic!("expected a session, got {other:?}"),
        }
    }

    fn session_status(&self, session: &str) -> SessionStatus {
        match self.reply(AgentRequest::SessionStatus { session: session.to_owned() }) {
            AgentReply::Session(status) => status,
            other => panic!("expected a session, got {other:?}"),
        }
    }

    fn shared_status(&self, session: &str) -> SharedSessionStatus {
        self.session_status(session).shared.unwrap()
    }

    fn runs(&self, session: &str) -> Vec<ProcessStatus> {
        match self.long_reply(AgentRequest::SessionRuns { session: session.to_owned() }) {
            AgentReply::Statuses(statuses) => statuses,
            other => panic!("expected statuses, got {other:?}"),
        }
    }

    /// A reply that may be too long for one frame.
    fn long_reply(&self, request: AgentRequest) -> AgentReply {
        let mut talk = self.send_request(request);
        let mut json = Vec::new();
        loop {
            match talk.frame().expect("a reply comes before the end") {
                Frame::Data(bytes) => json.extend(bytes),
                Frame::End => return Frame::Control(json.into()).parse_message().unwrap(),
                frame => return frame.parse_message().unwrap(),
            }
        }
    }

    fn run_names(&self, session: &str) -> Vec<String> {
        self.runs(session).into_iter().map(|status| status.process).collect()
    }

    fn refuse_run(&self, run: RunInSession) -> Fault {
        self.fault(AgentRequest::Run(run))
    }
}

#[test]
fn runs_of_a_command_session_do_not_share_state() {
    with_both_tree_modes(|agent| {
        let opened = agent.open_commands(commands(named("s")));
        assert_eq!((opened.kind, opened.runs), (Some(SharedSessionKind::Commands), 0));
        let first = agent.run_in(run_in("s", "r1", "cd /; export A=1; f() { :; }; echo out; echo err >&2"));
        assert_eq!((first.stdout().as_str(), first.of(StreamTag::Stderr).as_str()), ("out\n", "err\n"));
        let second = agent.run_in(run_in("s", "r2", "echo \"[$A]\" $$; type f; pwd; exit 7"));
        assert_eq!(second.exit(), ExitReason::Code(7));
        let expected = opened.directory.unwrap();
        assert!(second.stdout().starts_with("[] "), "{second:?}");
        assert!(second.stdout().ends_with(&format!("{expected}\n")), "{second:?}");
        let status = agent.session_status("s");
        assert!(!status.busy && status.pid.is_none(), "{status:?}");
        let status = status.shared.unwrap();
        assert_eq!((status.runs, status.exit), (2, Some(ExitReason::Code(7))));
        assert_eq!((status.run.as_deref(), status.last_run.as_deref()), (Some("r2"), Some("r2")));
    });
}

#[test]
fn variables_of_a_command_run_are_those_of_the_session_and_its_own() {
    with_both_tree_modes(|agent| {
        let env = [("A".to_owned(), "session".to_owned()), ("B".to_owned(), "kept".to_owned())].into();
        agent.open_commands(commands(OpenSession { env, ..named("s") }));
        let own = [("A".to_owned(), "run".to_owned())].into();
        let with = RunInSession { env: own, ..run_in("s", "r1", "echo $A $B") };
        assert_eq!(agent.run_in(with).stdout(), "run kept\n");
        assert_eq!(agent.run_in(run_in("s", "r2", "echo $A $B")).stdout(), "session kept\n");
    });
}

#[test]
fn input_of_a_command_run_is_open_until_it_is_closed() {
    with_both_tree_modes(|agent| {
        agent.open_commands(commands(named("s")));
        let mut talk =
            agent.begin(run_in("s", "r1", "echo on; while read -r line; do echo \"<$line>\"; done"));
        assert_eq!(talk.read_text(3), "on\n");
        let input = || AgentRequest::Input { process: "r1".to_owned() };
        let mut feeding = agent.send_request(input());
        assert_eq!(feeding.reply(), AgentReply::Ok);
        feeding.send(&Frame::Data(b"one\n"[..].into()));
        assert_eq!(talk.read_text(6), "<one>\n");
        // A connection that ends without `End` leaves the input open for the next one.
        drop(feeding);
        let mut feeding = agent.send_request(input());
        assert_eq!(feeding.reply(), AgentReply::Ok);
        feeding.send(&Frame::Data(b"two\n"[..].into()));
        feeding.send(&Frame::End);
        let output = talk.output();
        assert_eq!((output.stdout().as_str(), output.exit()), ("<two>\n", ExitReason::Code(0)));
        assert_eq!(agent.fault(input()).kind, FaultKind::Invalid, "a run that has ended takes no input");
    });
}

#[test]
fn directory_of_a_command_run_becomes_the_default() {
    with_both_tree_modes(|agent| {
        let opened =
            agent.open_commands(commands(OpenSession { directory: directory("/usr"), ..named("s") }));
        assert_eq!(opened.directory.as_deref(), Some("/usr"));
        assert_eq!(agent.run_in(run_in("s", "r1", "pwd; cd /")).stdout(), "/usr\n");
        assert_eq!(agent.run_in(run_at("r2", "bin/.", "pwd")).stdout(), "/usr/bin\n");
        assert_eq!(agent.run_in(run_in("s", "r3", "pwd")).stdout(), "/usr/bin\n");
        assert_eq!(agent.shared_status("s").directory.as_deref(), Some("/usr/bin"));
        let gone = agent.refuse_run(run_at("r4", "none", "pwd"));
        let start =
            wire::process::StartProcess { directory: directory("/usr/bin/none"), ..shell("p", "pwd") };
        assert_eq!(gone, agent.fault(AgentRequest::Start(start)), "any command gets this fault");
        assert_eq!(gone.kind, FaultKind::NotFound);
        let status = agent.shared_status("s");
        assert_eq!((status.directory.as_deref(), status.runs), (Some("/usr/bin"), 3));
        assert_eq!(agent.run_names("s"), ["r1", "r2", "r3"]);
        assert_eq!(agent.run_in(run_in("s", "r4", "pwd")).stdout(), "/usr/bin\n");
    });
}

/// A run that started elsewhere could destroy files there.
#[test]
fn command_run_is_refused_if_the_default_directory_was_removed() {
    with_both_tree_modes(|agent| {
        let removed = tempfile::tempdir().unwrap();
        let path = removed.path().to_str().unwrap().to_owned();
        agent.open_commands(commands(OpenSession { directory: directory(&path), ..named("s") }));
        assert_eq!(agent.run_in(run_in("s", "r1", "pwd")).stdout(), format!("{path}\n"));
        removed.close().unwrap();
        let fault = agent.refuse_run(run_in("s", "r2", "pwd"));
        assert_eq!((fault.kind, fault.subject.as_str()), (FaultKind::NotFound, path.as_str()));
        assert_eq!(agent.run_in(run_at("r3", "/", "pwd")).stdout(), "/\n");
    });
}

#[test]
fn command_session_is_not_opened_in_a_missing_directory_or_for_an_unknown_user() {
    with_both_tree_modes(|agent| {
        let missing = commands(OpenSession { directory: directory("/none"), ..named("s") });
        let fault = agent.fault(AgentRequest::OpenCommands(missing));
        assert_eq!((fault.kind, fault.subject.as_str()), (FaultKind::NotFound, "/none"));
        let unknown = OpenSession { identity: UserIdentity::User("nobody-here".to_owned()), ..named("s") };
        agent.fault(AgentRequest::OpenCommands(commands(unknown)));
        assert_eq!(agent.session_names(), [""; 0]);
    });
}

#[test]
fn script_is_read_before_each_command() {
    with_both_tree_modes(|agent| {
        let directory = tempfile::tempdir().unwrap();
        let script = directory.path().join("it's; exit 9 #\"$(exit 9)");
        let open = OpenCommands { open: named("s"), script: Some(script.to_str().unwrap().to_owned()) };
        agent.open_commands(open);
        assert_eq!(
            agent.run_in(run_in("s", "r1", "echo \"[$x]\"")).stdout(),
            "[]\n",
            "it does not exist yet"
        );
        std::fs::write(&script, "x='it is read'; shopt -s expand_aliases; alias greet='echo hello'").unwrap();
        let output = agent.run_in(run_in("s", "r2", "echo \"[$x]\" it\\'s\ngreet; false"));
        assert_eq!(
            (output.stdout().as_str(), output.exit()),
            ("[it is read] it's\nhello\n", ExitReason::Code(1))
        );
        let long = format!("echo ${{#x}}; : {}", "x".repeat(200 << 10));
        assert_eq!(agent.run_in(run_in("s", "r3", &long)).stdout(), "10\n");
        std::fs::remove_file(&script).unwrap();
        std::fs::create_dir(&script).unwrap();
        assert_eq!(agent.run_in(run_in("s", "r4", "echo \"[$x]\"")).stdout(), "[]\n");
        for wrong in ["", "a\0b", &"x".repeat(4097)] {
            let open = OpenCommands { open: named("t"), script: Some(wrong.to_owned()) };
            assert_eq!(agent.fault(AgentRequest::OpenCommands(open)).kind, FaultKind::Invalid);
        }
    });
}

#[test]
fn command_runs_wait_for_their_turn_or_are_refused() {
    with_both_tree_modes(|agent| {
        agent.open_commands(commands(named("s")));
        let directory = tempfile::tempdir().unwrap();
        let flag = directory.path().join("flag");
        let mut first = agent.begin(run_in("s", "r1", &wait_for_file(&flag)));
        assert_eq!(first.read_text(3), "on\n");
        assert_eq!(agent.refuse_run(run_in("s", "r0", "true")).kind, FaultKind::Busy);
        let log = directory.path().join("log");
        let append = |name: &str| format!("echo {name} >> {}; echo {name}", log.display());
        let queued = |process: &str| RunInSession { queue: true, ..run_in("s", process, &append(process)) };
        drop(agent.send_request(AgentRequest::Run(queued("gone"))));
        for process in ["r2", "r3"] {
            let reply = agent.reply(AgentRequest::Run(detached(process, &append(process))));
            assert_eq!(reply, AgentReply::Started { pid: 0 });
        }
        assert_eq!(agent.signal("r2", 9, SignalTarget::Tree), AgentReply::Ok);
        let mut last = agent.send_request(AgentRequest::Run(queued("r4")));
        let status = agent.session_status("s");
        assert!(status.busy);
        assert_eq!(status.shared.unwrap().run.as_deref(), Some("r1"));
        assert_eq!(agent.run_names("s"), ["r1"], "runs that wait have not begun");
        std::fs::write(flag, "").unwrap();
        assert_eq!(first.output().exit(), ExitReason::Code(0));
        assert!(matches!(last.reply(), AgentReply::Started { pid: 1.. }));
        assert_eq!(last.output().stdout(), "r4\n");
        assert_eq!(std::fs::read_to_string(log).unwrap(), "r3\nr4\n");
        assert_eq!(agent.follow("r2", 0).output().exit(), ExitReason::Signal(9));
        assert_eq!(agent.follow("r3", 0).output().stdout(), "r3\n");
        assert_eq!(agent.run_names("s"), ["r1", "r3", "r4"]);
    });
}

#[test]
fn detached_command_whose_directory_is_missing_ends_and_the_next_one_runs() {
    with_both_tree_modes(|agent| {
        agent.open_commands(commands(named("s")));
        let directory = tempfile::tempdir().unwrap();
        let flag = directory.path().join("flag");
        let mut first = agent.begin(run_in("s", "r1", &wait_for_file(&flag)));
        assert_eq!(first.read_text(3), "on\n");
        let missing =
            WorkingDirectory { path: "/none".to_owned(), missing: MissingDirectory::Fail, expand: false };
        let wrong = RunInSession { directory: Some(missing), ..detached("r2", "true") };
        assert_eq!(agent.reply(AgentRequest::Run(wrong)), AgentReply::Started { pid: 0 });
        let next = detached("r3", "echo next");
        assert_eq!(agent.reply(AgentRequest::Run(next)), AgentReply::Started { pid: 0 });
        let third = agent.follow("r3", 0);
        std::fs::write(flag, "").unwrap();
        assert_eq!(third.output().stdout(), "next\n");
        assert_eq!(agent.follow("r2", 0).output().exit(), ExitReason::Signal(9));
    });
}

#[test]
fn deadline_of_a_command_run_kills_only_that_run() {
    with_both_tree_modes(|agent| {
        agent.open_commands(commands(named("s")));
        let background = agent.run_in(run_in("s", "r1", "sleep 1000 >/dev/null 2>&1 & echo $!"));
        let background: i32 = background.stdout().trim().parse().unwrap();
        let text = "setsid sleep 1000 & echo $!; wait";
        let late = RunInSession { deadline_ms: Some(1500), ..run_in("s", "r2", text) };
        let late = agent.run_in(late);
        assert_eq!(late.exit(), ExitReason::Deadline);
        let killed: i32 = late.stdout().trim().parse().unwrap();
        let alive = |pid: i32| {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"));
            stat.is_ok_and(|stat| !stat.rsplit(')').next().unwrap().trim_start().starts_with('Z'))
        };
        let begun = Instant::now();
        while alive(killed) {
            assert!(begun.elapsed() < Duration::from_secs(10));
        }
        assert!(alive(background), "what an earlier run has left continues");
        assert!(agent.session_status("s").left);
        assert_eq!(agent.run_in(run_in("s", "r3", "echo next")).stdout(), "next\n");
        assert_eq!(agent.reply(close("s", 1)), AgentReply::Ok);
        while alive(background) {
            assert!(begun.elapsed() < Duration::from_secs(10), "it ends with its session");
        }
    });
}

#[test]
fn signals_reach_a_command_run_by_its_name_and_by_that_of_its_session() {
    with_both_tree_modes(|agent| {
        agent.open_commands(commands(named("s")));
        for (process, target) in [("r1", "r1"), ("r2", "s")] {
            let mut talk =
                agent.begin(run_in("s", process, "trap 'exit 5' INT; echo on; while :; do sleep 0.01; done"));
            assert_eq!(talk.read_text(3), "on\n");
            assert_eq!(agent.signal(target, 2, SignalTarget::Group), AgentReply::Ok);
            assert_eq!(talk.output().exit(), ExitReason::Code(5));
        }
        assert!(matches!(agent.signal("s", 2, SignalTarget::Group), AgentReply::Fault(_)), "nothing runs");
    });
}

#[test]
fn close_ends_the_command_run_in_progress() {
    with_both_tree_modes(|agent| {
        agent.open_commands(commands(named("s")));
        let mut talk = agent.begin(run_in("s", "r1", "echo on; sleep 1000"));
        assert_eq!(talk.read_text(3), "on\n");
        assert_eq!(agent.reply(close("s", 1)), AgentReply::Ok);
        assert_eq!(talk.output().exit(), ExitReason::Signal(9));
        assert_eq!(agent.refuse_run(run_in("s", "r2", "true")).kind, FaultKind::NotFound);
        let later = SessionSharing { requested_ns: 2, ..SessionSharing::default() };
        let opened = agent.open_commands(commands(shared("s", later)));
        assert_eq!((opened.runs, opened.last_run), (0, None));
        assert_eq!(agent.run_names("s"), [""; 0], "runs of the former session are not its own");
        assert_eq!(agent.run_in(run_in("s", "r2", "echo new")).stdout(), "new\n");
    });
}

#[test]
fn kinds_of_shared_sessions_do_not_mix() {
    with_both_tree_modes(|agent| {
        let terminal = |name: &str| OpenSession {
            terminal: Some(TerminalSize { columns: 80, rows: 24 }),
            text_terminal: true,
            ..named(name)
        };
        agent.open_commands(commands(named("commands")));
        agent.open_shared(named("pipes"));
        agent.open_shared(terminal("terminal"));
        let opening = |name: &str| {
            [
                AgentRequest::OpenCommands(commands(named(name))),
                AgentRequest::OpenSession(named(name)),
                AgentRequest::OpenSession(terminal(name)),
            ]
        };
        let kinds = [SharedSessionKind::Commands, SharedSessionKind::Pipes, SharedSessionKind::Terminal];
        for (own, name) in ["commands", "pipes", "terminal"].into_iter().enumerate() {
            assert_eq!(agent.shared_status(name).kind, Some(kinds[own]));
            for (other, request) in opening(name).into_iter().enumerate() {
                match agent.reply(request) {
                    AgentReply::Session(status) => assert_eq!((status.session.as_str(), own), (name, other)),
                    AgentReply::Fault(fault) => {
                        assert_ne!(own, other);
                        assert_eq!(fault.kind, FaultKind::AlreadyExists);
                        assert!(fault.subject.starts_with(&format!("{name}: it ")), "{fault:?}");
                    }
                    reply => panic!("{reply:?}"),
                }
            }
        }
        let restart = AgentRequest::RestartSession { session: "commands".to_owned() };
        assert_eq!(agent.fault(restart).kind, FaultKind::Invalid);
        for wrong in [terminal("t"), OpenSession { sharing: None, ..named("t") }] {
            assert_eq!(agent.fault(AgentRequest::OpenCommands(commands(wrong))).kind, FaultKind::Invalid);
        }
    });
}

#[test]
fn command_sessions_have_a_limit_and_are_closed_when_idle() {
    with_both_tree_modes(|agent| {
        let sharing =
            |idle_ms| SessionSharing { max_sessions: Some(2), idle_ms, ..SessionSharing::default() };
        agent.open_commands(commands(shared("old", sharing(None))));
        agent.open_commands(commands(shared("first", sharing(None))));
        agent.open_commands(commands(shared("second", sharing(Some(500)))));
        assert_eq!(agent.session_names(), ["first", "second"]);
        let output = agent.run_in(RunInSession {
            session: "second".to_owned(),
            ..run_in("s", "r1", "sleep 0.7; echo ran")
        });
        assert_eq!(output.stdout(), "ran\n", "a run does not count as idle");
        let begun = Instant::now();
        while agent.session_names() != ["first"] {
            assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", agent.sessions());
        }
    });
}

#[test]
fn note_and_idle_limit_of_a_shared_session_are_updated() {
    with_both_tree_modes(|agent| {
        let noted = SessionSharing {
            note: Some("{\"quiet\":1}".to_owned()),
            idle_ms: Some(60_000),
            ..SessionSharing::default()
        };
        agent.open_commands(commands(shared("s", noted.clone())));
        let status = agent.shared_status("s");
        assert_eq!((status.note.as_deref(), status.idle_ms), (Some("{\"quiet\":1}"), Some(60_000)));
        let update = |session: &str, note: Option<&str>, idle| {
            let (session, note) = (session.to_owned(), note.map(str::to_owned));
            AgentRequest::UpdateSession(UpdateSession { session, note, idle })
        };
        let AgentReply::Session(updated) = agent.reply(update("s", Some("ü"), None)) else {
            panic!("a session")
        };
        assert_eq!(updated, agent.session_status("s"));
        let updated = updated.shared.unwrap();
        assert_eq!((updated.note.as_deref(), updated.idle_ms), (Some("ü"), Some(60_000)));
        assert_eq!(updated.used_ms, status.used_ms, "an update is not a use");
        agent.reply(update("s", None, Some(IdleLimit::Never)));
        let status = agent.shared_status("s");
        assert_eq!((status.note.as_deref(), status.idle_ms), (Some("ü"), None));
        let found = agent.open_commands(commands(shared("s", noted)));
        assert_eq!(found.note.as_deref(), Some("ü"), "opening it again changes nothing");
        let long = "x".repeat(1025);
        assert_eq!(agent.fault(update("s", Some(&long), None)).kind, FaultKind::Invalid);
        assert_eq!(agent.fault(update("other", Some("x"), None)).kind, FaultKind::NotFound);
        let open = shared("t", SessionSharing { note: Some(long), ..SessionSharing::default() });
        assert_eq!(agent.fault(AgentRequest::OpenSession(open)).kind, FaultKind::Invalid);
        agent.reply(update("s", None, Some(IdleLimit::Milliseconds(1))));
        let begun = Instant::now();
        while !agent.session_names().is_empty() {
            assert!(begun.elapsed() < Duration::from_secs(10));
        }
    });
}

#[test]
fn runs_of_a_shell_are_remembered_with_their_texts() {
    with_both_tree_modes(|agent| {
        agent.open_shared(anonymous("s"));
        agent.run_in(run_in("s", "r1", "false"));
        let mut talk = agent.begin(run_in("s", "r2", "echo on; sleep 1000"));
        assert_eq!(talk.read_text(3), "on\n");
        let runs = agent.runs("s");
        let shown: Vec<_> = runs
            .iter()
            .map(|run| (run.process.as_str(), run.command.as_str(), run.ended.as_ref().map(|end| end.exit)))
            .collect();
        let expected = [("r1", "false", Some(ExitReason::Code(1))), ("r2", "echo on; sleep 1000", None)];
        assert_eq!(shown, expected);
        let unknown = AgentRequest::SessionRuns { session: "other".to_owned() };
        assert_eq!(agent.fault(unknown).kind, FaultKind::NotFound);
    });
}

/// Their texts are too long for one frame in JSON.
#[test]
fn transcript_of_long_texts_is_complete() {
    let agent = TestAgent::with_trees(TreeMode::Runners);
    agent.open_commands(commands(named("s")));
    let text = format!(": '{}'", "\u{1}".repeat(5000));
    for number in 0..MAX_SESSION_RUNS {
        agent.run_in(run_in("s", &format!("r{number}"), &text));
    }
    let runs = agent.runs("s");
    assert_eq!(runs.len(), MAX_SESSION_RUNS);
    assert!(runs.iter().all(|run| run.command.len() == 4096 && run.ended.is_some()));
}

#[test]
fn a_thousand_command_runs_leave_no_process() {
    with_both_tree_modes(|agent| {
        const RUNS: usize = 1000;
        agent.open_commands(commands(named("s")));
        for number in 0..RUNS {
            let run = RunInSession { follow: false, queue: true, ..run_in("s", &format!("r{number}"), ":") };
            assert!(matches!(agent.reply(AgentRequest::Run(run)), AgentReply::Started { .. }));
        }
        agent.run_in(RunInSession { queue: true, ..run_in("s", "last", "true") });
        let begun = Instant::now();
        let running = || {
            let AgentReply::Trees(trees) = agent.reply(AgentRequest::Trees { ended: false }) else {
                panic!("trees")
            };
            trees.into_iter().map(|tree| (tree.id, tree.text)).collect::<Vec<_>>()
        };
        while running() != [("s".to_owned(), "commands".to_owned())] {
            assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", running());
        }
        assert!(!agent.session_status("s").left);
        let status = agent.shared_status("s");
        assert_eq!(status.runs, RUNS as u64 + 1);
        let runs = agent.run_names("s");
        assert_eq!((runs.len(), runs.last().unwrap().as_str()), (MAX_SESSION_RUNS, "last"));
    });
}

/// Finished processes are forgotten when there are too many, but the last runs of a session come after all others. Runs
/// that are refused because their session is closed are the fastest way to many finished processes.
#[test]
fn runs_of_an_idle_session_outlive_thousands_of_other_processes() {
    const QUEUED: usize = 64;
    const ROUNDS: usize = 66;
    let agent = TestAgent::with_trees(TreeMode::Runners);
    agent.open_commands(commands(named("s")));
    for number in 0..=MAX_SESSION_RUNS {
        agent.run_in(run_in("s", &format!("r{number}"), "echo out"));
    }
    for round in 0..ROUNDS {
        let name = format!("other{round}");
        agent.open_commands(commands(anonymous(&name)));
        for number in 0..=QUEUED {
            let run = run_in(&name, &format!("p{round}-{number}"), "sleep 1000");
            let run = RunInSession { queue: true, detached: true, ..run };
            assert!(matches!(agent.reply(AgentRequest::Run(run)), AgentReply::Started { .. }));
        }
        assert_eq!(agent.reply(close(&name, 1)), AgentReply::Ok);
    }
    let runs = agent.run_names("s");
    assert_eq!((runs.len(), runs[0].as_str()), (MAX_SESSION_RUNS, "r1"));
    assert_eq!(agent.follow("r1", 0).output().stdout(), "out\n");
    let status = |process: &str| agent.reply(AgentRequest::Status { process: process.to_owned() });
    assert!(matches!(status("p0-1"), AgentReply::Fault(_)), "an older process is forgotten instead");
    assert!(matches!(status("r0"), AgentReply::Fault(_)), "older runs are forgotten like any process");
}

#[test]
fn run_of_a_closed_session_is_asked_to_end_and_then_killed() {
    with_both_tree_modes(|agent| {
        let close_after = |grace| AgentRequest::CloseSession {
            session: "s".to_owned(),
            requested_ns: None,
            grace_ms: Some(grace),
        };
        agent.open_commands(commands(named("s")));
        let mut polite = agent.begin(run_in("s", "r1", "trap 'echo bye; exit 3' TERM; echo on; read x"));
        assert_eq!(polite.read_text(3), "on\n");
        assert_eq!(agent.reply(close_after(60_000)), AgentReply::Ok);
        let output = polite.output();
        assert_eq!((output.stdout().as_str(), output.exit()), ("bye\n", ExitReason::Code(3)));
        assert_eq!(output.ended.signalled, Some(15));

        // The name is free at once, although the run of the former session still ignores the request.
        agent.open_commands(commands(named("s")));
        let mut deaf = agent.begin(run_in("s", "r2", "trap '' TERM; sleep 1000 & echo on; wait"));
        assert_eq!(deaf.read_text(3), "on\n");
        assert_eq!(agent.reply(close_after(200)), AgentReply::Ok);
        assert_eq!(agent.fault(close_after(200)).kind, FaultKind::NotFound);
        agent.open_commands(commands(named("s")));
        assert_eq!(agent.run_in(run_in("s", "r3", "echo new")).stdout(), "new\n");
        assert_eq!(deaf.output().exit(), ExitReason::Signal(9));
    });
}

#[test]
fn shells_and_commands_have_separate_limits() {
    let agent = TestAgent::with_trees(TreeMode::Runners);
    let limited = |session: &str| {
        let sharing = SessionSharing { max_sessions: Some(1), ..SessionSharing::default() };
        OpenSession { sharing: Some(sharing), ..anonymous(session) }
    };
    agent.open_shared(limited("shell"));
    agent.open_commands(commands(limited("c1")));
    agent.open_commands(commands(limited("c2")));
    assert!(agent.session_status("shell").shared.is_some());
    let gone = agent.fault(AgentRequest::SessionStatus { session: "c1".to_owned() });
    assert_eq!(gone.kind, FaultKind::NotFound);
}

#[test]
fn errors_are_counted_for_readers() {
    let agent = TestAgent::with_trees(TreeMode::Runners);
    agent.open_commands(commands(named("s")));
    let retention = wire::process::OutputRetention { first: 0, last: 1000, lossless: true, stall_ms: None };
    // Each stream has a pipe of its own, so the run waits until its output was read.
    let text = "printf 12345 >&2; read -r x; head -c 3000000 /dev/zero; read -r x; printf 678 >&2";
    let mut talk = agent.begin(RunInSession { retention, ..run_in("s", "r1", text) });
    let mut feeding = agent.send_request(AgentRequest::Input { process: "r1".to_owned() });
    assert_eq!(feeding.reply(), AgentReply::Ok);
    for length in [5, 3_000_000] {
        talk.read_text(length);
        feeding.send(&Frame::Data(b"\n"[..].into()));
    }
    talk.output();
    let mut talk = agent.send_request(AgentRequest::Follow { process: "r1".to_owned(), from: 0 });
    let AgentReply::Status(status) = talk.reply() else { panic!("a status comes first") };
    assert_eq!((status.written, status.stderr_before), (3_000_008, Some(0)));
    let AgentReply::Gap { from: 0, stderr_before: Some(5), .. } = talk.reply() else {
        panic!("the beginning is dropped")
    };
    let mut talk = agent.send_request(AgentRequest::Follow { process: "r1".to_owned(), from: 3_000_006 });
    let AgentReply::Status(status) = talk.reply() else { panic!("a status comes first") };
    assert_eq!(status.stderr_before, Some(6));
    let mut talk = agent.send_request(AgentRequest::Follow { process: "r1".to_owned(), from: 7 });
    let AgentReply::Status(status) = talk.reply() else { panic!("a status comes first") };
    assert_eq!(status.stderr_before, None, "that output is not kept");
}
