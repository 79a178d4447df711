//! Network policies: at a create, on the egress port and through the lifecycle API.

use std::sync::atomic::Ordering;

use domain::{NetworkAccess, NetworkPolicy, SandboxId};
use serde_json::{Value, json};
use testkit::fake_backend::FakeBackend;
use testkit::test_client::TestResponse;
use testkit::test_server::TestServer;

use super::{create, create_body, id_of, path_of};
use crate::setup::{UNKNOWN_ID, expect_error, issue_key, start, start_with, start_with_keys, with_key};

async fn create_with(server: &TestServer, changes: Value) -> TestResponse {
    let mut body = create_body();
    for (name, value) in changes.as_object().unwrap() {
        body[name] = value.clone();
    }
    server.post("/v1/sandboxes", body).await
}

fn rule(action: &str, target: &str) -> Value {
    json!({"action": action, "target": target})
}

fn egress(id: &str) -> String {
    format!("{}/proxy/18080/policy", path_of(id))
}

fn lifecycle(id: &str) -> String {
    format!("{}/networkpolicy", path_of(id))
}

async fn send(server: &TestServer, method: &str, path: &str, body: impl Into<String>) -> TestResponse {
    server.request(method, path).body(body.into()).send().await
}

/// The policy that the backend has for a sandbox.
fn in_backend(server: &TestServer, id: &str) -> Option<NetworkPolicy> {
    server.backend.policy(&SandboxId::parse(id).unwrap()).map(|policy| (*policy).clone())
}

fn network_of(server: &TestServer, id: &str) -> NetworkAccess {
    let found = server.service.sandbox_of(None, &SandboxId::parse(id).unwrap()).unwrap();
    found.current_state().spec.network
}

/// The error of the egress API, which is plain text.
#[track_caller]
fn expect_text(response: &TestResponse, status: u16, part: &str) {
    assert_eq!(response.status, status, "{}", response.text());
    assert!(response.header("content-type").is_some_and(|kind| kind.starts_with("text/plain")));
    assert!(response.text().contains(part), "{}", response.text());
}

