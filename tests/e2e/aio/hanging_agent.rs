//! An agent that hangs delays only its own sandbox, and none of its requests for ever.

use std::time::{Duration, Instant};

use e2e::aio::{AioSandbox, keyed_client};
use e2e::host;
use e2e::http::HttpClient;
use e2e::server::TestServer;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

/// Requests that do not concern the hanging sandbox.
const PROMPT: Duration = Duration::from_secs(2);
/// Requests that do, and do not need its agent.
const BOUNDED: Duration = Duration::from_secs(15);
/// DeerFlow's own limit.
const DELETE_TIMEOUT: Duration = Duration::from_secs(15);
const CREATE_HANGING: &str = r#"{"sandbox_id": "hanging"}"#;

/// A sandbox whose processes are stopped until this value is dropped.
struct StoppedAgent(Pid);

impl StoppedAgent {
    fn stop(sandbox: &AioSandbox) -> Self {
        let pid = host::agent_pid(&sandbox.container).expect("its agent runs");
        let pid = Pid::from_raw(i32::try_from(pid).expect("a pid")).expect("a pid is not zero");
        kill_process(pid, Signal::STOP).expect("root may signal it");
        Self(pid)
    }
}

impl Drop for StoppedAgent {
    fn drop(&mut self) {
        kill_process(self.0, Signal::CONT).ok();
    }
}

/// Sends a request to the provisioner, and returns its status and how long it took.
fn ask(server: &TestServer, method: &str, path: &str, body: &[u8]) -> (u16, Duration) {
    let began = Instant::now();
    let kind = if body.is_empty() { "" } else { "application/json" };
    let answer = keyed_client(server.address()).request(method, path, kind, body);
    (answer.expect("the server answers").status, began.elapsed())
}

#[test]
fn a_hanging_agent_delays_no_other_sandbox() {
    if !testkit::needs_root() {
        return;
    }
    let server = super::start_server();
    let hanging = AioSandbox::create(&server, "hanging");
    let mut other = AioSandbox::create(&server, "other");
    let stopped = StoppedAgent::stop(&hanging);
    std::thread::scope(|scope| {
        let (server, hanging) = (&server, &hanging);
        let request_status = |path: &'static str, body: serde_json::Value| {
            let mut own = hanging.with_client(HttpClient::new(server.address()));
            scope.spawn(move || own.try_post(path, &body).expect("the server answers").status)
        };
        // These wait until the agent goes on.
        let waiting = [
            request_status("/v1/file/read", json!({"file": "/etc/passwd"})),
            request_status("/v1/shell/exec", json!({"command": "true"})),
        ];
        // These are answered without it.
        let bounded = [("GET", "/api/sandboxes/hanging", ""), ("POST", "/api/sandboxes", CREATE_HANGING)];
        let bounded = bounded.map(|(method, path, body)| {
            scope.spawn(move || {
                let (status, took) = ask(server, method, path, body.as_bytes());
                assert!(took < BOUNDED * e2e::slowness_factor(), "{method} took {took:?}");
                status
            })
        });
        for _ in 0..20 {
            for path in ["/api/sandboxes/other", "/api/sandboxes", "/api/sandboxes/hanging/presence"] {
                let (status, took) = ask(server, "GET", path, &[]);
                assert_eq!(status, 200, "{path}");
                assert!(took < PROMPT * e2e::slowness_factor(), "{path} took {took:?}");
            }
            let began = Instant::now();
            assert_eq!(other.run("echo on"), "on");
            assert!(began.elapsed() < PROMPT * e2e::slowness_factor(), "exec took {:?}", began.elapsed());
        }
        // A sandbox that does not answer must not be given to a client, and one that may only be busy not be replaced.
        let statuses = bounded.map(|request| request.join().expect("a request does not panic"));
        assert_eq!(statuses, [404, 200]);
        drop(stopped);
        for request in waiting {
            assert_eq!(request.join().expect("a request does not panic"), 200);
        }
    });
    // A delete does not wait for the agent, and the id is free at once.
    let _stopped = StoppedAgent::stop(&hanging);
    let (status, took) = ask(&server, "DELETE", "/api/sandboxes/hanging", &[]);
    assert_eq!(status, 200);
    assert!(took < DELETE_TIMEOUT * e2e::slowness_factor(), "the delete took {took:?}");
    let next = AioSandbox::create(&server, "hanging");
    assert_ne!(next.container, hanging.container);
}
