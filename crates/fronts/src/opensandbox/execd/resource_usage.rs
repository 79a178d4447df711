//! Resource usage of a sandbox, from its own cgroups, not the host's totals.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use axum::Json;
use axum::extract::State;
use axum::response::Response;
use bytes::Bytes;
use domain::SandboxId;
use futures_util::stream;
use http::StatusCode;
use serde::Serialize;
use service::SandboxUsage;
use tokio::time::{Interval, interval};

use super::ExecTarget;
use super::problem::ExecdProblem;
use crate::kit::sse::event_stream_response;
use crate::kit::time::now_ms;
use crate::opensandbox::{OpenSandboxState, sse};

/// Samples older than this are dropped.
const SAMPLE_RETENTION: Duration = Duration::from_secs(600);
const WATCH_INTERVAL: Duration = Duration::from_secs(1);

/// The last CPU time sample of each sandbox: usage is the difference of two samples.
#[derive(Default)]
pub(in crate::opensandbox) struct CpuSamples(Mutex<HashMap<SandboxId, CpuSample>>);

#[derive(Clone, Copy)]
struct CpuSample {
    at: Instant,
    cpu_micros: u64,
}

#[derive(Serialize)]
pub(super) struct MetricsBody {
    cpu_count: f64,
    cpu_used_pct: f64,
    mem_total_mib: f64,
    mem_used_mib: f64,
    timestamp: i64,
}

/// `GET /metrics`: responds immediately; the CPU usage is that since the last call, or since the
/// sandbox was created.
pub(super) async fn get_metrics(
    State(state): State<OpenSandboxState>,
    target: ExecTarget,
) -> Result<Json<MetricsBody>, ExecdProblem> {
    measure_usage(&state, &target).await.map(Json)
}

/// `GET /metrics/watch`: one object a second.
pub(super) async fn watch_metrics(State(front): State<OpenSandboxState>, target: ExecTarget) -> Response {
    let start = (front, target, interval(WATCH_INTERVAL));
    event_stream_response(stream::unfold(Some(start), |state| async {
        let (front, scope, mut ticks): (OpenSandboxState, ExecTarget, Interval) = state?;
        ticks.tick().await;
        let mut frame = Vec::new();
        let measured = measure_usage(&front, &scope).await;
        let continues = measured.is_ok();
        match measured {
            Ok(body) => sse::write_event(&mut frame, &body),
            Err(fault) => sse::write_event(&mut frame, &serde_json::json!({ "error": fault.0.message })),
        }
        Some((Ok(Bytes::from(frame)), continues.then_some((front, scope, ticks))))
    }))
}

async fn measure_usage(state: &OpenSandboxState, target: &ExecTarget) -> Result<MetricsBody, ExecdProblem> {
    let usage = target.sandbox.current_usage().await?;
    let (Some(used), Some(total)) = (usage.memory, usage.memory_limit) else {
        let message = "this host does not measure the resource usage of sandboxes";
        return Err(ExecdProblem::new(StatusCode::NOT_IMPLEMENTED, "NOT_SUPPORTED", message));
    };
    let cores = usable_cores(&usage);
    let age = SystemTime::now().duration_since(target.sandbox.created()).unwrap_or_default();
    let busy = state.samples.busy_cores(target.sandbox.id(), usage.cpu_micros.unwrap_or_default(), age);
    Ok(MetricsBody {
        cpu_count: cores,
        cpu_used_pct: (100.0 * busy / cores).clamp(0.0, 100.0),
        mem_total_mib: to_mib(total.0),
        mem_used_mib: to_mib(used.0.min(total.0)),
        timestamp: now_ms(),
    })
}

/// Returns how many cores the sandbox may use.
fn usable_cores(usage: &SandboxUsage) -> f64 {
    let all = std::thread::available_parallelism().map_or(1, usize::from);
    match usage.cpu_limit.filter(|limit| *limit > 0) {
        Some(limit) => f64::from(limit) / 1000.0,
        None => u32::try_from(all).map_or(1.0, f64::from),
    }
}

#[expect(clippy::cast_precision_loss, reason = "a few bytes in a petabyte do not matter")]
fn to_mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

impl CpuSamples {
    /// Returns the average number of busy cores since the last sample, or since creation (`age`).
    fn busy_cores(&self, id: &SandboxId, cpu_micros: u64, age: Duration) -> f64 {
        let now = CpuSample { at: Instant::now(), cpu_micros };
        let mut samples = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        samples.retain(|_, sample| sample.at.elapsed() < SAMPLE_RETENTION);
        let (wall, used) = match samples.insert(id.clone(), now) {
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
        let samples = CpuSamples::default();
        let id = SandboxId::from_entropy([7; 20]);
        assert!((samples.busy_cores(&id, 500_000, Duration::from_secs(1)) - 0.5).abs() < 1e-9);
        assert!(samples.busy_cores(&id, 500_000, Duration::from_secs(1)) == 0.0);
        assert!(samples.busy_cores(&id, 400_000, Duration::from_secs(1)) == 0.0);
    }
}
