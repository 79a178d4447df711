//! Creating sandboxes and running commands in them, beside the floor.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde_json::json;

use super::client::BenchClient;
use super::floor::{FloorProcess, FloorTask};
use super::report::BenchReport;
use super::server::BenchServer;
use super::settle::wait_until_settled;
use super::statistics::TimeSamples;
use super::{RoundCounts, sleep_for};

/// The pause before each run of the settled series. Real traffic has pauses, in which the kernel finishes
/// earlier work and in which its grace periods show; a tight loop has neither.
const SETTLED_INTERVAL: Duration = Duration::from_millis(500);

/// From the request for a sandbox to the result of its first command, on a kept connection: in a tight loop,
/// and with pauses in which the kernel settles.
pub(crate) fn measure_create(
    server: &BenchServer,
    rounds: RoundCounts,
    report: &mut BenchReport,
) -> Result<()> {
    let settled = measure_pairs(server, rounds.spaced, SETTLED_INTERVAL)?;
    report.add_time("floor, settled", settled.floor.summary());
    report.add_time("create and first result, settled", settled.ours.summary());
    let ratio = settled.ours.summary().p50 / settled.floor.summary().p50;
    report.require_at_most("create and first result, settled", ratio, 2.5, "times the floor");

    let churn = measure_pairs(server, rounds.many, Duration::ZERO)?;
    report.add_time("floor: clone, overlay, pivot, exec", churn.floor.summary());
    report.add_time("create and first result", churn.ours.summary());
    let ratio = churn.ours.summary().p50 / churn.floor.summary().p50;
    report.require_at_most("create and first result, under churn", ratio, 2.5, "times the floor");
    Ok(())
}

struct SamplePairs {
    floor: TimeSamples,
    ours: TimeSamples,
}

/// Runs the floor and our server in turn, so that both see the same machine.
fn measure_pairs(server: &BenchServer, runs: usize, apart: Duration) -> Result<SamplePairs> {
    let mut floor = FloorProcess::start(server.directory())?;
    let mut client = server.client()?;
    let mut pairs = SamplePairs { floor: TimeSamples::default(), ours: TimeSamples::default() };
    // The first of each fills caches and is not counted.
    for run in 0..=runs {
        sleep_for(apart);
        let bare = floor.run(FloorTask::Sandbox)?;
        sleep_for(apart);
        let ours = create_once(&mut client)?;
        if run > 0 {
            pairs.floor.push(bare);
            pairs.ours.push(ours);
        }
    }
    Ok(pairs)
}

/// One sandbox from nothing to the result of `true`; its removal is not counted.
fn create_once(client: &mut BenchClient) -> Result<Duration> {
    let began = Instant::now();
    let mut sandbox = client.create_sandbox(&json!({}))?;
    client.resolve_endpoint(&mut sandbox)?;
    client.run_true(&sandbox)?;
    let time = began.elapsed();
    client.delete_sandbox(&sandbox)?;
    Ok(time)
}

/// `true` in a running sandbox, beside a bare spawn.
pub(crate) fn measure_exec(
    server: &BenchServer,
    rounds: RoundCounts,
    report: &mut BenchReport,
) -> Result<()> {
    let mut floor = FloorProcess::start(server.directory())?;
    let mut client = server.client()?;
    let mut sandbox = client.create_sandbox(&json!({}))?;
    client.resolve_endpoint(&mut sandbox)?;
    let (mut bare, mut ours) = (TimeSamples::default(), TimeSamples::default());
    for run in 0..=rounds.many {
        let spawned = floor.run(FloorTask::Spawn)?;
        let began = Instant::now();
        client.run_true(&sandbox)?;
        let ran = began.elapsed();
        if run > 0 {
            bare.push(spawned);
            ours.push(ran);
        }
    }
    client.delete_sandbox(&sandbox)?;
    report.add_time("bare spawn of `true`", bare.summary());
    report.add_time("`true` in a living sandbox", ours.summary());
    report.require_at_most(
        "`true` in a living sandbox",
        ours.summary().p50 / bare.summary().p50,
        1.8,
        "times a bare spawn",
    );
    Ok(())
}

/// All at once: as many connections as sandboxes, as many floor processes as clones.
pub(crate) fn measure_burst(
    server: &BenchServer,
    rounds: RoundCounts,
    report: &mut BenchReport,
) -> Result<()> {
    const REPEATS: usize = 5;
    let mut floors =
        (0..rounds.burst).map(|_| FloorProcess::start(server.directory())).collect::<Result<Vec<_>>>()?;
    let (mut bare, mut ours) = (TimeSamples::default(), TimeSamples::default());
    for _ in 0..REPEATS {
        wait_until_settled(server)?;
        bare.push(floor_burst(&mut floors)?);
        wait_until_settled(server)?;
        ours.push(create_burst(server, rounds.burst)?);
    }
    report.add_time(format!("floor, {} at once (wall)", rounds.burst), bare.summary());
    report.add_time(format!("create, {} at once (wall)", rounds.burst), ours.summary());
    report.require_at_most(
        "creates at once, all made",
        ours.summary().p50 / bare.summary().p50,
        1.8,
        "times the floor's",
    );
    Ok(())
}

fn floor_burst(floors: &mut [FloorProcess]) -> Result<Duration> {
    let began = Instant::now();
    for floor in floors.iter_mut() {
        floor.begin(FloorTask::Sandbox)?;
    }
    for floor in floors.iter_mut() {
        floor.end()?;
    }
    Ok(began.elapsed())
}

/// The time until the last of `count` simultaneous creates is answered. Each must succeed.
fn create_burst(server: &BenchServer, count: usize) -> Result<Duration> {
    let mut clients = (0..count).map(|_| server.client()).collect::<Result<Vec<_>>>()?;
    let start = Barrier::new(count + 1);
    std::thread::scope(|scope| {
        let threads: Vec<_> = clients
            .iter_mut()
            .map(|client| {
                let start = &start;
                scope.spawn(move || {
                    start.wait();
                    let sandbox = client.create_sandbox(&json!({}))?;
                    Ok((sandbox, Instant::now()))
                })
            })
            .collect();
        start.wait();
        let began = Instant::now();
        let mut last = began;
        let mut made = Vec::new();
        for thread in threads {
            let ended: Result<_> = thread.join().expect("a client does not panic");
            let (sandbox, at) = ended.context("one of many simultaneous creates failed")?;
            last = last.max(at);
            made.push(sandbox);
        }
        let mut client = server.client()?;
        made.iter().try_for_each(|sandbox| client.delete_sandbox(sandbox))?;
        Ok(last.duration_since(began))
    })
}
