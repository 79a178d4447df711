//! How busy a sandbox keeps its cores: the difference between two samples of its CPU time.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use crate::{SandboxRef, SandboxUsage, ServiceError};

/// A sample older than this is not compared with.
const SAMPLE_RETENTION: Duration = Duration::from_secs(600);

/// What a sandbox uses now, and how busy its cores are.
#[derive(Clone, Debug)]
pub struct SandboxLoad {
    pub usage: SandboxUsage,
    /// How many cores the sandbox may use.
    pub cores: f64,
    /// The average number of busy cores since the last measurement, or since the sandbox was created.
    pub busy_cores: f64,
}

/// The last sample of one sandbox.
#[derive(Default)]
pub(crate) struct CpuMeter(Mutex<Option<CpuSample>>);

#[derive(Clone, Copy)]
struct CpuSample {
    at: Instant,
    cpu_micros: u64,
}

impl SandboxRef {
    /// Measures the load of the sandbox, and remembers the sample for the next measurement.
    pub async fn measure_load(&self) -> Result<SandboxLoad, ServiceError> {
        let usage = self.current_usage().await?;
        let age = SystemTime::now().duration_since(self.created()).unwrap_or_default();
        let busy_cores = self.handle.cpu_meter.busy_cores(usage.cpu_micros.unwrap_or_default(), age);
        Ok(SandboxLoad { cores: usable_cores(&usage), busy_cores, usage })
    }
}

fn usable_cores(usage: &SandboxUsage) -> f64 {
    let all = std::thread::available_parallelism().map_or(1, usize::from);
    match usage.cpu_limit.filter(|limit| *limit > 0) {
        Some(limit) => f64::from(limit) / 1000.0,
        None => u32::try_from(all).map_or(1.0, f64::from),
    }
}

impl CpuMeter {
    /// Returns the average number of busy cores since the last sample, or since creation (`age`).
    fn busy_cores(&self, cpu_micros: u64, age: Duration) -> f64 {
        let now = CpuSample { at: Instant::now(), cpu_micros };
        let last = self.0.lock().unwrap_or_else(PoisonError::into_inner).replace(now);
        let (wall, used) = match last.filter(|last| last.at.elapsed() < SAMPLE_RETENTION) {
            Some(last) => (now.at - last.at, cpu_micros.saturating_sub(last.cpu_micros)),
            None => (age, cpu_micros),
        };
        Duration::from_micros(used).as_secs_f64() / wall.as_secs_f64().max(0.001)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_usage_is_measured_between_two_calls() {
        let meter = CpuMeter::default();
        assert!((meter.busy_cores(500_000, Duration::from_secs(1)) - 0.5).abs() < 1e-9);
        assert!(meter.busy_cores(500_000, Duration::from_secs(1)) == 0.0);
        assert!(meter.busy_cores(400_000, Duration::from_secs(1)) == 0.0);
    }
}
