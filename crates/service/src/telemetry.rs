//! What is reported about sandboxes: events, recent errors, resource usage, metrics and diagnostics.

pub(crate) mod cpu_share;
pub(crate) mod diagnostics;
pub(crate) mod events;
pub(crate) mod owner_metrics;
pub(crate) mod recent_errors;
pub(crate) mod service_metrics;
pub(crate) mod usage_history;
