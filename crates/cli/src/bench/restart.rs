//! Restarting a dead sandbox, beside creating one.

use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use super::RoundCounts;
use super::acquire::create_and_remove;
use super::report::BenchReport;
use super::server::BenchServer;
use super::statistics::TimeSamples;

pub(crate) fn measure_restart(
    server: &BenchServer,
    rounds: RoundCounts,
    report: &mut BenchReport,
) -> Result<()> {
    if !linux::privileges::is_host_root() {
        report.add_note("restart: left out, disks of an ordinary user are memory".to_owned());
        return Ok(());
    }
    let mut client = server.client()?;
    let named = json!({"coracle.key": "bench-restart"});
    let sandbox = client.create_sandbox(&named)?;
    let record = server.directory().join("state/boxes").join(&sandbox.id);
    let (mut cold, mut again) = (TimeSamples::default(), TimeSamples::default());
    for run in 0..=rounds.many {
        let made = create_and_remove(&mut client)?;
        kill_agent(&record)?;
        let began = Instant::now();
        let restarted = client.create_sandbox(&named)?;
        let time = began.elapsed();
        ensure!(restarted.id == sandbox.id, "another sandbox has the name");
        if run > 0 {
            cold.push(made);
            again.push(time);
        }
    }
    client.delete_sandbox(&sandbox)?;
    report.add_time("create", cold.summary());
    report.add_time("restart in place", again.summary());
    let ratio = again.summary().p50 / cold.summary().p50;
    report.require_at_most("restart in place", ratio, 1.2, "times a create");
    Ok(())
}

/// Kills the first process of a sandbox and waits until the server has released its resources.
fn kill_agent(record: &Path) -> Result<()> {
    let read = || -> Result<Value> { Ok(serde_json::from_slice(&std::fs::read(record)?)?) };
    let pid = read()?["process"]["pid"].as_i64().and_then(|pid| Pid::from_raw(i32::try_from(pid).ok()?));
    kill_process(pid.context("the sandbox has no process")?, Signal::KILL)?;
    while read().map_or(true, |record| record["stopped"] != true) {
        std::thread::yield_now();
    }
    Ok(())
}
