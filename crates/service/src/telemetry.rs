//! What is reported about sandboxes: events, recent errors, resource usage, metrics and diagnostics; and the watch over the
//! host's table of open files.

pub(crate) mod cpu_share;
pub(crate) mod create_stages;
pub(crate) mod diagnostics;
pub(crate) mod events;
pub(crate) mod file_table;
pub(crate) mod memory_stall;
mod network_usage;
pub(crate) mod owner_metrics;
pub(crate) mod recent_errors;
pub(crate) mod service_metrics;
pub(crate) mod usage_history;
