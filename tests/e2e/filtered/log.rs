//! What is recorded of connections: the log of a sandbox and the counters of a server.

use e2e::binary::ProgramCopies;
use e2e::probe::{http, http_at, probe, tls};
use e2e::run::{CommandOutput, TestUser};
use e2e::server::TestServer;
use e2e::test_network::TestNetwork;
use e2e::test_network::hosts::{OTHER, WEB};
use serde_json::Value;

use super::{create_filtered, start_server};

/// `coracle net log` of a sandbox.
fn net_log(server: &TestServer, id: &str, flags: &[&str]) -> CommandOutput {
    let mut command = ProgramCopies::shared().command();
    command.args(["--url", &format!("http://{}", server.address())]).args(["net", "log", id]).args(flags);
    command.output().expect("the binary runs").into()
}

/// The records of a log that the program prints as JSON, one a line.
fn json_log(server: &TestServer, id: &str) -> Vec<Value> {
    let mut command = ProgramCopies::shared().command();
    command.args(["--json", "--url", &format!("http://{}", server.address()), "net", "log", id]);
    let output = CommandOutput::from(command.output().expect("the binary runs"));
    assert_eq!(output.code, Some(0), "{output:?}");
    match serde_json::from_str(&output.stdout) {
        Ok(Value::Array(records)) => records,
        _ => output.stdout.lines().filter_map(|line| serde_json::from_str(line).ok()).collect(),
    }
}

#[test]
fn connections_and_denied_queries_are_logged_with_their_rules() {
    if !testkit::needs_root() {
        return;
    }
    let _world = TestNetwork::create();
    let server = start_server(TestUser::Same);
    let mut sandbox = create_filtered(&server, &["web.example", "*.packages.example:443"]);
    probe(
        &mut sandbox,
        &[
            tls("web.example"),
            http("other.example"),
            http_at(OTHER.v4, "other.example"),
            http_at(WEB.v4, "shared.example"),
            tls("a.packages.example"),
        ],
    );
    let shown = net_log(&server, &sandbox.id, &[]);
    assert_eq!(shown.code, Some(0), "{shown:?}");
    let denied = net_log(&server, &sandbox.id, &["--denied"]);
    assert_eq!(denied.code, Some(0), "{denied:?}");
    for word in ["web.example", "*.packages.example:443", WEB.v4, "other.example", OTHER.v4, "shared.example"]
    {
        assert!(shown.stdout.contains(word), "{word}: {shown:?}");
    }
    assert!(
        denied.stdout.contains("other.example") && denied.stdout.contains("shared.example"),
        "{denied:?}"
    );
    assert!(!denied.stdout.contains("packages"), "{denied:?}");
    let records = json_log(&server, &sandbox.id);
    let of = |name: &str| -> Vec<&Value> { records.iter().filter(|one| one["name"] == name).collect() };
    assert!(of("web.example").iter().all(|one| one["verdict"] == "allow"), "{records:?}");
    assert!(of("web.example").iter().any(|one| one["reason"] == "web.example"), "{records:?}");
    assert!(of("other.example").len() >= 2, "a query and a connection: {records:?}");
    assert!(of("other.example").iter().all(|one| one["verdict"] == "deny"), "{records:?}");
    // The operator's route has the same.
    let path = format!("/coracle/v1/sandboxes/{}/network", sandbox.id);
    let answer = server.client().get(&path).expect("the server answers");
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert!(
        answer.text().contains("other.example") && answer.text().contains("web.example"),
        "{}",
        answer.text()
    );
    let unknown = server.client().get("/coracle/v1/sandboxes/no-such/network").expect("the server answers");
    assert_eq!(unknown.status, 404, "{}", unknown.text());
    sandbox.delete();
}

#[test]
fn a_log_follows_what_happens_and_bytes_are_counted() {
    if !testkit::needs_root() {
        return;
    }
    let _world = TestNetwork::create();
    let server = start_server(TestUser::Same);
    let mut sandbox = create_filtered(&server, &["web.example"]);
    let mut command = ProgramCopies::shared().command();
    command.args(["--url", &format!("http://{}", server.address()), "net", "log", "-f", &sandbox.id]);
    command.stdout(std::process::Stdio::piped());
    let mut follower = command.spawn().expect("the binary runs");
    let lines = std::io::BufReader::new(follower.stdout.take().expect("it is a pipe"));
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        for line in std::io::BufRead::lines(lines).map_while(Result::ok) {
            sender.send(line).ok();
        }
    });
    let size = 200_000;
    let fetch = e2e::probe::with(http("web.example"), serde_json::json!({"path": format!("/bytes/{size}")}));
    probe(&mut sandbox, &[fetch, http("other.example")]);
    let mut seen = String::new();
    e2e::eventually("the follower sees both", || {
        seen.extend(receiver.try_iter().map(|line| line + "\n"));
        seen.contains("web.example") && seen.contains("other.example")
    });
    follower.kill().expect("it is our child");
    follower.wait().expect("it is our child");
    let metrics = server.client().get("/metrics").expect("the server answers").text();
    let network: Vec<&str> =
        metrics.lines().filter(|line| line.contains("network") || line.contains("egress")).collect();
    assert!(!network.is_empty(), "no counter of connections: {metrics}");
    e2e::eventually("the end of the connection is recorded with its bytes", || {
        json_log(&server, &sandbox.id).iter().any(|one| {
            let received = ["bytesReceived", "bytes_received"].iter().find_map(|name| one[name].as_u64());
            received.is_some_and(|bytes| bytes > size)
        })
    });
    sandbox.delete();
}
