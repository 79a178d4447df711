//! What sandboxes exchange through the filter of networks: sums per owner and hour, and metrics.
//!
//! Bytes are counted at each sample. What a sandbox exchanges after its last sample is not counted.

use backend::{NetworkCounters, NetworkTotals};

use crate::core::Core;
use crate::error::error_chain;
use crate::telemetry::service_metrics;

/// Counts what was exchanged since the last call.
pub(super) async fn count_network_usage(core: &Core) {
    let Some(filter) = core.host.backend.network_filter().filter(|_| core.host.capabilities.filtered) else {
        return;
    };
    let counters = tokio::select! {
        counters = filter.counters() => counters,
        () = core.tasks.cancelled() => return,
    };
    let NetworkCounters { open_connections, sandboxes } = match counters {
        Ok(counters) => counters,
        Err(error) => {
            return tracing::debug!(error = %error_chain(&error), "failed to read the counters of the network filter; the next sample has them");
        }
    };
    let now = core.clock.now();
    let mut sum = NetworkTotals::default();
    for (id, totals) in sandboxes {
        add_totals(&mut sum, core.telemetry.history.add_network_totals(&id, now, totals));
    }
    service_metrics::set_open_connections(open_connections);
    service_metrics::count_network(sum);
}

fn add_totals(sum: &mut NetworkTotals, more: NetworkTotals) {
    let NetworkTotals { allowed_connections, denied_connections, denied_queries, bytes_sent, bytes_received } =
        more;
    for (total, more) in [
        (&mut sum.allowed_connections, allowed_connections),
        (&mut sum.denied_connections, denied_connections),
        (&mut sum.denied_queries, denied_queries),
        (&mut sum.bytes_sent, bytes_sent),
        (&mut sum.bytes_received, bytes_received),
    ] {
        *total = total.saturating_add(more);
    }
}

/// What was added to `counted`. If any total is lower than before, all of them started over.
pub(super) fn totals_since(now: NetworkTotals, counted: NetworkTotals) -> NetworkTotals {
    let added = || {
        Some(NetworkTotals {
            allowed_connections: now.allowed_connections.checked_sub(counted.allowed_connections)?,
            denied_connections: now.denied_connections.checked_sub(counted.denied_connections)?,
            denied_queries: now.denied_queries.checked_sub(counted.denied_queries)?,
            bytes_sent: now.bytes_sent.checked_sub(counted.bytes_sent)?,
            bytes_received: now.bytes_received.checked_sub(counted.bytes_received)?,
        })
    };
    added().unwrap_or(now)
}
