//! Accepts connections, up to a limit on open connections.
//!
//! At the limit, no connection is accepted: new ones wait in the kernel's queue. A connection counts
//! against the limit until its socket is closed, even after it was upgraded to another protocol.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, sleep};

use crate::server::connection::ClientPeer;

/// Delay after a failed accept, which nearly always means a lack of file descriptors.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);
/// Failures are logged at most once per this interval.
const LOG_INTERVAL: Duration = Duration::from_secs(1);

pub(crate) struct ConnectionAcceptor<L> {
    listener: L,
    permits: Arc<Semaphore>,
    last_logged: Option<Instant>,
}

/// An accepted connection with its permit.
pub(crate) struct AdmittedStream<S> {
    stream: S,
    _permit: OwnedSemaphorePermit,
}

/// A source of connections.
pub(crate) trait Listener {
    type Stream: AsyncRead + AsyncWrite + Send + Unpin + 'static;
    /// Cancel-safe, like [`ConnectionAcceptor::next_connection`]: dropping the future loses no connection.
    fn accept(&self) -> impl Future<Output = io::Result<(Self::Stream, ClientPeer)>> + Send;
}

impl Listener for TcpListener {
    type Stream = TcpStream;

    async fn accept(&self) -> io::Result<(TcpStream, ClientPeer)> {
        let (stream, peer) = self.accept().await?;
        // Output comes in small pieces that must not wait for each other. If this fails, the connection
        // is already closed, which the first read reports.
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%error, "connection closed before it was served");
        }
        Ok((stream, ClientPeer::Network(peer)))
    }
}

impl Listener for UnixListener {
    type Stream = UnixStream;

    async fn accept(&self) -> io::Result<(UnixStream, ClientPeer)> {
        self.accept().await.map(|(stream, _nameless)| (stream, ClientPeer::Operator))
    }
}

impl<L: Listener> ConnectionAcceptor<L> {
    pub(crate) fn new(listener: L, connections: usize) -> Self {
        let places = Arc::new(Semaphore::new(connections.min(Semaphore::MAX_PERMITS)));
        Self { listener, permits: places, last_logged: None }
    }

    /// Waits for the next connection. Cancel-safe: dropping the future loses no connection.
    pub(crate) async fn next_connection(&mut self) -> (AdmittedStream<L::Stream>, ClientPeer) {
        let permit = self.permits.clone().acquire_owned().await.expect("the semaphore is never closed");
        loop {
            match self.listener.accept().await {
                Ok((stream, peer)) => return (AdmittedStream { stream, _permit: permit }, peer),
                Err(error) => {
                    self.log_accept_error(&error);
                    sleep(ACCEPT_RETRY_DELAY).await;
                }
            }
        }
    }

    fn log_accept_error(&mut self, error: &io::Error) {
        if self.last_logged.is_none_or(|last| last.elapsed() >= LOG_INTERVAL) {
            tracing::warn!(%error, "failed to accept a connection; retrying");
            self.last_logged = Some(Instant::now());
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for AdmittedStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for AdmittedStream<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, pieces)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[tokio::test]
    async fn accepting_resumes_when_a_connection_closes() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut door = ConnectionAcceptor::new(listener, 1);
        let _first = TcpStream::connect(address).await.unwrap();
        let (inside, _) = door.next_connection().await;
        let second = TcpStream::connect(address).await.unwrap();
        // The handshake of the second connection is complete, so only the limit holds it back.
        assert!(door.next_connection().now_or_never().is_none());
        assert_eq!(door.permits.available_permits(), 0);
        drop(inside);
        let (_, peer) = door.next_connection().await;
        assert_eq!(peer, ClientPeer::Network(second.local_addr().unwrap()));
    }
}
