//! An agent that sends false messages, against the real server.
//!
//! The agent of a living sandbox is replaced by one that answers every request with the same false message
//! (see `attacks/malicious_agent.rs`). Its client gets an error in bounded time, the server's memory stays flat, and
//! other clients are not affected.

use std::time::{Duration, Instant};

use e2e::host;
use e2e::run::attack_outside;
use e2e::sandbox::{CommandRun, RemoteSandbox};
use e2e::server::{TestServer, resident_memory};
use serde_json::{Value, json};

/// Messages after which the connection ends: the client gets a response at once.
const ENDING_MESSAGES: [&str; 8] = [
    "hang-up",
    "a-length-of-4-gib",
    "an-unknown-kind",
    "a-message-of-the-wrong-type",
    "bytes-that-are-no-frames",
    "a-later-version",
    "endless-messages",
    "an-endless-answer",
];

/// How long a server waits for a silent agent, with time to spare.
const AGENT_TIMEOUT: Duration = Duration::from_secs(60);

/// The growth of the server's memory that a false message may cause.
const MAX_MEMORY_GROWTH: u64 = 64 << 20;

/// A sandbox whose agent sends this false message from now on.
fn sandbox_with_malicious_agent(server: &TestServer, lie: &str) -> RemoteSandbox {
    let mut sandbox = server.create_sandbox();
    sandbox.upload_attacks();
    let agent = host::agent_pid(&sandbox.id).expect("its agent runs").to_string();
    let ended = attack_outside(&["subvert", &agent, "/opt/attacks", "lie", lie]);
    assert_eq!(ended.code, Some(0), "the agent could not be subverted: {ended:?}");
    sandbox
}

/// Sends every kind of request for which the server reads from an agent, and returns the responses.
fn ask_everything(sandbox: &mut RemoteSandbox) -> Vec<(&'static str, u16, String)> {
    let questions = [
        ("POST", "command", json!({"command": "echo hello"})),
        ("GET", "files/info?path=/root", Value::Null),
        ("GET", "files/download?path=/opt/attacks", Value::Null),
        ("GET", "files/search?path=/root&pattern=*", Value::Null),
        ("GET", "directories/list?path=/root", Value::Null),
        ("POST", "session", json!({})),
    ];
    let asked = questions.into_iter().map(|(method, path, body)| {
        let answer = sandbox.request_inside(method, path, &body);
        (path, answer.status, answer.text())
    });
    asked.collect()
}

/// Whether a response is an error: by its status, or by an error in a stream that had begun.
fn is_error(status: u16, body: &str) -> bool {
    (400..600).contains(&status) || (status == 200 && !CommandRun::from_events(body).error.is_empty())
}

fn check_unharmed(server: &TestServer, neighbour: &mut RemoteSandbox, before: u64, lie: &str) {
    let after = resident_memory(server.pid());
    assert!(after < before + MAX_MEMORY_GROWTH, "{lie}: memory rose from {before} to {after} bytes");
    assert_eq!(neighbour.run("echo fine").stdout, "fine\n", "{lie}: a neighbour was affected");
    assert_eq!(server.client().get("/health").expect("the server answers").status, 200, "{lie}");
}

#[test]
fn false_agent_response_is_an_error_for_its_client_only() {
    if !testkit::needs_root() {
        return;
    }
    let server = TestServer::start();
    let mut neighbour = server.create_sandbox();
    assert_eq!(neighbour.run("true").code, Some(0));
    for lie in ENDING_MESSAGES {
        let mut sandbox = sandbox_with_malicious_agent(&server, lie);
        let before = resident_memory(server.pid());
        let began = Instant::now();
        for (path, status, body) in ask_everything(&mut sandbox) {
            assert!(is_error(status, &body), "{lie}: `{path}` was answered with {status}: {body:.300}");
        }
        assert!(began.elapsed() < AGENT_TIMEOUT, "{lie}: the answers took {:?}", began.elapsed());
        check_unharmed(&server, &mut neighbour, before, lie);
        sandbox.delete();
    }
}

#[test]
fn silent_agent_is_waited_for_a_bounded_time() {
    if !testkit::needs_root() {
        return;
    }
    let server = TestServer::start();
    let mut neighbour = server.create_sandbox();
    assert_eq!(neighbour.run("true").code, Some(0));
    let lies = ["silence", "half-a-frame"];
    let sandboxes = lies.map(|lie| sandbox_with_malicious_agent(&server, lie));
    let before = resident_memory(server.pid());
    // The requests run in parallel, since each waits for its timeout.
    std::thread::scope(|scope| {
        for (mut sandbox, lie) in sandboxes.into_iter().zip(lies) {
            scope.spawn(move || {
                let began = Instant::now();
                let answer = sandbox.request_inside("POST", "command", &json!({"command": "echo hello"}));
                assert!(is_error(answer.status, &answer.text()), "{lie}: {}", answer.text());
                assert!(began.elapsed() < AGENT_TIMEOUT, "{lie}: the answer took {:?}", began.elapsed());
                sandbox.delete();
            });
        }
        assert_eq!(neighbour.run("echo fine").stdout, "fine\n", "a neighbour was delayed too");
    });
    check_unharmed(&server, &mut neighbour, before, "silence");
}

#[test]
fn output_at_forged_offsets_ends_the_stream_with_an_error() {
    if !testkit::needs_root() {
        return;
    }
    let server = TestServer::start();
    let mut sandbox = sandbox_with_malicious_agent(&server, "output-at-forged-offsets");
    let ran = sandbox.run_with(&json!({"command": "echo hello"}));
    assert!(ran.code != Some(0) && !ran.error.is_empty(), "a forged offset was believed: {ran:?}");
    assert!(!ran.stdout.contains("forged"), "{ran:?}");
    sandbox.delete();
}
