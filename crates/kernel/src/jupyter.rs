//! Runs code in a Jupyter kernel of the image.
//!
//! ```text
//!            3 orders                 shell, control
//!  agent ───────────► this process ◄─────────────────► Jupyter kernel
//!        ◄───────────                     iopub
//!          1, 2, 4
//! ```
//! The Jupyter kernel is found by its name or its language, started with its own connection file,
//! and ends with this process. It is in its own process group: this process receives the signals
//! and passes them on in the way that the kernel specifies for interrupts.

mod captured_output;
mod channels;
mod envelope;
pub(crate) mod kernel_specs;
mod message;

use std::io::{self, Write};
use std::process::{ExitCode, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process_group};
use tokio::process::{Child, Command};
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::{Instant, interval_at, timeout};

use crate::line_protocol::{KernelEvent, OrderReader, ReportWriter, RunOrder};
use crate::order_queue::OrderQueue;
use crate::script::exit_code_of;
use captured_output::CapturedOutput;
use channels::{ConnectionFile, KernelChannels};
use kernel_specs::JupyterKernelSpec;
use message::{JupyterMessage, MessageMeaning, StandardStream};

/// How long a kernel may take to answer for the first time. Some compile first.
const READY_TIMEOUT: Duration = Duration::from_secs(55);
/// The interval between requests until it does.
const READY_PROBE_INTERVAL: Duration = Duration::from_millis(300);
/// How long to wait for the second of reply and idle, which are sent together.
const RUN_END_TIMEOUT: Duration = Duration::from_secs(10);

const CONNECTION_CLOSED: &str = "the Jupyter kernel closed its connection";

/// Runs cells until there are no more, or the Jupyter kernel ends.
pub(crate) fn serve_jupyter_kernel(
    name: &str,
    orders: OrderReader,
    reports: &mut ReportWriter,
) -> Result<ExitCode> {
    let Some(spec) = kernel_specs::find_spec(name) else {
        return Ok(crate::report_missing(&format!("Jupyter kernel for {name}"), &available_kernels_hint()));
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(run_cells(spec, orders, reports))
}

async fn run_cells(
    spec: JupyterKernelSpec,
    orders: OrderReader,
    reports: &mut ReportWriter,
) -> Result<ExitCode> {
    let mut interrupts = signal(SignalKind::interrupt())?;
    let mut ends = signal(SignalKind::terminate())?;
    let place = ConnectionFile::create(&spec.name)?;
    let (mut words, heard) = CapturedOutput::capture()?;
    let mut kernel = start_kernel(&spec, &place, heard)?;
    let Some(channels) = wait_until_ready(&spec, &place, &mut kernel, &mut words).await? else {
        return exit_with_kernel(&mut kernel, words).await;
    };
    let mut bridge = KernelBridge { spec, group: process_group_of(&kernel)?, channels, reports, run: None };
    bridge.reports.send_ready()?;
    let mut orders = OrderQueue::start_reading(orders)?;
    loop {
        tokio::select! {
            _ = kernel.wait() => return exit_with_kernel(&mut kernel, words).await,
            () = words.read_once() => {}
            _ = interrupts.recv() => {
                // The interrupt is meant for an order that was sent before it.
                if bridge.run.is_none() && orders.has_order() && let Some(order) = orders.next_order().await {
                    words.clear();
                    bridge.begin_run(&order).await?;
                }
                bridge.interrupt_run().await?;
            }
            _ = ends.recv() => break,
            message = bridge.channels.output.recv() => bridge.handle_output(&message.context(CONNECTION_CLOSED)?).await?,
            message = bridge.channels.replies.recv() => bridge.handle_reply(message.context(CONNECTION_CLOSED)?)?,
            () = wait_for_deadline(bridge.run.as_ref().and_then(|run| run.deadline)) => bridge.finish_run()?,
            order = orders.next_order(), if bridge.run.is_none() => match order {
                Some(order) => {
                    words.clear();
                    bridge.begin_run(&order).await?;
                }
                None => break,
            },
        }
    }
    kill_process_group(bridge.group, Signal::KILL).unwrap_or_default();
    kernel.wait().await?;
    Ok(ExitCode::SUCCESS)
}

/// Exits as the Jupyter kernel did, and prints its last output.
async fn exit_with_kernel(kernel: &mut Child, words: CapturedOutput) -> Result<ExitCode> {
    let status = kernel.wait().await?;
    io::stderr().write_all(&words.into_bytes())?;
    Ok(exit_code_of(status))
}

fn available_kernels_hint() -> String {
    let names: Vec<String> = kernel_specs::load_all().into_iter().map(|spec| spec.name).collect();
    match names.is_empty() {
        true => "install one with its kernelspec in a Jupyter data directory".to_owned(),
        false => format!("available kernels: {}", names.join(", ")),
    }
}

fn start_kernel(
    spec: &JupyterKernelSpec,
    place: &ConnectionFile,
    [output, errors]: [Stdio; 2],
) -> Result<Child> {
    let words = spec.command_line(&place.path());
    let (program, arguments) = words.split_first().context("the kernelspec names no program")?;
    Command::new(program)
        .args(arguments)
        .envs(spec.env.iter().map(|(name, value)| (name, expand_variables(value))))
        // Some kernels watch for the end of their parent.
        .env("JPY_PARENT_PID", std::process::id().to_string())
        .stdout(output)
        .stderr(errors)
        .process_group(0)
        .kill_on_drop(true)
        .spawn()
        .with_context(|| format!("could not start `{program}` of the Jupyter kernel `{}`", spec.name))
}

/// Replaces `${NAME}` by our environment variable, as Jupyter does.
fn expand_variables(value: &str) -> String {
    let mut parts = value.split("${");
    let mut expanded = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        match part.split_once('}') {
            Some((name, rest)) => {
                expanded.push_str(&std::env::var(name).unwrap_or_default());
                expanded.push_str(rest);
            }
            None => expanded.extend(["${", part]),
        }
    }
    expanded
}

