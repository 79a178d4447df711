//! Passing input, output and signals between our caller and the command inside.

use std::io::{self, Write};
use std::path::Path;

use anyhow::{Context, Result};
use linux::signals::{self, Signals};
use rustix::event::{PollFd, PollFlags, poll};
use wire::process::{Exit, Reach, SignalProcess, Start};
use wire::{Frame, Reply, Request, StreamTag};

use super::input::InputForwarder;
use super::link::Link;
use super::terminal;

/// Runs the command to its end. Output is written as it comes; when our reader is slow, the agent waits,
/// and the command waits for the agent, as through a pipe.
pub(super) fn run(socket: &Path, start: Start) -> Result<Exit> {
    let process = start.process.clone();
    let signals = Signals::watch(&[
        signals::TERMINATE,
        signals::INTERRUPT,
        signals::HANG_UP,
        signals::QUIT,
        signals::WINDOW,
    ])
    .context("could not watch for signals")?;
    let interactive = start.terminal.is_some();
    let mut output = Link::ask(socket, Request::Start(start))?;
    output.reply()?;
    let mut input = Link::ask(socket, Request::Input { process: process.clone() })?;
    // A command that has already ended takes no input; its exit is about to arrive.
    let mut caller = input.reply().is_ok().then(|| InputForwarder::new(input)).transpose()?;
    let raw = interactive.then(terminal::Raw::enter).transpose()?;
    let exit = loop {
        let ready = wait(&output, caller.as_ref(), &signals)?;
        if ready.signals {
            forward(socket, &process, &signals)?;
        }
        if ready.output
            && let Some(exit) = take_output(&mut output)?
        {
            break exit;
        }
        if ready.input
            && let Some(forwarder) = &mut caller
            && !forwarder.forward()?
        {
            caller = None;
        }
    };
    drop(raw);
    Ok(exit)
}

struct Ready {
    output: bool,
    input: bool,
    signals: bool,
}

fn wait(output: &Link, input: Option<&InputForwarder>, signals: &Signals) -> Result<Ready> {
    let stdin = io::stdin();
    let mut watched = vec![PollFd::new(output, PollFlags::IN), PollFd::new(signals, PollFlags::IN)];
    watched.extend(input.map(|input| input.poll_fd(&stdin)));
    rustix::io::retry_on_intr(|| poll(&mut watched, None))?;
    let is_ready = |index: usize| watched.get(index).is_some_and(|fd| !fd.revents().is_empty());
    Ok(Ready { output: is_ready(0), signals: is_ready(1), input: is_ready(2) })
}

/// Writes the output that has arrived; returns the exit if that was the last frame.
fn take_output(link: &mut Link) -> Result<Option<Exit>> {
    let ended = link.fill()? == 0;
    while let Some(frame) = link.ready_frame()? {
        match frame {
            Frame::Output { stream: StreamTag::Stderr, bytes, .. } => {
                write(&mut io::stderr().lock(), &bytes)?
            }
            Frame::Output { bytes, .. } => write(&mut io::stdout().lock(), &bytes)?,
            frame => match frame.read()? {
                Reply::Ended(ended) => return Ok(Some(ended.exit)),
                Reply::Gap { from, to } => anyhow::bail!("the bytes {from} to {to} of the output were lost"),
                Reply::Fault(fault) => anyhow::bail!("could not {} `{}`", fault.operation, fault.subject),
                _ => {}
            },
        }
    }
    Ok(ended.then_some(Exit::Lost))
}

/// Writes and flushes at once. A closed reader is not our error: the command continues, as it would with
/// its own pipe closed until it writes again.
fn write(out: &mut impl Write, bytes: &[u8]) -> Result<()> {
    match out.write_all(bytes).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Err(error.into()),
        other => Ok(other?),
    }
}

/// Passes our signals to the command, and the new size of our terminal to its terminal.
fn forward(socket: &Path, process: &str, signals: &Signals) -> Result<()> {
    while let Some(signal) = signals.next()? {
        let process = process.to_owned();
        let request = if signal == signals::WINDOW {
            let Ok((columns, rows)) = terminal::size() else { continue };
            Request::Resize { process, columns, rows }
        } else {
            Request::Signal(SignalProcess { process, signal, reach: Reach::Group })
        };
        // A command that has just ended cannot be signalled; its exit is about to arrive.
        if let Ok(mut link) = Link::ask(socket, request) {
            drop(link.reply());
        }
    }
    Ok(())
}
