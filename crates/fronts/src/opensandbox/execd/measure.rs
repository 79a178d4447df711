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
use service::Usage;
use tokio::time::{Interval, interval};

use super::Scope;
use super::fault::Fault;
use crate::opensandbox::types::now_ms;
use crate::opensandbox::{Front, sse};

/// Samples older than this are dropped.
const MEMORY: Duration = Duration::from_secs(600);
const WATCH: Duration = Duration::from_secs(1);

/// The last CPU time sample of each sandbox: usage is the difference of two samples.
#[derive(Default)]
pub(in crate::opensandbox) struct Samples(Mutex<HashMap<SandboxId, Sample>>);

#[derive(Clone, Copy)]
struct Sample {
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
pub(super) async fn once(State(front): State<Front>, scope: Scope) -> Result<Json<MetricsBody>, Fault> {
    measure(&front, &scope).await.map(Json)
}

/// `GET /metrics/watch`: one object a second.
pub(super) async fn watch(State(front): State<Front>, scope: Scope) -> Response {
    let start = (front, scope, interval(WATCH));
    sse::response(stream::unfold(Some(start), |state| async {
        let (front, scope, mut ticks): (Front, Scope, Interval) = state?;
        ticks.tick().await;
        let mut frame = Vec::new();
        let measured = measure(&front, &scope).await;
        let continues = measured.is_ok();
        match measured {
            Ok(body) => sse::write(&mut frame, &body),
            Err(fault) => sse::write(&mut frame, &serde_json::json!({ "error": fault.0.message })),
        }
        Some((Ok(Bytes::from(frame)), continues.then_some((front, scope, ticks))))
    }))
}

async fn measure(front: &Front, scope: &Scope) -> Result<MetricsBody, Fault> {
    let sandbox = front.service.get(&scope.owner, &scope.id)?;
    let usage = front.service.usage(&scope.owner, &scope.id).await?;
    let (Some(used), Some(total)) = (usage.memory, usage.memory_limit) else {
        let message = "this host does not measure the resource usage of sandboxes";
        return Err(Fault::new(StatusCode::NOT_IMPLEMENTED, "NOT_SUPPORTED", message));
    };
    let cores = cores(&usage);
    let age = SystemTime::now().duration_since(sandbox.created).unwrap_or_default();
    let busy = front.samples.busy(&scope.id, usage.cpu_micros.unwrap_or_default(), age);
    Ok(MetricsBody {
        cpu_count: cores,
        cpu_used_pct: (100.0 * busy / cores).clamp(0.0, 100.0),
        mem_total_mib: mib(total.0),
        mem_used_mib: mib(used.0.min(total.0)),
        timestamp: now_ms(),
    })
}

/// Returns how many cores the sandbox may use.
fn cores(usage: &Usage) -> f64 {
    let all = std::thread::available_parallelism().map_or(1, usize::from);
    match usage.cpu_limit.filter(|limit| *limit > 0) {
        Some(limit) => f64::from(limit) / 1000.0,
        None => u32::try_from(all).map_or(1.0, f64::from),
    }
}

#[expect(clippy::cast_precision_loss, reason = "a few bytes in a petabyte do not matter")]
fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

impl Samples {
    /// Returns the average number of busy cores since the last sample, or since creation (`age`).
    fn busy(&self, id: &SandboxId, cpu_micros: u64, age: Duration) -> f64 {
        let now = Sample { at: Instant::now(), cpu_micros };
        let mut samples = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        samples.retain(|_, sample| sample.at.elapsed() < MEMORY);
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
        let samples = Samples::default();
        let id = SandboxId::from_entropy([7; 20]);
        assert!((samples.busy(&id, 500_000, Duration::from_secs(1)) - 0.5).abs() < 1e-9);
        assert!(samples.busy(&id, 500_000, Duration::from_secs(1)) == 0.0);
        assert!(samples.busy(&id, 400_000, Duration::from_secs(1)) == 0.0);
    }
}
