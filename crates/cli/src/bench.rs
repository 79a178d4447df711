//! `coracle bench`: our times beside the floor and beside other runtimes, in one run.
//!
//! The floor is what the kernel itself takes: a bare clone with the same namespaces, an overlay,
//! pivot_root and the exec of `true`; for commands, a bare spawn. Times move with the machine,
//! so every bar is a ratio, and the floor is measured between our own runs and at the same
//! concurrency. Volumes and network namespaces may be prepared ahead, as in any server; no
//! process of a sandbox exists before it is asked for.
//!
//! ```text
//!  bench ─► client.rs ── HTTP, kept connections ──► coracle serve (own state directory, port 0)
//!    └────► floor.rs  ── one word per run ────────► coracle __floor (one thread, so it may clone)
//! ```

mod acquire;
mod age;
mod aio;
mod alive;
mod breakdown;
mod client;
mod contexts;
mod exec_cli;
pub(crate) mod floor;
mod idle;
mod lifecycle;
mod network;
mod oneshot;
mod other_runtimes;
mod peer_server;
mod pip;
mod pools;
mod report;
mod restart;
mod server;
mod settle;
mod snapshots;
mod statistics;
mod transfer;

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;

use crate::args::BenchArgs;
use crate::config::PreparedSettings;
use crate::output::Printer;

use report::BenchReport;
use server::BenchServer;

/// How often each measurement is repeated.
#[derive(Clone, Copy, Debug)]
struct RoundCounts {
    /// Runs of operations that take milliseconds.
    many: usize,
    /// Runs before each of which the kernel gets time to settle.
    spaced: usize,
    /// Runs of operations that take a second or more.
    long: usize,
    /// Sandboxes at once.
    burst: usize,
    /// Sandboxes alive together, for the list and for the first figure of memory.
    idle: usize,
    /// The largest number of sandboxes alive together.
    alive: usize,
    /// Sandboxes that are created and removed one after the other, and restarts of the server meanwhile.
    aged: usize,
    restarts: usize,
    /// Commands that `coracle run` has executed before it is measured again.
    oneshot: usize,
    /// Bytes of the large file.
    file: u64,
    /// Bytes that a sandbox has written before a snapshot is taken of it.
    written: u64,
}

impl RoundCounts {
    const FULL: Self = Self {
        many: 200,
        spaced: 50,
        long: 7,
        burst: 100,
        idle: 1000,
        alive: 3000,
        aged: 500,
        restarts: 10,
        oneshot: 1000,
        file: 1 << 30,
        written: 2 << 30,
    };
    const QUICK: Self = Self {
        many: 40,
        spaced: 10,
        long: 3,
        burst: 20,
        idle: 100,
        alive: 200,
        aged: 60,
        restarts: 3,
        oneshot: 50,
        file: 128 << 20,
        written: 128 << 20,
    };

    fn from_args(args: &BenchArgs) -> Self {
        let rounds = if args.quick { Self::QUICK } else { Self::FULL };
        Self {
            aged: args.sandboxes.unwrap_or(rounds.aged),
            restarts: args.restarts.unwrap_or(rounds.restarts),
            ..rounds
        }
    }
}

/// Lets time pass between two runs or two checks.
#[expect(clippy::disallowed_methods, reason = "the pause itself is wanted; there is no event to wait for")]
fn sleep_for(time: Duration) {
    std::thread::sleep(time);
}

/// Measures, prints, and fails if a bar was missed.
pub(crate) fn run_benchmarks(args: &BenchArgs, printer: &Printer) -> Result<ExitCode> {
    let rounds = RoundCounts::from_args(args);
    let mut report = BenchReport::default();
    if args.breakdown {
        breakdown::measure_breakdown(rounds, &mut report)?;
        report.print(printer)?;
        return Ok(ExitCode::SUCCESS);
    }
    let server = BenchServer::start(args.ipykernel.clone())?;
    let PreparedSettings { volumes, namespaces } = PreparedSettings::default();
    report.add_note(format!("prepared ahead: {volumes} volumes and {namespaces} net namespaces, no process"));
    let wanted = |name: &str| args.only.as_deref().is_none_or(|word| name.contains(word));
    type Measurement = fn(&BenchServer, RoundCounts, &mut BenchReport) -> Result<()>;
    let measurements: &[(&str, Measurement)] = &[
        ("create", lifecycle::measure_create),
        ("exec", lifecycle::measure_exec),
        ("exec-cli", exec_cli::measure_exec_start),
        ("exec-cli", exec_cli::measure_exec_lines),
        ("exec-cli", exec_cli::measure_exec_bytes),
        ("run", oneshot::measure_oneshot),
        ("acquire", acquire::measure_acquire),
        ("restart", restart::measure_restart),
        ("contexts", contexts::measure_first_result),
        ("contexts", contexts::measure_parallel_contexts),
        ("burst", lifecycle::measure_burst),
        ("pool", pools::measure_claim),
        ("snapshot", snapshots::measure_snapshot),
        ("restore", snapshots::measure_restore),
        ("peers", other_runtimes::measure_runtimes),
        ("transfer", transfer::measure_transfer),
        ("pip", pip::measure_pip),
        ("memory-alive", alive::measure_alive),
        ("list", idle::measure_list),
        ("age", age::measure_age),
        ("network", network::measure_network),
        ("aio", aio::measure_aio),
    ];
    for (name, measure) in measurements {
        if wanted(name) {
            printer.note_on_terminal(format!("measuring {name}"));
            settle::wait_until_settled(&server)?;
            if let Err(error) = measure(&server, rounds, &mut report) {
                // Earlier figures may have taken minutes to measure.
                report.print(printer)?;
                return Err(error.context(format!("could not measure {name}")));
            }
        }
    }
    if let Some(url) = args.peer.as_deref().filter(|_| wanted("peers")) {
        printer.note_on_terminal(format!("measuring {url}"));
        settle::wait_until_settled(&server)?;
        peer_server::measure_peer(&server, url, &args.peer_image, rounds, &mut report)?;
    }
    server.stop()?;
    report.print(printer)?;
    Ok(if report.all_passed() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
