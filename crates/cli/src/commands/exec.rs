//! `exec`: runs a command in a sandbox as if it ran here.

use std::process::ExitCode;

use anyhow::{Context, Result, anyhow};
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};

use super::NotStarted;
use crate::args::ExecArgs;
use crate::client::{Event, Execution, Sandbox, Server, Wish};
use crate::output::Printer;

/// What shells answer for a command that a Ctrl-C ended.
const INTERRUPTED: u8 = 130;

pub(crate) async fn exec(server: &Server, args: ExecArgs, printer: &Printer) -> Result<ExitCode> {
    let sandbox = server.open(&args.id).await?;
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
            Event::Failed { value, details } => return ending(&value, &details, printer),
        }
    }
}

async fn interrupt(sandbox: &Sandbox, process: &str, printer: &Printer) {
    printer.note("asking the command to end; Ctrl-C again leaves it running");
    if let Err(error) = sandbox.interrupt(process).await {
        printer.error(&error);
    }
}

/// The exit code for a command that did not end with 0. The API has one number for every ending
/// but a code; the words beside it tell them apart.
fn ending(value: &str, details: &[String], printer: &Printer) -> Result<ExitCode> {
    if let Some(code) = value.parse::<u8>().ok().filter(|code| *code != 0) {
        return Ok(ExitCode::from(code));
    }
    let why = details.first().map_or(value, String::as_str);
    let code = code_for(why).ok_or_else(|| not_started(why))?;
    printer.warn(why);
    Ok(ExitCode::from(code))
}

/// What a shell or timeout(1) would have answered; `None` if the command never ran.
fn code_for(why: &str) -> Option<u8> {
    if why.contains("timeout") {
        return Some(124);
    }
    if why.contains("memory limit") {
        return Some(137);
    }
    let (_, signal) = why.split_once("signal ")?;
    signal.parse::<u8>().ok().filter(|signal| *signal < 128).map(|signal| 128 + signal)
}

/// Whether it was the program that could not be started; the API has only words for it.
fn not_started(why: &str) -> anyhow::Error {
    match (why.starts_with("could not exec "), why.ends_with("it does not exist")) {
        (true, true) => NotStarted::missing(why.to_owned()).into(),
        (true, false) => NotStarted::not_executable(why.to_owned()).into(),
        (false, _) => anyhow!(why.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_program_is_told_from_one_that_cannot_run() {
        for (why, code) in [
            ("could not exec `x`: it does not exist", Some(127)),
            ("could not exec `/etc/passwd`: permission denied", Some(126)),
            ("could not fork `x`", None),
        ] {
            let error = not_started(why);
            assert_eq!(error.downcast_ref::<NotStarted>().map(|failed| failed.code), code, "{why}");
            assert_eq!(error.to_string(), why);
        }
    }

    #[test]
    fn endings_have_the_codes_of_a_shell() {
        for (why, code) in [
            ("the command was killed by signal 9", Some(137)),
            ("the command was killed by signal 15", Some(143)),
            ("the command was killed because the memory limit was reached", Some(137)),
            ("the command was killed at its timeout", Some(124)),
            ("no such file or directory", None),
        ] {
            assert_eq!(code_for(why), code, "{why}");
        }
    }
}
