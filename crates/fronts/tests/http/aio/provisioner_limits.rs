//! A backend that is slow, a server that is full, and sandboxes whose time is over.

use std::time::Duration;

use domain::SandboxId;
use serde_json::{Value, json};
use testkit::fake_backend::FakeBackend;
use testkit::test_client::TestResponse;
use testkit::test_server::TestServer;
use testkit::unjailed_agent::example_program;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::{AioSandbox, path_of_url, provision};
use crate::setup::{OPERATOR_KEY, start_with, start_with_keys_and_agents};

/// How long a response may take that waits for nothing.
const PROMPT: Duration = Duration::from_secs(5);

async fn ask(server: &TestServer, method: &str, path: &str) -> TestResponse {
    timeout(PROMPT, provision(server, method, path).send()).await.expect("the response does not wait")
}

async fn create(server: &TestServer, id: &str) -> TestResponse {
    let request = provision(server, "POST", "/api/sandboxes").json(&json!({"sandbox_id": id}));
    timeout(PROMPT, request.send()).await.expect("the response does not wait")
}

/// Asserts that routes which do not wait for the backend answer while it is slow.
async fn expect_prompt_routes(server: &TestServer, living: &AioSandbox<'_>) {
    assert_eq!(create(server, "living").await.expect(200)["status"], "Running");
    ask(server, "GET", "/api/sandboxes/living").await.expect(200);
    ask(server, "GET", "/api/sandboxes/living/presence").await.expect(200);
    ask(server, "GET", "/api/sandboxes/unknown").await.expect(404);
    ask(server, "GET", "/api/sandboxes").await.expect(200);
    ask(server, "GET", "/api/capabilities").await.expect(200);
    ask(server, "DELETE", "/api/sandboxes/unknown").await.expect(200);
    let ran = timeout(PROMPT, living.exec_text("echo on")).await.expect("the response does not wait");
    assert_eq!(ran, "on");
}

/// Sends a request without waiting for its response.
fn send(server: &TestServer, method: &str, path: &str, body: &Value) -> JoinHandle<TestResponse> {
    tokio::spawn(provision(server, method, path).json(body).send())
}

#[tokio::test]
async fn n120_slow_creates_and_removals_block_no_other_route() {
    let server = start_with_keys_and_agents(|_| {}).await;
    let living = AioSandbox::create(&server, "living").await;
    create(&server, "leaving").await.expect(200);
    let creates = server.backend.times_asked_to("create asked");

    server.backend.gate.forget_permits(usize::MAX);
    let created = send(&server, "POST", "/api/sandboxes", &json!({"sandbox_id": "new"}));
    while server.backend.times_asked_to("create asked") == creates {
        tokio::task::yield_now().await;
    }
    expect_prompt_routes(&server, &living).await;

    server.backend.destroy_gate.forget_permits(usize::MAX);
    let deleted = send(&server, "DELETE", "/api/sandboxes/leaving", &Value::Null);
    while ask(&server, "GET", "/api/sandboxes/leaving").await.status == 200 {
        tokio::task::yield_now().await;
    }
    expect_prompt_routes(&server, &living).await;
    assert!(!created.is_finished() && !deleted.is_finished());

    server.backend.gate.add_permits(1);
    assert_eq!(created.await.unwrap().expect(200)["status"], "Running");
    server.backend.destroy_gate.add_permits(1);
    deleted.await.unwrap().expect(200);
    assert_eq!(server.backend.times_asked_to("create asked"), creates + 1, "nothing was created twice");
}

#[tokio::test]
async fn full_server_answers_503_with_retry_after_and_detail() {
    let backend = FakeBackend::with_agents(example_program("bare-agent"));
    let server = start_with(backend, |config| config.sandboxes = 1, |_| {}).await;
    server.service.set_operator_key(Some(OPERATOR_KEY));
    create(&server, "first").await.expect(200);
    let full = create(&server, "second").await;
    let body = full.expect(503);
    assert!(body["detail"].as_str().unwrap().contains("limit"), "{body}");
    let seconds: u64 = full.header("retry-after").expect("a time").parse().expect("seconds");
    assert!(seconds > 0);
    assert_eq!(full.header("x-deerflow-capability-refresh"), None);
    create(&server, "first").await.expect(200);
    ask(&server, "DELETE", "/api/sandboxes/first").await.expect(200);
    create(&server, "second").await.expect(200);
}

#[tokio::test]
async fn too_many_commands_are_429_with_retry_after() {
    let backend = FakeBackend::with_agents(example_program("bare-agent"));
    let server = start_with(backend, |config| config.commands_per_sandbox = 2, |_| {}).await;
    server.service.set_operator_key(Some(OPERATOR_KEY));
    let sandbox = AioSandbox::create(&server, "one").await;
    for id in ["a", "b"] {
        sandbox.create_session(id).await;
        sandbox.exec(json!({"command": "read line", "id": id, "async_mode": true})).await;
    }
    for (path, body) in [
        ("/v1/bash/exec", json!({"command": "touch started"})),
        ("/v1/bash/exec", json!({"command": "touch started", "async_mode": true})),
        ("/v1/bash/exec", json!({"command": "touch started", "timeout": 1})),
        ("/v1/shell/exec", json!({"command": "touch started", "id": "a"})),
        ("/v1/shell/exec", json!({"command": "touch started", "id": "a", "async_mode": true})),
    ] {
        let refused = sandbox.post(path, body.clone()).await;
        let envelope = refused.expect(429);
        assert_eq!((&envelope["success"], &envelope["data"]), (&json!(false), &Value::Null), "{body}");
        assert!(!envelope["message"].as_str().unwrap().is_empty());
        let seconds: u64 = refused.header("retry-after").expect("a time").parse().expect("seconds");
        assert!(seconds > 0, "{body}");
    }
    sandbox.shell("kill", json!({"id": "b"})).await;
    let body = json!({"command": "ls"});
    let after = loop {
        // The killed command counts until it has ended.
        let response = sandbox.post("/v1/bash/exec", body.clone()).await;
        if response.status != 429 {
            break response.expect(200);
        }
        tokio::task::yield_now().await;
    };
    assert_eq!(after["data"]["stdout"], Value::Null, "nothing was started: {after}");
}

#[tokio::test]
async fn expired_sandbox_is_never_revived_by_its_address() {
    let settings = json!({"idle_timeout": 300});
    let change = |http: &mut fronts::HttpSettings| {
        http.fronts.insert("deerflow".to_owned(), settings.as_object().unwrap().clone());
    };
    let server = start_with_keys_and_agents(change).await;
    let made = create(&server, "idle").await.expect(200);
    let path = path_of_url(made["sandbox_url"].as_str().unwrap());
    let id = SandboxId::parse(made["container_id"].as_str().unwrap()).unwrap();
    let expired = async {
        while server.backend.condition(&id).is_some() {
            tokio::task::yield_now().await;
        }
    };
    timeout(Duration::from_secs(60), expired).await.expect("its time is over");
    for _ in 0..2 {
        let refused = server.get(&format!("{path}/v1/sandbox")).await.expect(404);
        assert_eq!((&refused["success"], &refused["message"]), (&json!(false), &json!("Not Found")));
    }
    ask(&server, "GET", "/api/sandboxes/idle").await.expect(404);
    assert_eq!(server.backend.times_asked_to("create"), 1);
    // A new sandbox under the id has another address.
    let again = create(&server, "idle").await.expect(200);
    assert_ne!(again["sandbox_url"], made["sandbox_url"]);
    server.get(&format!("{path}/v1/sandbox")).await.expect(404);
}
