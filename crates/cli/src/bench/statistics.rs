//! Times of many runs, and the few numbers that describe them.

use std::time::Duration;

use serde::Serialize;

/// Times in the order they were taken.
#[derive(Clone, Debug, Default)]
pub(crate) struct TimeSamples(Vec<Duration>);

/// The summary of the samples, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct TimeSummary {
    pub(crate) runs: usize,
    pub(crate) p50: f64,
    pub(crate) p90: f64,
    pub(crate) p99: f64,
}

impl TimeSamples {
    pub(crate) fn push(&mut self, time: Duration) {
        self.0.push(time);
    }

    pub(crate) fn summary(&self) -> TimeSummary {
        let mut sorted = self.0.clone();
        sorted.sort();
        let at = |percent| percentile(&sorted, percent).as_secs_f64() * 1000.0;
        TimeSummary { runs: sorted.len(), p50: at(50), p90: at(90), p99: at(99) }
    }
}

impl FromIterator<Duration> for TimeSamples {
    fn from_iter<I: IntoIterator<Item = Duration>>(times: I) -> Self {
        Self(times.into_iter().collect())
    }
}

/// The smallest time that at least `percent` of all samples do not exceed.
fn percentile(sorted: &[Duration], percent: usize) -> Duration {
    let rank = (sorted.len() * percent).div_ceil(100).max(1);
    sorted.get(rank - 1).copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(times: &[u64], percent: usize, expected: u64) {
        let sorted: Vec<Duration> = times.iter().copied().map(Duration::from_millis).collect();
        assert_eq!(percentile(&sorted, percent), Duration::from_millis(expected));
    }

    #[test]
    fn a_percentile_is_a_time_that_was_taken() {
        check(&[], 50, 0);
        check(&[7], 99, 7);
        check(&[1, 2, 3, 4], 50, 2);
        check(&[1, 2, 3, 4], 90, 4);
        let hundred: Vec<u64> = (1..=100).collect();
        check(&hundred, 50, 50);
        check(&hundred, 99, 99);
    }

    #[test]
    fn a_summary_does_not_depend_on_the_order() {
        let times = [3, 1, 2].map(Duration::from_millis);
        let summary = times.into_iter().collect::<TimeSamples>().summary();
        assert_eq!(summary, TimeSummary { runs: 3, p50: 2.0, p90: 3.0, p99: 3.0 });
    }
}
