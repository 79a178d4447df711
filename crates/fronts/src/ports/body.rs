//! Streams a request's body to a service, without collecting it.
//!
//! The timeout for a silent service counts from the last chunk it was sent, so a long upload does not
//! time out. A client that first asks whether it may send (`Expect: 100-continue`) gets the service's
//! answer, not ours.

use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use http::StatusCode;
use hyper::body::{Body as HttpBody, Frame, SizeHint};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until, timeout};

/// If a service does not say whether it wants the body, the body is sent after this time, as any
/// client would do.
const CONTINUE_TIMEOUT: Duration = Duration::from_secs(1);

/// Tracks when something was last sent to a service.
pub(super) struct SendProgress {
    stall_timeout: Duration,
    last: Mutex<Instant>,
}

impl SendProgress {
    pub(super) fn new(patience: Duration) -> Self {
        Self { stall_timeout: patience, last: Mutex::new(Instant::now()) }
    }

    fn record_progress(&self) {
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }

    fn stall_deadline(&self) -> Instant {
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) + self.stall_timeout
    }

    /// Waits until nothing has been sent for too long.
    pub(super) async fn wait_until_stalled(&self) {
        while self.stall_deadline() > Instant::now() {
            sleep_until(self.stall_deadline()).await;
        }
    }
}

/// Opens once a service wants the body.
#[derive(Default)]
pub(super) struct ContinueGate {
    open: AtomicBool,
    opened: Notify,
}

impl ContinueGate {
    /// Handles an informational response.
    pub(super) fn handle_informational(&self, status: StatusCode) {
        if status == StatusCode::CONTINUE {
            self.open.store(true, Ordering::Release);
            self.opened.notify_one();
        }
    }

    async fn wait_until_open(&self) {
        while !self.open.load(Ordering::Acquire) {
            self.opened.notified().await;
        }
    }
}

type GateFuture = Pin<Box<dyn Future<Output = ()> + Send>>;

/// A request body that reports progress.
pub(super) struct ProgressBody {
    body: Body,
    progress: Arc<SendProgress>,
    /// Must complete before the first chunk is read.
    opening: Option<GateFuture>,
}

impl ProgressBody {
    pub(super) fn new(body: Body, progress: Arc<SendProgress>, gate: Option<Arc<ContinueGate>>) -> Self {
        let opening = gate.map(|gate| -> GateFuture {
            Box::pin(async move {
                // In either case it is time to send the body.
                timeout(CONTINUE_TIMEOUT, gate.wait_until_open()).await.unwrap_or_default();
            })
        });
        Self { body, progress, opening }
    }
}

impl HttpBody for ProgressBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        if let Some(opening) = &mut self.opening {
            std::task::ready!(opening.as_mut().poll(context));
            self.opening = None;
        }
        let frame = std::task::ready!(Pin::new(&mut self.body).poll_frame(context));
        self.progress.record_progress();
        Poll::Ready(frame)
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
    use futures_util::{FutureExt, StreamExt};
    use http_body_util::BodyExt;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn timeout_restarts_with_every_chunk() {
        let progress = Arc::new(SendProgress::new(Duration::from_secs(180)));
        let pieces = futures_util::stream::iter(0..3).then(|_| async {
            tokio::time::sleep(Duration::from_secs(100)).await;
            Ok::<_, std::io::Error>(Bytes::from_static(b"piece"))
        });
        let mut body = ProgressBody::new(Body::from_stream(pieces), progress.clone(), None);
        let begun = Instant::now();
        let mut stopped = std::pin::pin!(progress.wait_until_stalled());
        while body.frame().await.is_some() {
            assert!(stopped.as_mut().now_or_never().is_none());
        }
        stopped.await;
        assert_eq!(begun.elapsed().as_secs(), 480);
    }

    #[tokio::test(start_paused = true)]
    async fn gate_opens_on_continue_or_after_a_timeout() {
        for (heard, expected) in [(StatusCode::CONTINUE, 0), (StatusCode::EARLY_HINTS, 1)] {
            let (progress, gate) =
                (Arc::new(SendProgress::new(Duration::from_secs(1))), Arc::new(ContinueGate::default()));
            let mut body = ProgressBody::new(Body::from("text"), progress, Some(gate.clone()));
            assert!(body.frame().now_or_never().is_none(), "the body was sent before it was wanted");
            let begun = Instant::now();
            gate.handle_informational(heard);
            assert!(body.frame().await.is_some());
            assert_eq!(begun.elapsed().as_secs(), expected, "{heard}");
        }
    }
}
