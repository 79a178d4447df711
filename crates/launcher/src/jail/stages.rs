//! Where the time of a create goes: the durations of its stages, in the launcher and in the new process.
//!
//! ```text
//! launcher   check ─► socket ─► groups ─► volume ─► namespace ─► configuration ─► clone ─► handover
//! child                                                      join, wait ···········┘─► root ─► ... ─► exec
//! ```
//! The child works while the launcher does, so its wait is not counted twice. It sends its durations to the
//! launcher before it becomes the agent, and the launcher adds them to its response.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

/// The duration of one stage.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageTime {
    pub stage: String,
    pub micros: u64,
}

/// Measures stages that follow each other.
#[derive(Debug)]
pub(crate) struct StageClock {
    last: Instant,
    stages: Vec<StageTime>,
}

impl StageClock {
    pub(crate) fn start() -> Self {
        Self { last: Instant::now(), stages: Vec::new() }
    }

    /// Ends a stage; the next one begins.
    pub(crate) fn end_stage(&mut self, stage: &str) {
        let now = Instant::now();
        self.push(stage, now.duration_since(self.last));
        self.last = now;
    }

    fn push(&mut self, stage: &str, time: Duration) {
        let micros = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        self.stages.push(StageTime { stage: stage.to_owned(), micros });
    }

    pub(crate) fn into_stages(self) -> Vec<StageTime> {
        self.stages
    }

    /// Adds the stages of a child that became ready `total` after it was cloned. The launcher needed the
    /// first part of that time, `handover`, for its own last stage. What no stage accounts for is the
    /// start of the agent.
    pub(crate) fn add_child(
        mut self,
        child: Vec<StageTime>,
        handover: Duration,
        total: Duration,
    ) -> Vec<StageTime> {
        let mut counted = Duration::ZERO;
        for StageTime { stage, micros } in child {
            let time = Duration::from_micros(micros);
            counted += time;
            let time = if stage == CHILD_WAIT_STAGE { time.saturating_sub(handover) } else { time };
            self.push(&stage, time);
        }
        self.push("agent", total.saturating_sub(counted.max(handover)));
        self.stages
    }
}

/// The child's first stage: it joins its groups and waits for the launcher.
pub(crate) const CHILD_WAIT_STAGE: &str = "wait";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_that_launcher_and_child_share_is_counted_once() {
        let time = |stage: &str, millis: u64| StageTime { stage: stage.to_owned(), micros: millis * 1000 };
        let mut clock = StageClock::start();
        clock.push("handover", Duration::from_millis(3));
        let child = vec![time(CHILD_WAIT_STAGE, 5), time("root", 4)];
        let stages = clock.add_child(child, Duration::from_millis(3), Duration::from_millis(10));
        assert_eq!(
            stages,
            [time("handover", 3), time(CHILD_WAIT_STAGE, 2), time("root", 4), time("agent", 1)]
        );
        assert_eq!(stages.iter().map(|time| time.micros).sum::<u64>(), 10_000);
    }
}
