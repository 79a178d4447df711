//! Passing input, output and signals between our caller and the command inside.

use std::io::{self, Write};
use std::path::Path;

use anyhow::{Context, Result};
use linux::signals::{self, SignalFd};
use rustix::event::{PollFd, PollFlags, poll};
use wire::process::{ExitReason, SignalProcess, SignalTarget, StartProcess};
use wire::{AgentReply, AgentRequest, Frame, StreamTag};

use super::agent_connection::AgentConnection;
use super::input::InputForwarder;
use super::terminal;

/// Runs the command to its end. Output is written as it comes; when our reader is slow, the agent waits,
/// and the command waits for the agent, as through a pipe.
pub(super) fn relay_command(socket: &Path, start: StartProcess) -> Result<ExitReason> {
    let process = start.process.clone();
    let signals = SignalFd::watch(&[
        signals::SIGTERM,
        signals::SIGINT,
        signals::SIGHUP,
        signals::SIGQUIT,
        signals::SIGWINCH,
    ])
    .context("could not watch for signals")?;
    let interactive = start.terminal.is_some();
    let mut output = AgentConnection::send_request(socket, AgentRequest::Start(start))?;
    output.read_reply()?;
    let mut input = AgentConnection::send_request(socket, AgentRequest::Input { process: process.clone() })?;
    // A command that has already ended takes no input; its exit is about to arrive.
    let mut caller = input.read_reply().is_ok().then(|| InputForwarder::new(input)).transpose()?;
    let raw = interactive.then(terminal::RawTerminal::enter).transpose()?;
    let exit = loop {
        let ready = wait_until_ready(&output, caller.as_ref(), &signals)?;
        if ready.signals {
            forward_signals(socket, &process, &signals)?;
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

struct ReadySources {
    output: bool,
    input: bool,
    signals: bool,
}

fn wait_until_ready(
    output: &AgentConnection,
    input: Option<&InputForwarder>,
    signals: &SignalFd,
) -> Result<ReadySources> {
    let stdin = io::stdin();
    let mut watched = vec![PollFd::new(output, PollFlags::IN), PollFd::new(signals, PollFlags::IN)];
    watched.extend(input.map(|input| input.poll_fd(&stdin)));
    rustix::io::retry_on_intr(|| poll(&mut watched, None))?;
    let is_ready = |index: usize| watched.get(index).is_some_and(|fd| !fd.revents().is_empty());
    Ok(ReadySources { output: is_ready(0), signals: is_ready(1), input: is_ready(2) })
}

/// Writes the output that has arrived; returns the exit if that was the last frame.
fn take_output(connection: &mut AgentConnection) -> Result<Option<ExitReason>> {
    let ended = connection.read_available()? == 0;
    while let Some(frame) = connection.ready_frame()? {
        match frame {
            Frame::Output { stream: StreamTag::Stderr, bytes, .. } => {
                write_and_flush(&mut io::stderr().lock(), &bytes)?
            }
            Frame::Output { bytes, .. } => write_and_flush(&mut io::stdout().lock(), &bytes)?,
            frame => match frame.parse_message()? {
                AgentReply::Ended(ended) => return Ok(Some(ended.exit)),
                AgentReply::Gap { from, to, .. } => {
                    anyhow::bail!("the bytes {from} to {to} of the output were lost")
                }
                AgentReply::Fault(fault) => {
                    anyhow::bail!("could not {} `{}`", fault.operation, fault.subject)
                }
                _ => {}
            },
        }
    }
    Ok(ended.then_some(ExitReason::Lost))
}

/// Writes and flushes at once. A closed reader is not our error: the command continues, as it would with
/// its own pipe closed until it writes again.
fn write_and_flush(out: &mut impl Write, bytes: &[u8]) -> Result<()> {
    match out.write_all(bytes).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Err(error.into()),
        other => Ok(other?),
    }
}

/// Passes our signals to the command, and the new size of our terminal to its terminal.
fn forward_signals(socket: &Path, process: &str, signals: &SignalFd) -> Result<()> {
    while let Some(signal) = signals.next_signal()? {
        let process = process.to_owned();
        let request = if signal == signals::SIGWINCH {
            let Ok((columns, rows)) = terminal::terminal_size() else { continue };
            AgentRequest::Resize { process, columns, rows }
        } else {
            AgentRequest::Signal(SignalProcess { process, signal, reach: SignalTarget::Group })
        };
        // A command that has just ended cannot be signalled; its exit is about to arrive.
        if let Ok(mut link) = AgentConnection::send_request(socket, request) {
            drop(link.read_reply());
        }
    }
    Ok(())
}