#[tokio::test]
async fn policy_of_a_create_is_read_and_changed_on_both_routes() {
    let server = start().await;
    let policy = json!({"defaultAction": "deny", "egress": [rule("allow", "a.example.org")]});
    let id = id_of(&create_with(&server, json!({ "networkPolicy": policy })).await);
    for path in [egress(&id), lifecycle(&id)] {
        let read = server.get(&path).await.expect(200);
        assert_eq!(
            read,
            json!({"status": "ok", "mode": "enforcing", "enforcementMode": "dns+nft", "policy": policy})
        );
        // What an SDK does: the names change places.
        let patch = json!([rule("allow", "b.example.org"), rule("deny", "A.Example.org.")]);
        let patched = send(&server, "PATCH", &path, patch.to_string()).await.expect(200);
        let rules = json!([rule("allow", "b.example.org"), rule("deny", "a.example.org")]);
        assert_eq!(patched["policy"], json!({"defaultAction": "deny", "egress": rules}));
        assert_eq!(server.get(&path).await.expect(200)["policy"]["egress"], rules);
        let removed = send(&server, "DELETE", &path, r#"["b.example.org"]"#).await.expect(200);
        assert_eq!(removed["policy"]["egress"], json!([rule("deny", "a.example.org")]));
        let again = send(&server, "DELETE", &path, r#"["b.example.org", "?"]"#).await.expect(200);
        assert_eq!(again["reason"], "no matching targets found");
        let replaced = send(&server, "PUT", &path, policy.to_string()).await.expect(200);
        assert_eq!((&replaced["policy"], &replaced["mode"]), (&policy, &json!("enforcing")));
        assert_eq!(in_backend(&server, &id).unwrap().rules().len(), 1);
    }
    let reset = send(&server, "POST", &egress(&id), " \n").await.expect(200);
    assert_eq!(
        (&reset["mode"], &reset["reason"]),
        (&json!("deny_all"), &json!("policy reset to default deny-all"))
    );
    assert_eq!(in_backend(&server, &id), Some(NetworkPolicy::deny_all()));
    assert_eq!(server.backend.count(), 1, "the sandbox stays up");
}

#[tokio::test]
async fn policy_without_rules_can_be_changed_later() {
    let server = start().await;
    let denied = id_of(&create_with(&server, json!({"networkPolicy": {"defaultAction": "deny"}})).await);
    assert_eq!(network_of(&server, &denied), NetworkAccess::Filtered);
    assert_eq!(server.get(&egress(&denied)).await.expect(200)["mode"], "deny_all");
    let open = json!({"networkPolicy": {"defaultAction": "allow"}, "extensions": {"coracle.network": "on"}});
    let open = id_of(&create_with(&server, open).await);
    assert_eq!(network_of(&server, &open), NetworkAccess::On);
    assert_eq!(server.get(&egress(&open)).await.expect(200)["mode"], "allow_all");
    let patch = json!([rule("deny", "bad.example.org")]).to_string();
    let patched = send(&server, "PATCH", &egress(&open), patch).await.expect(200);
    assert_eq!(
        patched["policy"],
        json!({"defaultAction": "allow", "egress": [rule("deny", "bad.example.org")]})
    );
    assert_eq!(network_of(&server, &open), NetworkAccess::Filtered);
    let extension = json!({"extensions": {"coracle.network": "filtered"}});
    let named = id_of(&create_with(&server, extension).await);
    assert_eq!(in_backend(&server, &named), Some(NetworkPolicy::deny_all()));
}

#[tokio::test]
async fn invalid_changes_are_refused_whole() {
    let server = start().await;
    let id = create(&server).await;
    let path = egress(&id);
    let many = Value::from(vec![rule("allow", "a.org"); 4097]);
    let long = format!(r#"{{"egress": [], "padding": "{}"}}"#, "x".repeat(1 << 20));
    for (method, body, status, part) in [
        ("PUT", "{".to_owned(), 400, "invalid request body"),
        ("PUT", "[]".to_owned(), 400, "invalid request body"),
        ("PUT", json!({"defaultAction": "drop"}).to_string(), 400, "defaultAction"),
        (
            "PUT",
            json!({"egress": [rule("allow", "a.org"), rule("allow", "a.*.org")]}).to_string(),
            400,
            "rule 2",
        ),
        ("PUT", json!({ "egress": many }).to_string(), 413, "at most 4096 rules"),
        ("PUT", long, 413, "exceeds 1048576 bytes"),
        ("PATCH", String::new(), 400, "invalid request body"),
        ("PATCH", "[]".to_owned(), 400, "at least one rule"),
        ("PATCH", json!({"egress": [rule("allow", "a.org")]}).to_string(), 400, "invalid request body"),
        ("PATCH", json!([{"action": "allow"}]).to_string(), 400, "target"),
        ("DELETE", String::new(), 400, "invalid request body"),
        ("DELETE", "[]".to_owned(), 400, "at least one target"),
        ("OPTIONS", String::new(), 405, "method not allowed"),
    ] {
        let refused = send(&server, method, &path, body).await;
        expect_text(&refused, status, part);
    }
    expect_error(&send(&server, "PUT", &lifecycle(&id), "{").await, 400, "SANDBOX::INVALID_PARAMETER");
    assert_eq!(network_of(&server, &id), NetworkAccess::Off, "a refused change has no effect");
    let full: Vec<Value> = (0..4096).map(|number| rule("allow", &format!("n{number}.org"))).collect();
    send(&server, "PUT", &path, json!({ "egress": full }).to_string()).await.expect(200);
    expect_text(
        &send(&server, "PATCH", &path, json!([rule("deny", "x.org")]).to_string()).await,
        413,
        "4097",
    );
    assert_eq!(in_backend(&server, &id).unwrap().rules().len(), 4096);
    let create = json!({"networkPolicy": {"egress": [rule("allow", "https://a.org")]}});
    expect_error(&create_with(&server, create).await, 400, "SANDBOX::INVALID_PARAMETER");
}

#[tokio::test]
async fn change_needs_the_owner_and_a_sandbox_that_can_have_one() {
    let server = start_with_keys(|_| {}).await;
    let (_, key) = issue_key(&server, "one").await;
    let (_, other) = issue_key(&server, "other").await;
    let created = with_key(&server, &key, "POST", "/v1/sandboxes").json(&create_body()).send().await;
    let id = id_of(&created);
    let patch = json!([rule("allow", "a.org")]);
    for path in [egress(&id), lifecycle(&id)] {
        assert_eq!(with_key(&server, &other, "PATCH", &path).json(&patch).send().await.status, 404);
        assert_eq!(server.request("PATCH", &path).json(&patch).send().await.status, 401);
    }
    let missing = with_key(&server, &key, "PUT", &lifecycle(UNKNOWN_ID)).send().await;
    expect_error(&missing, 404, "DOCKER::SANDBOX_NOT_FOUND");
    let sandbox = server.service.sandbox_of(None, &SandboxId::parse(&id).unwrap()).unwrap();
    server.backend.kill(sandbox.id(), domain::EndCause::Oom);
    while sandbox.check_usable().is_ok() {
        tokio::task::yield_now().await;
    }
    let dead = with_key(&server, &key, "PATCH", &egress(&id)).json(&patch).send().await;
    expect_text(&dead, 409, "cannot set the network policy");
}

#[tokio::test]
async fn host_without_a_filter_says_so() {
    let backend = FakeBackend::new();
    backend.filtered.store(false, Ordering::Relaxed);
    let server = start_with(backend, |_| {}, |_| {}).await;
    let rules = json!({"networkPolicy": {"egress": [rule("allow", "a.org")]}});
    expect_error(&create_with(&server, rules).await, 400, "SANDBOX::API_NOT_SUPPORTED");
    let denied = id_of(&create_with(&server, json!({"networkPolicy": {"defaultAction": "deny"}})).await);
    assert_eq!(network_of(&server, &denied), NetworkAccess::Off);
    let patch = json!([rule("allow", "a.org")]).to_string();
    expect_text(
        &send(&server, "PATCH", &egress(&denied), patch.clone()).await,
        501,
        "cannot filter networks",
    );
    expect_error(
        &send(&server, "PATCH", &lifecycle(&denied), patch).await,
        501,
        "SANDBOX::API_NOT_SUPPORTED",
    );
    assert_eq!(send(&server, "PUT", &egress(&denied), "").await.expect(200)["mode"], "deny_all");
}

#[tokio::test]
async fn wider_network_than_the_operator_allows_is_refused() {
    let server =
        start_with(FakeBackend::new(), |config| config.most_network = NetworkAccess::Filtered, |_| {}).await;
    let on = create_with(&server, json!({"extensions": {"coracle.network": "on"}})).await;
    expect_error(&on, 400, "SANDBOX::INVALID_PARAMETER");
    assert!(on.text().contains("`filtered` at most"), "{}", on.text());
    id_of(&create_with(&server, json!({"extensions": {"coracle.network": "filtered"}})).await);
}
