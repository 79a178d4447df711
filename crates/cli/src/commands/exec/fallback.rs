//! A command on a server of another implementation, which has no exec socket: its output comes as the
//! text of events, and it gets no input.

use std::process::ExitCode;

use anyhow::{Context, Result};
use coracle_client::events::{CommandEnding, CommandEvent, CommandFailure};
use coracle_client::exec::ExecRequest;

use super::{ExecEnd, ExecOutcome, ExecSignals, Opened, ended_by, exec_exit_code, next_signal, warn_of_gap};
use crate::client::SandboxClient;
use crate::output::Printer;

/// Copies output to ours until the command has ended.
pub(super) async fn run_over_http(
    sandbox: &SandboxClient,
    request: &ExecRequest,
    mut signals: ExecSignals,
    printer: &Printer,
) -> Result<ExitCode> {
    let mut execution = match signals.wait_for(sandbox.run_command(request)).await {
        Opened::Done(execution) => execution?,
        Opened::GivenUp(signal) => return Ok(ended_by(signal)),
    };
    if let Some(signal) = signals.early {
        return Ok(ended_by(signal));
    }
    let mut process: Option<String> = None;
    let (mut interrupts, mut missing) = (0, 0);
    loop {
        // Both branches are cancel-safe.
        let event = tokio::select! {
            event = execution.next_event() => event?.context("the server did not say how the command ended")?,
            name = next_signal(&mut signals.receivers) => {
                interrupts += 1;
                match (&process, name, interrupts) {
                    (Some(process), "SIGINT", 1) => interrupt_command(sandbox, process, printer).await,
                    // This server takes no other signals for commands: the command runs on.
                    _ => return Ok(ended_by(name)),
                }
                continue;
            }
        };
        let end = match event {
            CommandEvent::Started(id) => {
                process = Some(id);
                continue;
            }
            CommandEvent::Stdout(text) => {
                printer.print_bytes(text.as_bytes())?;
                continue;
            }
            CommandEvent::Stderr(text) => {
                printer.print_error_bytes(text.as_bytes())?;
                continue;
            }
            CommandEvent::Gap { from, to } => {
                missing += to.saturating_sub(from);
                warn_of_gap(from, to, printer);
                continue;
            }
            CommandEvent::Completed => ExecEnd::Exited { code: 0, ending: None },
            CommandEvent::Failed(failure) => end_from_failure(failure),
        };
        return exec_exit_code(ExecOutcome { end, missing }, request, printer);
    }
}

async fn interrupt_command(sandbox: &SandboxClient, process: &str, printer: &Printer) {
    printer.note_on_terminal("asking the command to end; Ctrl-C again leaves it running");
    if let Err(error) = sandbox.interrupt_process(process).await {
        printer.print_error(&error);
    }
}

/// An exit code is sent as text; other endings are reported only by our own servers.
fn end_from_failure(failure: CommandFailure) -> ExecEnd {
    let CommandFailure { value, details, ending } = failure;
    if let Some(code) = value.parse::<u8>().ok().filter(|code| *code != 0) {
        return ExecEnd::Exited { code: i32::from(code), ending: None };
    }
    match ending {
        Some(CommandEnding::Signal { .. } | CommandEnding::Oom | CommandEnding::Deadline) => {
            ExecEnd::Exited { code: -1, ending }
        }
        ending => ExecEnd::Failed { message: details.into_iter().next().unwrap_or(value), ending },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_are_exit_codes_or_reasons() {
        let failure =
            |value: &str, ending| CommandFailure { value: value.to_owned(), details: Vec::new(), ending };
        assert!(matches!(end_from_failure(failure("3", None)), ExecEnd::Exited { code: 3, ending: None }));
        let killed = end_from_failure(failure("-1", Some(CommandEnding::Signal { signal: 9 })));
        assert!(matches!(killed, ExecEnd::Exited { ending: Some(CommandEnding::Signal { signal: 9 }), .. }));
        let missing = end_from_failure(failure("could not exec", Some(CommandEnding::Missing)));
        assert!(matches!(missing, ExecEnd::Failed { ending: Some(CommandEnding::Missing), .. }));
        assert!(matches!(end_from_failure(failure("-1", None)), ExecEnd::Failed { ending: None, .. }));
    }
}
