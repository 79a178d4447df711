//! Whole connections over loopback: a client, the interceptor and a server.

mod world;

use std::sync::atomic::Ordering;

use bytes::Bytes;
use domain::{Binding, BindingAuth, SubstitutionSurface, UrlScheme};
use egress_protocol::{SecretScope, VaultRequest};
use futures_util::{SinkExt, StreamExt};
use http::header::{CONTENT_LENGTH, HeaderValue};
use http::{HeaderMap, StatusCode};
use http_body_util::BodyExt;
use hyper::body::Body;
use tokio_tungstenite::client_async;
use tokio_tungstenite::tungstenite::Message;

use super::*;
use world::{
    BOTH, CANARY, Certificate, HOST, Protocol, SANDBOX, World, bearer, chunks, full, header, match_all,
    received, request, substitution,
};

fn host() -> DomainName {
    HOST.parse().expect("a name")
}

#[tokio::test]
async fn bearer_is_added_and_replaces_what_the_client_sent() {
    for protocol in BOTH {
        let world = World::with_bearer().await;
        let mut client = world.connect(protocol).await;
        let mut asked = request("GET", "/echo?a=b", full(""));
        asked.headers_mut().insert("authorization", HeaderValue::from_static("Bearer of-the-client"));
        asked.headers_mut().append("authorization", HeaderValue::from_static("second"));
        asked.headers_mut().insert("x-other", HeaderValue::from_static("kept"));
        let (status, _, body) = client.ask(asked).await;
        let received = received(&body);
        assert_eq!(status, StatusCode::OK);
        assert!(received.contains(&format!("authorization: Bearer {CANARY}\n")), "{protocol:?} {received}");
        assert!(received.contains("x-other: kept\n") && received.contains("/echo?a=b\n"), "{received}");
        assert!(!received.contains("of-the-client") && !received.contains("second"), "{received}");
        world.shut_down().await;
    }
}

#[tokio::test]
async fn echoed_secret_does_not_come_back() {
    for protocol in BOTH {
        let world = World::with_bearer().await;
        let mut client = world.connect(protocol).await;
        let mut asked = request("GET", "/leak", full(""));
        asked.headers_mut().insert("te", HeaderValue::from_static("trailers"));
        let response = client.send(asked).await.expect("a response");
        assert_eq!(response.headers()["x-echo"], "Bearer ***", "{protocol:?}");
        let collected = response.into_body().collect().await.expect("a whole body");
        assert_eq!(
            collected.trailers().map(|all| &all["x-trailer"]),
            Some(&HeaderValue::from_static("Bearer ***"))
        );
        let stars = "*".repeat(CANARY.len());
        assert_eq!(collected.to_bytes(), format!("you sent Bearer {stars}, Bearer {stars}."), "{protocol:?}");
        world.shut_down().await;
    }
}

#[tokio::test]
async fn large_bodies_stream_both_ways_with_trailers() {
    const CHUNK: usize = 100_003;
    const COUNT: usize = 200;
    for protocol in BOTH {
        let world = World::with_bearer().await;
        let mut client = world.connect(protocol).await;
        let chunk = |number: usize| Bytes::from(vec![u8::try_from(number % 251).expect("small"); CHUNK]);
        let mut trailers = HeaderMap::new();
        trailers.insert("x-sum", HeaderValue::from_static("42"));
        let sent = chunks((0..COUNT).map(chunk).collect(), Some(trailers));
        let mut asked = request("POST", "/mirror", sent);
        asked.headers_mut().insert("trailer", HeaderValue::from_static("x-sum"));
        asked.headers_mut().insert("te", HeaderValue::from_static("trailers"));
        let response = client.send(asked).await.expect("a response");
        let collected = response.into_body().collect().await.expect("a whole body");
        // The server mirrors trailers only where its protocol does not want them to be announced.
        if protocol == Protocol::Http2 {
            assert_eq!(collected.trailers().map(|all| &all["x-sum"]), Some(&HeaderValue::from_static("42")));
        }
        let bytes = collected.to_bytes();
        assert_eq!(bytes.len(), CHUNK * COUNT);
        let right = bytes.chunks(CHUNK).enumerate().all(|(number, part)| part == chunk(number));
        assert!(right, "{protocol:?}");
        world.shut_down().await;
    }
}

