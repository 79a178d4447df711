//! Sandboxes from create to delete.

use serde_json::json;

use super::{create, create_body, id_of, path_of};
use crate::setup::{UNKNOWN_ID, expect_error, start};

#[tokio::test]
async fn sandbox_is_shown_until_it_is_deleted() {
    let server = start().await;
    let mut body = create_body();
    body["metadata"] = json!({"team": "blue"});
    let created = server.post("/v1/sandboxes", body).await;
    let id = id_of(&created);
    assert_eq!(created.json()["status"]["state"], "Running");
    let shown = server.get(&path_of(&id)).await.expect(200);
    assert_eq!((&shown["id"], &shown["metadata"]), (&json!(id), &json!({"team": "blue"})));
    assert_eq!(shown["image"]["uri"], "host");
    // Every path also exists without `/v1`.
    assert_eq!(server.get(&format!("/sandboxes/{id}")).await.expect(200), shown);
    let deleted = server.delete(&path_of(&id)).await;
    assert!(deleted.status == 204 && deleted.body.is_empty(), "{deleted:?}");
    expect_error(&server.get(&path_of(&id)).await, 404, "DOCKER::SANDBOX_NOT_FOUND");
    expect_error(&server.delete(&path_of(&id)).await, 404, "DOCKER::SANDBOX_NOT_FOUND");
    assert_eq!(server.get("/v1/sandboxes").await.expect(200)["items"], json!([]));
}

#[tokio::test]
async fn list_has_pages_and_filters() {
    let server = start().await;
    for team in ["blue", "blue", "red"] {
        let mut body = create_body();
        body["metadata"] = json!({"team": team});
        id_of(&server.post("/v1/sandboxes", body).await);
    }
    let list = async |query: &str| server.get(&format!("/v1/sandboxes?{query}")).await.expect(200);
    let page = list("page=2&pageSize=2").await;
    assert_eq!(page["items"].as_array().map(Vec::len), Some(1));
    assert_eq!(
        page["pagination"],
        json!({"page": 2, "pageSize": 2, "totalItems": 3, "totalPages": 2, "hasNextPage": false})
    );
    assert_eq!(list("page=9").await["items"], json!([]));
    assert_eq!(list("metadata=team%3Dblue").await["pagination"]["totalItems"], 2);
    assert_eq!(list("state=Paused").await["pagination"]["totalItems"], 0);
    assert_eq!(list("state=Paused&state=Running").await["pagination"]["totalItems"], 3);
    for query in ["page=0", "page=x", "pageSize=0", "pageSize=201"] {
        let answer = server.get(&format!("/v1/sandboxes?{query}")).await;
        expect_error(&answer, 400, "SANDBOX::INVALID_PARAMETER");
    }
    expect_error(&server.get("/v1/sandboxes?metadata=team").await, 400, "INVALID_METADATA_FORMAT");
}

#[tokio::test]
async fn metadata_is_patched_by_key() {
    let server = start().await;
    let id = create(&server).await;
    let path = format!("{}/metadata", path_of(&id));
    let patch = async |body| server.request("PATCH", &path).json(&body).send().await;
    patch(json!({"a": "1", "b": "2"})).await.expect(200);
    let patched = patch(json!({"a": null, "c": "3"})).await.expect(200);
    assert_eq!(patched["metadata"], json!({"b": "2", "c": "3"}));
    assert_eq!(patch(json!({"a key with spaces": "1"})).await.status, 400);
}

#[tokio::test]
async fn expiry_is_renewed_only_into_the_future() {
    let server = start().await;
    let id = create(&server).await;
    let path = format!("{}/renew-expiration", path_of(&id));
    let soon = jiff::Timestamp::now() + jiff::SignedDuration::from_mins(20);
    let renewed = server.post(&path, json!({"expiresAt": soon.to_string()})).await.expect(200);
    let read: jiff::Timestamp = renewed["expiresAt"].as_str().unwrap().parse().unwrap();
    assert_eq!(read.as_second(), soon.as_second());
    let shown = server.get(&path_of(&id)).await.expect(200);
    assert_eq!(shown["expiresAt"], renewed["expiresAt"]);
    // The last one is later than the longest timeout of this server.
    for time in ["2001-01-01T00:00:00Z", "soon", "", "2999-01-01T00:00:00Z"] {
        let answer = server.post(&path, json!({"expiresAt": time})).await;
        expect_error(&answer, 400, "DOCKER::INVALID_EXPIRATION");
    }
}

#[tokio::test]
async fn pause_and_resume_twice_are_conflicts() {
    let server = start().await;
    let id = create(&server).await;
    let change =
        async |action: &str| server.request("POST", &format!("{}/{action}", path_of(&id))).send().await;
    expect_error(&change("resume").await, 409, "DOCKER::SANDBOX_NOT_PAUSED");
    assert_eq!(change("pause").await.status, 202);
    assert_eq!(server.get(&path_of(&id)).await.json()["status"]["state"], "Paused");
    expect_error(&change("pause").await, 409, "DOCKER::SANDBOX_NOT_RUNNING");
    assert_eq!(change("resume").await.status, 202);
    assert_eq!(server.get(&path_of(&id)).await.json()["status"]["state"], "Running");
    server.backend.refuse_to_pause();
    expect_error(&change("pause").await, 501, "SANDBOX::API_NOT_SUPPORTED");
}

#[tokio::test]
async fn endpoint_of_a_port_is_a_path_with_a_token() {
    let server = start().await;
    let id = create(&server).await;
    let path = |port: &str| format!("{}/endpoints/{port}", path_of(&id));
    let endpoint = server.get(&path("44772")).await.expect(200);
    let address = format!("{}/v1/sandboxes/{id}/proxy/44772", server.address);
    assert_eq!(endpoint["endpoint"], json!(address));
    assert!(endpoint["headers"]["X-EXECD-ACCESS-TOKEN"].is_string(), "{endpoint}");
    for port in ["0", "65536", "http"] {
        assert_eq!(server.get(&path(port)).await.status, 400, "{port}");
    }
    let unknown = server.get(&format!("{}/endpoints/80", path_of(UNKNOWN_ID))).await;
    expect_error(&unknown, 404, "DOCKER::SANDBOX_NOT_FOUND");
}

#[tokio::test]
async fn snapshot_is_taken_listed_restored_and_deleted() {
    let server = start().await;
    let id = create(&server).await;
    let taken = server.post(&format!("{}/snapshots", path_of(&id)), json!({"name": "daily"})).await;
    let snapshot = taken.expect(202)["id"].as_str().unwrap().to_owned();
    let path = format!("/v1/snapshots/{snapshot}");
    while server.get(&path).await.expect(200)["status"]["state"] != "Ready" {
        tokio::task::yield_now().await;
    }
    let listed = server.get("/v1/snapshots").await.expect(200);
    assert_eq!(listed["items"][0]["id"], json!(snapshot));
    let restored = json!({"snapshotId": snapshot, "resourceLimits": {}, "timeout": 600});
    assert_ne!(id_of(&server.post("/v1/sandboxes", restored).await), id);
    assert_eq!(server.delete(&path).await.status, 204);
    expect_error(&server.get(&path).await, 404, "SNAPSHOT::NOT_FOUND");
}
