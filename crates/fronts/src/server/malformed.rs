//! Answers input that cannot be parsed as a request.
//!
//! hyper answers such input by itself, with a status and an empty body, and some clients treat an
//! error without a body as success. hyper has no hook for this, so its response is replaced on the
//! way to the socket. It is recognised by its timing: bytes that hyper writes while every request it
//! passed on has been answered, and every answer flushed, are its own. At any other time, and once a
//! connection is upgraded, bytes pass unchanged. A head that `head_limit.rs` refuses is answered here too.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::response::Response;
use http::StatusCode;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::Semaphore;
use tokio::time::{Sleep, sleep};

use crate::registry::UNROUTED_ERRORS;
use crate::server::accept::{AdmittedStream, ClientStream};
use crate::server::concurrency::attach_guard;
use crate::server::connection_state::ConnectionState;
use crate::server::head_limit::{HeadLimit, HeadRefusal, HeadRoom};
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

    pub(crate) fn is_open(&self) -> bool {
        self.0.open.load(Ordering::Relaxed) > 0
    }

    pub(crate) fn handed_over(&self) -> u64 {
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
    stream: AdmittedStream<S>,
    in_flight: InFlight,
    head_limit: HeadLimit,
    /// How many requests had been passed on when all output was last flushed.
    flushed_requests: u64,
    final_response: Option<FinalResponse>,
    /// Whether the final response is ours alone: hyper still waits for the rest of a head.
    refusing: bool,
}

/// The last response on a connection.
struct FinalResponse {
    unsent: Vec<u8>,
    shut: bool,
    drained_bytes: usize,
    linger_timer: Pin<Box<Sleep>>,
}

impl FinalResponse {
    fn new(unsent: Vec<u8>) -> Self {
        Self { unsent, shut: false, drained_bytes: 0, linger_timer: Box::pin(sleep(LINGER_TIMEOUT)) }
    }
}

impl<S: ClientStream> RewritingStream<S> {
    pub(crate) fn new(stream: AdmittedStream<S>, large_heads: Arc<Semaphore>) -> Self {
        let head_limit = HeadLimit::new(stream.state().clone(), large_heads);
        let in_flight = InFlight::default();
        Self { stream, in_flight, head_limit, flushed_requests: 0, final_response: None, refusing: false }
    }

    pub(crate) fn in_flight(&self) -> &InFlight {
        &self.in_flight
    }

    pub(crate) fn state(&self) -> &ConnectionState {
        self.stream.state()
    }

    /// Replaces these bytes with a better response if they are one of hyper's own.
    fn replace_response(&mut self, pieces: &[IoSlice<'_>]) -> Option<usize> {
        if self.in_flight.is_open() || self.flushed_requests != self.in_flight.handed_over() {
            return None;
        }
        let theirs: Vec<u8> = pieces.iter().flat_map(|piece| piece.iter().copied()).collect();
        let unsent = replacement_for(&theirs)?;
        self.final_response = Some(FinalResponse::new(unsent));
        Some(theirs.len())
    }

    /// Reads at most `most` bytes, so that hyper's buffer stays small.
    fn poll_read_some(
        &mut self,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
        most: usize,
    ) -> Poll<io::Result<()>> {
        let most = most.min(buffer.remaining());
        let mut part = ReadBuf::new(buffer.initialize_unfilled_to(most));
        ready!(Pin::new(&mut self.stream).poll_read(context, &mut part))?;
        let count = part.filled().len();
        buffer.advance(count);
        self.head_limit.record(count);
        Poll::Ready(Ok(()))
    }

    /// Sends the refusal of a head, then reports the end of the input. hyper closes the connection.
    fn poll_refuse(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(self).poll_shutdown(context)
    }

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
    Some(build_final_response(first, &others.join("\r\n"), status, code, message))
}

/// Builds the response to a head that is not read to its end.
fn build_refusal(refusal: HeadRefusal) -> Vec<u8> {
    let (status, code, message) = refusal.error();
    build_final_response(&format!("HTTP/1.1 {status}"), "connection: close", status, code, message)
}

/// Builds a response from its status line, its other headers, and the error it reports.
fn build_final_response(
    status_line: &str,
    headers: &str,
    status: StatusCode,
    code: &str,
    message: &str,
) -> Vec<u8> {
    // Bytes that cannot be parsed name no path, so no front claims them.
    let format = UNROUTED_ERRORS;
    let (id, body) = (unique_hex(), (format.body)(status, code, message));
    tracing::info!(target: "access", request_id = id, route = "unreadable", status = status.as_u16(), "request completed");
    let (length, kind) = (body.len(), format.content_type);
    let ours = format!("content-type: {kind}\r\ncontent-length: {length}\r\nx-request-id: {id}");
    format!("{status_line}\r\n{headers}\r\n{ours}\r\n\r\n{body}").into_bytes()
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

impl<S: ClientStream> AsyncRead for RewritingStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.refusing {
            return self.poll_refuse(context);
        }
        let this = &mut *self;
        match this.head_limit.room(&this.in_flight) {
            HeadRoom::Unlimited => Pin::new(&mut this.stream).poll_read(context, buffer),
            HeadRoom::Bytes(most) => this.poll_read_some(context, buffer, most),
            HeadRoom::Refused(refusal) => {
                this.final_response = Some(FinalResponse::new(build_refusal(refusal)));
                this.refusing = true;
                this.poll_refuse(context)
            }
        }
    }
}

impl<S: ClientStream> AsyncWrite for RewritingStream<S> {
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
