//! What a thousand commands without a session id leave behind, and whether the next one is slower.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::client::{AioSandbox, provision};
use crate::bench::client::BenchClient;
use crate::bench::idle::to_f64;
use crate::bench::report::BenchReport;
use crate::bench::server::{BenchServer, parse_kibibytes};
use crate::bench::statistics::{TimeSamples, TimeSummary};
use crate::bench::transfer::time_work;

const COMMAND_COUNT: usize = 1000;
/// The first commands of a fresh sandbox and those after a thousand are compared by the medians of so many. They
/// alternate, since the speed of the host changes while a thousand commands run.
const COMPARED_COMMANDS: usize = 50;
const MAX_IDLE_SHELLS: f64 = 8.0;
const MEBIBYTE: f64 = 1024.0 * 1024.0;

pub(super) fn measure_aging(server: &BenchServer, report: &mut BenchReport) -> Result<()> {
    let mut client = server.client()?;
    let sandbox = provision(&mut client, "aging")?;
    let agents = find_processes(&sandbox.container)?;
    let Some(agent_memory) = proportional_bytes(&agents) else {
        report.add_unmeasured("AIO: what a thousand commands leave behind, which root alone may read");
        return sandbox.remove(&mut client);
    };
    // A sandbox counts as fresh when its first command has ended.
    run_commands(&mut client, &sandbox, 1)?;
    let memory_before = sandbox_memory(&mut client, &sandbox, &agents)?;
    run_commands(&mut client, &sandbox, COMMAND_COUNT - 1)?;
    let (fresh, aged) = compare_with_fresh(&mut client, &sandbox)?;
    let shells = find_processes(&sandbox.container)?.len().saturating_sub(agents.len());
    let growth = sandbox_memory(&mut client, &sandbox, &agents)?.saturating_sub(memory_before);
    let agent = proportional_bytes(&agents).context("the agent has ended")?;
    sandbox.remove(&mut client)?;
    report.add_time("AIO: the first commands of a sandbox", fresh);
    report.add_time(format!("AIO: commands after {COMMAND_COUNT} others"), aged);
    report.add_note(format!("agent of a fresh AIO sandbox: {:.2} MiB", to_f64(agent_memory) / MEBIBYTE));
    report.require_at_most(
        "AIO: idle shells after 1,000 commands",
        to_f64(shells as u64),
        MAX_IDLE_SHELLS,
        "",
    );
    report.require_at_most("AIO: growth of the sandbox meanwhile", to_f64(growth) / MEBIBYTE, 8.0, "MiB");
    report.require_at_most("AIO: its agent afterwards (PSS)", to_f64(agent) / MEBIBYTE, 3.0, "MiB");
    report.require_at_most(
        "AIO: command after 1,000 others",
        aged.p50 / fresh.p50,
        1.1,
        "times a fresh sandbox",
    );
    Ok(())
}

/// The times of commands in a fresh sandbox and in this one.
fn compare_with_fresh(client: &mut BenchClient, aged: &AioSandbox) -> Result<(TimeSummary, TimeSummary)> {
    let fresh = provision(client, "fresh")?;
    let (mut fresh_times, mut aged_times) = (TimeSamples::default(), TimeSamples::default());
    // The first of each fills caches and is not counted.
    for run in 0..=COMPARED_COMMANDS {
        let times = [
            (&mut fresh_times, time_command(client, &fresh)?),
            (&mut aged_times, time_command(client, aged)?),
        ];
        if run > 0 {
            times.into_iter().for_each(|(samples, time)| samples.push(time));
        }
    }
    fresh.remove(client)?;
    Ok((fresh_times.summary(), aged_times.summary()))
}

fn run_commands(client: &mut BenchClient, sandbox: &AioSandbox, count: usize) -> Result<()> {
    (0..count).try_for_each(|_| time_command(client, sandbox).map(drop))
}

fn time_command(client: &mut BenchClient, sandbox: &AioSandbox) -> Result<Duration> {
    let command = json!({"command": "true"});
    time_work(|| sandbox.run(client, "shell/exec", &command).map(drop))
}

/// The directories in `/proc` of the processes of a sandbox.
fn find_processes(container: &str) -> Result<Vec<PathBuf>> {
    let is_inside = |path: &PathBuf| {
        fs::read_to_string(path.join("cgroup")).is_ok_and(|groups| groups.contains(container))
    };
    Ok(fs::read_dir("/proc")?.flatten().map(|process| process.path()).filter(is_inside).collect())
}

/// The sum of the proportional shares of processes.
fn proportional_bytes(processes: &[PathBuf]) -> Option<u64> {
    let share =
        |path: &PathBuf| parse_kibibytes(&fs::read_to_string(path.join("smaps_rollup")).ok()?, "Pss:");
    (!processes.is_empty()).then(|| processes.iter().map(share).sum())?
}

/// The memory of a sandbox, as the server reports it, with that of its agent.
fn sandbox_memory(client: &mut BenchClient, sandbox: &AioSandbox, agents: &[PathBuf]) -> Result<u64> {
    let path = format!("/coracle/v1/sandboxes/{}", sandbox.container);
    let report = client.call("GET", &path, &Value::Null)?;
    let commands =
        report["usage"]["memoryBytes"].as_u64().context("the server does not report the memory")?;
    Ok(commands + proportional_bytes(agents).context("the agent has ended")?)
}