fn process_group_of(kernel: &Child) -> Result<Pid> {
    let number = kernel.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw);
    number.context("the kernel has ended")
}

/// Waits until the Jupyter kernel answers; `None` if it ends before.
async fn wait_until_ready(
    spec: &JupyterKernelSpec,
    place: &ConnectionFile,
    kernel: &mut Child,
    words: &mut CapturedOutput,
) -> Result<Option<KernelChannels>> {
    let answer = timeout(READY_TIMEOUT, connect_and_probe(place));
    tokio::pin!(answer);
    loop {
        tokio::select! {
            _ = kernel.wait() => return Ok(None),
            () = words.read_once() => {}
            channels = &mut answer => match channels {
                Ok(channels) => return channels.map(Some),
                Err(_late) => bail!("the Jupyter kernel `{}` did not answer in {READY_TIMEOUT:?}", spec.name),
            },
        }
    }
}

/// Connects, and repeats a request until both sockets have received something: messages published
/// before the subscription is complete are lost.
async fn connect_and_probe(place: &ConnectionFile) -> Result<KernelChannels> {
    let mut channels = place.connect_channels().await?;
    let mut again = interval_at(Instant::now(), READY_PROBE_INTERVAL);
    let (mut answers, mut publishes) = (false, false);
    while !(answers && publishes) {
        tokio::select! {
            _ = again.tick() => channels.request_kernel_info().await?,
            message = channels.replies.recv() => {
                answers |= message.context(CONNECTION_CLOSED)?.kind == "kernel_info_reply";
            }
            message = channels.output.recv() => publishes |= message.is_some(),
        }
    }
    Ok(channels)
}

/// The run in progress.
#[derive(Debug)]
struct ActiveRun {
    key: String,
    /// The id that messages about it name as their parent.
    id: String,
    /// Whether the kernel has reported that it begins.
    counted: bool,
    /// Whether it was interrupted before it had begun.
    interrupted: bool,
    failed: bool,
    /// A run has ended when its reply has arrived and the kernel has reported that it is idle. The
    /// two arrive on different sockets, in either order.
    reply: Option<JupyterMessage>,
    idle: bool,
    /// When the run counts as ended although one of the two is missing.
    deadline: Option<Instant>,
}

struct KernelBridge<'r> {
    spec: JupyterKernelSpec,
    group: Pid,
    channels: KernelChannels,
    reports: &'r mut ReportWriter,
    run: Option<ActiveRun>,
}

