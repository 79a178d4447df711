//! Waiting until the kernel has finished what earlier runs left to it.
//!
//! The kernel tears namespaces down in the background, for seconds after many were closed, and everything that
//! makes namespaces is slower meanwhile. There is no event for its end, so the floor shows it: a run of the
//! floor is slow as long as the kernel is busy.

use std::time::Duration;

use anyhow::Result;

use super::floor::{FloorProcess, FloorTask};
use super::server::BenchServer;
use super::sleep_for;

/// The pause between two looks, in which the kernel works.
const SETTLE_INTERVAL: Duration = Duration::from_millis(300);
/// The largest number of looks: on a busy machine the floor never becomes quiet.
const MAX_SETTLE_LOOKS: usize = 20;
/// Runs of the floor in one look; the fastest counts.
const RUNS_PER_LOOK: usize = 3;

/// Waits until the floor is no longer getting faster.
pub(crate) fn wait_until_settled(server: &BenchServer) -> Result<()> {
    let mut floor = FloorProcess::start(server.directory())?;
    let mut fastest = look(&mut floor)?;
    for _ in 0..MAX_SETTLE_LOOKS {
        sleep_for(SETTLE_INTERVAL);
        let now = look(&mut floor)?;
        if is_settled(fastest, now) {
            return Ok(());
        }
        fastest = fastest.min(now);
    }
    Ok(())
}

fn look(floor: &mut FloorProcess) -> Result<Duration> {
    let mut fastest = Duration::MAX;
    for _ in 0..RUNS_PER_LOOK {
        fastest = fastest.min(floor.run(FloorTask::Sandbox)?);
    }
    Ok(fastest)
}

/// Whether a look gained less than a tenth over the fastest one before it.
fn is_settled(before: Duration, now: Duration) -> bool {
    now * 10 >= before * 9
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floor_that_still_falls_is_not_settled() {
        let check = |before: u64, now: u64, expected: bool| {
            assert_eq!(is_settled(Duration::from_micros(before), Duration::from_micros(now)), expected);
        };
        check(4000, 2000, false);
        check(2000, 1700, false);
        check(2000, 1900, true);
        check(2000, 2500, true);
    }
}
