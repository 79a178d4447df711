//! Ports of a sandbox, by path, host and header. The agents of these tests have no network of their own, so a service of
//! the test itself stands for one inside.

use std::collections::BTreeMap;

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::extract::ws::{Message, WebSocketUpgrade};
use axum::response::{IntoResponse, Response};
use axum::routing::{any, get};
use fronts::{GatewayMode, HttpSettings};
use futures_util::StreamExt;
use http::{StatusCode, header};
use http_body_util::BodyExt;
use serde_json::{Value, json};
use testkit::test_server::TestServer;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::AioSandbox;
use crate::setup::{OPERATOR_KEY, start_with_keys_and_agents};

/// Answers with what it has received.
async fn describe_request(request: Request) -> Response {
    let (head, body) = request.into_parts();
    let body = axum::body::to_bytes(body, 1 << 24).await.unwrap();
    let headers: BTreeMap<_, _> = head
        .headers
        .iter()
        .map(|(name, value)| (name.to_string(), value.to_str().unwrap().to_owned()))
        .collect();
    let described = json!({
        "method": head.method.as_str(),
        "uri": head.uri.to_string(),
        "headers": headers,
        "length": body.len(),
    });
    axum::Json(described).into_response()
}

/// A service with a page, redirects, a stream and a socket. Returns its port.
async fn start_service() -> u16 {
    let redirect = |location: &'static str| {
        get(async move || {
            (StatusCode::FOUND, [(header::LOCATION, location), (header::SET_COOKIE, "a=1; Domain=x")])
        })
    };
    let socket = any(async |upgrade: WebSocketUpgrade| {
        upgrade.on_upgrade(async |mut socket| {
            while let Some(Ok(message)) = socket.recv().await {
                if let Message::Text(text) = message {
                    socket.send(Message::Text(format!("got {text}").into())).await.unwrap();
                }
            }
        })
    });
    // Sends an event and never ends.
    let events = get(async || {
        let first = futures_util::stream::once(async { Ok::<_, std::io::Error>("data: one\n\n") });
        let body = Body::from_stream(first.chain(futures_util::stream::pending()));
        ([(header::CONTENT_TYPE, "text/event-stream")], body)
    });
    let router = Router::new()
        .route("/login", redirect("/home"))
        .route("/absproxy/{port}/login", redirect("/absproxy/1/home"))
        .route("/socket", socket)
        .route("/events", events)
        .fallback(describe_request);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
    port
}

fn by_host(http: &mut HttpSettings) {
    http.gateway.mode = GatewayMode::Wildcard { domain: "boxes.example".to_owned() };
}

/// The host label of a sandbox's API, from its path.
fn label_of(sandbox: &AioSandbox<'_>) -> String {
    format!("aio-{}", sandbox.path.strip_prefix("/aio/").unwrap().replace('.', "-"))
}

/// The secret part of a sandbox's address.
fn mac_of(sandbox: &AioSandbox<'_>) -> String {
    sandbox.path.rsplit_once('.').unwrap().1.to_owned()
}

async fn two_sandboxes(server: &TestServer) -> [AioSandbox<'_>; 2] {
    [AioSandbox::create(server, "one").await, AioSandbox::create(server, "two").await]
}

#[tokio::test]
async fn j22_path_below_a_port_is_forwarded_without_or_with_its_prefix() {
    let server = start_with_keys_and_agents(|_| {}).await;
    let (sandbox, port) = (AioSandbox::create(&server, "one").await, start_service().await);
    for (path, expected) in [
        (format!("/proxy/{port}/"), "/".to_owned()),
        (format!("/proxy/{port}/a%2Fb//c?d=e"), "/a%2Fb//c?d=e".to_owned()),
        (format!("/absproxy/{port}/"), format!("/absproxy/{port}/")),
        (format!("/absproxy/{port}/a?b"), format!("/absproxy/{port}/a?b")),
    ] {
        assert_eq!(sandbox.get(&path).await.expect(200)["uri"], expected, "{path}");
    }
    for method in ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "PROPFIND"] {
        let path = format!("{}/proxy/{port}/x", sandbox.path);
        let described = server.request(method, &path).body(vec![7; 3 << 20]).send().await.expect(200);
        assert_eq!((&described["method"], &described["length"]), (&json!(method), &json!(3 << 20)));
    }
}

