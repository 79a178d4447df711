//! Resource usage of a sandbox, from its own cgroups, not the host's totals.

use std::time::Duration;

use axum::Json;
use axum::response::Response;
use bytes::Bytes;
use futures_util::stream;
use http::StatusCode;
use serde::Serialize;
use service::SandboxLoad;
use tokio::time::{Interval, interval};

use super::ExecTarget;
use super::problem::ExecdProblem;
use crate::kit::sse::event_stream_response;
use crate::kit::time::now_ms;
use crate::opensandbox::sse;

const WATCH_INTERVAL: Duration = Duration::from_secs(1);

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
pub(super) async fn get_metrics(target: ExecTarget) -> Result<Json<MetricsBody>, ExecdProblem> {
    measure_usage(&target).await.map(Json)
}

/// `GET /metrics/watch`: one object a second.
pub(super) async fn watch_metrics(target: ExecTarget) -> Result<Response, ExecdProblem> {
    target.begin_stream()?;
    let start = (target, interval(WATCH_INTERVAL));
    Ok(event_stream_response(stream::unfold(Some(start), |state| async {
        let (scope, mut ticks): (ExecTarget, Interval) = state?;
        ticks.tick().await;
        let mut frame = Vec::new();
        let measured = measure_usage(&scope).await;
        let continues = measured.is_ok();
        match measured {
            Ok(body) => sse::write_event(&mut frame, &body),
            Err(fault) => sse::write_event(&mut frame, &serde_json::json!({ "error": fault.0.message })),
        }
        Some((Ok(Bytes::from(frame)), continues.then_some((scope, ticks))))
    })))
}

async fn measure_usage(target: &ExecTarget) -> Result<MetricsBody, ExecdProblem> {
    let SandboxLoad { usage, cores, busy_cores } = target.sandbox.measure_load().await?;
    let (Some(used), Some(total)) = (usage.memory, usage.memory_limit) else {
        let message = "this host does not measure the resource usage of sandboxes";
        return Err(ExecdProblem::new(StatusCode::NOT_IMPLEMENTED, "NOT_SUPPORTED", message));
    };
    Ok(MetricsBody {
        cpu_count: cores,
        cpu_used_pct: (100.0 * busy_cores / cores).clamp(0.0, 100.0),
        mem_total_mib: to_mib(total.0),
        mem_used_mib: to_mib(used.0.min(total.0)),
        timestamp: now_ms(),
    })
}

#[expect(clippy::cast_precision_loss, reason = "a few bytes in a petabyte do not matter")]
fn to_mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}
