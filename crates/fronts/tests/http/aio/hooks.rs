//! Shutdown hooks. The agents of these tests have no jail, so what hooks write is found on the host.

use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use testkit::test_server::TestServer;

use super::{AioSandbox, provision};
use crate::setup::start_with_keys_and_agents;

async fn register(sandbox: &AioSandbox<'_>, name: &str, priority: i64, command: String) -> Value {
    let body = json!({"name": name, "priority": priority, "command": command, "timeout": 5});
    sandbox.post("/v1/sandbox/hooks", body).await.expect(200)
}

async fn remove_sandbox(server: &TestServer, id: &str) {
    provision(server, "DELETE", &format!("/api/sandboxes/{id}")).send().await.expect(200);
}

fn lines_of(path: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.lines().map(str::to_owned).collect()
}

#[tokio::test]
async fn hooks_run_by_priority_and_equal_ones_together() {
    let server = start_with_keys_and_agents(|_| {}).await;
    let sandbox = AioSandbox::create(&server, "one").await;
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).display().to_string();
    let log = path("log");
    register(&sandbox, "last", 300, format!("echo last >> {log}")).await;
    // Each of the two ends only when the other has begun.
    for (own, other) in [("left", "right"), ("right", "left")] {
        let command = format!(
            "touch {}; while [ ! -e {} ]; do sleep 0.05; done; echo middle >> {log}",
            path(own),
            path(other)
        );
        register(&sandbox, own, 200, command).await;
    }
    register(&sandbox, "first", -1, format!("echo first >> {log}; exit 7")).await;
    assert!(!Path::new(&log).exists());
    remove_sandbox(&server, "one").await;
    assert_eq!(lines_of(Path::new(&log)), ["first", "middle", "middle", "last"]);
}

#[tokio::test]
async fn hook_that_hangs_does_not_prevent_the_removal() {
    let server = start_with_keys_and_agents(|_| {}).await;
    let sandbox = AioSandbox::create(&server, "one").await;
    let directory = tempfile::tempdir().unwrap();
    let log = directory.path().join("log");
    let hanging = json!({"name": "hangs", "command": "sleep 60", "timeout": 0.5, "priority": 1});
    sandbox.post("/v1/sandbox/hooks", hanging).await.expect(200);
    register(&sandbox, "next", 2, format!("echo next >> {}", log.display())).await;
    let began = Instant::now();
    remove_sandbox(&server, "one").await;
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    assert_eq!(lines_of(&log), ["next"]);
    assert!(sandbox.get("/v1/sandbox/hooks").await.status == 404);
}

#[tokio::test]
async fn hooks_are_listed_replaced_and_removed() {
    let server = start_with_keys_and_agents(|_| {}).await;
    let sandbox = AioSandbox::create(&server, "one").await;
    let directory = tempfile::tempdir().unwrap();
    let log = directory.path().join("log");
    let registered = register(&sandbox, "kept", 1, "true".to_owned()).await;
    assert_eq!(registered["data"]["source"], "api", "{registered}");
    register(&sandbox, "gone", 1, format!("echo gone >> {}", log.display())).await;
    let replaced = register(&sandbox, "kept", 2, format!("echo kept >> {}", log.display())).await;
    let listed = sandbox.get("/v1/sandbox/hooks").await.expect(200);
    assert_eq!(listed["data"].as_array().unwrap().len(), 2);
    assert_eq!(listed["data"][0], replaced["data"]);
    let other = sandbox.get("/v1/sandbox/hooks?event=start").await.expect(200);
    assert_eq!(other["data"], json!([]));
    sandbox.request("DELETE", "/v1/sandbox/hooks/gone").send().await.expect(200);
    let again = sandbox.request("DELETE", "/v1/sandbox/hooks/gone").send().await;
    assert_eq!(again.expect(404)["message"], "Hook not found");
    let wrong = json!({"name": "x", "command": "true", "timeout": 11});
    let refused = sandbox.post("/v1/sandbox/hooks", wrong).await.expect(422);
    assert_eq!(refused["detail"][0]["loc"], json!(["body", "timeout"]));
    remove_sandbox(&server, "one").await;
    assert_eq!(lines_of(&log), ["kept"]);
}
