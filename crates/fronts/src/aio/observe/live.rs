//! `GET /v1/sandbox/observe/live`: the present usage of a sandbox. What cannot be measured on this host is `null`, or is
//! missing from its list.

use std::time::{Duration, SystemTime};

use axum::Json;
use axum::extract::State;
use domain::Bytes;
use serde::Serialize;
use serde_json::{Map, Value, json};
use service::{LifecycleEvent, SandboxUsage, UsageSample};

use super::registry::ObserveMode;
use crate::aio::AioState;
use crate::aio::envelope::{ResponseEnvelope, data_response};
use crate::aio::problem::AioProblem;
use crate::aio::target::AioTarget;
use crate::kit::time::format_rfc3339;

const MAX_EVENTS: usize = 20;
/// Two samples that are closer than this tell nothing about the load.
const MIN_SAMPLE_DISTANCE: Duration = Duration::from_millis(50);

#[derive(Serialize)]
pub(super) struct LiveSnapshot {
    captured_at: String,
    mode: &'static str,
    cgroup: UsageFigures,
    disk: Vec<DiskFigures>,
    /// Always empty: processes are not measured one by one.
    top_processes: [(); 0],
    recent_events: Vec<ObserveEvent>,
}

/// The figures of a sandbox at one moment. Percentages of processor time are those of one core.
#[derive(Debug, Serialize)]
pub(super) struct UsageFigures {
    cpu_usage_pct: Option<f64>,
    cpu_usage_usec: Option<u64>,
    cpu_nr_periods: Option<u64>,
    cpu_nr_throttled: Option<u64>,
    cpu_throttled_usec: Option<u64>,
    mem_current_bytes: Option<u64>,
    mem_max_bytes: Option<u64>,
    mem_usage_pct: Option<f64>,
    oom: Option<u64>,
    oom_kill: Option<u64>,
    memory_anon_bytes: Option<u64>,
    memory_file_bytes: Option<u64>,
    memory_shmem_bytes: Option<u64>,
    memory_slab_bytes: Option<u64>,
}

#[derive(Debug, Serialize)]
pub(super) struct DiskFigures {
    path: &'static str,
    used_bytes: u64,
    total_bytes: u64,
    free_bytes: u64,
    usage_pct: f64,
    inode_used: Option<u64>,
    inode_total: Option<u64>,
    inode_usage_pct: Option<f64>,
}

#[derive(Serialize)]
struct ObserveEvent {
    ts: String,
    #[serde(rename = "type")]
    kind: &'static str,
    message: String,
    data: Map<String, Value>,
}

pub(super) async fn get_live(
    State(state): State<AioState>,
    target: AioTarget,
) -> Result<Json<ResponseEnvelope<LiveSnapshot>>, AioProblem> {
    let usage = target.sandbox.current_usage().await?;
    let now = SystemTime::now();
    let former = target.sandbox.usage_samples();
    let mode = state.observe.with_known(target.sandbox.id(), |observed| {
        observed.active_session(now).map_or(ObserveMode::Guardrail, |session| session.mode)
    });
    let events = target.sandbox.lifecycle_events(MAX_EVENTS);
    Ok(data_response(LiveSnapshot {
        captured_at: format_rfc3339(now),
        mode: mode.name(),
        cgroup: UsageFigures::new(UsageSample { time: now, usage }, former.last()),
        disk: DiskFigures::from_usage(&usage).into_iter().collect(),
        top_processes: [],
        recent_events: events.iter().map(ObserveEvent::from_event).collect(),
    }))
}

impl UsageFigures {
    /// The load is that since the sample before.
    pub(super) fn new(sample: UsageSample, former: Option<&UsageSample>) -> Self {
        let UsageSample { time, usage } = sample;
        let bytes = |amount: Option<Bytes>| amount.map(|amount| amount.0);
        let load = former.and_then(|former| {
            let passed = time.duration_since(former.time).ok().filter(|time| *time >= MIN_SAMPLE_DISTANCE)?;
            let used = usage.cpu_micros?.checked_sub(former.usage.cpu_micros?)?;
            Some(percentage(Duration::from_micros(used).as_secs_f64(), passed.as_secs_f64()))
        });
        Self {
            cpu_usage_pct: load,
            cpu_usage_usec: usage.cpu_micros,
            cpu_nr_periods: None,
            cpu_nr_throttled: None,
            cpu_throttled_usec: None,
            mem_current_bytes: bytes(usage.memory),
            mem_max_bytes: bytes(usage.memory_limit),
            mem_usage_pct: usage.memory.zip(usage.memory_limit).map(|(used, limit)| share(used.0, limit.0)),
            oom: None,
            oom_kill: usage.oom_kills,
            memory_anon_bytes: None,
            memory_file_bytes: bytes(usage.file_memory),
            memory_shmem_bytes: None,
            memory_slab_bytes: None,
        }
    }
}

impl DiskFigures {
    pub(super) fn from_usage(usage: &SandboxUsage) -> Option<Self> {
        let (used, total) = (usage.disk?.0, usage.disk_limit?.0);
        Some(Self {
            path: "/",
            used_bytes: used,
            total_bytes: total,
            free_bytes: total.saturating_sub(used),
            usage_pct: share(used, total),
            inode_used: None,
            inode_total: None,
            inode_usage_pct: None,
        })
    }
}

impl ObserveEvent {
    fn from_event(event: &LifecycleEvent) -> Self {
        let phase = event.phase.name();
        let cause = event.cause.map(|cause| cause.name());
        let message = match cause {
            Some(cause) => format!("sandbox is {phase}: {cause}"),
            None => format!("sandbox is {phase}"),
        };
        let data = Map::from_iter([("phase".to_owned(), json!(phase)), ("cause".to_owned(), json!(cause))]);
        Self { ts: format_rfc3339(event.time), kind: "lifecycle", message, data }
    }
}

/// A percentage needs fewer digits than are lost.
fn share(used: u64, total: u64) -> f64 {
    percentage(used as f64, total as f64)
}

/// In percent with two decimals; zero of nothing is zero.
fn percentage(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { (part / whole * 10_000.0).round() / 100.0 } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use super::*;

    #[test]
    fn figures_are_those_of_the_samples_and_others_are_unknown() {
        let sample = |seconds, cpu| UsageSample {
            time: UNIX_EPOCH + Duration::from_secs(seconds),
            usage: SandboxUsage {
                cpu_micros: Some(cpu),
                memory: Some(Bytes(256)),
                memory_limit: Some(Bytes(1024)),
                ..SandboxUsage::default()
            },
        };
        let (first, second) = (sample(10, 1_000_000), sample(20, 6_000_000));
        let figures = UsageFigures::new(second, Some(&first));
        assert_eq!((figures.cpu_usage_pct, figures.mem_usage_pct), (Some(50.0), Some(25.0)));
        assert_eq!(UsageFigures::new(first, Some(&second)).cpu_usage_pct, None);
        assert_eq!(UsageFigures::new(first, None).cpu_usage_pct, None);
        let unknown =
            UsageFigures::new(UsageSample { time: UNIX_EPOCH, usage: SandboxUsage::default() }, None);
        let shown = serde_json::to_value(unknown).unwrap();
        assert!(shown.as_object().unwrap().values().all(Value::is_null), "{shown}");
        assert!(DiskFigures::from_usage(&SandboxUsage::default()).is_none());
    }
}
