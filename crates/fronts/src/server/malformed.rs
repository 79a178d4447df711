//! Answers input that cannot be parsed as a request.
//!
//! hyper answers such input by itself, with a status and an empty body, and some clients treat an
//! error without a body as success. hyper has no hook for this, so its response is replaced on the
//! way to the socket. It is recognised by its timing: bytes that hyper writes while every request it
//! passed on has been answered, and every answer flushed, are its own. At any other time, and once a
//! connection is upgraded, bytes pass unchanged.

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

use crate::registry::UNROUTED_ERRORS;
use crate::server::concurrency::attach_guard;
use crate::server::request_log::unique_hex;

/// How long, and how much of what a client still sends is read after the final response. Closing a
/// socket with unread bytes resets the connection, and the client loses what it has not read yet.
const LINGER_TIMEOUT: Duration = Duration::from_secs(2);
const MAX_LINGERED_BYTES: usize = 4 << 20;

/// Counts the requests of one connection.
#[derive(Clone, Default)]
pub(crate) struct InFlight(Arc<RequestCounts>);

#[derive(Default)]
struct RequestCounts {
    /// Requests that were passed to the router.
    handed_over: AtomicU64,
    /// Requests among them whose response hyper has not fully consumed.
    open: AtomicU64,
}

/// One request, open until this is dropped.
pub(crate) struct InFlightRequest(InFlight);

impl InFlight {
    pub(crate) fn begin_request(&self) -> InFlightRequest {
        self.0.handed_over.fetch_add(1, Ordering::Relaxed);
        self.0.open.fetch_add(1, Ordering::Relaxed);
        InFlightRequest(self.clone())
    }

    fn is_open(&self) -> bool {
        self.0.open.load(Ordering::Relaxed) > 0
    }

    fn handed_over(&self) -> u64 {
        self.0.handed_over.load(Ordering::Relaxed)
    }
}

impl InFlightRequest {
    /// Keeps the request open until hyper has consumed the whole response, and forever if the response
    /// upgrades the connection.
    pub(crate) fn close_with(self, response: Response) -> Response {
        if response.status() == StatusCode::SWITCHING_PROTOCOLS {
            self.0.0.open.fetch_add(1, Ordering::Relaxed);
        }
        response.map(|body| attach_guard(body, self))
    }
}

impl Drop for InFlightRequest {
    fn drop(&mut self) {
        self.0.0.open.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A connection on which hyper's own responses are replaced.
pub(crate) struct RewritingStream<S> {
    stream: S,
    in_flight: InFlight,
    /// How many requests had been passed on when all output was last flushed.
    flushed_requests: u64,
    final_response: Option<FinalResponse>,
}

/// The last response on a connection.
struct FinalResponse {
    unsent: Vec<u8>,
    shut: bool,
    drained_bytes: usize,
    linger_timer: Pin<Box<Sleep>>,
}

impl<S> RewritingStream<S> {
    pub(crate) fn new(stream: S, ledger: InFlight) -> Self {
        Self { stream, in_flight: ledger, flushed_requests: 0, final_response: None }
    }

    /// Replaces these bytes with a better response if they are one of hyper's own.
    fn replace_response(&mut self, pieces: &[IoSlice<'_>]) -> Option<usize> {
        if self.in_flight.is_open() || self.flushed_requests != self.in_flight.handed_over() {
            return None;
        }
        let theirs: Vec<u8> = pieces.iter().flat_map(|piece| piece.iter().copied()).collect();
        let unsent = replacement_for(&theirs)?;
        self.final_response = Some(FinalResponse {
            unsent,
            shut: false,
            drained_bytes: 0,
            linger_timer: Box::pin(sleep(LINGER_TIMEOUT)),
        });
        Some(theirs.len())
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> RewritingStream<S> {
    fn poll_send_final(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let Some(farewell) = &mut self.final_response else { return Poll::Ready(Ok(())) };
        while !farewell.unsent.is_empty() {
            let count = ready!(Pin::new(&mut self.stream).poll_write(context, &farewell.unsent))?;
            if count == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            farewell.unsent.drain(..count);
        }
        Poll::Ready(Ok(()))
    }

    /// Reads and discards what the client still sends, for a bounded time.
    fn poll_drain_input(&mut self, context: &mut Context<'_>) -> Poll<()> {
        let Some(farewell) = &mut self.final_response else { return Poll::Ready(()) };
        let mut room = [0; 4096];
        while farewell.drained_bytes < MAX_LINGERED_BYTES {
            let mut buffer = ReadBuf::new(&mut room);
            match Pin::new(&mut self.stream).poll_read(context, &mut buffer) {
                Poll::Ready(Ok(())) if !buffer.filled().is_empty() => {
                    farewell.drained_bytes += buffer.filled().len()
                }
                Poll::Ready(_) => return Poll::Ready(()),
                Poll::Pending => return farewell.linger_timer.as_mut().poll(context),
            }
        }
        Poll::Ready(())
    }
}

/// Returns the response to send instead, if these bytes are a complete response generated by hyper.
fn replacement_for(theirs: &[u8]) -> Option<Vec<u8>> {
    let head = str::from_utf8(theirs).ok()?.strip_suffix("\r\n\r\n")?;
    let (first, rest) = head.split_once("\r\n")?;
    let status = first.strip_prefix("HTTP/1.")?.get(2..5)?.parse::<u16>().ok()?;
    let status = StatusCode::from_u16(status).ok()?;
    let (code, message) = error_for_status(status)?;
    let others: Vec<&str> = rest.split("\r\n").filter(|line| *line != "content-length: 0").collect();
    if others.len() + 1 != rest.split("\r\n").count() {
        return None;
    }
    // Bytes that cannot be parsed name no path, so no front claims them.
    let format = UNROUTED_ERRORS;
    let (id, body) = (unique_hex(), (format.body)(status, code, message));
    tracing::info!(target: "access", request_id = id, route = "unreadable", status = status.as_u16(), "request completed");
    let (others, length, kind) = (others.join("\r\n"), body.len(), format.content_type);
    let ours = format!("content-type: {kind}\r\ncontent-length: {length}\r\nx-request-id: {id}");
    Some(format!("{first}\r\n{others}\r\n{ours}\r\n\r\n{body}").into_bytes())
}

fn error_for_status(status: StatusCode) -> Option<(&'static str, &'static str)> {
    match status {
        StatusCode::BAD_REQUEST => Some(("BAD_REQUEST", "malformed HTTP/1.1 request")),
        StatusCode::URI_TOO_LONG => {
            Some(("URI_TOO_LONG", "path and query exceed 65534 bytes; send fewer paths per request"))
        }
        StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE => Some((
            "REQUEST_HEADER_FIELDS_TOO_LARGE",
            "request head exceeds 128 KiB or 100 headers; send fewer paths per request",
        )),
        _ => None,
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for RewritingStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for RewritingStream<S> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(context, &[IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.replace_response(pieces) {
            Some(taken) => Poll::Ready(Ok(taken)),
            None => Pin::new(&mut self.stream).poll_write_vectored(context, pieces),
        }
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_send_final(context))?;
        ready!(Pin::new(&mut self.stream).poll_flush(context))?;
        if !self.in_flight.is_open() {
            self.flushed_requests = self.in_flight.handed_over();
        }
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_send_final(context))?;
        if self.final_response.as_ref().is_none_or(|farewell| !farewell.shut) {
            ready!(Pin::new(&mut self.stream).poll_shutdown(context))?;
        }
        if let Some(farewell) = &mut self.final_response {
            farewell.shut = true;
        }
        self.poll_drain_input(context).map(Ok)
    }
}