#[tokio::test]
async fn length_of_a_body_is_kept() {
    for protocol in BOTH {
        let world = World::with_bearer().await;
        let mut client = world.connect(protocol).await;
        let response = client.send(request("POST", "/mirror", full(CANARY))).await.expect("a response");
        assert_eq!(response.body().size_hint().exact(), Some(CANARY.len() as u64));
        let bytes = response.into_body().collect().await.expect("a whole body").to_bytes();
        assert_eq!(bytes, "*".repeat(CANARY.len()));
        world.shut_down().await;
    }
}

#[tokio::test]
async fn first_part_of_a_response_arrives_before_the_last_is_sent() {
    for protocol in BOTH {
        let world = World::with_bearer().await;
        let mut client = world.connect(protocol).await;
        let (sender, receiver) = tokio::sync::mpsc::channel::<Bytes>(1);
        let stream = futures_util::stream::unfold(receiver, |mut receiver| async move {
            let data = receiver.recv().await?;
            Some((Ok(hyper::body::Frame::data(data)), receiver))
        });
        let body = http_body_util::StreamBody::new(stream).boxed_unsync();
        // The first bytes of the secret at the end of a part may be held for a moment, but not for ever.
        sender.send(Bytes::from_static(b"data: ca")).await.expect("an open body");
        let response = client.send(request("POST", "/mirror", body)).await.expect("a response");
        let mut body = response.into_body();
        let mut arrived = Vec::new();
        while arrived.len() < 8 {
            let frame = body.frame().await.expect("more").expect("no error");
            arrived.extend_from_slice(&frame.into_data().expect("data"));
        }
        assert_eq!(arrived, b"data: ca", "{protocol:?}");
        drop(sender);
        assert!(body.collect().await.expect("a whole body").to_bytes().is_empty());
        world.shut_down().await;
    }
}

#[tokio::test]
async fn headers_of_each_kind_are_added() {
    let world = World::new(Certificate::Valid).await;
    let secrets = [("token", CANARY), ("pair", "bWU6cGFzc3dvcmQ=")];
    let binding = |name: &str, auth| {
        Binding::new(name.to_owned(), match_all(&[&format!("/{name}")], &[]), auth, Vec::new())
            .expect("valid")
    };
    let bindings = vec![
        binding("basic", BindingAuth::Basic { credential: "pair".to_owned() }),
        binding("key", BindingAuth::ApiKey(header("X-Api-Key", "token"))),
        binding(
            "custom",
            BindingAuth::CustomHeaders(vec![header("X-Id", "pair"), header("X-Secret", "token")]),
        ),
        binding("none", BindingAuth::Passthrough),
    ];
    world.set_vault(1, &secrets, bindings);
    let mut client = world.connect(Protocol::Http1).await;
    for (path, expected) in [
        ("/basic", vec!["authorization: Basic bWU6cGFzc3dvcmQ=\n".to_owned()]),
        ("/key", vec![format!("x-api-key: {CANARY}\n")]),
        ("/custom", vec!["x-id: bWU6cGFzc3dvcmQ=\n".to_owned(), format!("x-secret: {CANARY}\n")]),
    ] {
        let received = received(&client.get(path).await.2);
        for line in expected {
            assert!(received.contains(&line), "{path}: {received}");
        }
    }
    for path in ["/none", "/other", "/key/more"] {
        let received = received(&client.get(path).await.2);
        assert!(!received.contains(CANARY) && !received.contains("authorization"), "{path}: {received}");
    }
    world.shut_down().await;
}

