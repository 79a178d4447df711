//! `true` in a shell, in a session and on pipes, beside `/command` of the OpenSandbox API.

use std::time::{Duration, Instant};

use anyhow::Result;
use serde_json::json;

use super::client::provision;
use super::create_peer;
use crate::bench::RoundCounts;
use crate::bench::client::BenchClient;
use crate::bench::report::BenchReport;
use crate::bench::server::BenchServer;
use crate::bench::statistics::TimeSamples;
use crate::bench::transfer::time_work;

/// How many commands run at once; a sandbox has as many sessions by default.
const CONCURRENT_COMMANDS: usize = 50;

/// Many commands at once are measured in fewer rounds than single ones, by this factor. The time of a round depends on the
/// scheduler, so the median of three rounds is not reliable.
const CONCURRENT_ROUNDS_DIVISOR: usize = 4;

const UNIT: &str = "times /command of OpenSandbox";

pub(super) fn measure_commands(
    server: &BenchServer,
    rounds: RoundCounts,
    report: &mut BenchReport,
) -> Result<()> {
    let mut client = server.client()?;
    let peer = create_peer(&mut client)?;
    let sandbox = provision(&mut client, "commands")?;
    sandbox.call(&mut client, "shell/sessions/create", &json!({"id": "bench"}))?;
    let without_id = json!({"command": "true"});
    let in_session = json!({"command": "true", "id": "bench"});
    let [mut theirs, mut shell, mut session, mut bash] = [(); 4].map(|()| TimeSamples::default());
    // The first of each fills caches and is not counted.
    for run in 0..=rounds.many {
        let times = [
            (&mut theirs, time_work(|| client.run_line(&peer, "true"))?),
            (&mut shell, time_work(|| sandbox.run(&mut client, "shell/exec", &without_id).map(drop))?),
            (&mut session, time_work(|| sandbox.run(&mut client, "shell/exec", &in_session).map(drop))?),
            (&mut bash, time_work(|| sandbox.run(&mut client, "bash/exec", &without_id).map(drop))?),
        ];
        if run > 0 {
            times.into_iter().for_each(|(samples, time)| samples.push(time));
        }
    }
    sandbox.remove(&mut client)?;
    client.delete_sandbox(&peer)?;
    let reference = theirs.summary();
    report.add_time("/command of `true`, OpenSandbox", reference);
    for (bar, samples, bound) in [
        ("AIO: shell/exec of `true` without an id", &shell, 1.5),
        ("AIO: shell/exec of `true` in a session", &session, 1.0),
        ("AIO: bash/exec of `true`", &bash, 1.2),
    ] {
        let summary = samples.summary();
        report.add_time(bar, summary);
        report.require_at_most(bar, summary.p50 / reference.p50, bound, UNIT);
    }
    Ok(())
}

pub(super) fn measure_concurrent_commands(
    server: &BenchServer,
    rounds: RoundCounts,
    report: &mut BenchReport,
) -> Result<()> {
    let mut client = server.client()?;
    let peer = create_peer(&mut client)?;
    let sandbox = provision(&mut client, "concurrent")?;
    let command = json!({"command": "true"});
    let (mut theirs, mut ours) = (TimeSamples::default(), TimeSamples::default());
    for round in 0..=rounds.many / CONCURRENT_ROUNDS_DIVISOR {
        let reference = time_at_once(server, |client| client.run_line(&peer, "true"))?;
        let shells = time_at_once(server, |client| sandbox.run(client, "shell/exec", &command).map(drop))?;
        if round > 0 {
            theirs.push(reference);
            ours.push(shells);
        }
    }
    sandbox.remove(&mut client)?;
    client.delete_sandbox(&peer)?;
    let (theirs, ours) = (theirs.summary(), ours.summary());
    report.add_time(format!("{CONCURRENT_COMMANDS} /command of `true` at once, OpenSandbox"), theirs);
    report.add_time(format!("AIO: {CONCURRENT_COMMANDS} shell/exec of `true` at once"), ours);
    report.require_at_most("AIO: 50 shell/exec at once", ours.p50 / theirs.p50, 1.5, UNIT);
    Ok(())
}

/// The time until all commands that were sent at once have ended.
fn time_at_once(
    server: &BenchServer,
    run: impl Fn(&mut BenchClient) -> Result<()> + Sync,
) -> Result<Duration> {
    let clients: Vec<_> = (0..CONCURRENT_COMMANDS).map(|_| server.client()).collect::<Result<_>>()?;
    let run = &run;
    let began = Instant::now();
    std::thread::scope(|scope| {
        let runs: Vec<_> =
            clients.into_iter().map(|mut client| scope.spawn(move || run(&mut client))).collect();
        runs.into_iter().try_for_each(|run| run.join().expect("a run does not panic"))
    })?;
    Ok(began.elapsed())
}
