//! Refused requests: keys, bodies, paths and methods.

use serde_json::json;
use testkit::fake_backend::FakeBackend;

use super::{create, create_body, inside, path_of};
use crate::setup::{
    KEY_HEADER, OPERATOR_KEY, UNKNOWN_ID, expect_error, start, start_with, start_with_keys, with_key,
};

#[tokio::test]
async fn every_route_needs_a_valid_key() {
    let server = start_with_keys(|_| {}).await;
    for (method, path) in [
        ("GET", "/v1/sandboxes".to_owned()),
        ("POST", "/v1/sandboxes".to_owned()),
        ("DELETE", path_of(UNKNOWN_ID)),
        ("GET", "/v1/snapshots".to_owned()),
        ("GET", "/v1/pools".to_owned()),
    ] {
        let missing = server.request(method, &path).send().await;
        expect_error(&missing, 401, "MISSING_API_KEY");
        let wrong = with_key(&server, "another-key", method, &path).send().await;
        expect_error(&wrong, 401, "INVALID_API_KEY");
    }
    // The execution API has the error format of another part of the reference.
    let inside = server.get(&inside(UNKNOWN_ID, "ping")).await.expect(401);
    assert!(inside["error"].as_str().is_some_and(|message| message.contains("missing")), "{inside}");
    let listed = with_key(&server, OPERATOR_KEY, "GET", "/v1/sandboxes").send().await;
    assert_eq!(listed.status, 200);
    let listed = server.request("GET", "/v1/sandboxes").header("x-api-key", OPERATOR_KEY).send().await;
    assert_eq!(listed.status, 200);
}

#[tokio::test]
async fn web_pages_may_not_use_a_server_without_keys() {
    let server = start().await;
    let own = format!("http://{}", server.address);
    for (name, value) in [("origin", own.as_str()), ("sec-fetch-site", "same-origin")] {
        let answer = server.request("GET", "/v1/sandboxes").header(name, value).send().await;
        expect_error(&answer, 403, "FORBIDDEN");
    }
    let foreign = server.request("GET", "/v1/sandboxes").header("host", "rebound.example").send().await;
    expect_error(&foreign, 403, "FORBIDDEN");
}

#[tokio::test]
async fn malformed_bodies_are_refused() {
    let server = start().await;
    for body in ["", "{", "[]", "null", "{\"image\": 7}", "{\"timeout\": \"ten\"}", "\u{fffd}"] {
        let answer = server.request("POST", "/v1/sandboxes").body(body).send().await;
        expect_error(&answer, 400, "SANDBOX::INVALID_PARAMETER");
    }
    let id = create(&server).await;
    for body in ["", "{", "[]", "{}", "{\"command\": 7}"] {
        let answer = server.request("POST", &inside(&id, "command")).body(body).send().await;
        expect_error(&answer, 400, "INVALID_REQUEST_BODY");
    }
}

#[tokio::test]
async fn body_may_have_the_limit_but_not_more() {
    let server = start_with(FakeBackend::new(), |_| {}, |http| http.json_body_limit = 1000).await;
    let padded = |length: usize| {
        let body = create_body().to_string();
        format!("{body}{}", " ".repeat(length - body.len()))
    };
    let fits = server.request("POST", "/v1/sandboxes").body(padded(1000)).send().await;
    assert_eq!(fits.status, 202, "{fits:?}");
    for length in [1001, 100_000] {
        let long = server.request("POST", "/v1/sandboxes").body(padded(length)).send().await;
        expect_error(&long, 413, "SANDBOX::INVALID_PARAMETER");
    }
}

#[tokio::test]
async fn unknown_paths_and_methods_are_refused() {
    let server = start().await;
    let id = create(&server).await;
    for path in [format!("{}/nothing", path_of(&id)), inside(&id, "nothing"), inside(&id, "files/nothing")] {
        expect_error(&server.get(&path).await, 404, "NOT_FOUND");
    }
    for (method, path) in [
        ("PUT", "/v1/sandboxes".to_owned()),
        ("POST", path_of(&id)),
        ("GET", format!("{}/pause", path_of(&id))),
        ("PUT", inside(&id, "command")),
    ] {
        expect_error(&server.request(method, &path).send().await, 405, "METHOD_NOT_ALLOWED");
    }
}

#[tokio::test]
async fn unknown_and_malformed_ids_are_not_found() {
    let server = start().await;
    for id in [UNKNOWN_ID, "no-id", "%20", &"a".repeat(500)] {
        for (method, path) in [
            ("GET", path_of(id)),
            ("DELETE", path_of(id)),
            ("POST", format!("{}/pause", path_of(id))),
            ("GET", format!("{}/endpoints/80", path_of(id))),
        ] {
            let answer = server.request(method, &path).send().await;
            expect_error(&answer, 404, "DOCKER::SANDBOX_NOT_FOUND");
            assert!(answer.body.len() < 200, "{answer:?}");
        }
        for path in ["ping", "files/info?path=/"] {
            let answer = server.get(&inside(id, path)).await;
            expect_error(&answer, 404, "DOCKER::SANDBOX_NOT_FOUND");
        }
    }
    expect_error(&server.get("/v1/snapshots/none").await, 404, "SNAPSHOT::NOT_FOUND");
    expect_error(&server.get("/v1/pools/none").await, 404, "KUBERNETES::POOL_NOT_FOUND");
}

#[tokio::test]
async fn refused_features_say_that_they_are_not_supported() {
    let server = start().await;
    assert_eq!(server.get("/v1/templates").await.status, 501);
    // The client reports how long it waited; nothing is kept.
    assert_eq!(server.post("/v1/metrics/events", json!({})).await.status, 204);
}

#[tokio::test]
async fn dead_sandbox_refuses_commands_and_says_why() {
    let server = start().await;
    let id = create(&server).await;
    let path = format!("{}/pause", path_of(&id));
    assert_eq!(server.request("POST", &path).send().await.status, 202);
    let paused = server.post(&inside(&id, "command"), json!({"command": "true"})).await;
    expect_error(&paused, 409, "SERVICE_UNAVAILABLE");
    assert!(paused.text().contains("paused"), "{}", paused.text());
    let keyed = server.request("GET", &path_of(&id)).header(KEY_HEADER, "any").send().await;
    assert_eq!(keyed.status, 200, "a key is not needed, and does no harm");
}
