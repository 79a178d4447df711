//! The metrics of the service, under the names that operators see.

use std::time::Duration;

use backend::NetworkTotals;
use domain::{EndCause, OnDeath, Phase};
use metrics::{counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram};

use crate::ServiceError;

pub(crate) fn describe_metrics() {
    describe_gauge!("coracle_sandboxes", "Sandboxes by phase");
    describe_histogram!(
        "coracle_create_seconds",
        metrics::Unit::Seconds,
        "Time from a create request until a command can run"
    );
    describe_histogram!(
        "coracle_exec_seconds",
        metrics::Unit::Seconds,
        "Time from an exec request until the process is started"
    );
    describe_gauge!("coracle_total_limit", "The limit of all sandboxes together, by resource");
    describe_gauge!("coracle_pool_level", "Warm sandboxes that are ready, by pool");
    describe_counter!("coracle_pool_claimed_total", "Sandboxes that were taken from a pool");
    describe_counter!("coracle_pool_cold_total", "Sandboxes that were created although a pool fits");
    describe_counter!("coracle_snapshots_total", "Snapshots that were taken");
    describe_counter!("coracle_restarts_total", "Dead sandboxes that were restarted, by how");
    describe_gauge!(
        "coracle_network_open_connections",
        "Connections that are open through the filter of networks"
    );
    describe_counter!("coracle_network_connections_total", "Connections that the filter decided, by verdict");
    describe_counter!("coracle_network_denied_queries_total", "Names that were asked for and denied");
    describe_counter!(
        "coracle_network_bytes_total",
        metrics::Unit::Bytes,
        "Bytes that passed the filter of networks, by direction"
    );
    describe_counter!("coracle_failures_total", "Failures, by operation and cause");
}

/// Records that a sandbox moved from one phase to another; `None` means that it does not exist.
pub(crate) fn record_phase_change(from: Option<Phase>, to: Option<Phase>) {
    if let Some(phase) = from {
        gauge!("coracle_sandboxes", "phase" => phase.name()).decrement(1.0);
    }
    if let Some(phase) = to {
        gauge!("coracle_sandboxes", "phase" => phase.name()).increment(1.0);
    }
}

pub(crate) fn record_create_time(took: Duration) {
    histogram!("coracle_create_seconds").record(took);
}

pub(crate) fn record_launch_time(took: Duration) {
    histogram!("coracle_exec_seconds").record(took);
}

/// Sets the limit of all sandboxes together on a resource: bytes of memory, cores, processes.
pub fn set_total_limit(resource: &'static str, amount: f64) {
    gauge!("coracle_total_limit", "resource" => resource).set(amount);
}

/// Sets how many sandboxes of a pool are ready.
pub(crate) fn set_warm_count(pool: &str, count: usize) {
    let count = u32::try_from(count).unwrap_or(u32::MAX);
    gauge!("coracle_pool_level", "pool" => pool.to_owned()).set(count);
}

pub(crate) fn count_claim(pool: &str) {
    counter!("coracle_pool_claimed_total", "pool" => pool.to_owned()).increment(1);
}

pub(crate) fn count_cold_create(pool: &str) {
    counter!("coracle_pool_cold_total", "pool" => pool.to_owned()).increment(1);
}

pub(crate) fn count_snapshot() {
    counter!("coracle_snapshots_total").increment(1);
}

/// Counts a dead sandbox that runs again.
pub(crate) fn count_restart(how: OnDeath) {
    counter!("coracle_restarts_total", "how" => how.name()).increment(1);
}

/// Counts a sandbox that died by itself.
pub(crate) fn count_death(cause: EndCause) {
    counter!("coracle_failures_total", "operation" => "live", "cause" => cause.name()).increment(1);
}

/// Sets how many connections are open through the filter of networks.
pub(crate) fn set_open_connections(count: u64) {
    gauge!("coracle_network_open_connections").set(u32::try_from(count).unwrap_or(u32::MAX));
}

/// Counts what sandboxes exchanged and tried through the filter of networks since the last call.
pub(crate) fn count_network(since: NetworkTotals) {
    counter!("coracle_network_connections_total", "verdict" => "allow").increment(since.allowed_connections);
    counter!("coracle_network_connections_total", "verdict" => "deny").increment(since.denied_connections);
    counter!("coracle_network_denied_queries_total").increment(since.denied_queries);
    counter!("coracle_network_bytes_total", "direction" => "sent").increment(since.bytes_sent);
    counter!("coracle_network_bytes_total", "direction" => "received").increment(since.bytes_received);
}

/// Counts a failure.
pub(crate) fn count_failure(operation: &'static str, error: &ServiceError) {
    let cause = error.kind().name();
    counter!("coracle_failures_total", "operation" => operation, "cause" => cause).increment(1);
}
