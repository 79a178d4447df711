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

use super::Kept;
use crate::ServiceError;
use crate::core::Core;
use crate::error::chain;

/// The pauses after failures.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LAST_PAUSE: Duration = Duration::from_secs(60);

/// The change that a pool needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Need {
    Nothing,
    Another,
    /// There are more warm sandboxes than there should be.
    Fewer,
}

struct Keeper {
    core: Arc<Core>,
    kept: Arc<Kept>,
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
pub(super) async fn keep(core: Arc<Core>, kept: Arc<Kept>) {
    let (fetching, making) = (JoinSet::new(), JoinSet::new());
    let mut keeper = Keeper { core, kept, fetching, making, due: None, failing: None, full: false };
    while !keeper.kept.closed.is_cancelled() && !keeper.core.stop.is_cancelled() {
        keeper.turn().await;
    }
    // Sandboxes that are being made are finished, and removed if the pool is closed.
    while keeper.making.join_next().await.is_some() {}
    if keeper.kept.closed.is_cancelled() {
        keeper.core.empty_pool(&keeper.kept).await;
    }
    keeper.kept.emptied.cancel();
}

impl Keeper {
    /// Every branch may be dropped without losing anything.
    async fn turn(&mut self) {
        match self.need() {
            Need::Fewer => return self.remove_one().await,
            Need::Another if !self.full => {
                let pause = self.failing.map_or(self.kept.pool.refill.interval(), |(pause, _)| pause);
                self.due.get_or_insert_with(|| Instant::now() + pause);
            }
            Need::Another | Need::Nothing => self.due = None,
        }
        let due = self.due;
        tokio::select! {
            () = self.kept.closed.cancelled() => {}
            () = self.core.stop.cancelled() => {}
            Some(made) = self.making.join_next() => self.judge(made.ok()),
            Some(fetched) = self.fetching.join_next() => match fetched.ok() {
                Some(Ok(())) => self.begin(),
                failed => self.judge(failed),
            },
            () = self.kept.changed.notified() => self.full = false,
            () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => self.fetch(),
        }
    }

    fn need(&self) -> Need {
        let taken = self.core.registry.taken_from(&self.kept.pool.name);
        let state = self.kept.lock();
        let (wanted, ready) = (state.capacity.wanted(taken), state.ready.len());
        let begun = self.fetching.len() + self.making.len();
        let at_once = usize::try_from(self.kept.pool.refill.at_once).unwrap_or(usize::MAX);
        if ready > wanted {
            Need::Fewer
        } else if ready + begun < wanted && begun < at_once {
            Need::Another
        } else {
            Need::Nothing
        }
    }

    fn fetch(&mut self) {
        self.due = None;
        let (core, kept) = (Arc::clone(&self.core), Arc::clone(&self.kept));
        self.fetching.spawn(async move {
            let image = &kept.pool.template.image;
            core.ensure_warm_image(image).await?;
            // Requests for the image under another name are counted even while no sandbox is ready.
            let resolved = core.backend.resolve(image).await.ok().map(|resolved| resolved.name);
            let mut state = kept.lock();
            state.image = resolved.or_else(|| state.image.take());
            Ok(())
        });
    }

    fn begin(&mut self) {
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
            Err(error) => self.judge(Some(Err(error))),
        }
    }

    /// Records the result of making a sandbox; `None` if its task panicked.
    fn judge(&mut self, made: Option<Result<(), ServiceError>>) {
        match made {
            Some(Ok(())) | None => {
                self.failing = None;
                self.kept.lock().trouble = None;
            }
            Some(Err(error)) => {
                let now = Instant::now();
                let (pause, since) = match self.failing {
                    None => (FIRST_PAUSE, now),
                    // This sandbox was begun before the last failure, and failed for the same reason.
                    Some((pause, since)) if now < since + pause => (pause, since),
                    Some((pause, _)) => ((pause * 2).min(LAST_PAUSE), now),
                };
                let (pool, text) = (&self.kept.pool.name, chain(&error));
                tracing::warn!(pool, error = text, again = ?pause, "failed to fill pool; retrying after a pause");
                self.core.failed("fill pool", &Owner::single(), None)(&error);
                self.kept.lock().trouble = Some(text);
                self.failing = Some((pause, since));
                self.due = None;
            }
        }
    }

    async fn remove_one(&self) {
        if let Some(warm) = self.kept.pop() {
            self.core.remove_warm(&warm.id).await;
        }
    }
}
