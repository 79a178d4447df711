//! Waiting for a process without killing it.
//!
//! A wait has two limits, and neither ends the process: a soft one, after which the wait returns in any case, and a
//! quiet one, after which a process that prints nothing is assumed to be waiting for input. Only the deadline that the
//! process was started with kills it.

use std::time::Duration;

use tokio::time::Instant;

use crate::exec::output_stream::{OutputEvent, OutputStream};
use crate::{ProcessEnd, ServiceError};

/// The limits of a wait.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WaitLimits {
    /// The total time.
    pub soft: Option<Duration>,
    /// The time without any output.
    pub quiet: Option<Duration>,
}

/// Why a wait is over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WaitOutcome {
    Ended(ProcessEnd),
    /// The process still runs; the soft limit was reached.
    TooLong,
    /// The process still runs; it printed nothing for the quiet limit.
    TooQuiet,
}

/// How long after a limit events that have arrived are still taken.
const EVENT_GRACE: Duration = Duration::from_secs(1);

impl OutputStream {
    /// Waits until the process ends or a limit is reached, and passes each event before the end to `each`. The process
    /// can be followed and waited for again afterwards.
    pub async fn wait(
        &mut self,
        patience: WaitLimits,
        mut each: impl FnMut(OutputEvent),
    ) -> Result<WaitOutcome, ServiceError> {
        let soft = patience.soft.map(|limit| Instant::now() + limit);
        let mut quiet = patience.quiet.map(|limit| Instant::now() + limit);
        loop {
            // An agent that always has another event must not extend the limit.
            if soft.is_some_and(|limit| Instant::now() > limit + EVENT_GRACE) {
                return Ok(WaitOutcome::TooLong);
            }
            // All branches are safe to drop: `next` loses nothing, the others only wait.
            tokio::select! {
                // An event that has arrived counts, even if a limit is reached at the same moment.
                biased;
                event = self.next() => match event? {
                    OutputEvent::Ended(ended) => return Ok(WaitOutcome::Ended(ended)),
                    event => {
                        quiet = patience.quiet.map(|limit| Instant::now() + limit);
                        each(event);
                    }
                },
                () = sleep_until_limit(soft) => return Ok(WaitOutcome::TooLong),
                () = sleep_until_limit(quiet) => return Ok(WaitOutcome::TooQuiet),
            }
        }
    }
}

async fn sleep_until_limit(limit: Option<Instant>) {
    match limit {
        Some(limit) => tokio::time::sleep_until(limit).await,
        None => std::future::pending().await,
    }
}
