//! Shell sessions.

use std::collections::BTreeMap;

use wire::process::{
    ExitReason, MissingDirectory, OpenSession, OutputRetention, RunInSession, SessionStatus, UserIdentity,
    WorkingDirectory,
};
use wire::process::{SignalTarget, TerminalSize};
use wire::{AgentReply, AgentRequest, FaultKind, Frame, StreamTag};

use crate::client::{ProcessOutput, TestConnection};
use crate::harness::{TestAgent, TreeMode, with_both_tree_modes};

pub(crate) fn session() -> OpenSession {
    OpenSession {
        session: "s".to_owned(),
        identity: UserIdentity::Default,
        directory: None,
        env: BTreeMap::new(),
        terminal: None,
        text_terminal: false,
        isolation: None,
        sharing: None,
    }
}

pub(crate) fn run(process: &str, text: &str) -> RunInSession {
    RunInSession {
        session: "s".to_owned(),
        process: process.to_owned(),
        text: text.to_owned(),
        directory: None,
        deadline_ms: None,
        retention: OutputRetention { first: 1 << 20, last: 1 << 20, lossless: false, stall_ms: None },
        follow: true,
        queue: false,
        detached: false,
        env: BTreeMap::new(),
        beside: false,
    }
}

impl TestAgent {
    fn open(&self, open: OpenSession) {
        assert_eq!(self.reply(AgentRequest::OpenSession(open)), AgentReply::Ok);
    }

    pub(crate) fn begin(&self, run: RunInSession) -> TestConnection {
        let mut talk = self.send_request(AgentRequest::Run(run));
        match talk.reply() {
            AgentReply::Started { pid } => assert!(pid > 0),
            other => panic!("expected Started, got {other:?}"),
        }
        talk
    }

    pub(crate) fn run_in(&self, run: RunInSession) -> ProcessOutput {
        self.begin(run).output()
    }

    pub(crate) fn sessions(&self) -> Vec<SessionStatus> {
        match self.reply(AgentRequest::Sessions) {
            AgentReply::Sessions(sessions) => sessions,
            other => panic!("expected Sessions, got {other:?}"),
        }
    }
}

#[test]
fn session_keeps_its_directory_variables_and_functions() {
    with_both_tree_modes(|agent| {
        agent.open(session());
        let first =
            agent.run_in(run("r1", "cd /usr; export A='x  y'; B=plain; f() { echo f $1; }; echo one"));
        assert_eq!((first.stdout().as_str(), first.exit()), ("one\n", ExitReason::Code(0)));
        let second = agent.run_in(run("r2", "pwd; echo \"$A\" $B; f 1; env | grep ^A="));
        assert_eq!(second.stdout(), "/usr\nx  y plain\nf 1\nA=x  y\n");
        let AgentReply::Status(status) = agent.reply(AgentRequest::Status { process: "r2".to_owned() })
        else {
            panic!("a status")
        };
        assert_eq!((status.session.as_deref(), status.pid), (Some("s"), agent.sessions()[0].pid.unwrap()));
        assert_eq!(agent.follow("r1", 0).output().stdout(), "one\n");
    });
}

#[test]
fn exit_codes_are_exact() {
    with_both_tree_modes(|agent| {
        agent.open(session());
        for (number, (text, code)) in [
            ("true", 0),
            ("false", 1),
            ("(exit 42)", 42),
            ("sh -c 'kill -9 $$'", 137),
            ("no-such-command", 127),
            ("if", 2),
            ("echo 'unclosed", 2),
            ("", 0),
            ("# a comment", 0),
            ("cat <<X\nheredoc\nX", 0),
            ("echo last line without an end; false", 1),
        ]
        .into_iter()
        .enumerate()
        {
            assert_eq!(
                agent.run_in(run(&format!("r{number}"), text)).exit(),
                ExitReason::Code(code),
                "{text}"
            );
        }
    });
}

#[test]
fn output_ends_with_the_run_and_streams_stay_separate() {
    with_both_tree_modes(|agent| {
        agent.open(session());
        let output = agent.run_in(run("big", "seq 1 100000; echo err >&2; sleep 1000 & true"));
        assert_eq!(output.stdout().lines().count(), 100_000);
        assert_eq!(output.of(StreamTag::Stderr), "err\n");
        output.bytes_from(0);
        let quiet = agent.run_in(run("quiet", "set -x; true"));
        assert_eq!(quiet.of(StreamTag::Stderr), "++ true\n", "the agent's own script is not traced");
        let long = agent.run_in(run("long", &format!("# {}\necho ü end", "ü".repeat(200_000))));
        assert_eq!(long.stdout(), "ü end\n");
    });
}

