//! Measures asking for a sandbox by the name that it already has, beside making one.

use std::time::{Duration, Instant};

use anyhow::Result;
use serde_json::json;

use super::RoundCounts;
use super::client::BenchClient;
use super::report::BenchReport;
use super::server::BenchServer;
use super::statistics::TimeSamples;

pub(crate) fn measure_acquire(
    server: &BenchServer,
    rounds: RoundCounts,
    report: &mut BenchReport,
) -> Result<()> {
    let mut client = server.client()?;
    let named = json!({"coracle.key": "bench"});
    let sandbox = client.create_sandbox(&named)?;
    let (mut cold, mut again) = (TimeSamples::default(), TimeSamples::default());
    for run in 0..=rounds.many {
        let made = create_and_remove(&mut client)?;
        let began = Instant::now();
        client.create_sandbox(&named)?;
        let found = began.elapsed();
        if run > 0 {
            cold.push(made);
            again.push(found);
        }
    }
    client.delete_sandbox(&sandbox)?;
    report.add_time("create", cold.summary());
    report.add_time("acquire a living sandbox by its key", again.summary());
    let ratio = again.summary().p50 / cold.summary().p50;
    report.require_at_most("acquire a living sandbox by its key", ratio, 0.2, "times a create");
    Ok(())
}

/// The time of a create; the removal is not counted.
pub(super) fn create_and_remove(client: &mut BenchClient) -> Result<Duration> {
    let began = Instant::now();
    let sandbox = client.create_sandbox(&json!({}))?;
    let time = began.elapsed();
    client.delete_sandbox(&sandbox)?;
    Ok(time)
}
