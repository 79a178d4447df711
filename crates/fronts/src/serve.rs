//! Speaks HTTP/1.1 on a listener until told to stop.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::Router;
use axum::response::Response;
use http::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::sleep;
use tower::ServiceExt;

use crate::door::{Door, Entrance, Visitor};
use crate::leftover::Home;

const LARGEST_HEADERS: usize = 64 << 10;
/// How long a connection may wait for the whole head of its next request. hyper counts the
/// idle time before it as well, and clients keep idle connections for 30 to 60 seconds: a
/// shorter time would reset one just as it is used again.
const HEAD_TIME: Duration = Duration::from_secs(90);
/// As above, for the first request: whoever connects has something to say.
const FIRST_HEAD_TIME: Duration = Duration::from_secs(10);
/// How long requests in progress may go on once the server stops.
const GRACE: Duration = Duration::from_secs(5);

/// The other end of the connection that a request came on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Peer {
    Network(SocketAddr),
    /// Whoever may open the socket in the state directory.
    Operator,
}

/// How many operators may be connected at once.
const OPERATORS: usize = 64;

/// Serves at most `most` connections at once until `shutdown` resolves, then lets requests in
/// progress end for a short while.
pub async fn serve(listener: TcpListener, most: usize, router: Router, shutdown: impl Future<Output = ()>) {
    serve_at(listener, most, router, shutdown).await
}

/// As [`serve`], for whoever may open a socket that the kernel guards by its mode.
pub async fn serve_operators(listener: UnixListener, router: Router, shutdown: impl Future<Output = ()>) {
    serve_at(listener, OPERATORS, router, shutdown).await
}

async fn serve_at<L: Entrance>(listener: L, most: usize, router: Router, shutdown: impl Future<Output = ()>) {
    let mut door = Door::new(listener, most);
    let (stop, stopping) = watch::channel(false);
    let mut connections = JoinSet::new();
    let mut shutdown = pin!(shutdown);
    loop {
        // Every branch may be dropped: nothing is lost by accepting or reaping a turn later.
        tokio::select! {
            () = &mut shutdown => break,
            Some(_) = connections.join_next() => {}
            (visitor, peer) = door.next() => {
                connections.spawn(converse(visitor, peer, router.clone(), stopping.clone()));
            }
        }
    }
    drop(door);
    stop.send_replace(true);
    let all_ended = async { while connections.join_next().await.is_some() {} };
    if tokio::time::timeout(GRACE, all_ended).await.is_err() {
        tracing::info!(open = connections.len(), "closing connections whose requests go on");
    }
}

/// One connection, from its first request to its end.
async fn converse<S>(stream: Visitor<S>, peer: Peer, router: Router, mut stopping: watch::Receiver<bool>)
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let asked = Arc::new(AtomicBool::new(false));
    let heard = asked.clone();
    let answer = service_fn(move |request| {
        heard.store(true, Ordering::Relaxed);
        answer(router.clone(), peer, request)
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIME)
        .max_header_size(LARGEST_HEADERS)
        .serve_connection(TokioIo::new(stream), answer)
        .with_upgrades();
    let mut connection = pin!(connection);
    let silent = async {
        sleep(FIRST_HEAD_TIME).await;
        if asked.load(Ordering::Relaxed) {
            std::future::pending::<()>().await;
        }
    };
    let ended = tokio::select! {
        ended = &mut connection => ended,
        () = silent => {
            tracing::debug!("a connection was closed that asked for nothing");
            return;
        }
        _ = stopping.changed() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "a connection broke");
    }
}

async fn answer(router: Router, peer: Peer, request: Request<Incoming>) -> Result<Response, Infallible> {
    let home = Home::default();
    let mut request = home.lend(request);
    request.extensions_mut().insert(peer);
    let mut response = router.oneshot(request).await?;
    home.settle(&mut response).await;
    Ok(response)
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
        let router = Router::new().route("/", get(|| async { "answer" }));
        let mut server = JoinSet::new();
        server.spawn(serve(listener, 1, router, std::future::pending()));
        (client, server)
    }

    /// Sends two requests on one connection, the body of the first after its head, to a handler
    /// that reads none.
    async fn answers(body: usize) -> (String, bool) {
        let (mut client, _server) = connect().await;
        let head = format!("POST /no HTTP/1.1\r\nHost: localhost\r\nContent-Length: {body}\r\n\r\n");
        client.write_all(head.as_bytes()).await.unwrap();
        tokio::task::yield_now().await;
        // It may refuse the rest of a long one.
        client.write_all(&vec![b'x'; body]).await.unwrap_or_default();
        let mut answer = [0; 1 << 12];
        let count = client.read(&mut answer).await.unwrap();
        let first = String::from_utf8_lossy(&answer[..count]).into_owned();
        let asked = client.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").await;
        let second = client.read(&mut answer).await;
        (first, asked.is_ok() && second.is_ok_and(|count| count > 0))
    }

    #[tokio::test]
    async fn a_body_that_nobody_read_does_not_cost_the_connection() {
        let (first, goes_on) = answers(40).await;
        assert!(first.starts_with("HTTP/1.1 404") && goes_on, "{first}");
    }

    #[tokio::test]
    async fn a_long_body_that_nobody_read_ends_the_connection_as_told() {
        let (first, goes_on) = answers(1 << 20).await;
        assert!(first.contains("connection: close\r\n") && !goes_on, "{first}");
    }

    /// Time is not waited for: it jumps to the next timer whenever nothing else happens.
    #[tokio::test(start_paused = true)]
    async fn a_connection_that_asks_for_nothing_is_closed_soon() {
        let (mut client, _server) = connect().await;
        let begun = Instant::now();
        client.write_all(b"GET / HTTP/1.1\r\n").await.unwrap();
        assert_eq!(client.read(&mut [0; 16]).await.unwrap(), 0);
        assert!((FIRST_HEAD_TIME..HEAD_TIME).contains(&begun.elapsed()), "{:?}", begun.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_that_was_used_may_rest_longer() {
        let (mut client, _server) = connect().await;
        let begun = Instant::now();
        client.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").await.unwrap();
        let mut answer = Vec::new();
        client.read_to_end(&mut answer).await.unwrap();
        assert!(answer.starts_with(b"HTTP/1.1 200 OK\r\n"), "{}", answer.escape_ascii());
        assert!(begun.elapsed() >= HEAD_TIME, "{:?}", begun.elapsed());
    }
}
