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

use crate::serve::Peer;

/// Delay after a failed accept, which nearly always means a lack of file descriptors.
const PAUSE: Duration = Duration::from_millis(100);
/// Failures are logged at most once per this interval.
const QUIET: Duration = Duration::from_secs(1);

pub(crate) struct Door<L> {
    listener: L,
    places: Arc<Semaphore>,
    complained: Option<Instant>,
}

/// An accepted connection with its permit.
pub(crate) struct Visitor<S> {
    stream: S,
    _place: OwnedSemaphorePermit,
}

/// A source of connections.
pub(crate) trait Entrance {
    type Stream: AsyncRead + AsyncWrite + Send + Unpin + 'static;
    /// Cancel-safe, like [`Door::next`]: dropping the future loses no connection.
    fn accept(&self) -> impl Future<Output = io::Result<(Self::Stream, Peer)>> + Send;
}

impl Entrance for TcpListener {
    type Stream = TcpStream;

    async fn accept(&self) -> io::Result<(TcpStream, Peer)> {
        let (stream, peer) = self.accept().await?;
        // Output comes in small pieces that must not wait for each other. If this fails, the connection
        // is already closed, which the first read reports.
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%error, "connection closed before it was served");
        }
        Ok((stream, Peer::Network(peer)))
    }
}

impl Entrance for UnixListener {
    type Stream = UnixStream;

    async fn accept(&self) -> io::Result<(UnixStream, Peer)> {
        self.accept().await.map(|(stream, _nameless)| (stream, Peer::Operator))
    }
}

impl<L: Entrance> Door<L> {
    pub(crate) fn new(listener: L, connections: usize) -> Self {
        let places = Arc::new(Semaphore::new(connections.min(Semaphore::MAX_PERMITS)));
        Self { listener, places, complained: None }
    }

    /// Waits for the next connection. Cancel-safe: dropping the future loses no connection.
    pub(crate) async fn next(&mut self) -> (Visitor<L::Stream>, Peer) {
        let permit = self.places.clone().acquire_owned().await.expect("the semaphore is never closed");
        loop {
            match self.listener.accept().await {
                Ok((stream, peer)) => return (Visitor { stream, _place: permit }, peer),
                Err(error) => {
                    self.complain(&error);
                    sleep(PAUSE).await;
                }
            }
        }
    }

    fn complain(&mut self, error: &io::Error) {
        if self.complained.is_none_or(|last| last.elapsed() >= QUIET) {
            tracing::warn!(%error, "failed to accept a connection; retrying");
            self.complained = Some(Instant::now());
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Visitor<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Visitor<S> {
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
        let mut door = Door::new(listener, 1);
        let _first = TcpStream::connect(address).await.unwrap();
        let (inside, _) = door.next().await;
        let second = TcpStream::connect(address).await.unwrap();
        // The handshake of the second connection is complete, so only the limit holds it back.
        assert!(door.next().now_or_never().is_none());
        assert_eq!(door.places.available_permits(), 0);
        drop(inside);
        let (_, peer) = door.next().await;
        assert_eq!(peer, Peer::Network(second.local_addr().unwrap()));
    }
}
