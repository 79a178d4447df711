//! Taking a warm sandbox from a pool, beside creating one.

use std::time::{Duration, Instant};

use anyhow::Result;
use serde_json::{Value, json};

use super::client::BenchClient;
use super::report::BenchReport;
use super::server::BenchServer;
use super::statistics::TimeSamples;
use super::{RoundCounts, sleep_for};

const POOL_NAME: &str = "bench";
const POOL_LEVEL: u64 = 2;

/// The time from the request to the result of the first command: for a sandbox that is created, and for
/// one that is taken from a pool and gets a volume attached. The pools belong to another server, so that
/// the creates of this one are not served from a pool.
pub(crate) fn measure_claim(
    server: &BenchServer,
    rounds: RoundCounts,
    report: &mut BenchReport,
) -> Result<()> {
    let pooled = BenchServer::start_as("pool", "off")?;
    let (mut cold_client, mut warm_client) = (server.client()?, pooled.client()?);
    warm_client.create_pool(POOL_NAME, usize::try_from(POOL_LEVEL)?)?;
    let limits = json!({"cpu": "1", "memory": "512Mi"});
    let volume = json!({"name": "data", "mountPath": "/data", "pvc": {"claimName": "bench"}});
    let plain = json!({"resourceLimits": limits});
    let mounted = json!({"resourceLimits": limits, "volumes": [volume]});
    let (mut cold, mut warm, mut bare) =
        (TimeSamples::default(), TimeSamples::default(), TimeSamples::default());
    // The first of each fills caches and is not counted.
    for run in 0..=rounds.spaced {
        let made = time_create(&mut cold_client, &plain)?;
        wait_until_warm(&mut warm_client)?;
        let taken = time_create(&mut warm_client, &mounted)?;
        wait_until_warm(&mut warm_client)?;
        let without = time_create(&mut warm_client, &plain)?;
        if run > 0 {
            cold.push(made);
            warm.push(taken);
            bare.push(without);
        }
    }
    pooled.stop()?;
    report.add_time("create and first result, made", cold.summary());
    report.add_time("the same from a pool", bare.summary());
    report.add_time("the same from a pool, a volume attached", warm.summary());
    let ratio = warm.summary().p50 / cold.summary().p50;
    report.require_at_most("from a pool, a volume attached", ratio, 0.5, "times one that is made");
    Ok(())
}

/// One sandbox until the result of `true`; its removal is not counted.
fn time_create(client: &mut BenchClient, request: &Value) -> Result<Duration> {
    let began = Instant::now();
    let mut sandbox = client.create_from_request(request.clone())?;
    client.resolve_endpoint(&mut sandbox)?;
    client.run_true(&sandbox)?;
    let time = began.elapsed();
    client.delete_sandbox(&sandbox)?;
    Ok(time)
}

/// Waits until the pool is full, and then for a pause such as real traffic has.
fn wait_until_warm(client: &mut BenchClient) -> Result<()> {
    const POLL_INTERVAL: Duration = Duration::from_millis(20);
    while client.count_warm(POOL_NAME)? < POOL_LEVEL {
        sleep_for(POLL_INTERVAL);
    }
    sleep_for(POLL_INTERVAL);
    Ok(())
}
