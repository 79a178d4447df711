//! Sandboxes, names and volumes as operators and owners see them.

use domain::Owner;
use serde_json::json;

use crate::setup::{
    OPERATOR_KEY, UNKNOWN_ID, create_without_front, expect_error, issue_key, start, start_with_keys, with_key,
};

fn path_of(id: &str) -> String {
    format!("/coracle/v1/sandboxes/{id}")
}

#[tokio::test]
async fn sandbox_is_listed_inspected_and_removed() {
    let server = start().await;
    let sandbox = create_without_front(&server, &Owner::operator()).await;
    let id = sandbox.id.as_str();
    let listed = server.get("/coracle/v1/sandboxes").await.expect(200);
    assert_eq!((&listed["sandboxes"][0]["id"], &listed["operator"]), (&json!(id), &json!(false)));
    let report = server.get(&path_of(id)).await.expect(200);
    assert_eq!((&report["id"], &report["phase"]), (&json!(id), &json!("running")), "{report}");
    assert_eq!(server.delete(&path_of(id)).await.status, 204);
    expect_error(&server.get(&path_of(id)).await, 404, "SANDBOX_NOT_FOUND");
}

#[tokio::test]
async fn owners_see_only_their_own_and_operators_everything() {
    let server = start_with_keys(|_| {}).await;
    let (_, key) = issue_key(&server, "one").await;
    let own = create_without_front(&server, &Owner::parse("one").unwrap()).await;
    let other = create_without_front(&server, &Owner::parse("other").unwrap()).await;
    let list = async |key: &str, query: &str| {
        let path = format!("/coracle/v1/sandboxes{query}");
        let listed = with_key(&server, key, "GET", &path).send().await.expect(200);
        listed["sandboxes"].as_array().unwrap().len()
    };
    assert_eq!((list(&key, "").await, list(OPERATOR_KEY, "").await), (1, 2));
    assert_eq!((list(OPERATOR_KEY, "?owner=one").await, list(OPERATOR_KEY, "?mine=true").await), (1, 0));
    let denied = with_key(&server, &key, "GET", "/coracle/v1/sandboxes?owner=*").send().await;
    assert_eq!(denied.status, 403, "{}", denied.text());
    for id in [other.id.as_str(), UNKNOWN_ID, "no-id"] {
        for method in ["GET", "DELETE"] {
            let answer = with_key(&server, &key, method, &path_of(id)).send().await;
            expect_error(&answer, 404, "SANDBOX_NOT_FOUND");
        }
    }
    let seen = with_key(&server, OPERATOR_KEY, "GET", &path_of(own.id.as_str())).send().await;
    assert_eq!(seen.expect(200)["owner"], "one");
}

#[tokio::test]
async fn cursor_of_logs_is_a_number() {
    let server = start().await;
    let sandbox = create_without_front(&server, &Owner::operator()).await;
    let process = "00000000000000000000000000000000";
    for query in ["cursor=x", "cursor=-1", "follow=perhaps"] {
        let path = format!("{}/processes/{process}/logs?{query}", path_of(sandbox.id.as_str()));
        expect_error(&server.get(&path).await, 400, "INVALID_CURSOR");
    }
}

#[tokio::test]
async fn unknown_and_invalid_names_are_told_apart() {
    let server = start().await;
    expect_error(&server.get("/coracle/v1/names/nobody").await, 404, "NAME_NOT_FOUND");
    let long = format!("/coracle/v1/names/{}", "x".repeat(300));
    expect_error(&server.get(&long).await, 400, "INVALID_NAME");
}

#[tokio::test]
async fn volume_is_created_once_and_removed() {
    let server = start().await;
    let create = async |body| server.post("/coracle/v1/volumes", body).await;
    assert_eq!(create(json!({"name": "data", "size": "64Mi"})).await.expect(201)["name"], "data");
    assert_eq!(create(json!({"name": "data", "size": "64Mi"})).await.status, 200);
    for body in [json!({}), json!({"name": "no name"}), json!({"name": "b", "size": "much"})] {
        expect_error(&create(body).await, 400, "INVALID_VOLUME");
    }
    let listed = server.get("/coracle/v1/volumes").await.expect(200);
    assert_eq!(listed["items"].as_array().map(Vec::len), Some(1), "{listed}");
    assert_eq!(server.delete("/coracle/v1/volumes/data").await.status, 204);
    assert_eq!(server.get("/coracle/v1/volumes/data").await.status, 404);
}
