//! `exec`: runs a command in a sandbox as if it ran here.

use std::process::ExitCode;

use anyhow::{Context, Result, anyhow};
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};

use super::NotStarted;
use crate::args::ExecArgs;
use crate::client::{Ending, Event, Execution, Failure, Sandbox, Server, Wish};
use crate::output::Printer;

/// What shells answer for a command that a Ctrl-C ended.
const INTERRUPTED: u8 = 130;

pub(crate) async fn exec(server: &Server, args: ExecArgs, printer: &Printer) -> Result<ExitCode> {
    let sandbox = server.open(&server.resolve(&args.id).await?).await?;
    let wish = Wish {
        text: args.text,
        argv: args.command,
        directory: args.workdir,
        env: args.env,
        timeout: args.timeout,
        user: args.user,
    };
    if args.detach {
        let id = sandbox.detach(&wish).await?;
        if printer.json() {
            printer.value(&json!({ "process": id }))?
        } else {
            printer.line(id)?
        }
        return Ok(ExitCode::SUCCESS);
    }
    let execution = sandbox.run(&wish).await?;
    follow(&sandbox, execution, printer).await
}

/// Copies output to ours until the command has ended.
async fn follow(sandbox: &Sandbox, mut execution: Execution, printer: &Printer) -> Result<ExitCode> {
    let mut process: Option<String> = None;
    let mut pressed = signal(SignalKind::interrupt())?;
    let mut interrupts = 0;
    loop {
        // Both branches may be dropped and begun again without loss.
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
        match event {
            Event::Started(id) => process = Some(id),
            Event::Stdout(text) => printer.raw(text.as_bytes())?,
            Event::Stderr(text) => printer.raw_error(text.as_bytes())?,
            Event::Completed => return Ok(ExitCode::SUCCESS),
            Event::Failed(failure) => return ending(failure, printer),
        }
    }
}

async fn interrupt(sandbox: &Sandbox, process: &str, printer: &Printer) {
    printer.note("asking the command to end; Ctrl-C again leaves it running");
    if let Err(error) = sandbox.interrupt(process).await {
        printer.error(&error);
    }
}

/// The exit code for a command that did not end with 0: its own, or what a shell, env(1) or
/// timeout(1) would have answered.
fn ending(failure: Failure, printer: &Printer) -> Result<ExitCode> {
    if let Some(code) = failure.value.parse::<u8>().ok().filter(|code| *code != 0) {
        return Ok(ExitCode::from(code));
    }
    let why = failure.details.into_iter().next().unwrap_or(failure.value);
    let code = match failure.ending {
        Some(Ending::Signal { signal }) => 128 | (signal & 127),
        Some(Ending::Oom) => 137,
        Some(Ending::Deadline) => 124,
        Some(Ending::Missing) => return Err(NotStarted::missing(why).into()),
        Some(Ending::NotExecutable) => return Err(NotStarted::not_executable(why).into()),
        Some(Ending::Lost) | None => return Err(anyhow!(why)),
    };
    printer.warn(why);
    Ok(ExitCode::from(code))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code_of(ending_told: Option<Ending>, value: &str) -> Option<ExitCode> {
        let failure = Failure {
            value: value.to_owned(),
            details: vec!["words that mean nothing".to_owned()],
            ending: ending_told,
        };
        match ending(failure, &Printer::new(false)) {
            Ok(code) => Some(code),
            Err(error) => error.downcast_ref::<NotStarted>().map(|failed| ExitCode::from(failed.code)),
        }
    }

    #[test]
    fn endings_have_the_codes_of_a_shell() {
        for (told, value, code) in [
            (None, "3", Some(3)),
            (Some(Ending::Signal { signal: 9 }), "-1", Some(137)),
            (Some(Ending::Signal { signal: 15 }), "-1", Some(143)),
            (Some(Ending::Oom), "-1", Some(137)),
            (Some(Ending::Deadline), "-1", Some(124)),
            (Some(Ending::Missing), "could not exec", Some(127)),
            (Some(Ending::NotExecutable), "could not exec", Some(126)),
            (Some(Ending::Lost), "-1", None),
            (None, "-1", None),
        ] {
            assert_eq!(code_of(told, value), code.map(ExitCode::from), "{told:?} {value}");
        }
    }
}
