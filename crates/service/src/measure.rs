//! What is counted, under the names that operators read.

use std::time::Duration;

use domain::{Cause, Phase};
use metrics::{counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram};

use crate::ServiceError;

pub(crate) fn describe() {
    describe_gauge!("coracle_sandboxes", "Sandboxes by phase");
    describe_histogram!("coracle_create_seconds", metrics::Unit::Seconds, "From asking to the first command");
    describe_histogram!("coracle_exec_seconds", metrics::Unit::Seconds, "From asking to a started process");
    describe_counter!("coracle_snapshots_total", "Snapshots that were taken");
    describe_counter!("coracle_failures_total", "What failed, by operation and cause");
}

/// A sandbox went from one phase to another; `None` is where it does not exist.
pub(crate) fn moved(from: Option<Phase>, to: Option<Phase>) {
    if let Some(phase) = from {
        gauge!("coracle_sandboxes", "phase" => phase.name()).decrement(1.0);
    }
    if let Some(phase) = to {
        gauge!("coracle_sandboxes", "phase" => phase.name()).increment(1.0);
    }
}

pub(crate) fn created(took: Duration) {
    histogram!("coracle_create_seconds").record(took);
}

pub(crate) fn launched(took: Duration) {
    histogram!("coracle_exec_seconds").record(took);
}

pub(crate) fn snapshot_taken() {
    counter!("coracle_snapshots_total").increment(1);
}

/// A sandbox ended by itself.
pub(crate) fn died(cause: Cause) {
    counter!("coracle_failures_total", "operation" => "live", "cause" => cause.name()).increment(1);
}

/// Counts a failure.
pub(crate) fn failure(operation: &'static str, error: &ServiceError) {
    let cause = error.kind().name();
    counter!("coracle_failures_total", "operation" => operation, "cause" => cause).increment(1);
}
