//! The connection to an agent.
//!
//! Tokio writes to a socket only after epoll(7) has reported it as writable, which costs another turn of the runtime,
//! and the agent is woken once by the connection and once more by the request. A new connection has room, so the first
//! write does not wait for a report.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll};

use rustix::net::{AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;

pub(crate) struct AgentSocket {
    stream: UnixStream,
    /// Whether nothing was written so far.
    is_new: bool,
}

impl AgentSocket {
    /// Connects without waiting: if the agent has too many connections that it has not accepted yet, this fails.
    pub(crate) fn connect(path: &str) -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
        Ok(Self { stream: UnixStream::from_std(socket.into())?, is_new: true })
    }
}

impl AsyncRead for AgentSocket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for AgentSocket {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        if std::mem::take(&mut self.is_new)
            && let Ok(count) = rustix::net::send(&self.stream, bytes, SendFlags::NOSIGNAL)
        {
            return Poll::Ready(Ok(count));
        }
        // An error of the first attempt occurs again here.
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match pieces.iter().find(|piece| !piece.is_empty()) {
            Some(first) if self.is_new => self.poll_write(context, first),
            _ => Pin::new(&mut self.stream).poll_write_vectored(context, pieces),
        }
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
    use std::io::Read;
    use std::os::unix::net::UnixListener;
    use std::task::Waker;

    use tokio::io::AsyncWriteExt;

    use super::*;

    fn connected() -> (AgentSocket, std::os::unix::net::UnixStream) {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("socket");
        let listener = UnixListener::bind(&path).expect("it listens");
        let socket = AgentSocket::connect(path.to_str().expect("text")).expect("it connects");
        (socket, listener.accept().expect("a connection").0)
    }

    #[tokio::test]
    async fn first_write_does_not_wait_for_a_report() {
        let (mut socket, mut agent) = connected();
        let mut context = Context::from_waker(Waker::noop());
        let written = Pin::new(&mut socket).poll_write(&mut context, b"request");
        assert!(matches!(written, Poll::Ready(Ok(7))), "{written:?}");
        let mut received = [0; 7];
        agent.read_exact(&mut received).expect("the request");
        assert_eq!(&received, b"request");
    }

    #[tokio::test]
    async fn long_request_arrives_whole() {
        let (mut socket, mut agent) = connected();
        let reader = std::thread::spawn(move || {
            let mut received = Vec::new();
            agent.read_to_end(&mut received).expect("the request");
            received
        });
        let request: Vec<u8> = (0..4_000_000_u32).map(|number| number.to_le_bytes()[0]).collect();
        socket.write_all(&request).await.expect("it is sent");
        socket.shutdown().await.expect("it ends");
        assert!(reader.join().expect("it does not panic") == request);
    }

    #[tokio::test]
    async fn closed_agent_is_an_error_of_the_first_write() {
        let (mut socket, agent) = connected();
        drop(agent);
        let error = socket.write_all(b"request").await.expect_err("nobody reads");
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
    }
}
