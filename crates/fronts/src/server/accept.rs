//! Accepts connections, up to a limit on open connections.
//!
//! At the limit, no connection is accepted: new ones wait in the kernel's queue. A connection counts
//! against the limit until its socket is closed, even after it was upgraded to another protocol. A
//! connection of an address that has too many without a key is closed at once, as if all addresses together
//! have too many. So is a connection whose
//! client reads nothing of its output for too long.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, Sleep, sleep};

use crate::server::connection::{ClientPeer, ConnectionSettings};
use crate::server::connection_state::ConnectionState;
use crate::server::peer_limits::{AddressLimits, PeerAdmission};

/// Delay after a failed accept, which nearly always means a lack of file descriptors.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);
/// Failures are logged at most once per this interval.
const LOG_INTERVAL: Duration = Duration::from_secs(1);

pub(crate) struct ConnectionAcceptor<L> {
    listener: L,
    permits: Arc<Semaphore>,
    addresses: Arc<AddressLimits>,
    write_timeout: Duration,
    last_logged: Option<Instant>,
}

/// An accepted connection with its permit.
pub(crate) struct AdmittedStream<S> {
    stream: S,
    state: ConnectionState,
    /// Runs while the client reads nothing although there is output.
    stall_timer: Option<Pin<Box<Sleep>>>,
    _permit: OwnedSemaphorePermit,
}

/// The socket of a client.
pub(crate) trait ClientStream: AsyncRead + AsyncWrite + Send + Unpin + 'static {
    /// Makes the kernel drop unsent output when the socket is closed, instead of keeping it for a client
    /// that does not read.
    fn discard_unsent(&self);
}

impl ClientStream for TcpStream {
    fn discard_unsent(&self) {
        if let Err(error) = self.set_zero_linger() {
            tracing::debug!(%error, "the kernel keeps unsent output of a closed connection for a while");
        }
    }
}

impl ClientStream for UnixStream {
    /// Unsent output of a Unix socket lies with its reader.
    fn discard_unsent(&self) {}
}

/// A source of connections.
pub(crate) trait Listener {
    type Stream: ClientStream;
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

/// The socket of a server of one sandbox.
pub(crate) struct PrivateListener(pub(crate) UnixListener);

impl Listener for PrivateListener {
    type Stream = UnixStream;

    async fn accept(&self) -> io::Result<(UnixStream, ClientPeer)> {
        self.0.accept().await.map(|(stream, _nameless)| (stream, ClientPeer::SameUser))
    }
}

impl<L: Listener> ConnectionAcceptor<L> {
    pub(crate) fn new(listener: L, settings: &ConnectionSettings) -> Self {
        let permits = Arc::new(Semaphore::new(settings.connections.min(Semaphore::MAX_PERMITS)));
        let trusted = settings.trusted_proxies.clone();
        let addresses = AddressLimits::new(settings.connections, settings.per_address, trusted);
        Self { listener, permits, addresses, write_timeout: settings.write_timeout, last_logged: None }
    }

    /// Waits for the next connection. Cancel-safe: dropping the future loses no connection.
    pub(crate) async fn next_connection(&mut self) -> (AdmittedStream<L::Stream>, ClientPeer) {
        let permit = self.permits.clone().acquire_owned().await.expect("the semaphore is never closed");
        loop {
            match self.listener.accept().await {
                Ok((stream, peer)) => match self.admit_peer(peer) {
                    Some(state) => {
                        let stream = AdmittedStream { stream, state, stall_timer: None, _permit: permit };
                        return (stream, peer);
                    }
                    None => drop(stream),
                },
                Err(error) => {
                    if self.may_log() {
                        tracing::warn!(%error, "failed to accept a connection; retrying");
                    }
                    sleep(ACCEPT_RETRY_DELAY).await;
                }
            }
        }
    }

    /// The state of a connection of this peer, unless its address has too many.
    fn admit_peer(&mut self, peer: ClientPeer) -> Option<ConnectionState> {
        let address = match self.addresses.admit(peer) {
            PeerAdmission::Trusted => None,
            PeerAdmission::Counted(slot) => Some(slot),
            PeerAdmission::Refused(reason) => {
                metrics::counter!("coracle_http_refused_connections_total").increment(1);
                if self.may_log() {
                    tracing::warn!(?peer, %reason, "connections refused");
                }
                return None;
            }
        };
        Some(ConnectionState::new(address, self.write_timeout))
    }

    fn may_log(&mut self) -> bool {
        let may_log = self.last_logged.is_none_or(|last| last.elapsed() >= LOG_INTERVAL);
        if may_log {
            self.last_logged = Some(Instant::now());
        }
        may_log
    }
}

impl<S: ClientStream> AdmittedStream<S> {
    pub(crate) fn state(&self) -> &ConnectionState {
        &self.state
    }

    /// Turns a write that has waited too long into an error. Any progress starts the time anew, and
    /// without output there is no write that could wait.
    fn check_progress(
        &mut self,
        context: &mut Context<'_>,
        written: Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        let limit = self.state.write_timeout().filter(|_| written.is_pending());
        let Some(limit) = limit else {
            self.stall_timer = None;
            return written;
        };
        let timer = self.stall_timer.get_or_insert_with(|| Box::pin(sleep(limit)));
        ready!(timer.as_mut().poll(context));
        tracing::debug!("closed a connection whose client does not read");
        self.stream.discard_unsent();
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<S: ClientStream> AsyncRead for AdmittedStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: ClientStream> AsyncWrite for AdmittedStream<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.check_progress(context, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, pieces);
        self.check_progress(context, written)
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
        let mut door = ConnectionAcceptor::new(listener, &ConnectionSettings::with_connections(1));
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
