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

mod channels;
mod envelope;
mod message;
pub(crate) mod specs;
mod words;

use std::io::{self, Write};
use std::process::{ExitCode, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process_group};
use tokio::process::{Child, Command};
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::{Instant, interval_at, timeout};

use crate::incoming::Incoming;
use crate::report::{Order, Orders, Reports, Tell};
use crate::script::code_of;
use channels::{Channels, Place};
use message::{Meaning, Message, Stream};
use specs::Spec;
use words::Words;

/// How long a kernel may take to answer for the first time. Some compile first.
const PATIENCE: Duration = Duration::from_secs(55);
/// The interval between requests until it does.
const ASK_AGAIN: Duration = Duration::from_millis(300);
/// How long to wait for the second of reply and idle, which are sent together.
const AFTERWARDS: Duration = Duration::from_secs(10);

const HUNG_UP: &str = "the Jupyter kernel closed its connection";

/// Runs cells until there are no more, or the Jupyter kernel ends.
pub(crate) fn serve(name: &str, orders: Orders, reports: &mut Reports) -> Result<ExitCode> {
    let Some(spec) = specs::find(name) else {
        return Ok(crate::missing(&format!("Jupyter kernel for {name}"), &known()));
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(run(spec, orders, reports))
}

async fn run(spec: Spec, orders: Orders, reports: &mut Reports) -> Result<ExitCode> {
    let mut interrupts = signal(SignalKind::interrupt())?;
    let mut ends = signal(SignalKind::terminate())?;
    let place = Place::choose(&spec.name)?;
    let (mut words, heard) = Words::hear()?;
    let mut kernel = start(&spec, &place, heard)?;
    let Some(channels) = become_ready(&spec, &place, &mut kernel, &mut words).await? else {
        return ended(&mut kernel, words).await;
    };
    let mut bridge = Bridge { spec, group: group_of(&kernel)?, channels, reports, run: None };
    bridge.reports.ready()?;
    let mut orders = Incoming::read(orders)?;
    loop {
        tokio::select! {
            _ = kernel.wait() => return ended(&mut kernel, words).await,
            () = words.listen() => {}
            _ = interrupts.recv() => {
                // The interrupt is meant for an order that was sent before it.
                if bridge.run.is_none() && orders.has_next() && let Some(order) = orders.next().await {
                    words.forget();
                    bridge.begin(&order).await?;
                }
                bridge.interrupt().await?;
            }
            _ = ends.recv() => break,
            message = bridge.channels.output.recv() => bridge.said(&message.context(HUNG_UP)?).await?,
            message = bridge.channels.replies.recv() => bridge.replied(message.context(HUNG_UP)?)?,
            () = overdue(bridge.run.as_ref().and_then(|run| run.deadline)) => bridge.finish()?,
            order = orders.next(), if bridge.run.is_none() => match order {
                Some(order) => {
                    words.forget();
                    bridge.begin(&order).await?;
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
async fn ended(kernel: &mut Child, words: Words) -> Result<ExitCode> {
    let status = kernel.wait().await?;
    io::stderr().write_all(&words.last())?;
    Ok(code_of(status))
}

fn known() -> String {
    let names: Vec<String> = specs::all().into_iter().map(|spec| spec.name).collect();
    match names.is_empty() {
        true => "install one with its kernelspec in a Jupyter data directory".to_owned(),
        false => format!("available kernels: {}", names.join(", ")),
    }
}

fn start(spec: &Spec, place: &Place, [output, errors]: [Stdio; 2]) -> Result<Child> {
    let words = spec.command(&place.file());
    let (program, arguments) = words.split_first().context("the kernelspec names no program")?;
    Command::new(program)
        .args(arguments)
        .envs(spec.env.iter().map(|(name, value)| (name, expand(value))))
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
fn expand(value: &str) -> String {
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

fn group_of(kernel: &Child) -> Result<Pid> {
    let number = kernel.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw);
    number.context("the kernel has ended")
}

/// Waits until the Jupyter kernel answers; `None` if it ends before.
async fn become_ready(
    spec: &Spec,
    place: &Place,
    kernel: &mut Child,
    words: &mut Words,
) -> Result<Option<Channels>> {
    let answer = timeout(PATIENCE, meet(place));
    tokio::pin!(answer);
    loop {
        tokio::select! {
            _ = kernel.wait() => return Ok(None),
            () = words.listen() => {}
            channels = &mut answer => match channels {
                Ok(channels) => return channels.map(Some),
                Err(_late) => bail!("the Jupyter kernel `{}` did not answer in {PATIENCE:?}", spec.name),
            },
        }
    }
}

/// Connects, and repeats a request until both sockets have received something: messages published
/// before the subscription is complete are lost.
async fn meet(place: &Place) -> Result<Channels> {
    let mut channels = place.connect().await?;
    let mut again = interval_at(Instant::now(), ASK_AGAIN);
    let (mut answers, mut publishes) = (false, false);
    while !(answers && publishes) {
        tokio::select! {
            _ = again.tick() => channels.greet().await?,
            message = channels.replies.recv() => {
                answers |= message.context(HUNG_UP)?.kind == "kernel_info_reply";
            }
            message = channels.output.recv() => publishes |= message.is_some(),
        }
    }
    Ok(channels)
}

/// The run in progress.
#[derive(Debug)]
struct Run {
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
    reply: Option<Message>,
    idle: bool,
    /// When the run counts as ended although one of the two is missing.
    deadline: Option<Instant>,
}

struct Bridge<'r> {
    spec: Spec,
    group: Pid,
    channels: Channels,
    reports: &'r mut Reports,
    run: Option<Run>,
}

impl Bridge<'_> {
    async fn begin(&mut self, order: &Order) -> Result<()> {
        let id = self.channels.execute(&order.code).await?;
        let key = order.key.clone();
        self.run = Some(Run {
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
    async fn said(&mut self, message: &Message) -> Result<()> {
        let current = self.run.as_mut().filter(|run| run.id == message.parent);
        match (message.meaning(), current) {
            (Meaning::Printed(stream, text), _) => print(stream, &text)?,
            (Meaning::Told(tell), Some(run)) => {
                run.tell(tell, self.reports)?;
                if run.counted && std::mem::take(&mut run.interrupted) {
                    self.interrupt().await?;
                }
            }
            (Meaning::Idle, Some(run)) => {
                run.idle = true;
                self.close_in()?;
            }
            _ => {}
        }
        Ok(())
    }

    fn replied(&mut self, message: Message) -> Result<()> {
        let Some(run) = self.run.as_mut().filter(|run| run.id == message.parent) else { return Ok(()) };
        if message.kind == "execute_reply" {
            run.reply = Some(message);
            self.close_in()?;
        }
        Ok(())
    }

    /// Ends the run if nothing more will come, or sets the deadline by which it ends.
    fn close_in(&mut self) -> Result<()> {
        let Some(run) = &mut self.run else { return Ok(()) };
        if run.reply.is_some() && run.idle {
            return self.finish();
        }
        run.deadline.get_or_insert(Instant::now() + AFTERWARDS);
        Ok(())
    }

    fn finish(&mut self) -> Result<()> {
        let Some(mut run) = self.run.take() else { return Ok(()) };
        if let Some(reply) = run.reply.take() {
            for tell in reply.verdict(run.failed) {
                run.tell(tell, self.reports)?;
            }
        }
        Ok(self.reports.done(&run.key)?)
    }

    async fn interrupt(&mut self) -> Result<()> {
        let Some(run) = &mut self.run else { return Ok(()) };
        // A kernel that has not begun ignores a signal, so it is sent later. A second interrupt
        // does not wait for that.
        if !run.counted && !self.spec.wants_message() && !std::mem::replace(&mut run.interrupted, true) {
            return Ok(());
        }
        if self.spec.wants_message() {
            return self.channels.interrupt().await;
        }
        Ok(kill_process_group(self.group, Signal::INT)?)
    }
}

impl Run {
    fn tell(&mut self, tell: Tell, reports: &mut Reports) -> io::Result<()> {
        self.failed |= matches!(tell, Tell::Error(_));
        if matches!(tell, Tell::Count(_)) && std::mem::replace(&mut self.counted, true) {
            return Ok(());
        }
        reports.tell(&self.key, tell)
    }
}

/// Waits for the deadline of a run, if it has one.
async fn overdue(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}

fn print(stream: Stream, text: &str) -> io::Result<()> {
    match stream {
        Stream::Stdout => write(&mut io::stdout().lock(), text),
        Stream::Stderr => write(&mut io::stderr().lock(), text),
    }
}

fn write(out: &mut impl Write, text: &str) -> io::Result<()> {
    out.write_all(text.as_bytes())?;
    out.flush()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_in_a_kernelspec_are_filled_in() {
        let path = std::env::var("PATH").expect("PATH is set");
        assert_eq!(expand("a:${PATH}:b"), format!("a:{path}:b"));
        assert_eq!(expand("${NOBODY_SETS_THIS}x"), "x");
        assert_eq!(expand("open ${ end"), "open ${ end");
    }
}
