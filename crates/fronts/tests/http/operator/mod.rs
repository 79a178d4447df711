//! The operator API.

mod events;
mod fairness;
mod keys;
mod network;
mod sandboxes;

use crate::setup::{OPERATOR_KEY, expect_error, start, start_with_keys, with_key};

#[tokio::test]
async fn health_and_version_need_no_key() {
    let server = start_with_keys(|_| {}).await;
    assert_eq!(server.get("/health").await.expect(200)["status"], "healthy");
    assert!(server.get("/version").await.expect(200)["version"].is_string());
}

#[tokio::test]
async fn all_else_needs_a_valid_key() {
    let server = start_with_keys(|_| {}).await;
    for path in ["/metrics", "/coracle/v1/sandboxes", "/coracle/v1/keys", "/coracle/v1/events"] {
        let missing = server.get(path).await;
        assert_eq!(missing.status, 401, "{path}: {}", missing.text());
        let wrong = with_key(&server, "another-key", "GET", path).send().await;
        assert_eq!(wrong.status, 401, "{path}: {}", wrong.text());
    }
    let bearer = format!("Bearer {OPERATOR_KEY}");
    let listed = server.request("GET", "/coracle/v1/keys").header("authorization", &bearer).send().await;
    assert_eq!(listed.status, 200, "{}", listed.text());
}

#[tokio::test]
async fn unknown_paths_and_methods_are_refused() {
    let server = start().await;
    expect_error(&server.get("/coracle/v1/nothing").await, 404, "NOT_FOUND");
    expect_error(&server.get("/coracle").await, 404, "NOT_FOUND");
    expect_error(&server.delete("/health").await, 405, "METHOD_NOT_ALLOWED");
    expect_error(&server.delete("/coracle/v1/sandboxes").await, 405, "METHOD_NOT_ALLOWED");
}

#[tokio::test]
async fn metrics_that_are_not_measured_are_not_implemented() {
    expect_error(&start().await.get("/metrics").await, 501, "NOT_MEASURED");
}

#[tokio::test]
async fn capabilities_are_those_of_the_backend() {
    let offered = start().await.get("/coracle/v1/capabilities").await.expect(200);
    assert!(offered["limits"].is_array(), "{offered}");
}
