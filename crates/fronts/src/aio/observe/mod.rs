//! `/v1/sandbox/observe`: what a sandbox uses, now and over time.
//!
//! The figures are those of the core, which samples every living sandbox all the time (`service/telemetry`). So a session
//! only marks a stretch of time, and a report holds the samples of it:
//!
//! ```text
//! core's samples of the last hour:  ··········[ session ]····
//!                                               └─► export ─► report (gzip)
//! ```
//! Sessions and reports are kept in memory, as the samples are, and end with the sandbox or the server.

mod live;
mod registry;
mod reports;
mod sessions;

use axum::routing::{get, post};

use super::routes::AioRoute;

pub(super) use self::registry::ObserveRegistry;

/// How often the core takes a sample.
const SAMPLE_SECONDS: f64 = service::SAMPLE_INTERVAL.as_secs() as f64;

pub(super) fn routes() -> Vec<AioRoute> {
    vec![
        ("/v1/sandbox/observe/status", get(sessions::get_status)),
        ("/v1/sandbox/observe/live", get(live::get_live)),
        ("/v1/sandbox/observe/start", post(sessions::start_session)),
        ("/v1/sandbox/observe/stop", post(sessions::stop_session)),
        ("/v1/sandbox/observe/export", post(reports::export_report)),
        ("/v1/sandbox/observe/reports", get(reports::list_reports)),
        (
            "/v1/sandbox/observe/reports/{report_id}",
            get(reports::download_report).delete(reports::delete_report),
        ),
    ]
}
