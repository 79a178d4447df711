//! `coracle run -- true` beside bubblewrap with the same namespaces: on a fresh state directory, and after many
//! runs.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::RoundCounts;
use super::other_runtimes::{PeerRuntime, prepare_bubblewrap};
use super::report::BenchReport;
use super::server::BenchServer;
use super::settle::wait_until_settled;
use super::statistics::TimeSamples;

/// How much slower than bubblewrap `coracle run -- true` may be. It also makes control groups, a disk with a limit
/// and an agent.
const MAX_RATIO: f64 = 3.0;

pub(crate) fn measure_oneshot(
    server: &BenchServer,
    rounds: RoundCounts,
    report: &mut BenchReport,
) -> Result<()> {
    let place = server.directory();
    let peer = match prepare_bubblewrap(place).and_then(|peer| peer.time_once().map(|_| peer)) {
        Ok(peer) => peer,
        Err(error) => {
            report.add_unmeasured(format!("`coracle run -- true` beside bubblewrap: {error:#}"));
            return Ok(());
        }
    };
    let state = place.join("oneshot");
    // The first run makes what all later ones use.
    time_run(&state)?;
    for (age, bar) in
        [("young", "`coracle run -- true`, fresh state"), ("aged", "`coracle run -- true`, after many runs")]
    {
        if age == "aged" {
            for _ in 0..rounds.oneshot {
                time_run(&state)?;
            }
        }
        wait_until_settled(server)?;
        let (ours, theirs) = time_both(&state, &peer, rounds.many)?;
        let (ours, theirs) = (ours.summary(), theirs.summary());
        report.add_time(format!("`coracle run -- true`, {age}"), ours);
        report.add_time(format!("bubblewrap meanwhile, {age}"), theirs);
        report.require_at_most(bar, ours.p50 / theirs.p50, MAX_RATIO, "times bubblewrap");
    }
    report.add_note(format!("`coracle run`: {} runs between young and aged", rounds.oneshot));
    Ok(())
}

/// Runs both in turns, so that both meet the same kernel.
fn time_both(state: &Path, peer: &PeerRuntime, runs: usize) -> Result<(TimeSamples, TimeSamples)> {
    let (mut ours, mut theirs) = (TimeSamples::default(), TimeSamples::default());
    for _ in 0..runs {
        ours.push(time_run(state)?);
        theirs.push(peer.time_once()?);
    }
    Ok((ours, theirs))
}

fn time_run(state: &Path) -> Result<Duration> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["run", "--quiet", "--network", "off", "--state-dir"]).arg(state).args(["--", "true"]);
    let began = Instant::now();
    let output = command.stdin(Stdio::null()).output().context("could not start this program")?;
    let time = began.elapsed();
    if !output.status.success() {
        bail!("`coracle run -- true` failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(time)
}
