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
mod client;
mod contexts;
mod exec_cli;
pub(crate) mod floor;
mod idle;
mod lifecycle;
mod network;
mod peers;
mod pip;
mod pools;
mod report;
mod restart;
mod server;
mod snapshots;
mod statistics;
mod transfer;

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;

use crate::args::BenchArgs;
use crate::config::Prepared;
use crate::output::Printer;

use report::Report;
use server::Server;

/// How often each measurement is repeated.
#[derive(Clone, Copy, Debug)]
struct Rounds {
    /// Runs of operations that take milliseconds.
    many: usize,
    /// Runs with a pause before each.
    spaced: usize,
    /// Runs of operations that take a second or more.
    long: usize,
    /// Sandboxes at once.
    burst: usize,
    /// Sandboxes alive together.
    idle: usize,
    /// Bytes of the large file.
    file: u64,
    /// Bytes that a sandbox has written before a snapshot is taken of it.
    written: u64,
}

impl Rounds {
    const FULL: Self =
        Self { many: 200, spaced: 50, long: 7, burst: 100, idle: 1000, file: 1 << 30, written: 2 << 30 };
    const QUICK: Self =
        Self { many: 40, spaced: 10, long: 3, burst: 20, idle: 100, file: 128 << 20, written: 128 << 20 };
}

/// Lets time pass between two runs or two checks.
#[expect(clippy::disallowed_methods, reason = "the pause itself is wanted; there is no event to wait for")]
fn pause(time: Duration) {
    std::thread::sleep(time);
}

/// Measures, prints, and fails if a bar was missed.
pub(crate) fn bench(args: &BenchArgs, printer: &Printer) -> Result<ExitCode> {
    let rounds = if args.quick { Rounds::QUICK } else { Rounds::FULL };
    let server = Server::start(args.ipykernel.clone())?;
    let mut report = Report::default();
    let Prepared { volumes, namespaces } = Prepared::default();
    report.note(format!("prepared ahead: {volumes} volumes and {namespaces} net namespaces, no process"));
    let wanted = |name: &str| args.only.as_deref().is_none_or(|word| name.contains(word));
    type Measurement = fn(&Server, Rounds, &mut Report) -> Result<()>;
    let measurements: &[(&str, Measurement)] = &[
        ("create", lifecycle::create),
        ("exec", lifecycle::exec),
        ("exec-cli", exec_cli::start),
        ("exec-cli", exec_cli::lines),
        ("exec-cli", exec_cli::bytes),
        ("acquire", acquire::acquire),
        ("restart", restart::restart),
        ("contexts", contexts::first_result),
        ("contexts", contexts::side_by_side),
        ("burst", lifecycle::burst),
        ("pool", pools::claim),
        ("snapshot", snapshots::take),
        ("restore", snapshots::restore),
        ("peers", peers::compare),
        ("transfer", transfer::transfer),
        ("pip", pip::pip),
        ("memory", idle::memory),
        ("list", idle::list),
        ("network", network::network),
    ];
    for (name, measure) in measurements {
        if wanted(name) {
            printer.note(format!("measuring {name}"));
            measure(&server, rounds, &mut report)?;
        }
    }
    server.stop()?;
    report.print(printer)?;
    Ok(if report.all_passed() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