#[tokio::test]
async fn redirects_stay_below_their_port() {
    let server = start_with_keys_and_agents(by_host).await;
    let (sandbox, port) = (AioSandbox::create(&server, "one").await, start_service().await);
    for form in ["proxy", "absproxy"] {
        let response = sandbox.get(&format!("/{form}/{port}?a=b")).await;
        assert_eq!(response.status, StatusCode::TEMPORARY_REDIRECT);
        assert_eq!(response.header("location"), Some(format!("{port}/?a=b").as_str()));
    }
    let location = sandbox.get(&format!("/proxy/{port}/login")).await;
    let expected = format!("{}/proxy/{port}/home", sandbox.path);
    assert_eq!(location.header("location"), Some(expected.as_str()));
    let location = sandbox.get(&format!("/absproxy/{port}/login")).await;
    let expected = format!("{}/absproxy/1/home", sandbox.path);
    assert_eq!(location.header("location"), Some(expected.as_str()));
    let host = format!("{port}-{}.boxes.example", label_of(&sandbox));
    let location = server.request("GET", "/login").header("host", &host).send().await;
    assert_eq!((location.header("location"), location.header("set-cookie")), (Some("/home"), Some("a=1")));
    assert_eq!(location.header("referrer-policy"), Some("same-origin"));
}

#[tokio::test]
async fn service_never_sees_the_address_of_its_sandbox() {
    let server = start_with_keys_and_agents(by_host).await;
    let (sandbox, port) = (AioSandbox::create(&server, "one").await, start_service().await);
    let own_host = format!("{port}-{}.boxes.example", label_of(&sandbox));
    let server_host = server.address.to_string();
    for (host, path) in [
        (&server_host, format!("{}/proxy/{port}/page", sandbox.path)),
        (&server_host, format!("{}/absproxy/{port}/page", sandbox.path)),
        (&own_host, "/page".to_owned()),
    ] {
        let request = server.request("GET", &path).header("host", host).header("x-api-key", OPERATOR_KEY);
        let request = request.header("referer", &format!("http://{host}{path}"));
        let request = request.header("origin", &format!("http://{host}")).header("x-aio-proxy-port", "1");
        let response = request.send().await;
        let text = response.expect(200).to_string();
        assert!(!text.contains(&mac_of(&sandbox)) && !text.contains(OPERATOR_KEY), "{text}");
        assert!(!text.contains("x-aio-proxy-port"), "{text}");
        let referer = response.json()["headers"]["referer"].clone();
        assert!(referer.as_str().unwrap().starts_with(&format!("http://localhost:{port}/")), "{referer}");
    }
}

#[tokio::test]
async fn host_of_a_port_has_the_whole_path_for_itself() {
    let server = start_with_keys_and_agents(by_host).await;
    let (sandbox, port) = (AioSandbox::create(&server, "one").await, start_service().await);
    let host = format!("{port}-{}.boxes.example", label_of(&sandbox));
    for path in ["/", "/v1/sandbox", "/proxy/1/x?y", "/api/sandboxes"] {
        let request = server.request("GET", path).header("host", &host).header("cookie", "a=1");
        let described = request.send().await.expect(200);
        assert_eq!((&described["uri"], &described["headers"]["cookie"]), (&json!(path), &json!("a=1")));
    }
    let wrong = format!("{port}-{}0.boxes.example", &label_of(&sandbox)[..label_of(&sandbox).len() - 2]);
    assert_ne!(server.request("GET", "/").header("host", &wrong).send().await.status, StatusCode::OK);
}

