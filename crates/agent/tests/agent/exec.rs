//! Starting commands: their environment, and the faults when they cannot be started.

use std::collections::BTreeMap;

use wire::process::{ExitReason, MissingDirectory, TerminalSize, UserIdentity, WorkingDirectory};
use wire::{AgentReply, AgentRequest, FaultKind, Frame, StreamTag};

use crate::client::{argv, shell};
use crate::harness::{TestAgent, TreeMode, with_both_tree_modes};

#[test]
fn output_is_complete_and_in_order() {
    with_both_tree_modes(|agent| {
        let output =
            agent.run(shell("order", "for i in 1 2 3; do echo out $i; echo err $i >&2; done; exit 3"));
        assert_eq!(output.stdout(), "out 1\nout 2\nout 3\n");
        assert_eq!(output.of(StreamTag::Stderr), "err 1\nerr 2\nerr 3\n");
        assert_eq!(output.exit(), ExitReason::Code(3));
        assert_eq!(output.ended.written, 36);
        output.bytes_from(0);
    });
}

#[test]
fn words_reach_the_program_without_a_shell() {
    with_both_tree_modes(|agent| {
        let output = agent.run(argv("words", &["printf", "%s|", "a b", "$HOME", "*", "", "ü"]));
        assert_eq!(output.stdout(), "a b|$HOME|*||ü|");
    });
}

#[test]
fn missing_program_is_a_fault_and_leaves_nothing() {
    with_both_tree_modes(|agent| {
        let fault = agent.fault(AgentRequest::Start(argv("none", &["no-such-program"])));
        assert_eq!(
            (fault.kind, fault.errno, fault.operation.as_str(), fault.subject.as_str()),
            (FaultKind::NotFound, Some(2), "exec", "no-such-program")
        );
        let denied = agent.fault(AgentRequest::Start(argv("none", &["/etc/passwd"])));
        assert_eq!((denied.kind, denied.errno), (FaultKind::Permission, Some(13)));
        assert_eq!(agent.reply(AgentRequest::Processes), AgentReply::Statuses(Vec::new()));
        assert!(!agent.journal("none").exists());
        assert_eq!(agent.run(argv("none", &["true"])).exit(), ExitReason::Code(0));
    });
}

#[test]
fn name_is_unique_and_not_a_path() {
    with_both_tree_modes(|agent| {
        agent.run(shell("once", "true"));
        assert_eq!(agent.fault(AgentRequest::Start(shell("once", "true"))).kind, FaultKind::AlreadyExists);
        for name in ["", "..", "a/b", "a\0b", &"x".repeat(65)] {
            assert_eq!(
                agent.fault(AgentRequest::Start(shell(name, "true"))).kind,
                FaultKind::Invalid,
                "{name}"
            );
        }
    });
}

#[test]
fn environment_of_request_overrides_sandbox_and_account() {
    let agent = TestAgent::with_config(TreeMode::Runners, |config| {
        config.env.insert("HOME".to_owned(), "/overridden".to_owned());
        config.env.insert("LOGNAME".to_owned(), "somebody".to_owned());
        config.env.insert("SHARED".to_owned(), "config".to_owned());
        config.env.insert("KEPT".to_owned(), "kept".to_owned());
    });
    let mut start = argv("env", &["env"]);
    start.env = BTreeMap::from([("SHARED".to_owned(), "request".to_owned())]);
    let text = agent.run(start).stdout();
    let mut lines: Vec<&str> = text.lines().collect();
    lines.sort_unstable();
    assert_eq!(
        lines,
        [
            "HOME=/overridden",
            "KEPT=kept",
            "LOGNAME=somebody",
            "PATH=/usr/local/bin:/usr/bin:/bin",
            "SHARED=request",
            "SHELL=/bin/bash",
            "USER=root"
        ]
    );
    let mut wrong = argv("wrong", &["env"]);
    wrong.env = BTreeMap::from([("A=B".to_owned(), String::new())]);
    assert_eq!(agent.fault(AgentRequest::Start(wrong)).kind, FaultKind::Invalid);
}

#[test]
fn variables_of_the_default_user_apply_to_it_alone() {
    if !testkit::needs_root() {
        return;
    }
    let agent = TestAgent::with_config(TreeMode::Runners, |config| {
        for (name, value) in [("HOME", "/its"), ("USER", "it"), ("LOGNAME", "it"), ("SHELL", "/it")] {
            config.env.insert(name.to_owned(), value.to_owned());
        }
    });
    let shown = |name: &str, identity| {
        let mut start = argv(name, &["printenv", "HOME", "USER", "LOGNAME", "SHELL"]);
        start.identity = identity;
        agent.run(start).stdout()
    };
    assert_eq!(shown("usual", UserIdentity::Default), "/its\nit\nit\n/it\n");
    assert_eq!(shown("named", UserIdentity::User("root".to_owned())), "/its\nit\nit\n/it\n");
    let other = UserIdentity::Ids { uid: 4242, gid: 4343 };
    assert_eq!(shown("other", other), "/\n4242\n4242\n/bin/sh\n");
}

