//! Drains the rest of a request body after the response.
//!
//! A handler that needs no body, or refuses before reading it, leaves the body on the connection.
//! hyper then closes that connection, which its client notices only at its next request. So a short
//! rest is read here first; for a long one, the response announces that the connection closes. It
//! announces the same if the body is still being forwarded to a service that has already answered:
//! whether that service reads the rest is not known yet.

use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use http::{HeaderValue, Request, header};
use http_body_util::BodyExt;
use hyper::body::{Body as HttpBody, Frame, Incoming, SizeHint};
use tokio::time::timeout;

/// A longer rest is not drained.
const MAX_DRAINED_BYTES: u64 = 256 << 10;
const DRAIN_TIMEOUT: Duration = Duration::from_millis(500);

/// Knows how far a body was read, and receives one that was not read to its end.
#[derive(Clone, Default)]
pub(crate) struct BodyReturn(Arc<Mutex<BodyState>>);

#[derive(Default)]
enum BodyState {
    /// Nothing of it is left on the connection, or the client has not sent it.
    #[default]
    Done,
    /// It is being read.
    InUse,
    /// Its reader dropped it before its end.
    Returned(Incoming),
}

/// A body that is returned to its [`BodyReturn`] when dropped.
struct ReturningBody {
    body: Option<Incoming>,
    body_return: BodyReturn,
}

impl BodyReturn {
    /// Wraps the body of a request so that the unread rest is returned here.
    pub(crate) fn wrap_body(&self, request: Request<Incoming>) -> Request<Body> {
        // A client that sent `Expect` has not sent the body yet.
        let held_back = request.headers().contains_key(header::EXPECT);
        request.map(|body| match held_back {
            true => Body::new(body),
            false if body.is_end_stream() => Body::new(body),
            false => {
                self.set_state(BodyState::InUse);
                Body::new(ReturningBody { body: Some(body), body_return: self.clone() })
            }
        })
    }

    fn set_state(&self, state: BodyState) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = state;
    }

    /// Drains the rest, or sets `Connection: close` on the response.
    pub(crate) async fn drain_or_close(&self, response: &mut Response) {
        let state = std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        let drained = match state {
            BodyState::Done => true,
            BodyState::InUse => false,
            BodyState::Returned(rest) => drain_rest(rest).await,
        };
        if !drained {
            response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
    }
}

async fn drain_rest(mut body: Incoming) -> bool {
    if body.size_hint().lower() > MAX_DRAINED_BYTES {
        return false;
    }
    let reading = async {
        let mut taken = 0;
        while let Some(frame) = body.frame().await {
            let Ok(frame) = frame else { return false };
            taken += frame.data_ref().map_or(0, |data| data.len() as u64);
            if taken > MAX_DRAINED_BYTES {
                return false;
            }
        }
        true
    };
    timeout(DRAIN_TIMEOUT, reading).await.unwrap_or(false)
}

impl HttpBody for ReturningBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let Some(body) = &mut self.body else { return Poll::Ready(None) };
        let frame = std::task::ready!(Pin::new(&mut *body).poll_frame(context));
        let ended = body.is_end_stream() || !matches!(frame, Some(Ok(_)));
        if ended {
            self.body = None;
            self.body_return.set_state(BodyState::Done);
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(HttpBody::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map_or_else(|| SizeHint::with_exact(0), HttpBody::size_hint)
    }
}

impl Drop for ReturningBody {
    fn drop(&mut self) {
        if let Some(body) = self.body.take() {
            let ended = body.is_end_stream();
            self.body_return.set_state(if ended { BodyState::Done } else { BodyState::Returned(body) });
        }
    }
}
