//! Snapshots: their time does not depend on their content, and a sandbox made from one starts as fast as
//! any other.

use std::time::{Duration, Instant};

use anyhow::Result;
use serde_json::json;

use super::Rounds;
use super::client::{Client, Sandbox};
use super::report::Report;
use super::server::Server;
use super::statistics::Samples;

/// The time from asking for a snapshot until it is ready, for a sandbox that wrote much and for an empty
/// one.
pub(crate) fn take(server: &Server, rounds: Rounds, report: &mut Report) -> Result<()> {
    let mut client = server.client()?;
    let empty = client.create(&json!({}))?;
    let full = written(&mut client, rounds.written)?;
    let (mut of_empty, mut of_full) = (Samples::default(), Samples::default());
    // The first of each fills caches and is not counted.
    for run in 0..=rounds.spaced {
        let (bare, loaded) = (take_once(&mut client, &empty)?, take_once(&mut client, &full)?);
        if run > 0 {
            of_empty.push(bare);
            of_full.push(loaded);
        }
    }
    client.delete(&empty)?;
    client.delete(&full)?;
    report.time("snapshot of an empty sandbox", of_empty.summary());
    report.time(format!("snapshot with {} MiB written", rounds.written >> 20), of_full.summary());
    let ratio = of_full.summary().p50 / of_empty.summary().p50;
    report.at_most("snapshot of a full disk", ratio, 3.0, "times of an empty one");
    Ok(())
}

/// The time from the request for a sandbox with the files of a snapshot to the result of its first
/// command, beside a sandbox from an image.
pub(crate) fn restore(server: &Server, rounds: Rounds, report: &mut Report) -> Result<()> {
    let mut client = server.client()?;
    let source = written(&mut client, rounds.written)?;
    let snapshot = client.snapshot(&source)?;
    let (mut cold, mut restored) = (Samples::default(), Samples::default());
    for run in 0..=rounds.many {
        let plain = first_result(&mut client, |client| client.create(&json!({})))?;
        let from_snapshot = first_result(&mut client, |client| client.restore(&snapshot))?;
        if run > 0 {
            cold.push(plain);
            restored.push(from_snapshot);
        }
    }
    client.forget(&snapshot)?;
    client.delete(&source)?;
    report.time("create and first result, beside restores", cold.summary());
    report.time("restore and first result", restored.summary());
    let ratio = restored.summary().p50 / cold.summary().p50;
    report.at_most("restore and first result", ratio, 1.5, "times a create");
    Ok(())
}

/// A sandbox that has written this many bytes and waited until they were on disk.
fn written(client: &mut Client, bytes: u64) -> Result<Sandbox> {
    let mut sandbox = client.create(&json!({"coracle.disk": format!("{}Mi", (bytes >> 20) * 2)}))?;
    client.resolve(&mut sandbox)?;
    let text = format!("head -c {bytes} /dev/zero > /root/file && sync /root/file");
    client.run(&sandbox, &["sh", "-c", &text])?;
    Ok(sandbox)
}

fn take_once(client: &mut Client, sandbox: &Sandbox) -> Result<Duration> {
    let began = Instant::now();
    let snapshot = client.snapshot(sandbox)?;
    let time = began.elapsed();
    client.forget(&snapshot)?;
    Ok(time)
}

/// The time from the request to the result of `true`; the removal is not counted.
fn first_result(client: &mut Client, make: impl Fn(&mut Client) -> Result<Sandbox>) -> Result<Duration> {
    let began = Instant::now();
    let mut sandbox = make(client)?;
    client.resolve(&mut sandbox)?;
    client.run_true(&sandbox)?;
    let time = began.elapsed();
    client.delete(&sandbox)?;
    Ok(time)
}
