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
const MAX_SETTLE_LOOKS: usize = 10;
/// Runs of the floor in one look; the fastest counts.
const RUNS_PER_LOOK: usize = 3;
/// Looks in a row that must be as fast as the fastest: the kernel works in steps, between which the floor is flat for
/// a moment although more is to come.
const FLAT_LOOKS: u32 = 3;

/// Waits until the floor is no longer getting faster.
pub(crate) fn wait_until_settled(server: &BenchServer) -> Result<()> {
    let mut floor = FloorProcess::start(server.directory())?;
    let mut watch = FloorWatch::default();
    for _ in 0..MAX_SETTLE_LOOKS {
        if watch.add_look(look(&mut floor)?) {
            return Ok(());
        }
        sleep_for(SETTLE_INTERVAL);
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

/// The looks so far.
#[derive(Default)]
struct FloorWatch {
    fastest: Option<Duration>,
    /// Looks in a row that differed little from the fastest one.
    flat: u32,
}

impl FloorWatch {
    /// Whether the floor has been flat for long enough, including this look.
    fn add_look(&mut self, now: Duration) -> bool {
        self.flat = if self.fastest.is_some_and(|fastest| is_flat(fastest, now)) { self.flat + 1 } else { 0 };
        self.fastest = Some(self.fastest.map_or(now, |fastest| fastest.min(now)));
        self.flat >= FLAT_LOOKS
    }
}

/// Whether a look gained less than a tenth over the fastest one before it, and lost no more than a quarter.
fn is_flat(fastest: Duration, now: Duration) -> bool {
    now * 10 >= fastest * 9 && now * 4 <= fastest * 5
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The number of looks, in tenths of a millisecond, after which the floor counts as settled.
    fn check(looks: &[u64], expected: Option<usize>) {
        let mut watch = FloorWatch::default();
        let settled = looks.iter().position(|look| watch.add_look(Duration::from_micros(look * 100)));
        assert_eq!(settled.map(|index| index + 1), expected, "{looks:?}");
    }

    #[test]
    fn floor_is_settled_after_several_flat_looks() {
        check(&[20, 20, 19, 21], Some(4));
        check(&[20, 25, 20, 20], Some(4));
        check(&[40, 40, 40, 20, 20, 20, 20], Some(7));
    }

    #[test]
    fn floor_that_falls_or_rises_is_not_settled() {
        check(&[44, 38, 33, 28, 24, 20], None);
        check(&[20, 20, 20, 30, 20, 20], None);
        check(&[40, 40, 40], None);
    }
}
