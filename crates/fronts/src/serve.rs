//! Speaks HTTP/1.1 on a listener until told to stop.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::pin;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::response::Response;
use http::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tower::ServiceExt;

const LARGEST_HEADERS: usize = 64 << 10;
/// How long a connection may wait for the whole head of its next request. hyper counts the
/// idle time before it as well, and clients keep idle connections for 30 to 60 seconds: a
/// shorter time would reset one just as it is used again.
const HEAD_TIME: Duration = Duration::from_secs(90);
/// How long requests in progress may go on once the server stops.
const GRACE: Duration = Duration::from_secs(5);
/// A pause after a failed accept, which is nearly always a lack of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The other end of the connection that a request came on.
#[derive(Clone, Copy)]
pub(crate) struct Peer(pub(crate) SocketAddr);

/// Serves until `shutdown` resolves, then lets requests in progress end for a short while.
pub async fn serve(listener: TcpListener, router: Router, shutdown: impl Future<Output = ()>) {
    let (stop, stopping) = watch::channel(false);
    let mut connections = JoinSet::new();
    let mut shutdown = pin!(shutdown);
    loop {
        // Every branch may be dropped: nothing is lost by accepting or reaping a turn later.
        tokio::select! {
            () = &mut shutdown => break,
            Some(_) = connections.join_next() => {}
            accepted = listener.accept() => match accepted {
                Ok((stream, peer)) => {
                    connections.spawn(converse(stream, Peer(peer), router.clone(), stopping.clone()));
                }
                Err(error) => {
                    tracing::warn!(%error, "could not accept a connection");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }
    drop(listener);
    stop.send_replace(true);
    let all_ended = async { while connections.join_next().await.is_some() {} };
    if tokio::time::timeout(GRACE, all_ended).await.is_err() {
        tracing::info!(open = connections.len(), "closing connections whose requests go on");
    }
}

/// One connection, from its first request to its end.
async fn converse(stream: TcpStream, peer: Peer, router: Router, mut stopping: watch::Receiver<bool>) {
    // Output comes in small pieces that must not wait for each other.
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "a connection was gone before it was served");
        return;
    }
    let answer = service_fn(move |request| answer(router.clone(), peer, request));
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIME)
        .max_header_size(LARGEST_HEADERS)
        .serve_connection(TokioIo::new(stream), answer)
        .with_upgrades();
    let mut connection = pin!(connection);
    let ended = tokio::select! {
        ended = &mut connection => ended,
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
    let mut request = request.map(Body::new);
    request.extensions_mut().insert(peer);
    router.oneshot(request).await
}
