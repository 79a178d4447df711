//! Credential vaults on the egress API.

use domain::{NetworkPolicy, PolicyAction, PolicyEdit, PolicyRule, SandboxId};
use serde_json::json;

use super::{create, path_of};
use crate::setup::start;

const CANARY: &str = "canary-5d41402abc4b2a76";

#[tokio::test]
async fn vault_is_made_changed_and_deleted() {
    let server = start().await;
    let id = create(&server).await;
    let path = format!("{}/proxy/18080/credential-vault", path_of(&id));
    let body = json!({
        "credentials": [{"name": "token", "source": {"type": "inline", "value": CANARY}}],
        "bindings": [{
            "name": "api",
            "match": {"hosts": ["api.example.org"], "methods": null, "ports": [443]},
            "auth": {"type": "apiKey", "name": "X-Api-Key", "credential": "token"},
        }],
    });
    assert_eq!(server.post(&path, body.clone()).await.status, 412);
    assert_eq!(server.get(&path).await.status, 404);
    let parsed = SandboxId::parse(&id).unwrap();
    let sandbox = server.service.sandbox_of(None, &parsed).unwrap();
    let rule = PolicyRule { action: PolicyAction::Allow, target: "api.example.org".parse().unwrap() };
    let policy = NetworkPolicy::new(vec![rule], PolicyAction::Deny).unwrap();
    sandbox.network().edit_policy(PolicyEdit::Replace(policy)).await.unwrap();
    sandbox.vault().enable_proxy().await.unwrap();
    let made = server.post(&path, body.clone()).await.expect(201);
    assert_eq!(made["revision"], 1);
    assert_eq!(made["credentials"], json!([{"name": "token", "sourceType": "inline", "revision": 1}]));
    assert_eq!(made["bindings"][0]["auth"], json!({"type": "apiKey", "name": "X-Api-Key"}));
    assert_eq!(made["bindings"][0]["match"]["methods"], json!(["GET", "POST", "PUT", "PATCH", "DELETE"]));
    assert_eq!(server.post(&path, body).await.status, 409);
    assert_eq!(server.get(&path).await.expect(200), made);
    assert_eq!(server.get(&format!("{path}/credentials/token")).await.expect(200), made["credentials"][0]);
    assert_eq!(server.get(&format!("{path}/bindings")).await.expect(200)["bindings"], made["bindings"]);
    assert_eq!(server.get(&format!("{path}/bindings/other")).await.status, 404);
    let patch = async |body: serde_json::Value| server.request("PATCH", &path).json(&body).send().await;
    let deleted = patch(json!({"expectedRevision": 1, "bindings": {"delete": ["api"]}})).await.expect(200);
    assert_eq!((&deleted["revision"], &deleted["bindings"]), (&json!(2), &json!([])));
    assert_eq!(patch(json!({"expectedRevision": 1})).await.status, 409);
    for invalid in [
        json!({"credentials": {"delete": ["other"]}}),
        json!({"unknown": 1}),
        json!({"credentials": {"add": [{"name": "a", "source": {"value": CANARY, "kind": "x"}}]}}),
        json!({"credentials": {"add": [{"name": "a", "source": CANARY}]}}),
    ] {
        let refused = patch(invalid).await;
        assert_eq!(refused.status, 400);
        assert!(!String::from_utf8_lossy(&refused.body).contains("canary"), "{refused:?}");
    }
    assert_eq!(server.delete(&path).await.status, 204);
    assert_eq!(server.delete(&path).await.status, 404);
}
