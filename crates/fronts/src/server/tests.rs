//! Connections of peers without a key, over a real socket.
//!
//! Time is paused where a test waits: it jumps to the next timer whenever nothing else can run.

use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{Extension, Request};
use axum::middleware::from_fn_with_state;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use bytes::Bytes;
use domain::Owner;
use futures_util::{StreamExt, stream};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use super::accept::Listener;
use super::concurrency::{
    CallerProof, ConcurrencyError, ConcurrencyLimits, RequestAdmission, attach_guard, limit_concurrency,
};
use super::connection::{ClientPeer, ConnectionSettings, serve_listener};
use super::owner_slots::SoleOwner;
use crate::registry::UNROUTED_ERRORS;
use crate::settings::HttpSettings;

const WRITE_TIMEOUT: Duration = Duration::from_secs(30);
const HOUR: Duration = Duration::from_secs(3600);

/// A listener whose peers seem to come from another machine.
struct RemoteListener {
    listener: TcpListener,
    address: IpAddr,
}

impl Listener for RemoteListener {
    type Stream = TcpStream;

    async fn accept(&self) -> io::Result<(TcpStream, ClientPeer)> {
        let (stream, peer) = self.listener.accept().await?;
        Ok((stream, ClientPeer::Network(SocketAddr::new(self.address, peer.port()))))
    }
}

struct Server {
    address: SocketAddr,
    /// Notified when an endless response was dropped.
    ended: Arc<Notify>,
    _serving: JoinSet<()>,
}

/// Notifies when it is dropped.
struct NotifyOnDrop(Arc<Notify>);

impl Drop for NotifyOnDrop {
    fn drop(&mut self) {
        self.0.notify_one();
    }
}

/// Starts a server whose peers seem to have the address `peer`.
async fn start(peer: &str, change: impl FnOnce(&mut HttpSettings)) -> Server {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let mut settings = HttpSettings::new(address);
    change(&mut settings);
    let ended = Arc::new(Notify::new());
    let guard = ended.clone();
    let endless = move || {
        let chunks = stream::repeat(Bytes::from_static(&[b'x'; 1 << 16])).map(Ok::<_, Infallible>);
        attach_guard(Body::from_stream(chunks), NotifyOnDrop(guard.clone()))
    };
    let endless_stream = endless.clone();
    let router = Router::new()
        .route("/", get(async || "answer"))
        .route("/", post(async || "answer"))
        .route(
            "/keyed",
            get(async |Extension(admission)| respond(admit(&admission), || Body::from("answer"))),
        )
        .route("/endless", get(async move || endless()))
        .route("/quiet", get(quiet))
        .route(
            "/stream",
            get(async move |Extension(admission)| respond(admit_stream(&admission), endless_stream)),
        )
        .route("/up", get(upgrade))
        .layer(from_fn_with_state(ConcurrencyLimits::new(&settings), limit_concurrency));
    let listener = RemoteListener { listener, address: peer.parse().unwrap() };
    let connections: ConnectionSettings = settings.connection_settings();
    let mut serving = JoinSet::new();
    serving.spawn(serve_listener(listener, connections, router, std::future::pending()));
    Server { address, ended, _serving: serving }
}

fn admit(admission: &RequestAdmission) -> Result<(), ConcurrencyError> {
    admission.admit(&Owner::parse("one").unwrap(), SoleOwner::No, CallerProof::Presented)
}

fn admit_stream(admission: &RequestAdmission) -> Result<(), ConcurrencyError> {
    admit(admission)?;
    admission.begin_stream()
}

/// The response to an admitted request, or its refusal.
fn respond(admitted: Result<(), ConcurrencyError>, body: impl FnOnce() -> Body) -> Response {
    match admitted {
        Ok(()) => body().into_response(),
        Err(error) => error.build_response(UNROUTED_ERRORS),
    }
}

/// Says nothing for an hour.
async fn quiet() -> Body {
    Body::from_stream(stream::once(async {
        sleep(HOUR).await;
        Ok::<_, Infallible>(Bytes::from_static(b"late"))
    }))
}

/// Reads from the upgraded connection until it ends.
async fn upgrade(Extension(admission): Extension<RequestAdmission>, mut request: Request) -> Response {
    admit_stream(&admission).unwrap();
    let upgrade = hyper::upgrade::on(&mut request);
    tokio::spawn(async move {
        let mut stream = TokioIo::new(upgrade.await.unwrap());
        tokio::io::copy(&mut stream, &mut tokio::io::sink()).await
    });
    let head = Response::builder().status(101).header("connection", "upgrade").header("upgrade", "bare");
    head.body(Body::empty()).unwrap()
}

