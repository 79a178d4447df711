//! Fills a pool: one task per pool, woken by every change.
//!
//! A new sandbox is begun only after a pause, so that a client that has just taken one has the processor for its first
//! command, and creates of others are never delayed. After a failure the pauses grow until something succeeds.
//!
//! The image is fetched first, which may take long, and room is reserved only then, because callers that need room wait
//! for sandboxes that are being made.

use std::sync::Arc;
use std::time::Duration;

use domain::Owner;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};

use super::PoolState;
use crate::ServiceError;
use crate::core::Core;
use crate::error::error_chain;

/// The pauses after failures.
const MIN_FAILURE_DELAY: Duration = Duration::from_secs(1);
const MAX_FAILURE_DELAY: Duration = Duration::from_secs(60);

/// The change that a pool needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PoolNeed {
    Nothing,
    Another,
    /// There are more warm sandboxes than there should be.
    Fewer,
}

struct PoolKeeper {
    core: Arc<Core>,
    kept: Arc<PoolState>,
    /// Tasks that fetch the image. They have no room reserved yet.
    fetching: JoinSet<Result<(), ServiceError>>,
    making: JoinSet<Result<(), ServiceError>>,
    /// When the next sandbox may be begun, if one is needed.
    due: Option<Instant>,
    /// The pause after the last failure, and when it began.
    failing: Option<(Duration, Instant)>,
    /// Whether there was no room at the last attempt.
    full: bool,
}

/// Runs until the pool is closed or the service stops.
pub(super) async fn run_keeper(core: Arc<Core>, kept: Arc<PoolState>) {
    let (fetching, making) = (JoinSet::new(), JoinSet::new());
    let mut keeper = PoolKeeper { core, kept, fetching, making, due: None, failing: None, full: false };
    while !keeper.kept.closed.is_cancelled() && !keeper.core.tasks.is_stopping() {
        keeper.run_once().await;
    }
    // Sandboxes that are being made are finished, and removed if the pool is closed.
    while keeper.making.join_next().await.is_some() {}
    if keeper.kept.closed.is_cancelled() {
        keeper.core.empty_pool(&keeper.kept).await;
    }
    keeper.kept.emptied.cancel();
}

impl PoolKeeper {
    /// Every branch may be dropped without losing anything.
    async fn run_once(&mut self) {
        match self.current_need() {
            PoolNeed::Fewer => return self.remove_one().await,
            PoolNeed::Another if !self.full => {
                let pause = self.failing.map_or(self.kept.pool.refill.start_interval(), |(pause, _)| pause);
                self.due.get_or_insert_with(|| Instant::now() + pause);
            }
            PoolNeed::Another | PoolNeed::Nothing => self.due = None,
        }
        let due = self.due;
        tokio::select! {
            () = self.kept.closed.cancelled() => {}
            () = self.core.tasks.cancelled() => {}
            Some(made) = self.making.join_next() => self.record_result(made.ok()),
            Some(fetched) = self.fetching.join_next() => match fetched.ok() {
                Some(Ok(())) => self.begin_sandbox(),
                failed => self.record_result(failed),
            },
            () = self.kept.changed.notified() => self.full = false,
            () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => self.fetch_image(),
        }
    }

    fn current_need(&self) -> PoolNeed {
        let taken = self.core.lifecycle.registry.count_taken_from(&self.kept.pool.name);
        let state = self.kept.lock();
        let (wanted, ready) = (state.capacity.wanted_warm(taken), state.ready.len());
        let begun = self.fetching.len() + self.making.len();
        let at_once = usize::try_from(self.kept.pool.refill.at_once).unwrap_or(usize::MAX);
        if ready > wanted {
            PoolNeed::Fewer
        } else if ready + begun < wanted && begun < at_once {
            PoolNeed::Another
        } else {
            PoolNeed::Nothing
        }
    }

    fn fetch_image(&mut self) {
        self.due = None;
        let (core, kept) = (Arc::clone(&self.core), Arc::clone(&self.kept));
        self.fetching.spawn(async move {
            let image = &kept.pool.template.image;
            core.ensure_warm_image(image).await?;
            // Requests for the image under another name are counted even while no sandbox is ready.
            let resolved = core.resolve_image(image).await.ok().map(|resolved| resolved.name);
            let mut state = kept.lock();
            state.image = resolved.or_else(|| state.image.take());
            Ok(())
        });
    }

    fn begin_sandbox(&mut self) {
        match self.core.begin_warm(&self.kept) {
            Ok(Some(record)) => {
                let (core, kept) = (Arc::clone(&self.core), Arc::clone(&self.kept));
                self.making.spawn(async move { core.make_warm(&kept, record).await });
            }
            Ok(None) => {
                tracing::debug!(
                    pool = self.kept.pool.name,
                    "no room for a warm sandbox; waiting for a change"
                );
                self.full = true;
            }
            Err(error) => self.record_result(Some(Err(error))),
        }
    }

    /// Records the result of making a sandbox; `None` if its task panicked.
    fn record_result(&mut self, made: Option<Result<(), ServiceError>>) {
        match made {
            Some(Ok(())) | None => {
                self.failing = None;
                self.kept.lock().trouble = None;
            }
            Some(Err(error)) => {
                let now = Instant::now();
                let (pause, since) = match self.failing {
                    None => (MIN_FAILURE_DELAY, now),
                    // This sandbox was begun before the last failure, and failed for the same reason.
                    Some((pause, since)) if now < since + pause => (pause, since),
                    Some((pause, _)) => ((pause * 2).min(MAX_FAILURE_DELAY), now),
                };
                let (pool, text) = (&self.kept.pool.name, error_chain(&error));
                tracing::warn!(pool, error = text, again = ?pause, "failed to fill pool; retrying after a pause");
                self.core.record_failure("fill pool", &Owner::operator(), None)(&error);
                self.kept.lock().trouble = Some(text);
                self.failing = Some((pause, since));
                self.due = None;
            }
        }
    }

    async fn remove_one(&self) {
        if let Some(warm) = self.kept.pop_warm() {
            self.core.remove_warm(&warm.id).await;
        }
    }
}
