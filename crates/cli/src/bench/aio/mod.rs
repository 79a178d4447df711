//! The API of AIO Sandbox and the provisioner of DeerFlow, beside the OpenSandbox API of the same server.
//!
//! ```text
//! threads.rs   create, find and ask for a sandbox through the provisioner; from a pool with its mounts
//! commands.rs  `true` in shells, alone and many at once
//! aging.rs     what a thousand commands leave behind
//! files.rs     searches beside `rg` and `find`; a long text in JSON beside an upload
//! code.rs      code in a warm kernel
//! ```

mod aging;
mod client;
mod code;
mod commands;
mod files;
mod threads;

use anyhow::Result;
use serde_json::json;

use super::RoundCounts;
use super::client::{BenchClient, BenchSandbox};
use super::report::BenchReport;
use super::server::BenchServer;

/// User data lies in directories of the host, as where DeerFlow's gateway runs beside the server, so that a sandbox
/// has mounts.
const CONFIGURATION: &str = r#"
[deerflow]
user_data = "host"
state_root = "{empty}"
"#;

pub(super) fn measure_aio(
    _server: &BenchServer,
    rounds: RoundCounts,
    report: &mut BenchReport,
) -> Result<()> {
    let server = BenchServer::start_with_key("aio", CONFIGURATION)?;
    threads::measure_threads(&server, rounds, report)?;
    commands::measure_commands(&server, rounds, report)?;
    commands::measure_concurrent_commands(&server, rounds, report)?;
    aging::measure_aging(&server, report)?;
    files::measure_search(&server, rounds, report)?;
    files::measure_long_text(&server, rounds, report)?;
    code::measure_code(&server, rounds, report)?;
    server.stop()
}

/// A sandbox of the OpenSandbox API with the limits that one of the provisioner has.
fn create_peer(client: &mut BenchClient) -> Result<BenchSandbox> {
    let mut peer = client.create_with_size("1", "1Gi", &json!({"coracle.disk": "500Mi"}))?;
    client.resolve_endpoint(&mut peer)?;
    Ok(peer)
}
