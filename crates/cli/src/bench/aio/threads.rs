//! New and known threads of DeerFlow: each has a sandbox of the provisioner.

use std::time::Duration;

use anyhow::Result;

use super::CONFIGURATION;
use super::client::provision;
use crate::bench::client::BenchClient;
use crate::bench::report::BenchReport;
use crate::bench::server::BenchServer;
use crate::bench::statistics::TimeSamples;
use crate::bench::transfer::time_work;
use crate::bench::{RoundCounts, sleep_for};

const POOL_NAME: &str = "threads";
const POOL_LEVEL: u64 = 2;

/// The limits are those of the provisioner.
const POOL_CONFIGURATION: &str = r#"
[[pool]]
name = "threads"
guest = "aio"
level = 2
memory = "1Gi"
cpus = 1
disk = "500Mi"
"#;

/// The pool belongs to another server, so that the creates of this one are not served from it.
pub(super) fn measure_threads(
    server: &BenchServer,
    rounds: RoundCounts,
    report: &mut BenchReport,
) -> Result<()> {
    let pooled = BenchServer::start_with_key("aio-pool", &format!("{CONFIGURATION}{POOL_CONFIGURATION}"))?;
    let (mut client, mut pool_client) = (server.client()?, pooled.client()?);
    let known = provision(&mut client, "known")?;
    let [mut cold, mut again, mut found, mut claimed] = [(); 4].map(|()| TimeSamples::default());
    // The first of each fills caches and is not counted.
    for run in 0..=rounds.spaced {
        wait_until_warm(&mut pool_client)?;
        let name = format!("thread-{run}");
        let times = [
            (&mut cold, time_new_thread(&mut client, &name)?),
            (&mut again, time_work(|| provision(&mut client, "known").map(drop))?),
            (&mut found, time_work(|| known.look_up(&mut client))?),
            (&mut claimed, time_new_thread(&mut pool_client, &name)?),
        ];
        if run > 0 {
            times.into_iter().for_each(|(samples, time)| samples.push(time));
        }
    }
    known.remove(&mut client)?;
    pooled.stop()?;
    let created = cold.summary();
    report.add_time("AIO: create through the provisioner", created);
    for (bar, samples, bound) in [
        ("AIO: POST of an existing id", &again, 0.2),
        ("AIO: GET of a sandbox", &found, 0.1),
        ("AIO: new thread from a pool, with its mounts", &claimed, 0.5),
    ] {
        let summary = samples.summary();
        report.add_time(bar, summary);
        report.require_at_most(bar, summary.p50 / created.p50, bound, "times a create");
    }
    Ok(())
}

/// The time until a new sandbox can be used; its removal is not counted.
fn time_new_thread(client: &mut BenchClient, name: &str) -> Result<Duration> {
    let mut created = None;
    let time = time_work(|| {
        created = Some(provision(client, name)?);
        Ok(())
    })?;
    created.map_or(Ok(()), |sandbox| sandbox.remove(client))?;
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
