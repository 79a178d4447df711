//! JavaScript and TypeScript: cells are prepared here and run by node.
//!
//! ```text
//!            3 orders                 orders
//!  agent ───────────► this process ───────────► node ─► 1, 2 output
//!        ◄─────────────────────────────────────── 4 reports
//! ```
//! This process turns each cell into a script and reports those it cannot. Node has the agent's own
//! descriptors for everything else, so its output takes no detour. Only this process receives
//! signals: node is in its own process group and is interrupted by a byte on a pipe, since it can
//! handle a signal only at certain times.

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

use crate::line_protocol::{ExecutionError, KernelEvent, OrderReader, ReportWriter, RunOrder};
use crate::order_queue::OrderQueue;
use crate::process_group;
use crate::program_search;
use crate::transform::{self, PreparedScript, ScriptLanguage, SyntaxError};

const WORKER_SCRIPT: &str = include_str!("script/worker.js");
/// The parser recurses for every level of nesting. Only the used part of the stack takes memory.
const PARSER_STACK_BYTES: usize = 256 << 20;

/// A cell as node receives it.
#[derive(Debug, Serialize)]
struct ScriptCell<'a> {
    key: &'a str,
    count: u64,
    source: &'a str,
    #[serde(flatten)]
    script: PreparedScript,
}

/// Runs cells until there are no more, or node ends.
pub(crate) fn serve_node_kernel(
    language: ScriptLanguage,
    orders: OrderReader,
    reports: &mut ReportWriter,
) -> Result<ExitCode> {
    let Some(node) = find_node() else {
        return Ok(crate::report_missing("node", "install Node.js 18 or later in the image"));
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut interrupts = signal(SignalKind::interrupt())?;
        let mut node = NodeProcess::start(node, reports)?;
        let mut desk = CellDispatcher { language, reports, count: 0 };
        let mut orders = OrderQueue::start_reading(orders)?;
        loop {
            let (order, interrupted) = tokio::select! {
                ended = node.child.wait() => return Ok(exit_code_of(ended?)),
                // The interrupt is meant for an order that was sent before it.
                _ = interrupts.recv() => (if orders.has_order() { Some(orders.next_order().await) } else { None }, true),
                order = orders.next_order() => (Some(order), false),
            };
            match order {
                Some(Some(order)) => desk.dispatch_cell(&order, &node)?,
                Some(None) => {
                    node.child.kill().await?;
                    return Ok(ExitCode::SUCCESS);
                }
                None => {}
            }
            if interrupted {
                node.interrupt_cell(desk.count);
            }
        }
    })
}

fn find_node() -> Option<PathBuf> {
    ["node", "nodejs"].iter().find_map(|name| program_search::find_program(OsStr::new(name)))
}

/// Prepares cells, and reports those that cannot be run.
struct CellDispatcher<'r> {
    language: ScriptLanguage,
    reports: &'r mut ReportWriter,
    count: u64,
}

impl CellDispatcher<'_> {
    fn dispatch_cell(&mut self, order: &RunOrder, node: &NodeProcess) -> Result<()> {
        self.count += 1;
        self.reports.send_event(&order.key, KernelEvent::Count(self.count))?;
        match prepare_on_large_stack(&order.code, self.language)? {
            Ok(script) => {
                let cell = ScriptCell { key: &order.key, count: self.count, source: &order.code, script };
                let mut line = serde_json::to_vec(&cell)?;
                line.push(b'\n');
                // If node has exited, that is reported instead.
                node.orders.send(line).unwrap_or_default();
            }
            Err(SyntaxError { message, traceback }) => {
                let ename = "SyntaxError".to_owned();
                let failure = ExecutionError { ename, evalue: message, traceback };
                self.reports.send_event(&order.key, KernelEvent::Error(failure))?;
                self.reports.send_done(&order.key)?;
            }
        }
        Ok(())
    }
}

fn prepare_on_large_stack(
    code: &str,
    language: ScriptLanguage,
) -> Result<Result<PreparedScript, SyntaxError>> {
    thread::scope(|scope| {
        let deep = thread::Builder::new().stack_size(PARSER_STACK_BYTES);
        let worker = deep.spawn_scoped(scope, || transform::prepare_script(code, language));
        worker
            .context("could not start a thread")?
            .join()
            .map_err(|_panic| anyhow!("the parser panicked on a cell"))
    })
}

/// The node process that runs cells.
struct NodeProcess {
    child: Child,
    /// Sends lines to a thread that writes them, because node may not read for a while.
    orders: blocking::Sender<Vec<u8>>,
    interrupts: OwnedFd,
}

impl NodeProcess {
    fn start(program: PathBuf, reports: &ReportWriter) -> Result<Self> {
        let (orders, orders_in) = inherited_pipe()?;
        let (interrupts, interrupts_in) = inherited_pipe()?;
        rustix::io::ioctl_fionbio(&interrupts_in, true)?;
        let reports = reports.clone_for_child()?;
        let numbers = [&orders, &reports, &interrupts].map(|fd| fd.as_raw_fd().to_string());
        let child = tokio::process::Command::new(&program)
            .arg("-e")
            .arg(WORKER_SCRIPT)
            .args(numbers)
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("could not start `{}`", program.display()))?;
        let (sender, receiver) = blocking::channel();
        let write = move || write_lines(File::from(orders_in), &receiver);
        thread::Builder::new().name("to node".to_owned()).spawn(write).context("could not start a thread")?;
        Ok(Self { child, orders: sender, interrupts: interrupts_in })
    }

    /// Interrupts the cell with this number, and the programs that it has started and may be
    /// waiting for.
    fn interrupt_cell(&self, count: u64) {
        let count = i32::try_from(count).unwrap_or(i32::MAX);
        // A full pipe already holds enough interrupts, and a closed one needs none.
        rustix::io::write(&self.interrupts, &count.to_le_bytes()).map(drop).unwrap_or_default();
        let Some(node) = self.child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw) else {
            return;
        };
        for other in process_group::list_members(node).into_iter().filter(|member| *member != node) {
            // The process may have just ended.
            kill_process(other, Signal::INT).unwrap_or_default();
        }
    }
}

fn write_lines(mut to: File, lines: &blocking::Receiver<Vec<u8>>) {
    while let Ok(line) = lines.recv() {
        if to.write_all(&line).is_err() {
            return;
        }
    }
}

/// A pipe whose reading end child processes inherit.
fn inherited_pipe() -> Result<(OwnedFd, OwnedFd)> {
    let (read, write) = pipe_with(PipeFlags::CLOEXEC)?;
    Ok((rustix::io::dup(&read)?, write))
}

/// The exit code of a process; a signal is encoded as shells do.
pub(crate) fn exit_code_of(status: ExitStatus) -> ExitCode {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    ExitCode::from(code.and_then(|code| u8::try_from(code).ok()).unwrap_or(u8::MAX))
}
