//! Whether a server stays as quick as it was: creates, removals and starts, before and after many sandboxes and
//! restarts.

use std::time::{Duration, Instant};

use anyhow::Result;
use serde_json::json;

use super::RoundCounts;
use super::idle::{create_sandboxes, remove_sandboxes};
use super::report::BenchReport;
use super::server::BenchServer;
use super::settle::wait_until_settled;
use super::statistics::TimeSamples;

/// How much slower an aged server may be. Its state does not grow, so this is the noise of a measurement.
const MAX_AGED_RATIO: f64 = 1.25;
/// Sandboxes that are alive together while the server ages.
const BATCH_SIZE: usize = 50;
/// Runs of which the start of a server is the median.
const START_RUNS: usize = 3;

/// The times of one server at one age.
struct AgeTimes {
    create: TimeSamples,
    delete: TimeSamples,
    start: TimeSamples,
}

pub(crate) fn measure_age(
    _server: &BenchServer,
    rounds: RoundCounts,
    report: &mut BenchReport,
) -> Result<()> {
    let mut server = BenchServer::start_as("age", "off")?;
    let young = time_server(&mut server, rounds.many)?;
    let mut made = 0;
    for restart in 1..=rounds.restarts.max(1) {
        let target = rounds.aged * restart / rounds.restarts.max(1);
        while made < target {
            let batch = create_sandboxes(&server, BATCH_SIZE.min(target - made))?;
            made += batch.len();
            remove_sandboxes(&server, &batch)?;
        }
        if rounds.restarts > 0 {
            server.restart()?;
        }
    }
    let old = time_server(&mut server, rounds.many)?;
    server.stop()?;
    report.add_note(format!("age: {made} sandboxes and {} restarts", rounds.restarts));
    for (name, label, young, old) in [
        ("create, aged", "create", &young.create, &old.create),
        ("delete, aged", "delete", &young.delete, &old.delete),
        ("start of the server, aged", "start of the server", &young.start, &old.start),
    ] {
        report.add_time(format!("{label}, young"), young.summary());
        report.add_time(format!("{label}, aged"), old.summary());
        report.require_at_most(
            name,
            old.summary().p50 / young.summary().p50,
            MAX_AGED_RATIO,
            "times a young server",
        );
    }
    Ok(())
}

fn time_server(server: &mut BenchServer, runs: usize) -> Result<AgeTimes> {
    let start: TimeSamples =
        (0..START_RUNS).map(|_| server.restart()).collect::<Result<Vec<Duration>>>()?.into_iter().collect();
    wait_until_settled(server)?;
    let mut client = server.client()?;
    let mut times = AgeTimes { create: TimeSamples::default(), delete: TimeSamples::default(), start };
    for run in 0..=runs {
        let began = Instant::now();
        let sandbox = client.create_sandbox(&json!({}))?;
        let created = began.elapsed();
        let began = Instant::now();
        client.delete_sandbox(&sandbox)?;
        if run > 0 {
            times.create.push(created);
            times.delete.push(began.elapsed());
        }
    }
    Ok(times)
}
