//! Other ways in which a server, a `run` or a client ends.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::process::Stdio;
use std::time::{Duration, Instant};

use e2e::host;
use e2e::run::{Run, User, users};
use e2e::server::{Server, Start};
use serde_json::json;

use super::random::Random;
use super::remains::Remains;
use super::rounds::{say, seed};

#[test]
fn a_second_server_on_a_state_directory_is_refused() {
    let server = Server::start();
    let mut second = Start::new().spawn(server.directory());
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
    const LATEST_MICROS: u64 = 100_000;
    let seed = seed();
    say(&format!("killed first starts: CORACLE_CRASH_SEED={seed}"));
    let mut random = Random::new(seed);
    for _ in 0..DIRECTORIES {
        let home = User::Same.home();
        for _ in 0..2 {
            let mut attempt = Start::new().spawn(home.path());
            std::thread::park_timeout(Duration::from_micros(random.below(LATEST_MICROS)));
            attempt.kill().expect("it is our child");
            attempt.wait().expect("it is our child");
        }
        let server = Start::new().start_in(home);
        assert_eq!(server.create().run("true").code, Some(0));
    }
}

#[test]
fn sandboxes_survive_a_terminated_server() {
    let mut server = Server::start();
    let mut sandboxes = [server.create(), server.create()];
    let marks = [600_000, 700_000].map(|base| format!("sleep {}", base + std::process::id()));
    for (sandbox, mark) in sandboxes.iter_mut().zip(&marks) {
        sandbox.start(mark);
    }
    assert!(server.terminate().success());
    let log = server.log();
    let lines: Vec<&str> = log.lines().filter(|line| line.contains("sandboxes stay")).collect();
    assert_eq!(lines.len(), 1, "{log}");
    assert!(lines[0].contains("2 sandboxes stay") && lines[0].contains("coracle rm --all"), "{lines:?}");
    for mark in &marks {
        assert_eq!(host::processes_with(mark).len(), 1, "`{mark}` has ended with the server");
    }
    let again = Start::new().listen(server.address());
    server.start_again(&again);
    for sandbox in &mut sandboxes {
        assert_eq!(sandbox.run("true").code, Some(0));
    }
}

#[test]
fn a_create_whose_client_has_gone_is_undone() {
    const CLIENTS: usize = 20;
    let server = Server::start();
    let mut kept = server.create();
    let reported = (0..CLIENTS).filter(|_| leave_during_create(&server) == Left::Told).count();
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
enum Left {
    Before,
    Told,
}

/// Asks for a sandbox and hangs up when the launcher has begun to make it.
fn leave_during_create(server: &Server) -> Left {
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
    if answer.is_empty() { Left::Before } else { Left::Told }
}

#[test]
fn runs_killed_at_any_instant_are_cleaned_up_by_the_next_run() {
    const RUNS: usize = 25;
    const LATEST_MICROS: u64 = 60_000;
    let seed = seed();
    say(&format!("killed runs: CORACLE_CRASH_SEED={seed}"));
    let mut random = Random::new(seed);
    for user in users() {
        let name = if user == User::Same { "same" } else { "ordinary" };
        let home = user.home();
        let state = home.path().join("state");
        let instance = format!("crash-{name}-{}", std::process::id());
        let run = Run::new(user).state(&state);
        let command = |argv: &[&str]| {
            let mut command = run.command(argv);
            command.env("CORACLE_INSTANCE", &instance).stdout(Stdio::null());
            command
        };
        let succeeds = || command(&["true"]).status().expect("the binary runs").success();
        assert!(succeeds(), "{user:?}");
        let before = Remains::at_rest(&state, &instance);
        for _ in 0..RUNS {
            let mut child = command(&["sleep", "60"]).stderr(Stdio::null()).spawn().expect("the binary runs");
            std::thread::park_timeout(Duration::from_micros(random.below(LATEST_MICROS)));
            child.kill().expect("it is our child");
            child.wait().expect("it is our child");
        }
        assert!(succeeds(), "{user:?}: the next start fails over leftovers");
        before.wait_for(&state, &instance);
    }
}
