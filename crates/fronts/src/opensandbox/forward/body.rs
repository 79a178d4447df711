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
const CONTINUE_TIME: Duration = Duration::from_secs(1);

/// Tracks when something was last sent to a service.
pub(super) struct Progress {
    patience: Duration,
    last: Mutex<Instant>,
}

impl Progress {
    pub(super) fn new(patience: Duration) -> Self {
        Self { patience, last: Mutex::new(Instant::now()) }
    }

    fn made(&self) {
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }

    fn end(&self) -> Instant {
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) + self.patience
    }

    /// Waits until nothing has been sent for too long.
    pub(super) async fn stopped(&self) {
        while self.end() > Instant::now() {
            sleep_until(self.end()).await;
        }
    }
}

/// Opens once a service wants the body.
#[derive(Default)]
pub(super) struct Gate {
    open: AtomicBool,
    opened: Notify,
}

impl Gate {
    /// Handles an informational response.
    pub(super) fn hear(&self, status: StatusCode) {
        if status == StatusCode::CONTINUE {
            self.open.store(true, Ordering::Release);
            self.opened.notify_one();
        }
    }

    async fn wait(&self) {
        while !self.open.load(Ordering::Acquire) {
            self.opened.notified().await;
        }
    }
}

type Opening = Pin<Box<dyn Future<Output = ()> + Send>>;

/// A request body that reports progress.
pub(super) struct Watched {
    body: Body,
    progress: Arc<Progress>,
    /// Must complete before the first chunk is read.
    opening: Option<Opening>,
}

impl Watched {
    pub(super) fn new(body: Body, progress: Arc<Progress>, gate: Option<Arc<Gate>>) -> Self {
        let opening = gate.map(|gate| -> Opening {
            Box::pin(async move {
                // In either case it is time to send the body.
                timeout(CONTINUE_TIME, gate.wait()).await.unwrap_or_default();
            })
        });
        Self { body, progress, opening }
    }
}

impl HttpBody for Watched {
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
        self.progress.made();
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
        let progress = Arc::new(Progress::new(Duration::from_secs(180)));
        let pieces = futures_util::stream::iter(0..3).then(|_| async {
            tokio::time::sleep(Duration::from_secs(100)).await;
            Ok::<_, std::io::Error>(Bytes::from_static(b"piece"))
        });
        let mut body = Watched::new(Body::from_stream(pieces), progress.clone(), None);
        let begun = Instant::now();
        let mut stopped = std::pin::pin!(progress.stopped());
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
                (Arc::new(Progress::new(Duration::from_secs(1))), Arc::new(Gate::default()));
            let mut body = Watched::new(Body::from("text"), progress, Some(gate.clone()));
            assert!(body.frame().now_or_never().is_none(), "the body was sent before it was wanted");
            let begun = Instant::now();
            gate.hear(heard);
            assert!(body.frame().await.is_some());
            assert_eq!(begun.elapsed().as_secs(), expected, "{heard}");
        }
    }
}
