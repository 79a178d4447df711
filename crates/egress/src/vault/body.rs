//! Bodies on their way through: placeholders replaced in requests, secrets removed from responses, nothing collected.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http::HeaderMap;
use http_body_util::BodyExt;
use http_body_util::combinators::UnsyncBoxBody;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use tokio::time::Sleep;

use super::redact::{RedactionSet, StreamRedactor};
use super::replace::{Replacements, StreamReplacer};

pub(crate) type BodyError = Box<dyn std::error::Error + Send + Sync>;
pub(crate) type ProxyBody = UnsyncBoxBody<Bytes, BodyError>;

/// How long bytes are held that may begin a secret. A conversation over one body stands still for at most this time.
const HOLD_TIMEOUT: Duration = Duration::from_millis(100);

/// A body that passes as it is.
pub(crate) fn pass_body(body: Incoming) -> ProxyBody {
    body.map_err(Into::into).boxed_unsync()
}

/// The body of a request, with placeholders replaced.
pub(super) struct ReplacedBody {
    inner: Incoming,
    replacer: StreamReplacer,
    trailers: Option<HeaderMap>,
    ended: bool,
}

/// The body of a response, without secrets.
pub(super) struct RedactedBody {
    inner: Incoming,
    set: Arc<RedactionSet>,
    redactor: StreamRedactor,
    trailers: Option<HeaderMap>,
    hold: Option<Pin<Box<Sleep>>>,
    ended: bool,
}

impl ReplacedBody {
    pub(super) fn new(inner: Incoming, replacements: Arc<Replacements>) -> Self {
        Self { inner, replacer: StreamReplacer::new(replacements), trailers: None, ended: false }
    }
}

impl Body for ReplacedBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let this = &mut *self;
        loop {
            if let Some(trailers) = this.trailers.take() {
                return Poll::Ready(Some(Ok(Frame::trailers(trailers))));
            }
            if this.ended {
                return Poll::Ready(None);
            }
            let data = match ready!(Pin::new(&mut this.inner).poll_frame(context)).transpose()? {
                None => {
                    this.ended = true;
                    this.replacer.finish()
                }
                Some(frame) => match frame.into_data() {
                    Ok(data) => this.replacer.push(data),
                    Err(frame) => {
                        this.trailers = frame.into_trailers().ok();
                        this.replacer.finish()
                    }
                },
            };
            if !data.is_empty() {
                return Poll::Ready(Some(Ok(Frame::data(data))));
            }
        }
    }
}

impl RedactedBody {
    pub(super) fn new(inner: Incoming, set: Arc<RedactionSet>) -> Self {
        let redactor = StreamRedactor::new(Arc::clone(&set));
        Self { inner, set, redactor, trailers: None, hold: None, ended: false }
    }

    /// Waits for more of the body, but not longer than held bytes may wait.
    fn poll_hold(&mut self, context: &mut Context<'_>) -> Poll<Bytes> {
        if self.redactor.held_bytes() == 0 {
            return Poll::Pending;
        }
        let hold = self.hold.get_or_insert_with(|| Box::pin(tokio::time::sleep(HOLD_TIMEOUT)));
        ready!(hold.as_mut().poll(context));
        self.hold = None;
        Poll::Ready(self.redactor.pass_held())
    }
}

impl Body for RedactedBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let this = &mut *self;
        loop {
            if let Some(trailers) = this.trailers.take() {
                return Poll::Ready(Some(Ok(Frame::trailers(trailers))));
            }
            if this.ended {
                return Poll::Ready(None);
            }
            let Poll::Ready(frame) = Pin::new(&mut this.inner).poll_frame(context) else {
                return this.poll_hold(context).map(|data| Some(Ok(Frame::data(data))));
            };
            this.hold = None;
            let data = match frame.transpose()? {
                None => {
                    this.ended = true;
                    this.redactor.pass_held()
                }
                Some(frame) => match frame.into_data() {
                    Ok(data) => this.redactor.push(data),
                    Err(frame) => {
                        let mut trailers = frame.into_trailers().unwrap_or_default();
                        this.set.redact_headers(&mut trailers);
                        this.trailers = Some(trailers);
                        this.redactor.pass_held()
                    }
                },
            };
            if !data.is_empty() {
                return Poll::Ready(Some(Ok(Frame::data(data))));
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.ended
            || (self.inner.is_end_stream() && self.redactor.held_bytes() == 0 && self.trailers.is_none())
    }

    fn size_hint(&self) -> SizeHint {
        let inner = self.inner.size_hint();
        let held = u64::try_from(self.redactor.held_bytes()).unwrap_or(u64::MAX);
        let mut hint = SizeHint::new();
        if let Some(upper) = inner.upper() {
            hint.set_upper(upper.saturating_add(held));
        }
        hint.set_lower(inner.lower().saturating_add(held));
        hint
    }
}