#[test]
fn options_end_with_their_run() {
    with_both_tree_modes(|agent| {
        agent.open(session());
        let before = agent.run_in(run("r1", "echo $-; set -o | grep pipefail")).stdout();
        let set = "set -euxvfCa; set -o pipefail; f() { :; }; cd /usr";
        assert_eq!(agent.run_in(run("r2", set)).exit(), ExitReason::Code(0));
        let after = agent.run_in(run("r3", "false; echo $NONE$-; set -o | grep pipefail; f; pwd"));
        assert_eq!((after.stdout(), after.exit()), (format!("{before}/usr\n"), ExitReason::Code(0)));
        assert_eq!(after.of(StreamTag::Stderr), "", "resetting the options is not traced");
    });
}

#[test]
fn input_is_empty_and_the_private_pipes_are_not_inherited() {
    with_both_tree_modes(|agent| {
        agent.open(session());
        let output = agent.run_in(run("fds", "cat; read x; ls /proc/self/fd"));
        assert_eq!(output.stdout(), "0\n1\n2\n3\n");
        let fault = agent.fault(AgentRequest::Input { process: "fds".to_owned() });
        assert_eq!(fault.kind, FaultKind::Invalid);
    });
}

#[test]
fn exited_shell_is_replaced_and_keeps_its_state() {
    with_both_tree_modes(|agent| {
        agent.open(session());
        let before = agent.sessions()[0].pid;
        let output = agent.run_in(run("r1", "cd /usr/lib; export KEPT=\"it's\"; echo out; exit 7"));
        assert_eq!((output.stdout().as_str(), output.exit()), ("out\n", ExitReason::Code(7)));
        let output = agent.run_in(run("r2", "pwd; echo $KEPT; (exit 3)"));
        assert_eq!((output.stdout().as_str(), output.exit()), ("/usr/lib\nit's\n", ExitReason::Code(3)));
        assert_ne!(agent.sessions()[0].pid, before);
        let output = agent.run_in(run("r3", "set -e; false; echo not reached"));
        assert_eq!((output.stdout().as_str(), output.exit()), ("", ExitReason::Code(1)));
        let output = agent.run_in(run("r4", "exec sh -c 'echo replaced; exit 5'"));
        assert_eq!((output.stdout().as_str(), output.exit()), ("replaced\n", ExitReason::Code(5)));
        assert_eq!(agent.run_in(run("r5", "pwd")).stdout(), "/usr/lib\n");
    });
}

#[test]
fn killed_shell_is_replaced() {
    with_both_tree_modes(|agent| {
        agent.open(session());
        agent.run_in(run("r1", "cd /usr; export A=1"));
        let output = agent.run_in(run("r2", "cd /tmp; kill -9 $$; echo never"));
        assert_eq!((output.stdout().as_str(), output.exit()), ("", ExitReason::Signal(9)));
        assert_eq!(agent.run_in(run("r3", "pwd; echo $A")).stdout(), "/usr\n1\n");
        let mut talk = agent.begin(run("r4", "echo here; exec sleep 1000"));
        talk.read_text(5);
        assert_eq!(agent.signal("r4", 9, SignalTarget::Tree), AgentReply::Ok);
        assert_eq!(talk.output().exit(), ExitReason::Signal(9));
        assert_eq!(agent.run_in(run("r5", "echo well")).stdout(), "well\n");
    });
}

#[test]
fn deadline_ends_the_run_and_the_session_continues() {
    with_both_tree_modes(|agent| {
        agent.open(session());
        agent.run_in(run("r1", "cd /usr"));
        let mut late = run("r2", "echo before; sleep 1000; echo after");
        late.deadline_ms = Some(1000);
        let output = agent.run_in(late);
        assert_eq!((output.stdout().as_str(), output.exit()), ("before\n", ExitReason::Deadline));
        assert_eq!(agent.run_in(run("r3", "pwd")).stdout(), "/usr\n");
    });
}

#[test]
fn run_that_passes_its_deadline_changes_nothing_in_the_session() {
    with_both_tree_modes(|agent| {
        agent.open(session());
        let text = "cd /usr; x='a  b'; l=(1 2); f() { echo from f; }; shopt -s expand_aliases; alias g='echo from g'";
        agent.run_in(run("r1", text));
        let mut late = run("r2", "cd /; x=changed; unset -f f; unalias g; y=1; sleep 1000");
        late.deadline_ms = Some(1000);
        assert_eq!(agent.run_in(late).exit(), ExitReason::Deadline);
        let output = agent.run_in(run("r3", "pwd; echo \"$x ${#l[@]} ${y-unset}\"; f\ng"));
        assert_eq!(
            output.stdout(),
            "/usr\na  b 2 unset\nfrom f\nfrom g\n",
            "{}",
            output.of(StreamTag::Stderr)
        );
    });
}

