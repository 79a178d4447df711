//! `exec`: runs a command in a sandbox as if it ran here.

use std::process::ExitCode;

use anyhow::{Context, Result};
use serde_json::json;

use crate::args::ExecArgs;
use crate::client::{Event, Execution, Outcome, Sandbox, Server, Wish};
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
    let mut interrupts = 0;
    loop {
        // Both branches may be dropped and begun again without loss.
        let event = tokio::select! {
            event = execution.next() => event?.context("the server did not say how the command ended")?,
            pressed = tokio::signal::ctrl_c() => {
                pressed?;
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
            Event::Failed { value, details } => {
                return Ok(ending(sandbox, process.as_deref(), &value, &details, printer).await);
            }
        }
    }
}

async fn interrupt(sandbox: &Sandbox, process: &str, printer: &Printer) {
    printer.note("asking the command to end; Ctrl-C again leaves it running");
    if let Err(error) = sandbox.interrupt(process).await {
        printer.error(&error);
    }
}

/// The exit code for a command that did not end with 0.
async fn ending(
    sandbox: &Sandbox,
    process: Option<&str>,
    value: &str,
    details: &[String],
    printer: &Printer,
) -> ExitCode {
    if let Some(code) = value.parse::<u8>().ok().filter(|code| *code != 0) {
        return ExitCode::from(code);
    }
    // The API has one number for every other ending; the server's status tells them apart.
    let told = match process {
        Some(process) => sandbox.outcome(process).await.ok(),
        None => None,
    };
    if let Some(Outcome::Code(code)) = told {
        return ExitCode::from(code);
    }
    let why = details.first().map_or(value, String::as_str);
    printer.warn(format_args!("the command did not end by itself: {why}"));
    ExitCode::from(code_for(why))
}

/// What a shell or `timeout` would have answered.
fn code_for(why: &str) -> u8 {
    let why = why.to_ascii_lowercase();
    if why.contains("deadline") || why.contains("timeout") || why.contains("timed out") {
        return 124;
    }
    if why.contains("memory") || why.contains("oom") {
        return 137;
    }
    match why.split_once("signal").and_then(|(_, rest)| rest.trim_matches([':', ' ']).parse::<u8>().ok()) {
        Some(signal) if signal < 128 => 128 + signal,
        _ => super::NOT_RUN,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endings_have_the_codes_of_a_shell() {
        for (why, code) in [
            ("signal 9", 137),
            ("killed by signal: 15", 143),
            ("out of memory", 137),
            ("the deadline passed", 124),
            ("no such file or directory", 125),
        ] {
            assert_eq!(code_for(why), code, "{why}");
        }
    }
}
