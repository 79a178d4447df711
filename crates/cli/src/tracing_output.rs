//! Structured logs on standard error: JSON lines, or text for people where `CORACLE_LOG_FORMAT`
//! is `text`. `CORACLE_LOG` chooses what is logged, as `tracing` directives.

use std::io;

use tracing_subscriber::EnvFilter;

pub(crate) fn start() {
    let filter = EnvFilter::try_from_env("CORACLE_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    let logs = tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr);
    let started = if std::env::var("CORACLE_LOG_FORMAT").is_ok_and(|format| format == "text") {
        logs.try_init()
    } else {
        logs.json().flatten_event(true).try_init()
    };
    // Somebody who started them before keeps theirs.
    started.unwrap_or_default();
}
