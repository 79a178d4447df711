//! Limits how many requests are in progress at once.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::body::Body;
use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::Response;
use bytes::Bytes;
use http::StatusCode;
use hyper::body::{Body as HttpBody, Frame, SizeHint};
use tokio::sync::Semaphore;

use crate::answer;
use crate::hosts::is_named;

/// Refuses a request if no slot is free; otherwise holds a slot until the response has been sent.
pub(crate) async fn admit(State(slots): State<Arc<Semaphore>>, request: Request, next: Next) -> Response {
    if request.uri().path() == "/health" && !is_named(&request) {
        return next.run(request).await;
    }
    let Ok(slot) = slots.try_acquire_owned() else {
        metrics::counter!("coracle_http_refused_total").increment(1);
        let message = "limit of concurrent requests reached";
        return answer::try_later(StatusCode::TOO_MANY_REQUESTS, "TOO_MANY_REQUESTS", message, 1);
    };
    next.run(request).await.map(|body| hold(body, slot))
}

/// A body that owns a guard value until it has been sent.
struct Held<T> {
    body: Body,
    _kept: T,
}

/// Wraps a body so that `kept` is dropped together with it.
pub(crate) fn hold<T: Send + Unpin + 'static>(body: Body, kept: T) -> Body {
    Body::new(Held { body, _kept: kept })
}

impl<T: Unpin> HttpBody for Held<T> {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use axum::Router;
    use axum::middleware::from_fn_with_state;
    use axum::routing::get;
    use tower::ServiceExt;

    use super::*;

    async fn ask(router: &Router, path: &str) -> Response {
        let request = Request::builder().uri(path).body(Body::empty()).unwrap();
        router.clone().oneshot(request).await.unwrap()
    }

    #[tokio::test]
    async fn slot_is_held_until_the_response_was_sent() {
        let slots = Arc::new(Semaphore::new(1));
        let router = Router::new().route("/", get(|| async { "answer" })).route("/health", get(|| async {}));
        let router = router.layer(from_fn_with_state(slots, admit));
        let first = ask(&router, "/").await;
        assert_eq!(first.status(), StatusCode::OK);
        let second = ask(&router, "/").await;
        assert_eq!(second.status(), StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(second.headers()["retry-after"], "1");
        assert_eq!(ask(&router, "/health").await.status(), StatusCode::OK);
        drop(first);
        assert_eq!(ask(&router, "/").await.status(), StatusCode::OK);
    }
}
