//! Whether the backend answers, for pages that everyone may read.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use backend::Backend;

/// How long an answer is used again. Clients without a key can ask, and must not keep the backend busy.
const REUSE_TIMEOUT: Duration = Duration::from_secs(1);

/// How long the backend may take.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);

/// The newest result, and when the backend was asked.
#[derive(Default)]
pub(crate) struct BackendCheck(Mutex<Option<(Instant, bool)>>);

impl BackendCheck {
    /// Asks the backend, unless it was asked a moment ago. The time is recorded first, so that clients that disconnect
    /// cannot have it asked more often; meanwhile others get the last result.
    pub(crate) async fn answers(&self, backend: &dyn Backend) -> bool {
        if let Some(known) = self.recent_result() {
            return known;
        }
        let answers = matches!(tokio::time::timeout(ANSWER_TIMEOUT, backend.probe()).await, Ok(Ok(_)));
        self.record(answers);
        answers
    }

    /// The result of a moment ago. Otherwise the caller must ask the backend, and no other caller does.
    fn recent_result(&self) -> Option<bool> {
        let mut newest = self.0.lock().expect("no thread panics while it holds this");
        match *newest {
            Some((asked, answers)) if asked.elapsed() < REUSE_TIMEOUT => Some(answers),
            former => {
                *newest = Some((Instant::now(), former.is_none_or(|(_, answers)| answers)));
                None
            }
        }
    }

    fn record(&self, answers: bool) {
        if let Some((_, newest)) = &mut *self.0.lock().expect("no thread panics while it holds this") {
            *newest = answers;
        }
    }
}
