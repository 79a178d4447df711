//! What the token of a port opens, and what a web page that a sandbox serves may reach.

use fronts::GatewayMode;
use serde_json::{Value, json};
use testkit::fake_backend::FakeBackend;
use testkit::test_server::TestServer;

use super::{create, create_body, id_of, inside, path_of};
use crate::setup::{issue_key, start, start_with, start_with_keys, with_key};

/// A path below a port of a sandbox.
fn port_path(id: &str, port: &str) -> String {
    format!("{}/proxy/{port}/", path_of(id))
}

/// The status of a request that a browser sends for a page of this origin.
async fn status_for_page(server: &TestServer, host: &str, method: &str, path: &str) -> u16 {
    let origin = format!("http://{host}");
    let request = server.request(method, path).header("host", host).header("origin", &origin);
    let request = request.header("sec-fetch-site", "same-origin").header("sec-fetch-mode", "cors");
    request.json(&json!({})).send().await.status.as_u16()
}

#[tokio::test]
async fn token_of_a_port_opens_no_other_port() {
    let server = start_with_keys(|_| {}).await;
    let (_, key) = issue_key(&server, "one").await;
    let mut ids = Vec::new();
    for _ in 0..2 {
        let created = with_key(&server, &key, "POST", "/v1/sandboxes").json(&create_body()).send().await;
        ids.push(id_of(&created));
    }
    let token = async |port: u16, header: &str| {
        let path = format!("{}/endpoints/{port}", path_of(&ids[0]));
        let endpoint: Value = with_key(&server, &key, "GET", &path).send().await.expect(200);
        endpoint["headers"][header].as_str().unwrap().to_owned()
    };
    let port_token = token(8000, "X-Coracle-Access-Token").await;
    let is_refused = async |id: &str, port: &str, header: &str, token: &str| {
        let request = server.request("GET", &port_path(id, port)).header(header, token);
        request.send().await.status == 401
    };
    assert!(!is_refused(&ids[0], "8000", "x-coracle-access-token", &port_token).await);
    for (id, port) in [(0, "9000"), (0, "44772"), (0, "18080"), (1, "8000")] {
        assert!(is_refused(&ids[id], port, "x-coracle-access-token", &port_token).await, "{id} {port}");
        assert!(is_refused(&ids[id], port, "x-execd-access-token", &port_token).await, "{id} {port}");
    }
    assert_eq!(token(8000, "X-Coracle-Access-Token").await, port_token);
    assert_ne!(token(9000, "X-Coracle-Access-Token").await, port_token);
    let execd = token(44772, "X-EXECD-ACCESS-TOKEN").await;
    assert!(is_refused(&ids[0], "8000", "x-coracle-access-token", &execd).await);
}

#[tokio::test]
async fn page_below_a_path_reaches_no_api_of_a_server_without_keys() {
    let server = start().await;
    let host = server.address.to_string();
    let (own, other) = (create(&server).await, create(&server).await);
    for (method, path) in [
        ("GET", "/v1/sandboxes".to_owned()),
        ("POST", "/v1/sandboxes".to_owned()),
        ("DELETE", path_of(&other)),
        ("GET", inside(&own, "ping")),
        ("POST", inside(&own, "command")),
        ("POST", inside(&other, "command")),
        ("GET", format!("{}/proxy/18080/policy", path_of(&other))),
    ] {
        assert_eq!(status_for_page(&server, &host, method, &path).await, 403, "{method} {path}");
    }
    // All sandboxes share this origin, so their ports are open to each other.
    for id in [&own, &other] {
        assert_ne!(status_for_page(&server, &host, "GET", &port_path(id, "8000")).await, 403);
    }
}

#[tokio::test]
async fn page_below_a_signed_path_reaches_at_most_its_own_sandbox() {
    let server = start_with_keys(|_| {}).await;
    let (_, key) = issue_key(&server, "one").await;
    let mut ids = Vec::new();
    for _ in 0..2 {
        let created = with_key(&server, &key, "POST", "/v1/sandboxes").json(&create_body()).send().await;
        ids.push(id_of(&created));
    }
    let expires = jiff::Timestamp::now().as_second() + 600;
    let path = format!("{}/endpoints/44772?expires={expires}", path_of(&ids[0]));
    let endpoint = with_key(&server, &key, "GET", &path).send().await.expect(200);
    let (host, signed) = endpoint["endpoint"].as_str().unwrap().split_once('/').unwrap();
    let (own, others) = (format!("/{signed}/ping"), format!("/{signed}/ping").replace(&ids[0], &ids[1]));
    assert_eq!(status_for_page(&server, host, "GET", &own).await, 200);
    for path in [others.as_str(), &inside(&ids[1], "ping"), &inside(&ids[0], "ping"), "/v1/sandboxes"] {
        assert_eq!(status_for_page(&server, host, "GET", path).await, 401, "{path}");
    }
}

#[tokio::test]
async fn page_by_host_reaches_no_api() {
    for with_keys in [false, true] {
        let server = start_with(
            FakeBackend::new(),
            |_| {},
            |http| http.gateway.mode = GatewayMode::Wildcard { domain: "localhost".to_owned() },
        )
        .await;
        let ids = [create(&server).await, create(&server).await];
        if with_keys {
            server.service.set_operator_key(Some(crate::setup::OPERATOR_KEY));
        }
        let [own, other] = ids.each_ref().map(|id| format!("{id}-8000.localhost"));
        let page = format!("http://{own}");
        let server_host = server.address.to_string();
        let execd = format!("{}-44772.localhost", ids[0]);
        for (host, method, path) in [
            (&server_host, "GET", "/v1/sandboxes".to_owned()),
            (&server_host, "GET", inside(&ids[0], "ping")),
            (&execd, "GET", "/ping".to_owned()),
            (&other, "GET", "/".to_owned()),
        ] {
            let request = server.request(method, &path).header("host", host).header("origin", &page);
            let request = request.header("sec-fetch-site", "same-site").header("sec-fetch-mode", "cors");
            let status = request.send().await.status.as_u16();
            assert!(matches!(status, 401 | 403), "{status}: {host} {path}, keys: {with_keys}");
        }
        // Its own host never answers as an API, whatever the path.
        for path in ["/v1/sandboxes", "/health", "/openapi.json"] {
            let status = status_for_page(&server, &own, "GET", path).await;
            assert!(status != 200 && status != 404, "{status}: {path}, keys: {with_keys}");
        }
    }
}