#[test]
fn missing_directory_fails_is_created_or_is_ignored() {
    with_both_tree_modes(|agent| {
        let home = agent.home().to_str().unwrap().to_owned();
        let in_directory = |name: &str, path: &str, missing, expand| {
            let mut start = argv(name, &["pwd"]);
            start.env = BTreeMap::from([("HOME".to_owned(), home.clone()), ("D".to_owned(), "d".to_owned())]);
            start.directory = Some(WorkingDirectory { path: path.to_owned(), missing, expand });
            start
        };
        let fault =
            agent.fault(AgentRequest::Start(in_directory("a", "/no/such", MissingDirectory::Fail, false)));
        assert_eq!((fault.kind, fault.operation.as_str()), (FaultKind::NotFound, "change directory"));
        assert_eq!(fault.subject, "/no/such");
        let made = agent.run(in_directory("b", "~/new/$D/deep", MissingDirectory::Create, true));
        assert_eq!(made.stdout(), format!("{home}/new/d/deep\n"));
        let literal = agent.run(in_directory("c", "~/$D", MissingDirectory::Create, false));
        assert_eq!(literal.stdout(), format!("{home}/$D\n"));
        let ignored = agent.run(in_directory("d", "/no/such", MissingDirectory::Ignore, false));
        assert_eq!(ignored.stdout(), format!("{home}\n"));
        assert_eq!(agent.run(argv("e", &["pwd"])).stdout(), format!("{home}\n"));
    });
}

#[test]
fn shell_text_longer_than_an_argument_runs() {
    with_both_tree_modes(|agent| {
        let text = format!("# {}\necho long; exit 4", "x".repeat(300_000));
        let output = agent.run(shell("long", &text));
        assert_eq!((output.stdout().as_str(), output.exit()), ("long\n", ExitReason::Code(4)));
    });
}

#[test]
fn a_command_inherits_three_descriptors_and_no_blocked_signal() {
    with_both_tree_modes(|agent| {
        let output = agent.run(shell("fds", "ls /proc/self/fd; grep -E 'Sig(Blk|Ign)' /proc/self/status"));
        let mut lines: Vec<String> = output.stdout().lines().map(str::to_owned).collect();
        // The fourth descriptor is the directory that `ls` itself has open.
        assert_eq!(lines.drain(..4).collect::<Vec<_>>(), ["0", "1", "2", "3"]);
        assert_eq!(lines, ["SigBlk:\t0000000000000000", "SigIgn:\t0000000000000000"]);
    });
}

#[test]
fn another_user_keeps_no_capability_and_gets_its_groups() {
    if !testkit::needs_root() {
        return;
    }
    with_both_tree_modes(|agent| {
        let mut start =
            shell("user", "id -u; id -g; grep -E 'Cap(Eff|Prm|Bnd|Amb)|NoNewPrivs' /proc/self/status");
        start.identity = UserIdentity::Ids { uid: 4242, gid: 4343 };
        let none = "0000000000000000";
        let expected = format!(
            "4242\n4343\nCapPrm:\t{none}\nCapEff:\t{none}\nCapBnd:\t{none}\nCapAmb:\t{none}\nNoNewPrivs:\t1\n"
        );
        assert_eq!(agent.run(start).stdout(), expected);
        let mut start = shell("nobody", "whoami; echo $HOME; echo to-stdout > /dev/stdout");
        start.identity = UserIdentity::User("nobody".to_owned());
        assert_eq!(agent.run(start).stdout(), "nobody\n/nonexistent\nto-stdout\n");
        let mut start = argv("stranger", &["true"]);
        start.identity = UserIdentity::User("no-such-user".to_owned());
        let fault = agent.fault(AgentRequest::Start(start));
        assert_eq!((fault.kind, fault.subject.as_str()), (FaultKind::NotFound, "no-such-user"));
        let mut start = argv("minus-one", &["true"]);
        start.identity = UserIdentity::Ids { uid: u32::MAX, gid: 0 };
        assert_eq!(agent.fault(AgentRequest::Start(start)).kind, FaultKind::Invalid);
    });
}

#[test]
fn root_keeps_only_the_configured_capabilities() {
    if !testkit::needs_root() {
        return;
    }
    let agent = TestAgent::with_config(TreeMode::Runners, |config| config.command_capabilities = 0b11);
    let output = agent.run(shell("caps", "grep -E 'Cap(Eff|Prm|Bnd)' /proc/self/status"));
    let kept = "0000000000000003";
    assert_eq!(output.stdout(), format!("CapPrm:\t{kept}\nCapEff:\t{kept}\nCapBnd:\t{kept}\n"));
}

