//! Other ways in which a server, a `run` or a client ends.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::process::Stdio;
use std::time::{Duration, Instant};

use e2e::host;
use e2e::run::{RunCommand, TestUser, all_users};
use e2e::server::{ServerBuilder, TestServer};
use serde_json::json;

use super::leftovers::HostLeftovers;
use super::random::RandomChoices;
use super::rounds::{print_progress, seed};

#[test]
fn a_second_server_on_a_state_directory_is_refused() {
    let server = TestServer::start();
    let mut second = ServerBuilder::new().spawn(server.directory());
    let status = second.wait().expect("it is our child");
    assert_eq!(status.code(), Some(1));
    let log = server.log();
    assert!(log.contains("another server uses the state directory"), "the log lacks the reason: {log}");
    assert!(log.contains("hint: "), "the log lacks the remedy: {log}");
    assert_eq!(server.client().get("/health").expect("the first one answers").status, 200);
}

#[test]
fn a_server_killed_during_its_first_start_starts_the_next_time() {
    const DIRECTORIES: usize = 8;
    const MAX_KILL_DELAY_MICROS: u64 = 100_000;
    let seed = seed();
    print_progress(&format!("killed first starts: CORACLE_CRASH_SEED={seed}"));
    let mut random = RandomChoices::new(seed);
    for _ in 0..DIRECTORIES {
        let home = TestUser::Same.make_home();
        for _ in 0..2 {
            let mut attempt = ServerBuilder::new().spawn(home.path());
            std::thread::park_timeout(Duration::from_micros(random.below(MAX_KILL_DELAY_MICROS)));
            attempt.kill().expect("it is our child");
            attempt.wait().expect("it is our child");
        }
        let server = ServerBuilder::new().start_in(home);
        assert_eq!(server.create_sandbox().run("true").code, Some(0));
    }
}

#[test]
fn sandboxes_survive_a_terminated_server() {
    let mut server = TestServer::start();
    let mut sandboxes = [server.create_sandbox(), server.create_sandbox()];
    let marks = [600_000, 700_000].map(|base| format!("sleep {}", base + std::process::id()));
    for (sandbox, mark) in sandboxes.iter_mut().zip(&marks) {
        sandbox.start_background(mark);
    }
    assert!(server.terminate().success());
    let log = server.log();
    let lines: Vec<&str> = log.lines().filter(|line| line.contains("sandboxes stay")).collect();
    assert_eq!(lines.len(), 1, "{log}");
    assert!(lines[0].contains("2 sandboxes stay") && lines[0].contains("coracle rm --all"), "{lines:?}");
    for mark in &marks {
        assert_eq!(host::pids_with_command_line(mark).len(), 1, "`{mark}` has ended with the server");
    }
    let again = ServerBuilder::new().listen(server.address());
    server.restart(&again);
    for sandbox in &mut sandboxes {
        assert_eq!(sandbox.run("true").code, Some(0));
    }
}

#[test]
fn a_create_whose_client_has_gone_is_undone() {
    const CLIENTS: usize = 20;
    let server = TestServer::start();
    let mut kept = server.create_sandbox();
    let reported = (0..CLIENTS).filter(|_| leave_during_create(&server) == HangUpTime::Told).count();
    assert!(
        reported < CLIENTS / 2,
        "creates are too fast to interrupt: {reported} of {CLIENTS} were answered"
    );
    e2e::eventually("unanswered creates are undone", || {
        let page = server.client().get("/v1/sandboxes?pageSize=200").expect("the server answers").json();
        page["items"].as_array().is_some_and(|items| items.len() == 1 + reported)
    });
    assert_eq!(kept.run("true").code, Some(0));
}

/// When a client hung up.
#[derive(PartialEq, Eq)]
enum HangUpTime {
    Before,
    Told,
}

/// Asks for a sandbox and hangs up when the launcher has begun to make it.
fn leave_during_create(server: &TestServer) -> HangUpTime {
    let request = json!({
        "image": {"uri": "host"},
        "timeout": 3600,
        "resourceLimits": {},
        "entrypoint": ["tail", "-f", "/dev/null"],
    });
    let request = request.to_string();
    let boxes = server.state_directory().join("boxes");
    let names = || -> BTreeSet<OsString> {
        fs::read_dir(&boxes).into_iter().flatten().flatten().map(|entry| entry.file_name()).collect()
    };
    let before = names();
    let mut client = TcpStream::connect(server.address()).expect("the server listens");
    let head = format!(
        "POST /v1/sandboxes HTTP/1.1\r\nHost: {}\r\nContent-Type: application/json\r\nContent-Length: {}",
        server.address(),
        request.len()
    );
    write!(client, "{head}\r\n\r\n{request}").expect("the server reads");
    let begun = Instant::now();
    while names().is_subset(&before) {
        assert!(begun.elapsed() < Duration::from_secs(60), "no sandbox is being made");
        std::thread::yield_now();
    }
    // For the server, a client that closes its writing side has gone; we can still read what it sends.
    client.shutdown(Shutdown::Write).expect("it is a socket");
    let mut answer = Vec::new();
    client.read_to_end(&mut answer).ok();
    if answer.is_empty() { HangUpTime::Before } else { HangUpTime::Told }
}

#[test]
fn runs_killed_at_any_instant_are_cleaned_up_by_the_next_run() {
    const RUNS: usize = 25;
    const MAX_KILL_DELAY_MICROS: u64 = 60_000;
    let seed = seed();
    print_progress(&format!("killed runs: CORACLE_CRASH_SEED={seed}"));
    let mut random = RandomChoices::new(seed);
    for user in all_users() {
        let name = if user == TestUser::Same { "same" } else { "ordinary" };
        let home = user.make_home();
        let state = home.path().join("state");
        let instance = format!("crash-{name}-{}", std::process::id());
        let run = RunCommand::new(user).state(&state);
        let command = |argv: &[&str]| {
            let mut command = run.command(argv);
            command.env("CORACLE_INSTANCE", &instance).stdout(Stdio::null());
            command
        };
        let succeeds = || command(&["true"]).status().expect("the binary runs").success();
        assert!(succeeds(), "{user:?}");
        let before = HostLeftovers::at_rest(&state, &instance);
        for _ in 0..RUNS {
            let mut child = command(&["sleep", "60"]).stderr(Stdio::null()).spawn().expect("the binary runs");
            std::thread::park_timeout(Duration::from_micros(random.below(MAX_KILL_DELAY_MICROS)));
            child.kill().expect("it is our child");
            child.wait().expect("it is our child");
        }
        assert!(succeeds(), "{user:?}: the next start fails over leftovers");
        before.wait_for(&state, &instance);
    }
}
