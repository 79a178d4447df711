//! JavaScript and TypeScript: cells are prepared here and run by node.
//!
//! ```text
//!            3 orders                 orders
//!  agent ───────────► this process ───────────► node ─► 1, 2 output
//!        ◄─────────────────────────────────────── 4 reports
//! ```
//! This process makes a script of each cell and says so where it cannot. Node has the agent's
//! own descriptors for everything else, so nothing that it prints takes a detour. Signals come
//! here alone: node is in a group of its own, and is told by a byte, since it bears a signal only
//! at times that it chooses.

use std::ffi::OsStr;
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{ExitCode, ExitStatus};
use std::sync::mpsc as blocking;
use std::thread;

use anyhow::{Context, Result, anyhow};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, Signal, kill_process};
use serde::Serialize;
use tokio::process::Child;
use tokio::signal::unix::{SignalKind, signal};

use crate::group;
use crate::incoming::Incoming;
use crate::report::{Failure, Order, Orders, Reports, Tell};
use crate::search;
use crate::transform::{self, Language, Refused, Script};

const WORKER: &str = include_str!("script/worker.js");
/// The parser calls itself for every level of nesting. Only what is used of this becomes memory.
const STACK: usize = 256 << 20;

/// What node is asked to run.
#[derive(Debug, Serialize)]
struct Cell<'a> {
    key: &'a str,
    count: u64,
    source: &'a str,
    #[serde(flatten)]
    script: Script,
}

/// Runs cells until there are no more, or node ends.
pub(crate) fn serve(language: Language, orders: Orders, reports: &mut Reports) -> Result<ExitCode> {
    let Some(node) = find_node() else {
        return Ok(crate::missing("node", "install Node.js 18 or later in the image"));
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut interrupts = signal(SignalKind::interrupt())?;
        let mut node = Node::start(node, reports)?;
        let mut desk = Desk { language, reports, count: 0 };
        let mut orders = Incoming::read(orders)?;
        loop {
            let (order, interrupted) = tokio::select! {
                ended = node.child.wait() => return Ok(code_of(ended?)),
                // What it is meant for was ordered before.
                _ = interrupts.recv() => (if orders.has_next() { Some(orders.next().await) } else { None }, true),
                order = orders.next() => (Some(order), false),
            };
            match order {
                Some(Some(order)) => desk.hand_over(&order, &node)?,
                Some(None) => {
                    node.child.kill().await?;
                    return Ok(ExitCode::SUCCESS);
                }
                None => {}
            }
            if interrupted {
                node.interrupt(desk.count);
            }
        }
    })
}

fn find_node() -> Option<PathBuf> {
    ["node", "nodejs"].iter().find_map(|name| search::program(OsStr::new(name)))
}

/// Prepares cells, and answers those that cannot be run.
struct Desk<'r> {
    language: Language,
    reports: &'r mut Reports,
    count: u64,
}

impl Desk<'_> {
    fn hand_over(&mut self, order: &Order, node: &Node) -> Result<()> {
        self.count += 1;
        self.reports.tell(&order.key, Tell::Count(self.count))?;
        match prepare(&order.code, self.language)? {
            Ok(script) => {
                let cell = Cell { key: &order.key, count: self.count, source: &order.code, script };
                let mut line = serde_json::to_vec(&cell)?;
                line.push(b'\n');
                // If node has gone, its end is what will be told.
                node.orders.send(line).unwrap_or_default();
            }
            Err(Refused { message, traceback }) => {
                let ename = "SyntaxError".to_owned();
                let failure = Failure { ename, evalue: message, traceback };
                self.reports.tell(&order.key, Tell::Error(failure))?;
                self.reports.done(&order.key)?;
            }
        }
        Ok(())
    }
}

fn prepare(code: &str, language: Language) -> Result<Result<Script, Refused>> {
    thread::scope(|scope| {
        let deep = thread::Builder::new().stack_size(STACK);
        let worker = deep.spawn_scoped(scope, || transform::prepare(code, language));
        worker
            .context("could not start a thread")?
            .join()
            .map_err(|_panic| anyhow!("a cell could not be prepared"))
    })
}

/// The process that runs cells.
struct Node {
    child: Child,
    /// To a thread that writes them: node may be busy with something else for a while.
    orders: blocking::Sender<Vec<u8>>,
    interrupts: OwnedFd,
}

impl Node {
    fn start(program: PathBuf, reports: &Reports) -> Result<Self> {
        let (orders, orders_in) = inherited_pipe()?;
        let (interrupts, interrupts_in) = inherited_pipe()?;
        rustix::io::ioctl_fionbio(&interrupts_in, true)?;
        let reports = reports.for_child()?;
        let numbers = [&orders, &reports, &interrupts].map(|fd| fd.as_raw_fd().to_string());
        let child = tokio::process::Command::new(&program)
            .arg("-e")
            .arg(WORKER)
            .args(numbers)
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("could not start `{}`", program.display()))?;
        let (sender, receiver) = blocking::channel();
        let write = move || write_all(File::from(orders_in), &receiver);
        thread::Builder::new().name("to node".to_owned()).spawn(write).context("could not start a thread")?;
        Ok(Self { child, orders: sender, interrupts: interrupts_in })
    }

    /// Interrupts the cell of this number, and the programs that it has started and may be waiting for.
    fn interrupt(&self, count: u64) {
        let count = i32::try_from(count).unwrap_or(i32::MAX);
        // A full pipe holds interrupts enough, and a closed one needs none.
        rustix::io::write(&self.interrupts, &count.to_le_bytes()).map(drop).unwrap_or_default();
        let Some(node) = self.child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw) else {
            return;
        };
        for other in group::members(node).into_iter().filter(|member| *member != node) {
            // One that has just ended needs no signal.
            kill_process(other, Signal::INT).unwrap_or_default();
        }
    }
}

fn write_all(mut to: File, lines: &blocking::Receiver<Vec<u8>>) {
    while let Ok(line) = lines.recv() {
        if to.write_all(&line).is_err() {
            return;
        }
    }
}

/// A pipe whose reading end programs inherit.
fn inherited_pipe() -> Result<(OwnedFd, OwnedFd)> {
    let (read, write) = pipe_with(PipeFlags::CLOEXEC)?;
    Ok((rustix::io::dup(&read)?, write))
}

/// Ends as node has ended; a signal is told as a shell does.
pub(crate) fn code_of(status: ExitStatus) -> ExitCode {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    ExitCode::from(code.and_then(|code| u8::try_from(code).ok()).unwrap_or(u8::MAX))
}
