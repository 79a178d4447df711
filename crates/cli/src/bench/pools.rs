//! Taking a warm sandbox from a pool, beside creating one.

use std::time::{Duration, Instant};

use anyhow::Result;
use serde_json::{Value, json};

use super::client::Client;
use super::report::Report;
use super::server::Server;
use super::statistics::Samples;
use super::{Rounds, pause};

const POOL: &str = "bench";
const LEVEL: u64 = 2;

/// The time from the request to the result of the first command: for a sandbox that is created, and for
/// one that is taken from a pool and gets a volume attached. The pools belong to another server, so that
/// the creates of this one are not served from a pool.
pub(crate) fn claim(server: &Server, rounds: Rounds, report: &mut Report) -> Result<()> {
    let pooled = Server::start_as("pool", "off")?;
    let (mut cold_client, mut warm_client) = (server.client()?, pooled.client()?);
    warm_client.create_pool(POOL, usize::try_from(LEVEL)?)?;
    let limits = json!({"cpu": "1", "memory": "512Mi"});
    let volume = json!({"name": "data", "mountPath": "/data", "pvc": {"claimName": "bench"}});
    let plain = json!({"resourceLimits": limits});
    let mounted = json!({"resourceLimits": limits, "volumes": [volume]});
    let (mut cold, mut warm, mut bare) = (Samples::default(), Samples::default(), Samples::default());
    // The first of each fills caches and is not counted.
    for run in 0..=rounds.spaced {
        let made = create_once(&mut cold_client, &plain)?;
        wait_until_warm(&mut warm_client)?;
        let taken = create_once(&mut warm_client, &mounted)?;
        wait_until_warm(&mut warm_client)?;
        let without = create_once(&mut warm_client, &plain)?;
        if run > 0 {
            cold.push(made);
            warm.push(taken);
            bare.push(without);
        }
    }
    pooled.stop()?;
    report.time("create and first result, made", cold.summary());
    report.time("the same from a pool", bare.summary());
    report.time("the same from a pool, a volume attached", warm.summary());
    let ratio = warm.summary().p50 / cold.summary().p50;
    report.at_most("from a pool, a volume attached", ratio, 0.5, "times one that is made");
    Ok(())
}

/// One sandbox until the result of `true`; its removal is not counted.
fn create_once(client: &mut Client, wish: &Value) -> Result<Duration> {
    let began = Instant::now();
    let mut sandbox = client.create_wish(wish.clone())?;
    client.resolve(&mut sandbox)?;
    client.run_true(&sandbox)?;
    let time = began.elapsed();
    client.delete(&sandbox)?;
    Ok(time)
}

/// Waits until the pool is full, and then for a pause such as real traffic has.
fn wait_until_warm(client: &mut Client) -> Result<()> {
    const STEP: Duration = Duration::from_millis(20);
    while client.warm(POOL)? < LEVEL {
        pause(STEP);
    }
    pause(STEP);
    Ok(())
}