#[test]
fn a_sandbox_with_one_user_refuses_others_by_name() {
    let agent = TestAgent::with_config(TreeMode::Runners, |config| config.single_user = true);
    let mut start = argv("other", &["true"]);
    start.identity = UserIdentity::User("nobody".to_owned());
    let fault = agent.fault(AgentRequest::Start(start));
    assert_eq!(fault.kind, FaultKind::Permission);
    assert!(fault.subject.contains("nobody"), "{}", fault.subject);
    assert_eq!(agent.run(argv("root", &["true"])).exit(), ExitReason::Code(0));
}

#[test]
fn input_reaches_the_process_and_its_end_does_too() {
    with_both_tree_modes(|agent| {
        let mut start = shell("cat", "cat; echo done");
        start.stdin = true;
        let following = agent.start(start);
        let mut talk = agent.send_request(AgentRequest::Input { process: "cat".to_owned() });
        assert_eq!(talk.reply(), AgentReply::Ok);
        // More than a pipe holds, so the feeder has to wait for the reader.
        let line = "0123456789".repeat(10_000);
        for _ in 0..10 {
            talk.send(&Frame::Data(line.clone().into()));
        }
        drop(talk);
        // A connection that ends without `End` leaves the input open for the next one.
        let mut talk = agent.send_request(AgentRequest::Input { process: "cat".to_owned() });
        assert_eq!(talk.reply(), AgentReply::Ok);
        talk.send(&Frame::Data(b"last\n"[..].into()));
        talk.send(&Frame::End);
        assert_eq!(talk.frame(), None);
        assert_eq!(following.output().stdout(), format!("{}last\ndone\n", line.repeat(10)));
        let fault = agent.fault(AgentRequest::Input { process: "cat".to_owned() });
        assert_eq!(fault.kind, FaultKind::Invalid);
    });
}

#[test]
fn feeder_continues_however_fast_the_process_reads() {
    const TOTAL: usize = 64 << 20;
    with_both_tree_modes(|agent| {
        let piece = vec![b'x'; 48 << 10];
        for round in 0..4 {
            let name = format!("fast{round}");
            let mut start = argv(&name, &["wc", "-c"]);
            start.stdin = true;
            let following = agent.start(start);
            let mut talk = agent.send_request(AgentRequest::Input { process: name });
            assert_eq!(talk.reply(), AgentReply::Ok);
            let mut sent = 0;
            while sent < TOTAL {
                talk.send(&Frame::Data(piece.clone().into()));
                sent += piece.len();
            }
            talk.send(&Frame::End);
            assert_eq!(following.output().stdout().trim(), sent.to_string());
        }
    });
}

#[test]
fn without_input_there_is_nothing_to_read() {
    with_both_tree_modes(|agent| {
        assert_eq!(agent.run(argv("empty", &["cat"])).exit(), ExitReason::Code(0));
        assert_eq!(agent.fault(AgentRequest::Input { process: "none".to_owned() }).kind, FaultKind::NotFound);
    });
}

#[test]
fn terminal_is_a_tty_and_can_be_resized() {
    with_both_tree_modes(|agent| {
        let script = "trap 'stty size; exit 5' WINCH; test -t 0 && stty size; while :; do sleep 0.01; done";
        let mut start = shell("tty", script);
        start.terminal = Some(TerminalSize { columns: 80, rows: 24 });
        let mut talk = agent.start(start);
        assert_eq!(talk.read_text(7), "24 80\r\n");
        let resize = AgentRequest::Resize { process: "tty".to_owned(), columns: 132, rows: 43 };
        assert_eq!(agent.reply(resize), AgentReply::Ok);
        let output = talk.output();
        assert_eq!(output.of(StreamTag::Terminal), "43 132\r\n");
        assert_eq!(output.exit(), ExitReason::Code(5));
    });
}

#[test]
fn a_terminal_takes_input_and_the_end_of_it() {
    with_both_tree_modes(|agent| {
        let mut start = shell("tty", "cat; echo bye");
        start.terminal = Some(TerminalSize { columns: 80, rows: 24 });
        let following = agent.start(start);
        let mut talk = agent.send_request(AgentRequest::Input { process: "tty".to_owned() });
        assert_eq!(talk.reply(), AgentReply::Ok);
        talk.send(&Frame::Data(b"hello\n"[..].into()));
        talk.send(&Frame::End);
        assert_eq!(following.output().of(StreamTag::Terminal), "hello\r\nhello\r\nbye\r\n");
    });
}

#[test]
fn more_processes_than_allowed_are_refused() {
    let agent = TestAgent::with_config(TreeMode::Runners, |config| config.max_processes = 2);
    let mut first = shell("first", "read x");
    first.stdin = true;
    let mut second = first.clone();
    second.process = "second".to_owned();
    let first = agent.start(first);
    let _second = agent.start(second);
    assert_eq!(agent.fault(AgentRequest::Start(argv("third", &["true"]))).kind, FaultKind::Busy);
    agent.signal("first", 9, wire::process::SignalTarget::Tree);
    first.output();
    assert_eq!(agent.run(argv("third", &["true"])).exit(), ExitReason::Code(0));
}