#[test]
fn deadline_spares_what_earlier_runs_have_left() {
    if !testkit::needs_root() {
        return;
    }
    let agent = TestAgent::with_trees(TreeMode::Groups);
    agent.open(session());
    let output = agent.run_in(run("r1", "sleep 1000 & echo $!"));
    let earlier: i32 = output.stdout().trim().parse().unwrap();
    let mut late = run("r2", "sleep 1000 & echo $!; (setsid sleep 1000 & echo $!); wait");
    late.deadline_ms = Some(2000);
    let output = agent.run_in(late);
    assert_eq!(output.exit(), ExitReason::Deadline);
    assert_eq!(output.stdout().lines().count(), 2);
    for pid in output.stdout().lines() {
        crate::signals::wait_until_gone(pid.parse().unwrap());
    }
    assert!(std::path::Path::new(&format!("/proc/{earlier}")).exists());
    assert!(agent.sessions()[0].left, "the job of the first run is reported");
    let output = agent.run_in(run("r3", &format!("kill -0 {earlier} && echo alive")));
    assert_eq!(output.stdout(), "alive\n", "{}", output.of(StreamTag::Stderr));
    assert_eq!(
        agent.reply(AgentRequest::CloseSession {
            session: "s".to_owned(),
            requested_ns: None,
            grace_ms: None
        }),
        AgentReply::Ok
    );
    crate::signals::wait_until_gone(earlier);
}

/// A run still ends normally, and the next shell starts without variables.
#[test]
fn state_that_is_too_long_is_not_kept() {
    with_both_tree_modes(|agent| {
        agent.open(session());
        assert_eq!(agent.run_in(run("r1", "x=kept; cd /usr")).exit(), ExitReason::Code(0));
        let long = "long=$(head -c 3000000 /dev/zero | tr '\\0' a); echo ${#long}; exit 3";
        let output = agent.run_in(run("r2", long));
        assert_eq!((output.stdout().as_str(), output.exit()), ("3000000\n", ExitReason::Code(3)));
        let output = agent.run_in(run("r3", "pwd; echo ${#long} ${x-unset}"));
        assert_eq!(output.stdout(), "/usr\n0 unset\n", "{}", output.of(StreamTag::Stderr));
    });
}

#[test]
fn background_job_of_the_shell_is_reported() {
    with_both_tree_modes(|agent| {
        agent.open(session());
        let left = || match agent.reply(wire::AgentRequest::Sessions) {
            AgentReply::Sessions(sessions) => sessions[0].left,
            other => panic!("{other:?}"),
        };
        agent.run_in(run("r1", "true"));
        assert!(!left());
        agent.run_in(run("r2", "sleep 1000 > /dev/null 2>&1 &"));
        assert!(left());
        // Until the job has executed `sleep` it has bash's handlers, which would lose a SIGTERM.
        agent.run_in(run("r3", "kill -KILL $!; wait"));
        assert!(!left());
    });
}

#[test]
fn second_run_is_refused_or_waits() {
    with_both_tree_modes(|agent| {
        agent.open(session());
        let fifo = agent.home().join("fifo");
        rustix::fs::mkfifoat(rustix::fs::CWD, &fifo, rustix::fs::Mode::RWXU).unwrap();
        let first = agent.begin(run("r1", "read x < fifo; echo first"));
        assert!(agent.sessions()[0].busy);
        assert_eq!(agent.fault(AgentRequest::Run(run("r2", "true"))).kind, FaultKind::Busy);
        let mut queued = run("r3", "echo third");
        queued.queue = true;
        let mut third = agent.send_request(AgentRequest::Run(queued));
        std::fs::write(&fifo, "\n").unwrap();
        assert_eq!(first.output().stdout(), "first\n");
        assert!(matches!(third.reply(), AgentReply::Started { .. }));
        assert_eq!(third.output().stdout(), "third\n");
        assert!(!agent.sessions()[0].busy);
    });
}

#[test]
fn run_may_start_in_another_directory_and_stays_there() {
    with_both_tree_modes(|agent| {
        agent.open(session());
        let in_directory = |name: &str, path: &str, missing| {
            let mut run = run(name, "pwd");
            run.directory = Some(WorkingDirectory { path: path.to_owned(), missing, expand: false });
            run
        };
        assert_eq!(agent.run_in(in_directory("r1", "/usr", MissingDirectory::Fail)).stdout(), "/usr\n");
        assert_eq!(agent.run_in(run("r2", "pwd")).stdout(), "/usr\n");
        assert_eq!(agent.run_in(in_directory("r3", "lib", MissingDirectory::Fail)).stdout(), "/usr/lib\n");
        let fault = agent.fault(AgentRequest::Run(in_directory("r4", "/no/such", MissingDirectory::Fail)));
        assert_eq!(fault.kind, FaultKind::NotFound);
        assert_eq!(
            agent.run_in(in_directory("r5", "/no/such", MissingDirectory::Ignore)).stdout(),
            "/usr/lib\n"
        );
        let made = agent.home().join("it's new/deep");
        let made = made.to_str().unwrap();
        assert_eq!(
            agent.run_in(in_directory("r6", made, MissingDirectory::Create)).stdout(),
            format!("{made}\n")
        );
    });
}

