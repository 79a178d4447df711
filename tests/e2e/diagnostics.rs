//! Diagnostics for a sandbox that misbehaves.

use e2e::sandbox::RemoteSandbox;
use e2e::server::TestServer;
use serde_json::json;

fn show(server: &TestServer, sandbox: &RemoteSandbox, what: &str) -> e2e::http::HttpResponse {
    let path = format!("/v1/sandboxes/{}/diagnostics/{what}", sandbox.id);
    server.client().get(&path).expect("the server answers")
}

#[test]
fn long_main_process_output_is_shown_from_its_end() {
    let server = TestServer::start();
    // More than is read, and more than is kept.
    let loud = "yes 0123456789abcdef | head -c 40000000; echo the end; exec sleep 1000";
    let sandbox = server.create_sandbox_with(&json!({"entrypoint": ["sh", "-c", loud]}));
    let logs = || show(&server, &sandbox, "logs?scope=container").json();
    e2e::eventually("it has printed all", || {
        logs()["content"].as_str().is_some_and(|content| content.ends_with("the end\n"))
    });
    let reported = logs();
    assert_eq!((&reported["truncated"], &reported["warnings"]), (&json!(true), &json!([])));
    assert_eq!(reported["content"].as_str().expect("a text").lines().count(), 100);
    let most = show(&server, &sandbox, "logs?tail=10000").text();
    assert_eq!(most.lines().count(), 10_000);
    assert!(most.lines().take(9_999).all(|line| line.ends_with("Z 0123456789abcdef")), "a line is cut");
}

#[test]
fn diagnostics_do_not_count_as_use_of_a_sandbox() {
    let server = TestServer::start();
    let idle = json!({
        "entrypoint": ["sh", "-c", "echo here; exec sleep 1000"],
        "extensions": {"coracle.idle-timeout": "5"},
    });
    let mut sandbox = server.create_sandbox_with(&idle);
    // Diagnostics requests do not keep an idle sandbox from being removed.
    e2e::eventually("it is removed", || {
        let answer = show(&server, &sandbox, "summary");
        assert!(matches!(answer.status, 200 | 404), "{}", answer.text());
        sandbox.state().is_none()
    });
}
