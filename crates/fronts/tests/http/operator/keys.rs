//! API keys of owners.

use serde_json::json;

use crate::setup::{OPERATOR_KEY, expect_error, issue_key, start, start_with_keys, with_key};

const KEYS: &str = "/coracle/v1/keys";

#[tokio::test]
async fn issued_key_is_shown_once_and_works_until_it_is_revoked() {
    let server = start_with_keys(|_| {}).await;
    let operator = |method: &str, path: &str| with_key(&server, OPERATOR_KEY, method, path);
    let issued = operator("POST", KEYS).json(&json!({"owner": "one", "expiresInSeconds": 3600})).send().await;
    let issued = issued.expect(201);
    let (id, key) = (issued["id"].as_str().unwrap(), issued["key"].as_str().unwrap());
    assert!(issued["expiresAt"].is_string(), "{issued}");
    let listed = operator("GET", KEYS).send().await.expect(200);
    assert_eq!(listed["items"][0]["owner"], "one");
    assert!(!listed.to_string().contains(key), "{listed}");
    let own = async || with_key(&server, key, "GET", "/coracle/v1/sandboxes").send().await.status;
    assert_eq!(own().await, 200);
    assert_eq!(operator("DELETE", &format!("{KEYS}/{id}")).send().await.status, 204);
    assert_eq!(own().await, 401);
    let again = operator("DELETE", &format!("{KEYS}/{id}")).send().await;
    expect_error(&again, 404, "KEY_NOT_FOUND");
}

#[tokio::test]
async fn owners_do_not_manage_keys_or_read_metrics() {
    let server = start_with_keys(|_| {}).await;
    let (id, key) = issue_key(&server, "one").await;
    let revoke = format!("{KEYS}/{id}");
    for (method, path) in [("GET", KEYS), ("POST", KEYS), ("DELETE", &revoke), ("GET", "/metrics")] {
        let answer = with_key(&server, &key, method, path).json(&json!({"owner": "default"})).send().await;
        assert_eq!(answer.status, 403, "{method} {path}: {}", answer.text());
    }
}

#[tokio::test]
async fn malformed_key_requests_are_refused() {
    let server = start_with_keys(|_| {}).await;
    for body in ["", "{", "{}", "{\"owner\": \"no owner\"}", "{\"owner\": \"one\", \"more\": 1}"] {
        let answer = with_key(&server, OPERATOR_KEY, "POST", KEYS).body(body).send().await;
        expect_error(&answer, 400, "INVALID_KEY_REQUEST");
    }
}

#[tokio::test]
async fn server_without_a_key_issues_none() {
    // Otherwise no client could manage it any more.
    let answer = start().await.post(KEYS, json!({"owner": "one"})).await;
    expect_error(&answer, 409, "NO_OPERATOR_KEY");
}