#[test]
fn session_on_a_terminal_takes_input() {
    with_both_tree_modes(|agent| {
        let terminal = Some(TerminalSize { columns: 80, rows: 24 });
        agent.open(OpenSession { terminal, ..session() });
        assert!(agent.sessions()[0].terminal);
        let mut talk =
            agent.begin(run("r1", "test -t 0 && test -t 1 && stty -echo && echo tty; read x; echo got $x"));
        assert_eq!(talk.read_text(5), "tty\r\n");
        let mut input = agent.send_request(AgentRequest::Input { process: "r1".to_owned() });
        assert_eq!(input.reply(), AgentReply::Ok);
        input.send(&Frame::Data(b"word\n"[..].into()));
        let output = talk.output();
        assert_eq!(
            (output.of(StreamTag::Terminal).as_str(), output.exit()),
            ("got word\r\n", ExitReason::Code(0))
        );
        let resize = AgentRequest::Resize { process: "r2".to_owned(), columns: 99, rows: 11 };
        let mut talk = agent
            .begin(run("r2", "trap 'stty size; R=1' WINCH; echo on; until test $R; do sleep 0.01; done"));
        talk.read_text(4);
        assert_eq!(agent.reply(resize), AgentReply::Ok);
        assert_eq!(talk.output().of(StreamTag::Terminal), "11 99\r\n");
    });
}

#[test]
fn text_terminal_prints_lines_as_they_are() {
    with_both_tree_modes(|agent| {
        let terminal = Some(TerminalSize { columns: 20, rows: 24 });
        agent.open(OpenSession { terminal, text_terminal: true, ..session() });
        let long = "x".repeat(50);
        let text = format!(
            "test -t 0 && test -t 1 && test -t 2 && echo {long}; printf 'a\\tb\\n'; echo $PAGER $TERM"
        );
        let output = agent.run_in(run("r1", &text));
        assert_eq!(output.of(StreamTag::Terminal), format!("{long}\na\tb\ncat dumb\n"));
        let reading = RunInSession { follow: true, ..run("r2", "echo on; read -r line; echo \"[$line]\"") };
        let mut talk = agent.begin(reading);
        assert_eq!(talk.read_text(3), "on\n");
        let mut input = agent.send_request(AgentRequest::Input { process: "r2".to_owned() });
        assert_eq!(input.reply(), AgentReply::Ok);
        input.send(&Frame::Data(b"typed\n".to_vec().into()));
        assert_eq!(talk.output().of(StreamTag::Terminal), "[typed]\n", "nothing is echoed");
    });
}

#[test]
fn closed_session_ends_with_everything_in_it() {
    with_both_tree_modes(|agent| {
        agent.open(session());
        let again = AgentRequest::OpenSession(session());
        assert_eq!(agent.fault(again).kind, FaultKind::AlreadyExists);
        let mut talk = agent.begin(run("r1", "echo on; sleep 1000"));
        talk.read_text(3);
        assert_eq!(
            agent.reply(AgentRequest::CloseSession {
                session: "s".to_owned(),
                requested_ns: None,
                grace_ms: None
            }),
            AgentReply::Ok
        );
        assert_eq!(talk.output().exit(), ExitReason::Signal(9));
        assert_eq!(agent.sessions(), []);
        assert_eq!(agent.fault(AgentRequest::Run(run("r2", "true"))).kind, FaultKind::NotFound);
        assert_eq!(
            agent
                .fault(AgentRequest::CloseSession {
                    session: "s".to_owned(),
                    requested_ns: None,
                    grace_ms: None
                })
                .kind,
            FaultKind::NotFound
        );
        agent.open(session());
        assert_eq!(agent.run_in(run("r3", "echo new")).stdout(), "new\n");
    });
}

#[test]
fn session_that_cannot_start_returns_the_reason() {
    with_both_tree_modes(|agent| {
        let directory =
            WorkingDirectory { path: "/no/such".to_owned(), missing: MissingDirectory::Fail, expand: false };
        let open = OpenSession { directory: Some(directory), ..session() };
        let fault = agent.fault(AgentRequest::OpenSession(open));
        assert_eq!((fault.kind, fault.operation.as_str()), (FaultKind::NotFound, "change directory"));
        assert_eq!(agent.sessions(), []);
        agent.open(session());
        assert_eq!(agent.fault(AgentRequest::Run(run("bad/name", "true"))).kind, FaultKind::Invalid);
        assert_eq!(agent.fault(AgentRequest::Run(run("zero", "a\0b"))).kind, FaultKind::Invalid);
    });
}
