//! Serves HTTP/1.1 on a listener until shutdown.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::Router;
use axum::response::Response;
use http::{HeaderValue, Request, StatusCode, header};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::sleep;
use tower::ServiceExt;

use crate::server::accept::{ClientStream, ConnectionAcceptor, Listener, PrivateListener};
use crate::server::connection_state::ConnectionState;
use crate::server::drain_body::BodyReturn;
use crate::server::malformed::{InFlightRequest, RewritingStream};
use crate::server::peer_limits::TrustedNetwork;

/// Limit on the request line and headers. It is larger than the limit on an address, so that an
/// address that is too long can be distinguished from headers that are.
const MAX_HEAD_BYTES: usize = 128 << 10;
/// How many large heads, in the sense of `head_limit.rs`, may arrive at once. Together with the number of
/// connections, this bounds the memory of half-sent heads.
const MAX_LARGE_HEADS: usize = 256;
/// How long a connection may wait for the whole head of its next request. hyper counts the
/// idle time before it as well, and clients keep idle connections for 30 to 60 seconds: a
/// shorter time would reset one just as it is used again.
const HEAD_TIMEOUT: Duration = Duration::from_secs(90);
/// Like [`HEAD_TIMEOUT`], for the first request: a client that connects is expected to send one soon.
const FIRST_HEAD_TIMEOUT: Duration = Duration::from_secs(10);
/// How long requests in progress may take to finish once the server stops.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(5);

/// The other end of the connection that a request came on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ClientPeer {
    Network(SocketAddr),
    /// A client of the socket in the state directory, which only operators may open.
    Operator,
    /// A client of the socket of a server of one sandbox, which only the user who started it may open.
    SameUser,
}

/// How many operator connections may be open at once.
const MAX_OPERATOR_CONNECTIONS: usize = 64;
/// How long a client may read nothing although there is output for it.
const WRITE_TIMEOUT: Duration = Duration::from_secs(30);

/// Limits on the connections of a listener.
#[derive(Clone, Debug)]
pub struct ConnectionSettings {
    /// The maximum number of open connections; further ones wait until one is closed.
    pub connections: usize,
    /// The maximum number of connections of one address that have not presented a key; further ones are
    /// closed.
    pub per_address: usize,
    /// Peers whose addresses are not counted, besides this machine.
    pub trusted_proxies: Vec<TrustedNetwork>,
    /// How long a client may read nothing although there is output for it. Authenticated long streams may
    /// wait for their client.
    pub write_timeout: Duration,
}

impl ConnectionSettings {
    /// At most this many connections, and the defaults of everything else.
    pub fn with_connections(connections: usize) -> Self {
        Self { connections, per_address: 256, trusted_proxies: Vec::new(), write_timeout: WRITE_TIMEOUT }
    }
}

/// Serves connections until `shutdown` resolves, then gives requests in progress a short time to
/// finish.
pub async fn serve_network(
    listener: TcpListener,
    settings: ConnectionSettings,
    router: Router,
    shutdown: impl Future<Output = ()>,
) {
    serve_listener(listener, settings, router, shutdown).await
}

/// Like [`serve_network`], on a Unix socket whose file mode limits who may open it.
pub async fn serve_operators(listener: UnixListener, router: Router, shutdown: impl Future<Output = ()>) {
    let settings = ConnectionSettings::with_connections(MAX_OPERATOR_CONNECTIONS);
    serve_listener(listener, settings, router, shutdown).await
}

/// Like [`serve_network`], on a Unix socket that only the user who started the server may open.
pub async fn serve_private_socket(
    listener: UnixListener,
    settings: ConnectionSettings,
    router: Router,
    shutdown: impl Future<Output = ()>,
) {
    serve_listener(PrivateListener(listener), settings, router, shutdown).await
}

pub(crate) async fn serve_listener<L: Listener>(
    listener: L,
    settings: ConnectionSettings,
    router: Router,
    shutdown: impl Future<Output = ()>,
) {
    let mut door = ConnectionAcceptor::new(listener, &settings);
    let large_heads = Arc::new(Semaphore::new(MAX_LARGE_HEADS));
    let (stop, stopping) = watch::channel(false);
    let mut connections = JoinSet::new();
    let mut shutdown = pin!(shutdown);
    loop {
        // Every branch is cancel-safe: accepting or reaping can wait for the next iteration.
        tokio::select! {
            () = &mut shutdown => break,
            Some(_) = connections.join_next() => {}
            (visitor, peer) = door.next_connection() => {
                let stream = RewritingStream::new(visitor, large_heads.clone());
                connections.spawn(serve_connection(stream, peer, router.clone(), stopping.clone()));
            }
        }
    }
    drop(door);
    stop.send_replace(true);
    let all_ended = async { while connections.join_next().await.is_some() {} };
    if tokio::time::timeout(SHUTDOWN_GRACE, all_ended).await.is_err() {
        tracing::info!(open = connections.len(), "closing connections with unfinished requests");
    }
}

