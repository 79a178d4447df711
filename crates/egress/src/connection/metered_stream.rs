//! A connection whose bytes are counted and limited as they are read and written by a library.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use rustix::net::Shutdown;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::Sleep;

use crate::sandbox::{ConnectionTraffic, Direction};

/// A socket that others hold too, so that they can reset it.
pub(crate) struct MeteredStream {
    stream: Arc<TcpStream>,
    /// `None` for the near side, whose bytes are counted at the far side.
    traffic: Option<Arc<ConnectionTraffic>>,
    pause: Option<Pin<Box<Sleep>>>,
}

impl MeteredStream {
    pub(crate) fn new(stream: Arc<TcpStream>, traffic: Option<Arc<ConnectionTraffic>>) -> Self {
        Self { stream, traffic, pause: None }
    }

    fn count(&mut self, direction: Direction, bytes: usize) {
        let pause = self.traffic.as_ref().map(|traffic| traffic.count_now(direction, bytes as u64));
        if let Some(pause) = pause.filter(|pause| !pause.is_zero()) {
            self.pause = Some(Box::pin(tokio::time::sleep(pause)));
        }
    }

    fn poll_pause(&mut self, context: &mut Context<'_>) -> Poll<()> {
        if let Some(pause) = &mut self.pause {
            ready!(pause.as_mut().poll(context));
            self.pause = None;
        }
        Poll::Ready(())
    }
}

impl AsyncRead for MeteredStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        ready!(self.poll_pause(context));
        loop {
            ready!(self.stream.poll_read_ready(context))?;
            match self.stream.try_read(buffer.initialize_unfilled()) {
                Ok(count) => {
                    buffer.advance(count);
                    self.count(Direction::Received, count);
                    return Poll::Ready(Ok(()));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }
}

impl AsyncWrite for MeteredStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        ready!(self.poll_pause(context));
        loop {
            ready!(self.stream.poll_write_ready(context))?;
            match self.stream.try_write(bytes) {
                Ok(count) => {
                    self.count(Direction::Sent, count);
                    return Poll::Ready(Ok(count));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        match rustix::net::shutdown(&*self.stream, Shutdown::Write) {
            Err(rustix::io::Errno::NOTCONN) => Poll::Ready(Ok(())),
            outcome => Poll::Ready(Ok(outcome?)),
        }
    }
}
