//! Observing sandboxes: their events, enforced limits and usage.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use e2e::binary::ProgramCopies;
use e2e::server::{ServerBuilder, TestServer};
use serde_json::Value;

fn coracle(server: &TestServer, words: &[&str]) -> Command {
    let mut command = ProgramCopies::shared().command();
    command.args(["--json", "--url", &format!("http://{}", server.address())]).args(words);
    command
}

fn json(server: &TestServer, words: &[&str]) -> Value {
    let output = coracle(server, words).output().expect("the binary runs");
    assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("it is JSON")
}

#[test]
fn events_are_followed_and_found_again_after_a_crash() {
    let mut server = TestServer::start();
    let mut following =
        coracle(&server, &["events", "-f"]).stdout(Stdio::piped()).spawn().expect("the binary runs");
    let mut lines = BufReader::new(following.stdout.take().expect("it is a pipe")).lines();
    let mut next = || -> Value {
        let line = lines.next().expect("the stream continues").expect("it is text");
        serde_json::from_str(&line).expect("it is JSON")
    };
    let mut sandbox = server.create_sandbox();
    let (starting, running) = (next(), next());
    assert_eq!((starting["phase"].as_str(), running["phase"].as_str()), (Some("starting"), Some("running")));
    assert_eq!(running["sandbox"].as_str(), Some(sandbox.id.as_str()));
    sandbox.delete();
    let (stopping, stopped) = (next(), next());
    assert_eq!((stopping["phase"].as_str(), stopped["phase"].as_str()), (Some("stopping"), Some("stopped")));
    assert_eq!(stopped["cause"].as_str(), Some("destroyed"));
    // A separate task stores the events, so it may take a moment until a crash cannot lose them.
    let database = server.state_directory().join("server/coracle.db-wal");
    e2e::eventually("the events are kept", || {
        std::fs::read(&database).is_ok_and(|log| log.windows(9).any(|part| part == b"destroyed"))
    });
    server.kill();
    following.wait().expect("it is our child");
    server.restart(&ServerBuilder::new());
    let after = running["id"].to_string();
    let output = coracle(&server, &["events", "--after", &after]).output().expect("the binary runs");
    let reported = String::from_utf8_lossy(&output.stdout);
    let phases: Vec<Value> =
        reported.lines().map(|line| serde_json::from_str(line).expect("it is JSON")).collect();
    assert_eq!(phases, [stopping, stopped]);
}

#[test]
fn sandbox_can_be_inspected() {
    let server = TestServer::start();
    let sandbox = server.create_sandbox();
    let report = json(&server, &["inspect", &sandbox.id]);
    assert_eq!((report["phase"].as_str(), report["image"]["used"].as_str()), (Some("running"), Some("host")));
    assert!(report["inForce"]["filter"].is_string(), "{report}");
    let seen = json(&server, &["top", "--once", "--every", "200ms"]);
    assert_eq!(seen[0]["id"].as_str(), Some(sandbox.id.as_str()), "{seen}");
    let unknown = coracle(&server, &["inspect", "aaaaaaaaaaaaaaaaaaaa"]).output().expect("the binary runs");
    assert!(!unknown.status.success());
}

#[test]
fn recent_errors_are_recorded() {
    let server = TestServer::start();
    let request = serde_json::json!({
        "image": {"uri": "host"}, "resourceLimits": {}, "entrypoint": ["/no/such/program"],
    });
    let refused = server.client().post("/v1/sandboxes", &request).expect("the server answers");
    assert_eq!(refused.status, 400, "{}", refused.text());
    let errors = server.client().get("/coracle/v1/errors").expect("the server answers").json();
    assert_eq!(errors["items"][0]["operation"].as_str(), Some("create"), "{errors}");
    let offered = server.client().get("/coracle/v1/capabilities").expect("the server answers").json();
    assert!(offered["limits"].is_array(), "{offered}");
}
