//! Owners have no access to the sandboxes of others.

use domain::Owner;
use serde_json::{Value, json};
use service::OwnerQuota;
use testkit::test_client::TestResponse;
use testkit::test_server::TestServer;

use super::{create_body, id_of, inside, path_of};
use crate::setup::{UNKNOWN_ID, expect_error, issue_key, start_with_keys, with_key};

async fn create_as(server: &TestServer, key: &str, body: &Value) -> TestResponse {
    with_key(server, key, "POST", "/v1/sandboxes").json(body).send().await
}

/// Every route of a sandbox, with a body that is valid for it.
fn routes(id: &str) -> Vec<(&'static str, String, Value)> {
    let at = |path: &str| format!("{}/{path}", path_of(id));
    vec![
        ("GET", path_of(id), json!({})),
        ("DELETE", path_of(id), json!({})),
        ("PATCH", at("metadata"), json!({})),
        ("POST", at("renew-expiration"), json!({"expiresAt": "2999-01-01T00:00:00Z"})),
        ("POST", at("pause"), json!({})),
        ("POST", at("resume"), json!({})),
        ("POST", at("snapshots"), json!({})),
        ("GET", at("diagnostics/logs"), json!({})),
        ("GET", at("endpoints/44772"), json!({})),
        ("GET", at("endpoints/8000"), json!({})),
        ("POST", inside(id, "command"), json!({"command": "true"})),
        ("GET", inside(id, "files/info?path=/etc/passwd"), json!({})),
        ("GET", inside(id, "files/download?path=/etc/passwd"), json!({})),
        ("POST", inside(id, "session"), json!({})),
        ("GET", inside(id, "ping"), json!({})),
        ("GET", at("proxy/18080/policy"), json!({})),
        ("GET", at("proxy/8000/"), json!({})),
    ]
}

#[tokio::test]
async fn foreign_sandbox_is_not_found() {
    let server = start_with_keys(|_| {}).await;
    let (_, one) = issue_key(&server, "one").await;
    let (_, other) = issue_key(&server, "other").await;
    let id = id_of(&create_as(&server, &one, &create_body()).await);
    for ((method, path, body), (_, never, _)) in routes(&id).into_iter().zip(routes(UNKNOWN_ID)) {
        let ask = async |path: &str| with_key(&server, &other, method, path).json(&body).send().await;
        let foreign = ask(&path).await;
        assert_eq!(foreign.status, 404, "{method} {path}: {}", foreign.text());
        // The response is the same as for an id that never existed.
        assert_eq!(ask(&never).await.text().replace(UNKNOWN_ID, &id), foreign.text(), "{method} {path}");
    }
    let list = async |key: &str| with_key(&server, key, "GET", "/v1/sandboxes").send().await.expect(200);
    assert_eq!(list(&other).await["items"], json!([]));
    assert_eq!(list(&one).await["items"][0]["id"], json!(id));
}

#[tokio::test]
async fn secure_access_needs_more_than_the_owners_key() {
    let server = start_with_keys(|_| {}).await;
    let (_, one) = issue_key(&server, "one").await;
    let (_, other) = issue_key(&server, "other").await;
    let mut secure = create_body();
    secure["secureAccess"] = json!(true);
    let id = id_of(&create_as(&server, &one, &secure).await);
    for path in ["44772/ping", "18080/policy", "8000/"] {
        let path = format!("{}/proxy/{path}", path_of(&id));
        assert_eq!(with_key(&server, &one, "GET", &path).send().await.status, 401, "{path}");
        assert_eq!(with_key(&server, &other, "GET", &path).send().await.status, 404, "{path}");
    }
    let path = format!("{}/endpoints/44772", path_of(&id));
    let endpoint = with_key(&server, &one, "GET", &path).send().await.expect(200);
    let token = endpoint["headers"]["OpenSandbox-Secure-Access"].as_str().unwrap();
    let ping = server.request("GET", &inside(&id, "ping")).header("opensandbox-secure-access", token);
    assert_eq!(ping.send().await.status, 200);
}

#[tokio::test]
async fn the_same_key_of_two_owners_leads_to_two_sandboxes() {
    let server = start_with_keys(|_| {}).await;
    let mut named = create_body();
    named["extensions"] = json!({"coracle.key": "mine"});
    let mut ids = Vec::new();
    for owner in ["one", "other"] {
        let (_, key) = issue_key(&server, owner).await;
        ids.push(id_of(&create_as(&server, &key, &named).await));
    }
    assert_ne!(ids[0], ids[1]);
}

#[tokio::test]
async fn owner_over_quota_is_asked_to_retry_later() {
    let one_sandbox = OwnerQuota { sandboxes: Some(1), ..OwnerQuota::default() };
    let server = start_with_keys(|config| {
        config.quotas.named.insert(Owner::parse("small").unwrap(), one_sandbox);
    })
    .await;
    let (_, small) = issue_key(&server, "small").await;
    let (_, other) = issue_key(&server, "other").await;
    let first = id_of(&create_as(&server, &small, &create_body()).await);
    let refused = create_as(&server, &small, &create_body()).await;
    expect_error(&refused, 429, "KUBERNETES::POOL_CAPACITY_EXHAUSTED");
    assert_eq!(refused.header("retry-after"), Some("1"));
    id_of(&create_as(&server, &other, &create_body()).await);
    assert_eq!(with_key(&server, &small, "DELETE", &path_of(&first)).send().await.status, 204);
    id_of(&create_as(&server, &small, &create_body()).await);
}

#[tokio::test]
async fn only_the_operator_manages_pools() {
    let server = start_with_keys(|_| {}).await;
    let (_, tenant) = issue_key(&server, "tenant").await;
    for (method, path) in
        [("GET", "/v1/pools"), ("GET", "/v1/pools/p"), ("DELETE", "/v1/pools/p"), ("POST", "/v1/pools")]
    {
        let answer = with_key(&server, &tenant, method, path).json(&json!({"name": "p"})).send().await;
        assert_eq!(answer.status, 403, "{method} {path}: {}", answer.text());
    }
    let unknown = create_as(&server, &tenant, &json!({"extensions": {"poolRef": "q"}})).await;
    expect_error(&unknown, 404, "KUBERNETES::POOL_NOT_FOUND");
}