#[tokio::test]
async fn placeholders_are_replaced_in_the_whole_request() {
    for protocol in BOTH {
        let world = World::new(Certificate::Valid).await;
        let everywhere = [
            SubstitutionSurface::Path,
            SubstitutionSurface::Query,
            SubstitutionSurface::Header,
            SubstitutionSurface::Body,
        ];
        let substitutions = vec![substitution("__KEY__", &everywhere)];
        let binding =
            Binding::new("s".to_owned(), match_all(&[], &[]), BindingAuth::Passthrough, substitutions)
                .expect("valid");
        world.set_vault(1, &[("token", "a/\"b")], vec![binding]);
        let mut client = world.connect(protocol).await;
        let mut asked = request("POST", "/echo/__KEY__?k=__KEY__", full(r#"{"k":"__KEY__"}"#));
        asked.headers_mut().insert("x-key", HeaderValue::from_static("is __KEY__"));
        asked.headers_mut().insert("content-type", HeaderValue::from_static("application/json"));
        asked.headers_mut().insert(CONTENT_LENGTH, HeaderValue::from_static("15"));
        let received = received(&client.ask(asked).await.2);
        for expected in [
            "/echo/a%2F%22b?k=a%2F%22b\n",
            "x-key: is a/\"b\n",
            "content-length: 13\n",
            "\n{\"k\":\"a/\\\"b\"}",
        ] {
            assert!(received.contains(expected), "{protocol:?} {expected}: {received}");
        }
        let cut = ["x=__K", "EY__&y=__KEY_", "_"].map(|part| Bytes::from_static(part.as_bytes()));
        let streamed = client.ask(request("POST", "/echo", chunks(cut.to_vec(), None))).await.2;
        let streamed = world::received(&streamed);
        assert!(streamed.ends_with("\nx=a/\"b&y=a/\"b"), "{protocol:?}: {streamed}");
        world.shut_down().await;
    }
}

#[tokio::test]
async fn websocket_passes_and_its_handshake_is_authorized() {
    let world = World::with_bearer().await;
    for alpn in [&["http/1.1"][..], &[]] {
        let stream = world.connect_tls(alpn).await.expect("a trusted certificate");
        let (mut socket, response) =
            client_async(format!("wss://{HOST}/socket"), stream).await.expect("a WebSocket");
        assert_eq!(response.headers()["x-authorized"], "true");
        for text in ["first", "second"] {
            socket.send(Message::text(text)).await.expect("sent");
            let echoed = socket.next().await.expect("open").expect("a message");
            assert_eq!(echoed.into_text().expect("text"), text);
        }
        socket.close(None).await.expect("closed");
    }
    world.shut_down().await;
}

#[tokio::test]
async fn wrong_certificate_is_502_and_nothing_is_sent() {
    for certificate in [Certificate::OfAnotherHost, Certificate::OfUnknownAuthority] {
        for protocol in BOTH {
            let world = World::new(certificate).await;
            world.set_vault(1, &[("token", CANARY)], vec![bearer("token")]);
            let mut client = world.connect(protocol).await;
            let (status, _, body) = client.ask(request("POST", "/echo", full("data"))).await;
            assert_eq!(status, StatusCode::BAD_GATEWAY);
            assert!(body.contains("certificate") && !body.contains(CANARY), "{body}");
            assert_eq!(world.server.requests.load(Ordering::SeqCst), 0, "{certificate:?} {protocol:?}");
            world.shut_down().await;
        }
    }
}

#[tokio::test]
async fn request_for_another_host_is_refused() {
    let world = World::with_bearer().await;
    let mut client = world.connect(Protocol::Http1).await;
    let mut asked = request("GET", "/echo", full(""));
    asked.headers_mut().insert("host", HeaderValue::from_static("other.example.org"));
    let (status, _, body) = client.ask(asked).await;
    assert_eq!(status, StatusCode::MISDIRECTED_REQUEST, "{body}");
    let mut client = world.connect(Protocol::Http2).await;
    let mut asked = request("GET", "/echo", full(""));
    *asked.uri_mut() = "https://other.example.org/echo".parse().expect("an address");
    let (status, _, body) = client.ask(asked).await;
    assert_eq!(status, StatusCode::MISDIRECTED_REQUEST, "{body}");
    assert_eq!(world.server.requests.load(Ordering::SeqCst), 0);
    world.shut_down().await;
}

#[tokio::test]
async fn change_of_the_vault_applies_to_open_connections() {
    for protocol in BOTH {
        let world = World::with_bearer().await;
        let mut client = world.connect(protocol).await;
        let mut token = async |expected: Option<&str>| {
            let received = received(&client.get("/echo").await.2);
            match expected {
                Some(value) => {
                    assert!(received.contains(&format!("authorization: Bearer {value}\n")), "{received}")
                }
                None => assert!(!received.contains("authorization"), "{received}"),
            }
        };
        token(Some(CANARY)).await;
        world.set_vault(2, &[("token", "another-value")], vec![bearer("token")]);
        token(Some("another-value")).await;
        world.store.handle(VaultRequest::RemoveVault { sandbox: SANDBOX.to_owned() }).expect("removed");
        token(None).await;
        assert!(world.store.target(SANDBOX, UrlScheme::Https, &host()).is_none());
        world.shut_down().await;
    }
}

#[tokio::test]
async fn server_that_ends_its_connection_ends_the_clients() {
    let world = World::with_bearer().await;
    let mut client = world.connect(Protocol::Http1).await;
    let (status, headers, body) = client.get("/gone").await;
    assert_eq!((status, body.as_str()), (StatusCode::OK, "bye"));
    assert_eq!(headers["connection"], "close");
    assert!(client.send(request("GET", "/echo", full(""))).await.is_err());
    world.shut_down().await;
}

#[tokio::test]
async fn plain_http_gets_secrets_only_if_a_binding_names_it() {
    let world = World::new(Certificate::None).await;
    world.set_vault(1, &[("token", CANARY)], vec![bearer("token")]);
    assert!(world.store.target(SANDBOX, UrlScheme::Http, &host()).is_none());
    let auth = BindingAuth::Bearer { credential: "token".to_owned() };
    let binding =
        Binding::new("plain".to_owned(), match_all(&[], &["http"]), auth, Vec::new()).expect("valid");
    world.set_vault(2, &[("token", CANARY)], vec![binding]);
    assert!(world.store.target(SANDBOX, UrlScheme::Https, &host()).is_none());
    let mut client = world.connect_plain().await;
    let received = received(&client.get("/echo").await.2);
    assert!(received.contains(&format!("authorization: Bearer {CANARY}\n")), "{received}");
    world.shut_down().await;
}

#[tokio::test]
async fn client_that_names_another_host_in_its_handshake_is_refused() {
    let world = World::with_bearer().await;
    let other: DomainName = "other.example.org".parse().expect("a name");
    assert!(world.store.target(SANDBOX, UrlScheme::Https, &other).is_none());
    assert!(world.store.target("sb-2", UrlScheme::Https, &host()).is_none());
    let target = world.store.target(SANDBOX, UrlScheme::Https, &host()).expect("a bound host");
    let (mut client, near) = tokio::io::duplex(4096);
    let (far, _server) = tokio::io::duplex(4096);
    let sent = tokio::io::AsyncWriteExt::write_all(&mut client, b"GET / HTTP/1.1\r\n\r\n");
    sent.await.expect("written");
    assert!(matches!(target.intercept(near, far).await, Err(InterceptError::ClientHandshake(_))));
    world.shut_down().await;
}

#[tokio::test]
async fn value_of_another_sandbox_is_refused() {
    let world = World::with_bearer().await;
    let mut vault = world.message(2, &[("token", CANARY)], vec![bearer("token")]);
    let moved = VaultRequest::SetVault { sandbox: "sb-2".to_owned(), vault: vault.clone() };
    assert!(matches!(world.store.handle(moved), Err(VaultFailure::Open { .. })));
    vault.credentials[0].scope = SecretScope::Sandbox("sb-2".to_owned());
    let relabelled = VaultRequest::SetVault { sandbox: SANDBOX.to_owned(), vault };
    assert!(matches!(world.store.handle(relabelled), Err(VaultFailure::Open { .. })));
    world.shut_down().await;
}

#[tokio::test]
async fn authority_is_the_same_after_a_restart() {
    let mut world = World::with_bearer().await;
    let message = world.message(1, &[("token", CANARY)], vec![bearer("token")]);
    world.shut_down_tasks().await;
    // Another process with the same key: clients still trust it by the certificate that they have.
    let mut successor = World::new(Certificate::Valid).await;
    successor.authority = world.authority.clone();
    let request = VaultRequest::SetVault { sandbox: SANDBOX.to_owned(), vault: message };
    successor.store.handle(request).expect("sealed with the same key");
    let mut client = successor.connect(Protocol::Http2).await;
    assert_eq!(client.get("/echo").await.0, StatusCode::OK);
    successor.shut_down().await;
}

#[tokio::test]
async fn debug_forms_and_errors_have_no_secret() {
    let world = World::with_bearer().await;
    let target = world.store.target(SANDBOX, UrlScheme::Https, &host()).expect("a bound host");
    let current = world.store.current(SANDBOX).expect("a vault");
    let plan = current.plan(UrlScheme::Https, &host());
    let mut texts = vec![format!("{:?} {target:?} {plan:?} {:?}", world.store, current.vault)];
    let mut client = world.connect(Protocol::Http1).await;
    texts.push(client.get("/gone").await.2);
    drop(client);
    let unknown = world.message(2, &[("other", CANARY)], vec![bearer("token")]);
    let failed = world.store.handle(VaultRequest::SetVault { sandbox: SANDBOX.to_owned(), vault: unknown });
    texts.push(format!("{failed:?}"));
    texts.push(format!("{:?}", world.errors.lock().expect("not poisoned")));
    for text in texts {
        assert!(!text.contains("canary"), "{text}");
    }
    world.shut_down().await;
}
