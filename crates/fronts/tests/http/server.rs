//! What is shared by all fronts: paths of no front, the document, and hosts.

use testkit::fake_backend::FakeBackend;

use crate::setup::{expect_error, start, start_with, start_with_keys};

#[tokio::test]
async fn path_of_no_front_is_not_found() {
    let server = start().await;
    for path in ["/", "/nothing", "/v1", "/v1/sandboxes-x", "/openapi.json/more"] {
        expect_error(&server.get(path).await, 404, "NOT_FOUND");
    }
    expect_error(&server.delete("/openapi.json").await, 405, "METHOD_NOT_ALLOWED");
}

#[tokio::test]
async fn document_needs_no_key_and_describes_every_front() {
    let server = start_with_keys(|_| {}).await;
    let document = server.get("/openapi.json").await.expect(200);
    for (path, described) in [
        ("/v1/sandboxes", cfg!(feature = "opensandbox")),
        ("/coracle/v1/sandboxes", cfg!(feature = "operator")),
    ] {
        assert_eq!(document["paths"].get(path).is_some(), described, "{path}");
    }
}

#[tokio::test]
async fn server_without_keys_refuses_foreign_hosts_and_sites() {
    let server = start().await;
    let own = format!("http://{}", server.address);
    for (name, value, status) in [
        ("host", "localhost", 404),
        ("host", "rebound.example", 403),
        ("host", "10.0.0.1", 403),
        ("origin", own.as_str(), 404),
        ("origin", "http://rebound.example", 403),
        ("origin", "null", 403),
    ] {
        let answer = server.request("GET", "/nothing").header(name, value).send().await;
        let code = if status == 403 { "FORBIDDEN" } else { "NOT_FOUND" };
        expect_error(&answer, status, code);
    }
}

#[tokio::test]
async fn server_with_keys_accepts_any_host() {
    let server = start_with_keys(|_| {}).await;
    let answer = server.request("GET", "/nothing").header("host", "coracle.example").send().await;
    expect_error(&answer, 404, "NOT_FOUND");
}

#[tokio::test]
async fn requests_beyond_the_limit_are_refused_with_a_time_to_retry() {
    let server = start_with(FakeBackend::new(), |_| {}, |http| http.concurrent_requests = 0).await;
    let answer = server.get("/nothing").await;
    assert_eq!((answer.status.as_u16(), answer.header("retry-after")), (429, Some("1")), "{answer:?}");
}