impl Server {
    async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.address).await.unwrap()
    }

    /// A connection on which this path was requested.
    async fn request(&self, path: &str) -> TcpStream {
        let mut client = self.connect().await;
        send_get(&mut client, path, "").await;
        client
    }
}

async fn send_get(client: &mut TcpStream, path: &str, headers: &str) {
    let head = format!("GET {path} HTTP/1.1\r\nhost: a\r\n{headers}\r\n");
    client.write_all(head.as_bytes()).await.unwrap();
}

/// Reads a response whose body is short, and returns its status.
async fn read_status(client: &mut TcpStream) -> String {
    let mut answer = Vec::new();
    while !answer.ends_with(b"answer") && !answer.ends_with(b"}") {
        assert!(client.read_buf(&mut answer).await.unwrap() > 0, "{}", answer.escape_ascii());
    }
    String::from_utf8_lossy(&answer[9..12]).into_owned()
}

/// Whether the server closes a new connection without a response to its request.
async fn is_refused(server: &Server) -> bool {
    let mut client = server.connect().await;
    // The connection may be closed before the request is sent.
    let sent = client.write_all(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n").await;
    sent.is_err() || matches!(client.read(&mut [0; 16]).await, Ok(0) | Err(_))
}

const REMOTE: &str = "203.0.113.7";

#[tokio::test(start_paused = true)]
async fn client_that_does_not_read_is_disconnected() {
    let server = start(REMOTE, |http| http.write_timeout = WRITE_TIMEOUT).await;
    let begun = Instant::now();
    let _client = server.request("/endless").await;
    timeout(HOUR, server.ended.notified()).await.unwrap();
    assert!((WRITE_TIMEOUT..2 * WRITE_TIMEOUT).contains(&begun.elapsed()), "{:?}", begun.elapsed());
}

/// A server without keys has no authenticated clients, and its users stop their readers too.
#[tokio::test(start_paused = true)]
async fn client_on_this_machine_may_pause() {
    let server = start("127.0.0.1", |http| http.write_timeout = WRITE_TIMEOUT).await;
    let _client = server.request("/endless").await;
    assert!(timeout(HOUR, server.ended.notified()).await.is_err());
}

#[tokio::test(start_paused = true)]
async fn slow_reader_stays_connected() {
    let server = start(REMOTE, |http| http.write_timeout = WRITE_TIMEOUT).await;
    let mut client = server.request("/endless").await;
    let mut buffer = vec![0; 8 << 20];
    for _ in 0..5 {
        sleep(WRITE_TIMEOUT * 2 / 3).await;
        client.read_exact(&mut buffer).await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn quiet_response_stays_connected() {
    let server = start(REMOTE, |http| http.write_timeout = WRITE_TIMEOUT).await;
    let mut client = server.request("/quiet").await;
    let mut answer = Vec::new();
    while !answer.windows(4).any(|bytes| bytes == b"late") {
        assert!(client.read_buf(&mut answer).await.unwrap() > 0);
    }
}

/// Commands wait for their client, and a user may stop a terminal for as long as they like.
#[tokio::test(start_paused = true)]
async fn authenticated_stream_waits_for_its_reader() {
    let server = start(REMOTE, |http| http.write_timeout = WRITE_TIMEOUT).await;
    let _client = server.request("/stream").await;
    assert!(timeout(HOUR, server.ended.notified()).await.is_err());
}

#[tokio::test]
async fn head_is_small_until_a_key_was_seen() {
    let server = start(REMOTE, |_| {}).await;
    let large = format!("x: {}\r\n", "x".repeat(20 << 10));
    let mut client = server.connect().await;
    send_get(&mut client, "/", &large).await;
    let mut answer = String::new();
    client.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 431 ") && answer.contains("exceeds 16 KiB"), "{answer}");
    assert!(
        answer.contains("\r\nx-request-id: ") && answer.contains("\r\nconnection: close\r\n"),
        "{answer}"
    );
    // A request without a key does not change that.
    let mut client = server.request("/").await;
    assert_eq!(read_status(&mut client).await, "200");
    send_get(&mut client, "/", &large).await;
    assert_eq!(read_status(&mut client).await, "431");
    let mut client = server.request("/keyed").await;
    assert_eq!(read_status(&mut client).await, "200");
    send_get(&mut client, "/", &large).await;
    assert_eq!(read_status(&mut client).await, "200");
}

#[tokio::test]
async fn trusted_peers_may_send_large_heads_at_once() {
    let large = format!("x: {}\r\n", "x".repeat(20 << 10));
    for (peer, trusted) in [("127.0.0.1", "192.0.2.1"), (REMOTE, REMOTE)] {
        let server = start(peer, |http| http.trusted_proxies = vec![trusted.parse().unwrap()]).await;
        let mut client = server.connect().await;
        send_get(&mut client, "/", &large).await;
        assert_eq!(read_status(&mut client).await, "200");
    }
}

/// The limit applies to heads only.
#[tokio::test]
async fn body_may_follow_a_small_head_at_once() {
    let server = start(REMOTE, |_| {}).await;
    let mut client = server.connect().await;
    let body = "x".repeat(100 << 10);
    let request = format!("POST / HTTP/1.1\r\nhost: a\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    client.write_all(request.as_bytes()).await.unwrap();
    assert_eq!(read_status(&mut client).await, "200");
    send_get(&mut client, "/", "").await;
    assert_eq!(read_status(&mut client).await, "200");
}

#[tokio::test]
async fn connections_without_a_key_are_limited_by_address() {
    let server = start(REMOTE, |http| http.connections_per_address = 2).await;
    let (mut first, mut second) = (server.request("/").await, server.request("/").await);
    assert_eq!(read_status(&mut first).await, "200");
    assert_eq!(read_status(&mut second).await, "200");
    assert!(is_refused(&server).await);
    // With a key, the first one no longer counts.
    send_get(&mut first, "/keyed", "").await;
    assert_eq!(read_status(&mut first).await, "200");
    let mut third = server.request("/").await;
    assert_eq!(read_status(&mut third).await, "200");
    assert!(is_refused(&server).await);
    send_get(&mut second, "/", "").await;
    assert_eq!(read_status(&mut second).await, "200");
}

#[tokio::test]
async fn connections_of_this_machine_are_not_limited_by_address() {
    let server = start("127.0.0.1", |http| http.connections_per_address = 0).await;
    assert_eq!(read_status(&mut server.request("/").await).await, "200");
}

#[tokio::test]
async fn connection_beyond_those_of_its_owner_is_refused_and_closed() {
    // One of four is left to others.
    let server = start("127.0.0.1", |http| http.connections = 4).await;
    let mut kept = Vec::new();
    for _ in 0..3 {
        let mut client = server.request("/keyed").await;
        assert_eq!(read_status(&mut client).await, "200");
        kept.push(client);
    }
    let mut answer = String::new();
    server.request("/keyed").await.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 429 ") && answer.contains("connection: close\r\n"), "{answer}");
    assert!(answer.contains("limit of connections of one owner reached (3)"), "{answer}");
    for mut client in kept {
        send_get(&mut client, "/keyed", "").await;
        assert_eq!(read_status(&mut client).await, "200");
    }
}

#[tokio::test]
async fn upgraded_connection_holds_a_stream_until_it_ends() {
    let server = start(REMOTE, |http| http.concurrent_streams = 1).await;
    let mut first = server.connect().await;
    send_get(&mut first, "/up", "connection: upgrade\r\nupgrade: bare\r\n").await;
    let mut answer = [0; 12];
    first.read_exact(&mut answer).await.unwrap();
    assert_eq!(&answer, b"HTTP/1.1 101");
    assert_eq!(read_status(&mut server.request("/stream").await).await, "429");
    // Requests are counted apart.
    assert_eq!(read_status(&mut server.request("/keyed").await).await, "200");
    drop(first);
    loop {
        let mut client = server.request("/stream").await;
        client.read_exact(&mut answer).await.unwrap();
        if &answer == b"HTTP/1.1 200" {
            break;
        }
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn slot_is_held_until_the_response_was_sent() {
    let server = start("127.0.0.1", |http| {
        http.concurrent_requests = 1;
        http.concurrent_streams = 1;
    })
    .await;
    let mut reader = server.request("/stream").await;
    let mut answer = [0; 12];
    reader.read_exact(&mut answer).await.unwrap();
    assert_eq!(&answer, b"HTTP/1.1 200");
    assert_eq!(read_status(&mut server.request("/stream").await).await, "429");
    drop(reader);
    server.ended.notified().await;
    let mut again = server.request("/stream").await;
    again.read_exact(&mut answer).await.unwrap();
    assert_eq!(&answer, b"HTTP/1.1 200");
}
