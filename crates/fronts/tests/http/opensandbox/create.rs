//! What a create accepts and refuses, and what a repeated one returns.

use std::collections::BTreeSet;

use serde_json::{Value, json};
use testkit::fake_backend::FakeBackend;
use testkit::test_client::TestResponse;
use testkit::test_server::TestServer;

use super::{create, create_body, id_of, path_of};
use crate::setup::{expect_error, start, start_with};

/// Creates a sandbox with some fields changed.
async fn create_with(server: &TestServer, changes: Value) -> TestResponse {
    let mut body = create_body();
    for (name, value) in changes.as_object().unwrap() {
        body[name] = value.clone();
    }
    server.post("/v1/sandboxes", body).await
}

async fn create_with_key(server: &TestServer, key: &str) -> TestResponse {
    server.request("POST", "/v1/sandboxes").header("idempotency-key", key).json(&create_body()).send().await
}

#[tokio::test]
async fn retry_returns_the_first_sandbox() {
    let server = start().await;
    let first = create_with_key(&server, "order 66").await;
    let again = create_with_key(&server, "order 66").await;
    assert_eq!(id_of(&first), id_of(&again));
    assert_eq!((first.header("coracle-existing"), again.header("coracle-existing")), (None, Some("true")));
    assert_ne!(id_of(&create_with_key(&server, "order 67").await), id_of(&first));
    // A name and a retry key are different things, even with the same text.
    let named = create_with(&server, json!({"extensions": {"coracle.key": "order 66"}})).await;
    assert_ne!(id_of(&named), id_of(&first));
}

#[tokio::test]
async fn a_storm_of_retries_makes_one_sandbox() {
    let server = start().await;
    let storm = futures_util::future::join_all((0..30).map(|_| create_with_key(&server, "order 66")));
    let ids: BTreeSet<String> = storm.await.iter().map(id_of).collect();
    assert_eq!((ids.len(), server.backend.times_asked_to("create")), (1, 1), "{ids:?}");
}

#[tokio::test]
async fn invalid_retry_keys_are_refused() {
    let server = start().await;
    for key in ["", &"x".repeat(300)] {
        expect_error(&create_with_key(&server, key).await, 400, "SANDBOX::INVALID_PARAMETER");
    }
    let mut body = create_body();
    body["extensions"] = json!({"coracle.key": "mine"});
    let both =
        server.request("POST", "/v1/sandboxes").header("idempotency-key", "1").json(&body).send().await;
    expect_error(&both, 400, "SANDBOX::INVALID_PARAMETER");
    let long = create_with(&server, json!({"extensions": {"coracle.key": "x".repeat(300)}})).await;
    expect_error(&long, 400, "SANDBOX::INVALID_PARAMETER");
    assert_eq!(server.backend.count(), 0);
}

#[tokio::test]
async fn too_many_sandboxes_are_a_429_until_one_is_deleted() {
    let server = start_with(FakeBackend::new(), |config| config.sandboxes = 2, |_| {}).await;
    let first = create(&server).await;
    create(&server).await;
    let refused = server.post("/v1/sandboxes", create_body()).await;
    expect_error(&refused, 429, "KUBERNETES::POOL_CAPACITY_EXHAUSTED");
    let seconds: u64 = refused.header("retry-after").unwrap().parse().unwrap();
    assert!((1..=3600).contains(&seconds), "{seconds}");
    assert_eq!(server.delete(&path_of(&first)).await.status, 204);
    create(&server).await;
}

#[tokio::test]
async fn failed_create_leaves_nothing_and_says_which_step_failed() {
    let server = start().await;
    server.backend.fail("create", 1);
    let failed = server.post("/v1/sandboxes", create_body()).await;
    expect_error(&failed, 500, "DOCKER::SANDBOX_START_FAILED");
    assert!(failed.text().contains("the test requested this failure"), "{}", failed.text());
    server.backend.until_empty().await;
    assert_eq!(server.get("/v1/sandboxes").await.expect(200)["items"], json!([]));
}

#[tokio::test]
async fn invalid_hooks_are_refused() {
    let server = start().await;
    let periodic = |change: Value| {
        let mut hook = json!({"name": "a", "schedule": "@every 1s", "command": ["true"]});
        for (name, value) in change.as_object().unwrap() {
            hook[name] = value.clone();
        }
        hook
    };
    let plain = periodic(json!({}));
    for hooks in [
        json!({"postStop": {"command": ["true"]}}),
        json!({"preStart": {"command": ["true"], "timeoutSeconds": 10801}}),
        json!({"preStart": {"command": []}}),
        json!({"periodic": [plain, plain]}),
        json!({"periodic": [periodic(json!({"schedule": "* * *"}))]}),
        json!({"periodic": [periodic(json!({"timeoutSeconds": 301}))]}),
        json!({"periodic": [periodic(json!({"shell": true}))]}),
    ] {
        let answer = create_with(&server, json!({"lifecycle": hooks})).await;
        assert_eq!(answer.status, 400, "{hooks}: {}", answer.text());
    }
    assert_eq!(server.backend.count(), 0);
}
