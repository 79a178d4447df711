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

use crate::hosts::names_port;
use crate::registry;

/// Refuses a request if no slot is free; otherwise holds a slot until the response has been sent.
pub(crate) async fn limit_concurrency(
    State(slots): State<Arc<Semaphore>>,
    request: Request,
    next: Next,
) -> Response {
    if registry::is_unlimited_path(request.uri().path()) && !names_port(&request) {
        return next.run(request).await;
    }
    let Ok(slot) = slots.try_acquire_owned() else {
        metrics::counter!("coracle_http_refused_total").increment(1);
        let message = "limit of concurrent requests reached";
        return registry::error_format_of(&request).build_retry_error(
            StatusCode::TOO_MANY_REQUESTS,
            "TOO_MANY_REQUESTS",
            message,
            1,
        );
    };
    next.run(request).await.map(|body| attach_guard(body, slot))
}

/// A body that owns a guard value until it has been sent.
struct GuardedBody<T> {
    body: Body,
    _guard: T,
}

/// Wraps a body so that `kept` is dropped together with it.
pub(crate) fn attach_guard<T: Send + Unpin + 'static>(body: Body, kept: T) -> Body {
    Body::new(GuardedBody { body, _guard: kept })
}

impl<T: Unpin> HttpBody for GuardedBody<T> {
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

    async fn send_request(router: &Router, path: &str) -> Response {
        let request = Request::builder().uri(path).body(Body::empty()).unwrap();
        router.clone().oneshot(request).await.unwrap()
    }

    #[tokio::test]
    async fn slot_is_held_until_the_response_was_sent() {
        let slots = Arc::new(Semaphore::new(1));
        let router = Router::new().route("/", get(|| async { "answer" })).route("/health", get(|| async {}));
        let router = router.layer(from_fn_with_state(slots, limit_concurrency));
        let first = send_request(&router, "/").await;
        assert_eq!(first.status(), StatusCode::OK);
        let second = send_request(&router, "/").await;
        assert_eq!(second.status(), StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(second.headers()["retry-after"], "1");
        if cfg!(feature = "operator") {
            assert_eq!(send_request(&router, "/health").await.status(), StatusCode::OK);
        }
        drop(first);
        assert_eq!(send_request(&router, "/").await.status(), StatusCode::OK);
    }
}
