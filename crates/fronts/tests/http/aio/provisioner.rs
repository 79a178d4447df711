//! The provisioner, and addresses.

use serde_json::json;

use super::{AioSandbox, provision};
use crate::setup::{issue_key, start, start_with_keys_and_agents};

#[tokio::test]
async fn n124_every_route_needs_a_key() {
    let keyless = start().await;
    let server = start_with_keys_and_agents(|_| {}).await;
    for (method, path) in
        [("GET", "/api/sandboxes"), ("POST", "/api/sandboxes"), ("GET", "/api/capabilities")]
    {
        for response in [
            keyless.request(method, path).header("x-api-key", "any").send().await,
            server.request(method, path).send().await,
            server.request(method, path).header("x-api-key", "wrong").send().await,
        ] {
            assert_eq!((response.status.as_u16(), response.text()), (401, "Unauthorized"), "{method} {path}");
        }
    }
}

#[tokio::test]
async fn address_opens_its_sandbox_until_it_is_deleted() {
    let server = start_with_keys_and_agents(|_| {}).await;
    let sandbox = AioSandbox::create(&server, "one").await;
    let again = AioSandbox::create(&server, "one").await;
    assert_eq!(sandbox.path, again.path);
    sandbox.get("/v1/browser/info").await.expect(501);
    assert_eq!(sandbox.get("/v1/unknown").await.expect(404)["message"], "Not Found");
    let wrong = format!("{}0", &sandbox.path[..sandbox.path.len() - 1]);
    let wrong = if wrong == sandbox.path { format!("{}1", &wrong[..wrong.len() - 1]) } else { wrong };
    let refused = server.get(&format!("{wrong}/v1/browser/info")).await;
    assert_eq!(refused.expect(404), sandbox.get("/v1/unknown").await.expect(404));
    provision(&server, "DELETE", "/api/sandboxes/one").send().await.expect(200);
    sandbox.get("/v1/browser/info").await.expect(404);
    let successor = AioSandbox::create(&server, "one").await;
    assert_ne!(sandbox.path, successor.path);
    sandbox.get("/v1/browser/info").await.expect(404);
    successor.get("/v1/browser/info").await.expect(501);
}

#[tokio::test]
async fn owners_have_ids_of_their_own() {
    let server = start_with_keys_and_agents(|_| {}).await;
    let (_, key) = issue_key(&server, "team").await;
    let sandbox = AioSandbox::create(&server, "one").await;
    let created = server.request("POST", "/api/sandboxes").header("x-api-key", &key);
    let created = created.json(&json!({"sandbox_id": "one"})).send().await;
    assert!(!created.expect(200)["sandbox_url"].as_str().unwrap().ends_with(&sandbox.path));
    let listed = provision(&server, "GET", "/api/sandboxes").send().await;
    assert_eq!(listed.expect(200)["count"], 1);
}
