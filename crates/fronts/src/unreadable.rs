//! Answers what cannot be read as a request.
//!
//! hyper answers that by itself, with a status and nothing else, and there are clients that take
//! an error without a body for a success. It has no hook for this, so its answer is exchanged on
//! the way to the socket. It is known by its moment: what hyper sends while every request that
//! it handed on was answered, and every answer was flushed, is its own. In any other moment, and
//! once a connection was upgraded, bytes pass as they are.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::response::Response;
use http::StatusCode;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Sleep, sleep};

use crate::answer::words;
use crate::limits::hold;
use crate::trace::unique_hex;

/// How long, and how much of what a client still sends is read after the last word. Whoever
/// closes with bytes unread resets the connection, and with it what the client has not read yet.
const LINGER: Duration = Duration::from_secs(2);
const MOST_LINGERED: usize = 4 << 20;

/// The requests of one connection.
#[derive(Clone, Default)]
pub(crate) struct Ledger(Arc<Counts>);

#[derive(Default)]
struct Counts {
    /// Requests that were handed on.
    handed: AtomicU64,
    /// Those among them whose answer hyper has not taken whole.
    open: AtomicU64,
}

/// One request; it is open until this is dropped.
pub(crate) struct Entry(Ledger);

impl Ledger {
    pub(crate) fn enter(&self) -> Entry {
        self.0.handed.fetch_add(1, Ordering::Relaxed);
        self.0.open.fetch_add(1, Ordering::Relaxed);
        Entry(self.clone())
    }

    fn is_open(&self) -> bool {
        self.0.open.load(Ordering::Relaxed) > 0
    }

    fn handed(&self) -> u64 {
        self.0.handed.load(Ordering::Relaxed)
    }
}

impl Entry {
    /// Keeps the request open until all of its answer was taken, and for good if the connection
    /// becomes something else by it.
    pub(crate) fn close_with(self, response: Response) -> Response {
        if response.status() == StatusCode::SWITCHING_PROTOCOLS {
            self.0.0.open.fetch_add(1, Ordering::Relaxed);
        }
        response.map(|body| hold(body, self))
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.0.0.open.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A connection on which hyper's own answers are exchanged.
pub(crate) struct Watched<S> {
    stream: S,
    ledger: Ledger,
    /// How many requests were handed on before all that was said was flushed.
    settled: u64,
    farewell: Option<Farewell>,
}

/// The last answer on a connection.
struct Farewell {
    unsent: Vec<u8>,
    shut: bool,
    heard: usize,
    patience: Pin<Box<Sleep>>,
}

impl<S> Watched<S> {
    pub(crate) fn new(stream: S, ledger: Ledger) -> Self {
        Self { stream, ledger, settled: 0, farewell: None }
    }

    /// Takes an answer of hyper's own in exchange for a better one, if these bytes are one.
    fn exchange(&mut self, pieces: &[IoSlice<'_>]) -> Option<usize> {
        if self.ledger.is_open() || self.settled != self.ledger.handed() {
            return None;
        }
        let theirs: Vec<u8> = pieces.iter().flat_map(|piece| piece.iter().copied()).collect();
        let unsent = instead_of(&theirs)?;
        self.farewell = Some(Farewell { unsent, shut: false, heard: 0, patience: Box::pin(sleep(LINGER)) });
        Some(theirs.len())
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> Watched<S> {
    fn say(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let Some(farewell) = &mut self.farewell else { return Poll::Ready(Ok(())) };
        while !farewell.unsent.is_empty() {
            let count = ready!(Pin::new(&mut self.stream).poll_write(context, &farewell.unsent))?;
            if count == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            farewell.unsent.drain(..count);
        }
        Poll::Ready(Ok(()))
    }

    /// Hears the client out, for a bounded while.
    fn linger(&mut self, context: &mut Context<'_>) -> Poll<()> {
        let Some(farewell) = &mut self.farewell else { return Poll::Ready(()) };
        let mut room = [0; 4096];
        while farewell.heard < MOST_LINGERED {
            let mut buffer = ReadBuf::new(&mut room);
            match Pin::new(&mut self.stream).poll_read(context, &mut buffer) {
                Poll::Ready(Ok(())) if !buffer.filled().is_empty() => farewell.heard += buffer.filled().len(),
                Poll::Ready(_) => return Poll::Ready(()),
                Poll::Pending => return farewell.patience.as_mut().poll(context),
            }
        }
        Poll::Ready(())
    }
}

/// What is sent in place of an answer that hyper made up, if these bytes are the whole of one.
fn instead_of(theirs: &[u8]) -> Option<Vec<u8>> {
    let head = str::from_utf8(theirs).ok()?.strip_suffix("\r\n\r\n")?;
    let (first, rest) = head.split_once("\r\n")?;
    let status = first.strip_prefix("HTTP/1.")?.get(2..5)?.parse::<u16>().ok()?;
    let (code, message) = reason(StatusCode::from_u16(status).ok()?)?;
    let others: Vec<&str> = rest.split("\r\n").filter(|line| *line != "content-length: 0").collect();
    if others.len() + 1 != rest.split("\r\n").count() {
        return None;
    }
    let (id, body) = (unique_hex(), words(code, message));
    tracing::info!(target: "access", request_id = id, route = "unreadable", status, "answered");
    let (others, length) = (others.join("\r\n"), body.len());
    let ours = format!("content-type: application/json\r\ncontent-length: {length}\r\nx-request-id: {id}");
    Some(format!("{first}\r\n{others}\r\n{ours}\r\n\r\n{body}").into_bytes())
}

fn reason(status: StatusCode) -> Option<(&'static str, &'static str)> {
    match status {
        StatusCode::BAD_REQUEST => Some(("BAD_REQUEST", "this is not a request in HTTP/1.1")),
        StatusCode::URI_TOO_LONG => Some((
            "URI_TOO_LONG",
            "path and query of a request have at most 65534 bytes; name fewer paths in each request",
        )),
        StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE => Some((
            "REQUEST_HEADER_FIELDS_TOO_LARGE",
            "address and headers of a request have at most 128 KiB and 100 headers; name fewer paths in each request",
        )),
        _ => None,
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Watched<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Watched<S> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(context, &[IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.exchange(pieces) {
            Some(taken) => Poll::Ready(Ok(taken)),
            None => Pin::new(&mut self.stream).poll_write_vectored(context, pieces),
        }
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.say(context))?;
        ready!(Pin::new(&mut self.stream).poll_flush(context))?;
        if !self.ledger.is_open() {
            self.settled = self.ledger.handed();
        }
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.say(context))?;
        if self.farewell.as_ref().is_none_or(|farewell| !farewell.shut) {
            ready!(Pin::new(&mut self.stream).poll_shutdown(context))?;
        }
        if let Some(farewell) = &mut self.farewell {
            farewell.shut = true;
        }
        self.linger(context).map(Ok)
    }
}
