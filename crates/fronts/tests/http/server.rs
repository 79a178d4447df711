//! What is shared by all fronts: paths of no front, the document, and hosts.

use std::pin::pin;

use testkit::fake_backend::FakeBackend;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::setup::{OPERATOR_KEY, expect_error, start, start_with, start_with_keys, with_key};

#[tokio::test]
async fn path_of_no_front_is_not_found() {
    let server = start().await;
    for path in ["/", "/nothing", "/v1", "/v1/sandboxes-x", "/openapi.json/more"] {
        expect_error(&server.get(path).await, 404, "NOT_FOUND");
    }
    expect_error(&server.delete("/openapi.json").await, 405, "METHOD_NOT_ALLOWED");
}

#[tokio::test]
async fn browser_gets_a_page_at_the_root_and_programs_get_json() {
    const BROWSER: &str = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8";
    let server = start_with_keys(|_| {}).await;
    let page = server.request("GET", "/").header("accept", BROWSER).send().await;
    assert_eq!((page.status.as_u16(), page.header("content-type")), (200, Some("text/html; charset=utf-8")));
    let policy = page.header("content-security-policy").unwrap();
    assert!(policy.starts_with("default-src 'none'; style-src 'sha256-"), "{policy}");
    assert!(!policy.contains("unsafe"), "{policy}");
    let text = page.text();
    assert!(text.contains("Coracle") && text.contains("It works"), "{text}");
    // It links only to this server, and each link leads somewhere.
    let links: Vec<&str> =
        text.split("href=\"").skip(1).map(|rest| rest.split('"').next().unwrap()).collect();
    assert!(links.contains(&"/docs") && links.contains(&"/openapi.json"), "{links:?}");
    for link in links.iter().filter(|link| cfg!(feature = "operator") || **link != "/health") {
        assert_eq!(server.get(link).await.status, 200, "{link}");
    }
    assert!(!text.contains("://") && !text.contains("src="), "{text}");
    for (method, path, accept) in [
        ("GET", "/", "application/json"),
        ("GET", "/", "*/*"),
        ("POST", "/", BROWSER),
        ("GET", "/nothing", BROWSER),
    ] {
        let answer = server.request(method, path).header("accept", accept).send().await;
        expect_error(&answer, 404, "NOT_FOUND");
    }
}

#[tokio::test]
async fn page_says_that_the_backend_does_not_answer() {
    let backend = FakeBackend::new();
    let server = start_with(backend.clone(), |_| {}, |_| {}).await;
    backend.fail("probe", 1);
    let page = || server.request("GET", "/").header("accept", "text/html").send();
    let first = page().await;
    let text = first.text();
    assert!(text.contains("It does not work fully") && !text.contains("It works"), "{text}");
    // The result is used again for a moment, so that clients without a key do not keep the backend busy.
    const REQUESTS: u64 = 50;
    let probes = || backend.calls().iter().filter(|call| **call == "probe").count() as u64;
    let (before, began) = (probes(), std::time::Instant::now());
    for _ in 0..REQUESTS {
        page().await;
    }
    let seconds = began.elapsed().as_secs();
    assert!(probes() - before <= seconds + 1, "{} in {seconds} s", probes() - before);
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

/// A path of each front that needs a key.
fn keyed_paths() -> Vec<&'static str> {
    let paths = [
        ("/v1/sandboxes", cfg!(feature = "opensandbox")),
        ("/coracle/v1/sandboxes", cfg!(feature = "operator")),
    ];
    paths.into_iter().filter(|(_, present)| *present).map(|(path, _)| path).collect()
}

#[tokio::test]
async fn requests_beyond_the_limit_are_refused_with_a_time_to_retry() {
    let server = start_with(FakeBackend::new(), |_| {}, |http| http.concurrent_requests = 0).await;
    for path in keyed_paths() {
        let answer = server.get(path).await;
        expect_error(&answer, 429, "TOO_MANY_REQUESTS");
        assert_eq!(answer.header("retry-after"), Some("1"), "{path}");
    }
    // Nobody needs a key for these, so they take no slot.
    expect_error(&server.get("/nothing").await, 404, "NOT_FOUND");
    server.get("/openapi.json").await.expect(200);
}

#[tokio::test]
async fn refused_request_with_an_unfinished_body_takes_no_slot() {
    let server = start_with(FakeBackend::new(), |_| {}, |http| http.concurrent_requests = 1).await;
    server.service.set_operator_key(Some(OPERATOR_KEY));
    for path in keyed_paths() {
        let mut client = TcpStream::connect(server.address).await.unwrap();
        let head = format!("POST {path} HTTP/1.1\r\nhost: a\r\ncontent-length: 10\r\n\r\n");
        client.write_all(head.as_bytes()).await.unwrap();
        // The server waits a moment for the body before it answers.
        let mut answer = [0; 12];
        let mut answered = pin!(client.read_exact(&mut answer));
        loop {
            let request = with_key(&server, OPERATOR_KEY, "GET", path).send();
            tokio::select! {
                response = request => assert_eq!(response.status, 200, "{}", response.text()),
                read = &mut answered => {
                    assert_eq!(read.unwrap(), 12);
                    break;
                }
            }
        }
        assert!(matches!(&answer, b"HTTP/1.1 401" | b"HTTP/1.1 405"), "{}", answer.escape_ascii());
    }
}
