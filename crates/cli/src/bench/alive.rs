//! The cost of a sandbox among many: the memory of each, and the times of creating and removing one more.

use std::fs;
use std::time::Instant;

use anyhow::{Context, Result};
use serde_json::json;

use super::RoundCounts;
use super::client::BenchSandbox;
use super::idle::{create_sandboxes, remove_sandboxes, to_f64};
use super::report::BenchReport;
use super::server::{BenchServer, parse_kibibytes};
use super::settle::wait_until_settled;
use super::statistics::TimeSamples;

const MEBIBYTE: f64 = 1024.0 * 1024.0;

/// The number of sandboxes beside which the times with many are compared.
const FEW: usize = 10;

/// The times of a create and of a removal.
struct CreateAndDelete {
    create: TimeSamples,
    delete: TimeSamples,
}

/// Memory at two numbers of sandboxes, and the times with few and with many.
pub(crate) fn measure_alive(
    server: &BenchServer,
    rounds: RoundCounts,
    report: &mut BenchReport,
) -> Result<()> {
    // This comes first: a server keeps the host ids of the most sandboxes that it ever had, and there are not enough for
    // two servers with the largest number.
    measure_stop(rounds, report)?;
    wait_until_settled(server)?;
    let few = create_sandboxes(server, FEW)?;
    wait_until_settled(server)?;
    let with_few = time_create_and_delete(server, rounds.spaced)?;
    let before = available_memory()?;
    let mut many = create_sandboxes(server, rounds.idle)?;
    let each = memory_per_sandbox(before, many.len())?;
    report.require_at_most("memory of an idle sandbox", each, 0.8, "MiB");
    match agent_share(&many) {
        Some(share) => report.require_at_most("of which its agent (PSS)", share / MEBIBYTE, 0.8, "MiB"),
        None => report.add_unmeasured("the share of an agent, which root alone may read"),
    }
    many.extend(create_sandboxes(server, rounds.alive.saturating_sub(many.len()))?);
    let each = memory_per_sandbox(before, many.len())?;
    report.require_at_most("the same, with the largest number alive", each, 0.8, "MiB");
    wait_until_settled(server)?;
    let with_many = time_create_and_delete(server, rounds.spaced)?;
    report.add_note(format!("alive: {} and {} sandboxes, beside {FEW}", rounds.idle, many.len()));
    for (name, label, few, many) in [
        ("create with many alive", "create", &with_few.create, &with_many.create),
        ("delete with many alive", "delete", &with_few.delete, &with_many.delete),
    ] {
        report.add_time(format!("{label}, {FEW} alive"), few.summary());
        report.add_time(format!("{label}, {} alive", rounds.alive), many.summary());
        let ratio = many.summary().p50 / few.summary().p50;
        report.require_at_most(name, ratio, 1.5, "times with ten");
    }
    let began = Instant::now();
    remove_sandboxes(server, &many)?;
    report.add_note(format!(
        "{} sandboxes were removed in {:.1} s",
        many.len(),
        began.elapsed().as_secs_f64()
    ));
    remove_sandboxes(server, &few)
}

/// The time of a stop that removes all sandboxes (`on_stop = "remove"`), with a server of its own.
fn measure_stop(rounds: RoundCounts, report: &mut BenchReport) -> Result<()> {
    let server = BenchServer::start_removing()?;
    let count = create_sandboxes(&server, rounds.alive)?.len();
    let took = server.time_stop()?;
    report.add_note(format!("a stop removed {count} sandboxes in {:.1} s", took.as_secs_f64()));
    Ok(())
}

fn time_create_and_delete(server: &BenchServer, runs: usize) -> Result<CreateAndDelete> {
    let mut client = server.client()?;
    let mut times = CreateAndDelete { create: TimeSamples::default(), delete: TimeSamples::default() };
    for run in 0..=runs {
        let began = Instant::now();
        let sandbox = client.create_sandbox(&json!({}))?;
        let created = began.elapsed();
        let began = Instant::now();
        client.delete_sandbox(&sandbox)?;
        let deleted = began.elapsed();
        if run > 0 {
            times.create.push(created);
            times.delete.push(deleted);
        }
    }
    Ok(times)
}

/// The decrease of the host's available memory for each of `count` sandboxes, in MiB.
fn memory_per_sandbox(before: u64, count: usize) -> Result<f64> {
    Ok(to_f64(before.saturating_sub(available_memory()?)) / to_f64(count as u64) / MEBIBYTE)
}

fn available_memory() -> Result<u64> {
    let text = fs::read_to_string("/proc/meminfo")?;
    parse_kibibytes(&text, "MemAvailable:").context("the kernel does not say how much memory is available")
}

/// The mean of the agents' proportional shares, in bytes.
fn agent_share(sandboxes: &[BenchSandbox]) -> Option<f64> {
    let mut total = 0;
    let mut found = 0_u32;
    for process in fs::read_dir("/proc").ok()?.flatten() {
        let Ok(groups) = fs::read_to_string(process.path().join("cgroup")) else { continue };
        if sandboxes.iter().any(|sandbox| groups.contains(&sandbox.id)) {
            let share = fs::read_to_string(process.path().join("smaps_rollup")).ok()?;
            total += parse_kibibytes(&share, "Pss:")?;
            found += 1;
        }
    }
    (found > 0).then(|| to_f64(total) / f64::from(found))
}