#[tokio::test]
async fn header_names_a_port_only_behind_a_trusted_gateway() {
    for accepted in [false, true] {
        let change = |http: &mut HttpSettings| {
            let values = serde_json::from_value(json!({"port_header": accepted})).unwrap();
            http.fronts.insert("aio".to_owned(), values);
        };
        let server = start_with_keys_and_agents(change).await;
        let (sandbox, port) = (AioSandbox::create(&server, "one").await, start_service().await);
        let path = format!("{}/v1/unknown?a", sandbox.path);
        let request = server.request("GET", &path).header("x-aio-proxy-port", &port.to_string());
        let response = request.send().await;
        if accepted {
            let described = response.expect(200);
            assert_eq!(described["uri"], "/v1/unknown?a");
            assert_eq!(described["headers"].get("x-aio-proxy-port"), None);
            let request = server.request("GET", &path).header("x-aio-proxy-port", "0");
            assert_eq!(
                request.send().await.expect(422)["detail"][0]["loc"],
                json!(["header", "x-aio-proxy-port"])
            );
        } else {
            response.expect(404);
        }
    }
}

#[tokio::test]
async fn port_without_a_listener_is_a_bad_gateway_in_the_envelope() {
    let server = start_with_keys_and_agents(|_| {}).await;
    let sandbox = AioSandbox::create(&server, "one").await;
    // The port was free a moment ago.
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    drop(listener);
    let refused = sandbox.get(&format!("/proxy/{port}/")).await.expect(502);
    assert_eq!((&refused["success"], &refused["data"]), (&json!(false), &Value::Null), "{refused}");
    for port in ["0", "65536", "x", "-1", "+80", "1e3"] {
        for form in ["proxy", "absproxy"] {
            for path in ["", "/", "/x"] {
                let refused = sandbox.get(&format!("/{form}/{port}{path}")).await.expect(422);
                assert_eq!(refused["detail"][0]["loc"], json!(["path", "port"]), "{refused}");
            }
        }
    }
}

#[tokio::test]
async fn events_are_not_held_back() {
    let server = start_with_keys_and_agents(|_| {}).await;
    let (sandbox, port) = (AioSandbox::create(&server, "one").await, start_service().await);
    let request = server.request("GET", &format!("{}/proxy/{port}/events", sandbox.path));
    let mut response = request.send_and_stream().await;
    let frame = response.body_mut().frame().await.unwrap().unwrap();
    assert_eq!(frame.into_data().unwrap(), "data: one\n\n");
}

#[tokio::test]
async fn j22_sockets_pass_in_both_directions() {
    let server = start_with_keys_and_agents(by_host).await;
    let (sandbox, port) = (AioSandbox::create(&server, "one").await, start_service().await);
    let own_host = format!("{port}-{}.boxes.example", label_of(&sandbox));
    for (host, path) in [
        (server.address.to_string(), format!("{}/proxy/{port}/socket", sandbox.path)),
        (own_host, "/socket".to_owned()),
    ] {
        let mut stream = TcpStream::connect(server.address).await.unwrap();
        let request = format!(
            "GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
             Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        );
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(stream.read_u8().await.unwrap());
        }
        assert!(head.starts_with(b"HTTP/1.1 101 "), "{}", String::from_utf8_lossy(&head));
        // A masked text frame; the mask is zero.
        stream.write_all(b"\x81\x82\0\0\0\0hi").await.unwrap();
        let mut frame = [0; 8];
        stream.read_exact(&mut frame).await.unwrap();
        assert_eq!(&frame, b"\x81\x06got hi");
    }
}

#[tokio::test]
async fn page_by_host_reaches_no_api() {
    let server = start_with_keys_and_agents(by_host).await;
    let [own, other] = two_sandboxes(&server).await;
    let page = format!("http://8000-{}.boxes.example", label_of(&own));
    let server_host = server.address.to_string();
    for sandbox in [&own, &other] {
        let api_host = format!("{}.boxes.example", label_of(sandbox));
        for (host, path) in
            [(&api_host, "/v1/sandbox".to_owned()), (&server_host, format!("{}/v1/sandbox", sandbox.path))]
        {
            for origin in [page.as_str(), "null"] {
                let request = server.request("GET", &path).header("host", host).header("origin", origin);
                request.send().await.expect(403);
            }
            // A page of the API itself, such as the terminal, may use it.
            let request = server.request("GET", &path).header("host", host);
            request.header("origin", &format!("http://{host}")).send().await.expect(200);
        }
    }
}