/// Serves one connection until it ends.
async fn serve_connection<S: ClientStream>(
    stream: RewritingStream<S>,
    peer: ClientPeer,
    router: Router,
    mut stopping: watch::Receiver<bool>,
) {
    let asked = Arc::new(AtomicBool::new(false));
    let heard = asked.clone();
    let (entered, state) = (stream.in_flight().clone(), stream.state().clone());
    let answer = service_fn(move |mut request| {
        heard.store(true, Ordering::Relaxed);
        let extensions = request.extensions_mut();
        extensions.insert(peer);
        extensions.insert(state.clone());
        answer_request(router.clone(), state.clone(), request, entered.begin_request())
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .max_header_size(MAX_HEAD_BYTES)
        .serve_connection(TokioIo::new(stream), answer)
        .with_upgrades();
    let mut connection = pin!(connection);
    let silent = async {
        sleep(FIRST_HEAD_TIMEOUT).await;
        if asked.load(Ordering::Relaxed) {
            std::future::pending::<()>().await;
        }
    };
    let ended = tokio::select! {
        ended = &mut connection => ended,
        () = silent => {
            tracing::debug!("closed a connection that sent no request");
            return;
        }
        _ = stopping.changed() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "connection failed");
    }
}

async fn answer_request(
    router: Router,
    state: ConnectionState,
    request: Request<Incoming>,
    entry: InFlightRequest,
) -> Result<Response, Infallible> {
    let home = BodyReturn::default();
    let mut response = router.oneshot(home.wrap_body(request)).await?;
    home.drain_or_close(&mut response).await;
    if state.is_closing() && response.status() != StatusCode::SWITCHING_PROTOCOLS {
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    Ok(entry.close_with(response))
}

#[cfg(test)]
mod tests {
    use axum::routing::get;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpStream;
    use tokio::time::Instant;

    use super::*;

    async fn connect() -> (TcpStream, JoinSet<()>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let router = Router::new()
            .route("/", get(|| async { "answer" }))
            .route("/bare", get(|| async { http::StatusCode::BAD_REQUEST }))
            .route("/up", get(upgrade));
        let mut server = JoinSet::new();
        let settings = ConnectionSettings::with_connections(1);
        server.spawn(serve_network(listener, settings, router, std::future::pending()));
        (client, server)
    }

    /// Sends two requests on one connection, the body of the first after its head, to a handler
    /// that reads none.
    async fn send_two_requests(body: usize) -> (String, bool) {
        let (mut client, _server) = connect().await;
        let head = format!("POST /no HTTP/1.1\r\nHost: localhost\r\nContent-Length: {body}\r\n\r\n");
        client.write_all(head.as_bytes()).await.unwrap();
        tokio::task::yield_now().await;
        // The server may refuse the rest of a long body.
        client.write_all(&vec![b'x'; body]).await.unwrap_or_default();
        let mut answer = [0; 1 << 12];
        let count = client.read(&mut answer).await.unwrap();
        let first = String::from_utf8_lossy(&answer[..count]).into_owned();
        let asked = client.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").await;
        let second = client.read(&mut answer).await;
        (first, asked.is_ok() && second.is_ok_and(|count| count > 0))
    }

    #[tokio::test]
    async fn short_unread_body_keeps_the_connection_open() {
        let (first, reusable) = send_two_requests(40).await;
        assert!(first.starts_with("HTTP/1.1 404") && reusable, "{first}");
    }

    #[tokio::test]
    async fn long_unread_body_closes_the_connection_with_a_header() {
        let (first, reusable) = send_two_requests(1 << 20).await;
        assert!(first.contains("connection: close\r\n") && !reusable, "{first}");
    }

    /// Sends these bytes on a new connection and returns the complete response.
    async fn send_bytes(bytes: &[u8]) -> String {
        let (mut client, _server) = connect().await;
        client.write_all(bytes).await.unwrap();
        let mut answer = Vec::new();
        client.read_to_end(&mut answer).await.unwrap();
        String::from_utf8(answer).unwrap()
    }

    #[tokio::test]
    async fn malformed_requests_are_answered_with_a_reason_and_an_id() {
        let long = |count: usize| "x".repeat(count);
        for (request, status) in [
            ("\u{1}\r\n\r\n".to_owned(), "400"),
            ("GET / HTTP/9\r\n\r\n".to_owned(), "400"),
            ("GET / HTTP/1.1\r\nno header\r\n\r\n".to_owned(), "400"),
            (format!("GET /?{} HTTP/1.1\r\n\r\n", long(70_000)), "414"),
            (format!("GET /?{} HTTP/1.1\r\n\r\n", long(1 << 20)), "431"),
            (format!("GET / HTTP/1.1\r\nx: {}\r\n\r\n", long(200_000)), "431"),
            (format!("GET / HTTP/1.1\r\n{}\r\n", "a: b\r\n".repeat(101)), "431"),
        ] {
            let answer = send_bytes(request.as_bytes()).await;
            let (head, body) = answer.split_once("\r\n\r\n").unwrap();
            let lines: Vec<&str> = head.lines().collect();
            assert!(lines[0].starts_with(&format!("HTTP/1.1 {status} ")), "{answer}");
            for line in [
                "connection: close",
                "content-type: application/json",
                &format!("content-length: {}", body.len()),
            ] {
                assert_eq!(lines.iter().filter(|other| **other == line).count(), 1, "{line} in {answer}");
            }
            assert!(
                lines
                    .iter()
                    .any(|line| line.len() == "x-request-id: ".len() + 32
                        && line.starts_with("x-request-id: "))
            );
            let body: serde_json::Value = serde_json::from_str(body).unwrap();
            assert!(body["code"].is_string() && body["message"].is_string(), "{body}");
        }
    }

    #[tokio::test]
    async fn pipelined_requests_are_answered_in_order() {
        let answer =
            send_bytes(b"GET / HTTP/1.1\r\nhost: a\r\n\r\nGET / HTTP/1.1\r\nhost: a\r\n\r\n\x01\r\n\r\n")
                .await;
        let statuses = answer.split("\r\n").filter_map(|line| line.split_once("HTTP/1.1 ")?.1.get(..3));
        assert_eq!(statuses.take(3).collect::<Vec<_>>(), ["200", "200", "400"], "{answer}");
        assert!(answer.ends_with("}"), "{answer}");
    }

    /// A response as hyper generates it.
    const BARE: &str = "HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";

    #[tokio::test]
    async fn handler_errors_pass_unchanged() {
        let (mut client, _server) = connect().await;
        client.write_all(b"GET /bare HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n").await.unwrap();
        let mut answer = String::new();
        client.read_to_string(&mut answer).await.unwrap();
        assert!(answer.contains("content-length: 0\r\n") && answer.ends_with("\r\n\r\n"), "{answer}");
        assert!(!answer.contains("x-request-id"), "{answer}");
    }

    #[tokio::test]
    async fn bytes_after_an_upgrade_pass_unchanged() {
        let (mut client, _server) = connect().await;
        let ask = b"GET /up HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: bare\r\n\r\n";
        client.write_all(ask).await.unwrap();
        let mut answer = String::new();
        client.read_to_string(&mut answer).await.unwrap();
        assert!(answer.starts_with("HTTP/1.1 101 ") && answer.ends_with(&BARE.repeat(2)), "{answer}");
    }

    async fn upgrade(mut request: axum::extract::Request) -> Response {
        let upgrade = hyper::upgrade::on(&mut request);
        tokio::spawn(async move {
            let mut stream = TokioIo::new(upgrade.await.unwrap());
            for _ in 0..2 {
                stream.write_all(BARE.as_bytes()).await.unwrap();
                stream.flush().await.unwrap();
            }
        });
        let head = Response::builder().status(101).header("connection", "upgrade").header("upgrade", "bare");
        head.body(axum::body::Body::empty()).unwrap()
    }

    /// Time is paused: it jumps to the next timer whenever nothing else can run.
    #[tokio::test(start_paused = true)]
    async fn connection_without_a_request_is_closed_soon() {
        let (mut client, _server) = connect().await;
        let begun = Instant::now();
        client.write_all(b"GET / HTTP/1.1\r\n").await.unwrap();
        assert_eq!(client.read(&mut [0; 16]).await.unwrap(), 0);
        assert!((FIRST_HEAD_TIMEOUT..HEAD_TIMEOUT).contains(&begun.elapsed()), "{:?}", begun.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn used_connection_may_stay_idle_longer() {
        let (mut client, _server) = connect().await;
        let begun = Instant::now();
        client.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").await.unwrap();
        let mut answer = Vec::new();
        client.read_to_end(&mut answer).await.unwrap();
        assert!(answer.starts_with(b"HTTP/1.1 200 OK\r\n"), "{}", answer.escape_ascii());
        assert!(begun.elapsed() >= HEAD_TIMEOUT, "{:?}", begun.elapsed());
    }
}
