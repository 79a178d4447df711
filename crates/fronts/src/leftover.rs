//! What is left of a request's body when it was answered.
//!
//! A handler that needs no body, or refuses before it reads one, leaves it on the connection.
//! hyper then closes that connection, which its client finds out only when it asks for the next
//! thing. So a short rest is read here first; for a long one the client is told of the end.

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

/// A longer rest is not waited for.
const SHORT: u64 = 256 << 10;
const PATIENCE: Duration = Duration::from_millis(500);

/// Where a body comes back to that was not read to its end.
#[derive(Clone, Default)]
pub(crate) struct Home(Arc<Mutex<Option<Incoming>>>);

/// A body on loan.
struct Lent {
    body: Option<Incoming>,
    home: Home,
}

impl Home {
    /// Lends the body of a request to whoever answers it.
    pub(crate) fn lend(&self, request: Request<Incoming>) -> Request<Body> {
        // Who waits to be asked for the body has not sent it.
        let held_back = request.headers().contains_key(header::EXPECT);
        request.map(|body| match held_back {
            true => Body::new(body),
            false => Body::new(Lent { body: Some(body), home: self.clone() }),
        })
    }

    /// Reads what is left, or tells the client that the connection ends.
    pub(crate) async fn settle(&self, response: &mut Response) {
        let left = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(left) = left else { return };
        if !drained(left).await {
            response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
    }
}

async fn drained(mut body: Incoming) -> bool {
    if body.size_hint().lower() > SHORT {
        return false;
    }
    let reading = async {
        let mut taken = 0;
        while let Some(frame) = body.frame().await {
            let Ok(frame) = frame else { return false };
            taken += frame.data_ref().map_or(0, |data| data.len() as u64);
            if taken > SHORT {
                return false;
            }
        }
        true
    };
    timeout(PATIENCE, reading).await.unwrap_or(false)
}

impl HttpBody for Lent {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let Some(body) = &mut self.body else { return Poll::Ready(None) };
        let frame = std::task::ready!(Pin::new(body).poll_frame(context));
        if !matches!(frame, Some(Ok(_))) {
            self.body = None;
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

impl Drop for Lent {
    fn drop(&mut self) {
        if let Some(body) = self.body.take().filter(|body| !body.is_end_stream()) {
            *self.home.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(body);
        }
    }
}