impl KernelBridge<'_> {
    async fn begin_run(&mut self, order: &RunOrder) -> Result<()> {
        let id = self.channels.request_execution(&order.code).await?;
        let key = order.key.clone();
        self.run = Some(ActiveRun {
            key,
            id,
            counted: false,
            interrupted: false,
            failed: false,
            reply: None,
            idle: false,
            deadline: None,
        });
        Ok(())
    }

    /// Handles a message that the kernel published. Output is passed on whatever request it belongs
    /// to: threads of an earlier cell may still print.
    async fn handle_output(&mut self, message: &JupyterMessage) -> Result<()> {
        let current = self.run.as_mut().filter(|run| run.id == message.parent);
        match (message.meaning(), current) {
            (MessageMeaning::Printed(stream, text), _) => print_output(stream, &text)?,
            (MessageMeaning::Event(tell), Some(run)) => {
                run.report_event(tell, self.reports)?;
                if run.counted && std::mem::take(&mut run.interrupted) {
                    self.interrupt_run().await?;
                }
            }
            (MessageMeaning::Idle, Some(run)) => {
                run.idle = true;
                self.finish_or_set_deadline()?;
            }
            _ => {}
        }
        Ok(())
    }

    fn handle_reply(&mut self, message: JupyterMessage) -> Result<()> {
        let Some(run) = self.run.as_mut().filter(|run| run.id == message.parent) else { return Ok(()) };
        if message.kind == "execute_reply" {
            run.reply = Some(message);
            self.finish_or_set_deadline()?;
        }
        Ok(())
    }

    /// Ends the run if nothing more will come, or sets the deadline by which it ends.
    fn finish_or_set_deadline(&mut self) -> Result<()> {
        let Some(run) = &mut self.run else { return Ok(()) };
        if run.reply.is_some() && run.idle {
            return self.finish_run();
        }
        run.deadline.get_or_insert(Instant::now() + RUN_END_TIMEOUT);
        Ok(())
    }

    fn finish_run(&mut self) -> Result<()> {
        let Some(mut run) = self.run.take() else { return Ok(()) };
        if let Some(reply) = run.reply.take() {
            for tell in reply.reply_events(run.failed) {
                run.report_event(tell, self.reports)?;
            }
        }
        Ok(self.reports.send_done(&run.key)?)
    }

    async fn interrupt_run(&mut self) -> Result<()> {
        let Some(run) = &mut self.run else { return Ok(()) };
        // A kernel that has not begun ignores a signal, so it is sent later. A second interrupt
        // does not wait for that.
        if !run.counted
            && !self.spec.is_interrupted_by_message()
            && !std::mem::replace(&mut run.interrupted, true)
        {
            return Ok(());
        }
        if self.spec.is_interrupted_by_message() {
            return self.channels.request_interrupt().await;
        }
        Ok(kill_process_group(self.group, Signal::INT)?)
    }
}

impl ActiveRun {
    fn report_event(&mut self, tell: KernelEvent, reports: &mut ReportWriter) -> io::Result<()> {
        self.failed |= matches!(tell, KernelEvent::Error(_));
        if matches!(tell, KernelEvent::Count(_)) && std::mem::replace(&mut self.counted, true) {
            return Ok(());
        }
        reports.send_event(&self.key, tell)
    }
}

/// Waits for the deadline of a run, if it has one.
async fn wait_for_deadline(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}

fn print_output(stream: StandardStream, text: &str) -> io::Result<()> {
    match stream {
        StandardStream::Stdout => write_and_flush(&mut io::stdout().lock(), text),
        StandardStream::Stderr => write_and_flush(&mut io::stderr().lock(), text),
    }
}

fn write_and_flush(out: &mut impl Write, text: &str) -> io::Result<()> {
    out.write_all(text.as_bytes())?;
    out.flush()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_in_a_kernelspec_are_filled_in() {
        let path = std::env::var("PATH").expect("PATH is set");
        assert_eq!(expand_variables("a:${PATH}:b"), format!("a:{path}:b"));
        assert_eq!(expand_variables("${NOBODY_SETS_THIS}x"), "x");
        assert_eq!(expand_variables("open ${ end"), "open ${ end");
    }
}
