//! Snapshots: their time does not depend on their content, and a sandbox made from one starts as fast as
//! any other.

use std::time::{Duration, Instant};

use anyhow::Result;
use serde_json::json;

use super::RoundCounts;
use super::client::{BenchClient, BenchSandbox};
use super::report::BenchReport;
use super::server::BenchServer;
use super::settle::wait_until_settled;
use super::statistics::TimeSamples;

/// The time from asking for a snapshot until it is ready, for a sandbox that wrote much and for an empty
/// one.
pub(crate) fn measure_snapshot(
    server: &BenchServer,
    rounds: RoundCounts,
    report: &mut BenchReport,
) -> Result<()> {
    let mut client = server.client()?;
    let empty = client.create_sandbox(&json!({}))?;
    let full = create_filled_sandbox(&mut client, rounds.written)?;
    wait_until_settled(server)?;
    let (mut of_empty, mut of_full) = (TimeSamples::default(), TimeSamples::default());
    // The first of each fills caches and is not counted.
    for run in 0..=rounds.spaced {
        let (bare, loaded) = (time_snapshot(&mut client, &empty)?, time_snapshot(&mut client, &full)?);
        if run > 0 {
            of_empty.push(bare);
            of_full.push(loaded);
        }
    }
    client.delete_sandbox(&empty)?;
    client.delete_sandbox(&full)?;
    report.add_time("snapshot of an empty sandbox", of_empty.summary());
    report.add_time(format!("snapshot with {} MiB written", rounds.written >> 20), of_full.summary());
    let ratio = of_full.summary().p50 / of_empty.summary().p50;
    report.require_at_most("snapshot of a full disk", ratio, 3.0, "times of an empty one");
    Ok(())
}

/// The time from the request for a sandbox with the files of a snapshot to the result of its first
/// command, beside a sandbox from an image.
pub(crate) fn measure_restore(
    server: &BenchServer,
    rounds: RoundCounts,
    report: &mut BenchReport,
) -> Result<()> {
    let mut client = server.client()?;
    let source = create_filled_sandbox(&mut client, rounds.written)?;
    let snapshot = client.take_snapshot(&source)?;
    wait_until_settled(server)?;
    let (mut cold, mut restored) = (TimeSamples::default(), TimeSamples::default());
    for run in 0..=rounds.many {
        let plain = time_first_result(&mut client, |client| client.create_sandbox(&json!({})))?;
        let from_snapshot = time_first_result(&mut client, |client| client.restore_snapshot(&snapshot))?;
        if run > 0 {
            cold.push(plain);
            restored.push(from_snapshot);
        }
    }
    client.delete_snapshot(&snapshot)?;
    client.delete_sandbox(&source)?;
    report.add_time("create and first result, beside restores", cold.summary());
    report.add_time("restore and first result", restored.summary());
    let ratio = restored.summary().p50 / cold.summary().p50;
    report.require_at_most("restore and first result", ratio, 1.2, "times a create");
    Ok(())
}

/// A sandbox that has written this many bytes and waited until they were on disk.
fn create_filled_sandbox(client: &mut BenchClient, bytes: u64) -> Result<BenchSandbox> {
    let mut sandbox = client.create_sandbox(&json!({"coracle.disk": format!("{}Mi", (bytes >> 20) * 2)}))?;
    client.resolve_endpoint(&mut sandbox)?;
    let text = format!("head -c {bytes} /dev/zero > /root/file && sync /root/file");
    client.run_command(&sandbox, &["sh", "-c", &text])?;
    Ok(sandbox)
}

fn time_snapshot(client: &mut BenchClient, sandbox: &BenchSandbox) -> Result<Duration> {
    let began = Instant::now();
    let snapshot = client.take_snapshot(sandbox)?;
    let time = began.elapsed();
    client.delete_snapshot(&snapshot)?;
    Ok(time)
}

/// The time from the request to the result of `true`; the removal is not counted.
fn time_first_result(
    client: &mut BenchClient,
    make: impl Fn(&mut BenchClient) -> Result<BenchSandbox>,
) -> Result<Duration> {
    let began = Instant::now();
    let mut sandbox = make(client)?;
    client.resolve_endpoint(&mut sandbox)?;
    client.run_true(&sandbox)?;
    let time = began.elapsed();
    client.delete_sandbox(&sandbox)?;
    Ok(time)
}
