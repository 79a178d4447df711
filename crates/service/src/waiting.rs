//! Waiting for a process without killing it.
//!
//! A wait has two limits, and neither ends the process: a soft one, after which the caller is
//! answered whatever happens, and a quiet one, after which a process that prints nothing is taken
//! for one that waits itself. What kills is the deadline it was started with.

use std::time::Duration;

use tokio::time::Instant;

use crate::following::{Event, Following};
use crate::{Ended, ServiceError};

/// How long somebody waits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Patience {
    /// In all.
    pub soft: Option<Duration>,
    /// Without any output.
    pub quiet: Option<Duration>,
}

/// Why a wait is over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Waited {
    Ended(Ended),
    /// It still runs; the soft limit was reached.
    TooLong,
    /// It still runs; it has printed nothing for the quiet limit.
    TooQuiet,
}

impl Following {
    /// Waits until the process has ended or patience has, handing each event before the end to
    /// `each`. The process can be followed and waited for again afterwards.
    pub async fn wait(
        &mut self,
        patience: Patience,
        mut each: impl FnMut(Event),
    ) -> Result<Waited, ServiceError> {
        let soft = patience.soft.map(|limit| Instant::now() + limit);
        let mut quiet = patience.quiet.map(|limit| Instant::now() + limit);
        loop {
            // All branches are safe to drop: `next` loses nothing, the others only wait.
            tokio::select! {
                // What has arrived counts, even if a limit is reached at the same moment.
                biased;
                event = self.next() => match event? {
                    Event::Ended(ended) => return Ok(Waited::Ended(ended)),
                    event => {
                        quiet = patience.quiet.map(|limit| Instant::now() + limit);
                        each(event);
                    }
                },
                () = reached(soft) => return Ok(Waited::TooLong),
                () = reached(quiet) => return Ok(Waited::TooQuiet),
            }
        }
    }
}

async fn reached(limit: Option<Instant>) {
    match limit {
        Some(limit) => tokio::time::sleep_until(limit).await,
        None => std::future::pending().await,
    }
}
