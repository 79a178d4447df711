//! A command on a server of another implementation, which has no exec socket: its output comes as the
//! text of events, and it gets no input.

use std::process::ExitCode;

use anyhow::{Context, Result};
use coracle_client::events::{Ending, Event, Failure};
use coracle_client::exec::ExecRequest;
use tokio::signal::unix::{SignalKind, signal};

use super::{End, INTERRUPTED, Outcome, finish, warn_of_gap};
use crate::client::Sandbox;
use crate::output::Printer;

/// Copies output to ours until the command has ended.
pub(super) async fn run(sandbox: &Sandbox, request: &ExecRequest, printer: &Printer) -> Result<ExitCode> {
    let mut execution = sandbox.run(request).await?;
    let mut process: Option<String> = None;
    let mut pressed = signal(SignalKind::interrupt())?;
    let (mut interrupts, mut missing) = (0, 0);
    loop {
        // Both branches are cancel-safe.
        let event = tokio::select! {
            event = execution.next() => event?.context("the server did not say how the command ended")?,
            _ = pressed.recv() => {
                interrupts += 1;
                match (&process, interrupts) {
                    (Some(process), 1) => interrupt(sandbox, process, printer).await,
                    _ => return Ok(ExitCode::from(INTERRUPTED)),
                }
                continue;
            }
        };
        let end = match event {
            Event::Started(id) => {
                process = Some(id);
                continue;
            }
            Event::Stdout(text) => {
                printer.raw(text.as_bytes())?;
                continue;
            }
            Event::Stderr(text) => {
                printer.raw_error(text.as_bytes())?;
                continue;
            }
            Event::Gap { from, to } => {
                missing += to.saturating_sub(from);
                warn_of_gap(from, to, printer);
                continue;
            }
            Event::Completed => End::Exited { code: 0, ending: None },
            Event::Failed(failure) => end_of(failure),
        };
        return finish(Outcome { end, missing }, request, printer);
    }
}

async fn interrupt(sandbox: &Sandbox, process: &str, printer: &Printer) {
    printer.note("asking the command to end; Ctrl-C again leaves it running");
    if let Err(error) = sandbox.interrupt(process).await {
        printer.error(&error);
    }
}

/// An exit code is sent as text; other endings are reported only by our own servers.
fn end_of(failure: Failure) -> End {
    let Failure { value, details, ending } = failure;
    if let Some(code) = value.parse::<u8>().ok().filter(|code| *code != 0) {
        return End::Exited { code: i32::from(code), ending: None };
    }
    match ending {
        Some(Ending::Signal { .. } | Ending::Oom | Ending::Deadline) => End::Exited { code: -1, ending },
        ending => End::Failed { message: details.into_iter().next().unwrap_or(value), ending },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_are_exit_codes_or_reasons() {
        let failure = |value: &str, ending| Failure { value: value.to_owned(), details: Vec::new(), ending };
        assert!(matches!(end_of(failure("3", None)), End::Exited { code: 3, ending: None }));
        let killed = end_of(failure("-1", Some(Ending::Signal { signal: 9 })));
        assert!(matches!(killed, End::Exited { ending: Some(Ending::Signal { signal: 9 }), .. }));
        let missing = end_of(failure("could not exec", Some(Ending::Missing)));
        assert!(matches!(missing, End::Failed { ending: Some(Ending::Missing), .. }));
        assert!(matches!(end_of(failure("-1", None)), End::Failed { ending: None, .. }));
    }
}
