//! Whether the backend answers, for pages that everyone may read.

use std::time::Duration;

use backend::Backend;
use tokio::sync::Mutex;
use tokio::time::Instant;

/// How long an answer is used again. Clients without a key can ask, and must not keep the backend busy.
const REUSE_TIMEOUT: Duration = Duration::from_secs(1);

/// How long the backend may take.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);

/// The newest result, and when it was found.
#[derive(Default)]
pub(crate) struct BackendCheck(Mutex<Option<(Instant, bool)>>);

impl BackendCheck {
    /// Asks the backend, one request at a time, unless it was asked a moment ago.
    pub(crate) async fn answers(&self, backend: &dyn Backend) -> bool {
        let mut newest = self.0.lock().await;
        if let Some((_, answers)) = newest.filter(|(found, _)| found.elapsed() < REUSE_TIMEOUT) {
            return answers;
        }
        let answers = matches!(tokio::time::timeout(ANSWER_TIMEOUT, backend.probe()).await, Ok(Ok(_)));
        *newest = Some((Instant::now(), answers));
        answers
    }
}
