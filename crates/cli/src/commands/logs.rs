//! `logs`: the output of a command, from any byte on.

use std::process::ExitCode;

use anyhow::{Context, Result, anyhow, bail};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use domain::{ProcessId, SandboxId};
use http::StatusCode;

use crate::args::LogsArgs;
use crate::client::{LogRecord, LogStream, OwnerScope, ServerClient, failed_with_status};
use crate::output::{Printer, WithHint};

/// The exit code when some of the output is no longer kept.
const EXIT_INCOMPLETE: u8 = 3;
/// The tag of a sandbox's main process.
const MAIN_PROCESS_TAG: &str = "entrypoint";

pub(crate) async fn print_logs(server: &ServerClient, args: LogsArgs, printer: &Printer) -> Result<ExitCode> {
    let scope = args.owners.scope();
    let id = server.resolve_sandbox_in(&args.id, &scope).await?;
    let process = match &args.process {
        Some(process) => server.resolve_processes(&id, std::slice::from_ref(process)).await?.remove(0),
        None => default_process(server, &id).await?,
    };
    let logs = match open_logs(server, &id, &process, &args, &scope).await {
        Err(error) if failed_with_status(&error, StatusCode::NOT_FOUND) => {
            match newest_run(server, &id, &process).await? {
                Some(run) => open_logs(server, &id, &run, &args, &scope).await?,
                None => return Err(error).with_hint(format!("`coracle ps --all {id}` lists the processes")),
            }
        }
        logs => logs?,
    };
    if printer.is_json() { print_records(logs, printer).await } else { print_text(logs, printer).await }
}

async fn open_logs(
    server: &ServerClient,
    id: &SandboxId,
    process: &ProcessId,
    args: &LogsArgs,
    scope: &OwnerScope,
) -> Result<LogStream> {
    match scope {
        OwnerScope::Own => server.open_sandbox(id).await?.open_logs(process, args.from, args.follow).await,
        OwnerScope::Owner(_) | OwnerScope::All => {
            server.open_logs_as_operator(id, process, args.from, args.follow).await
        }
    }
}

/// The newest run of a session or context, which have no output of their own. `None` if `process` is
/// neither.
async fn newest_run(server: &ServerClient, id: &SandboxId, process: &ProcessId) -> Result<Option<ProcessId>> {
    // The oldest is first.
    let all = server.list_processes(id, true).await?;
    let of = all.iter().find(|one| one.id == process.as_str());
    let Some(of) = of.filter(|one| matches!(one.kind.as_str(), "session" | "context")) else {
        return Ok(None);
    };
    let run = all.iter().rev().find(|one| one.kind == "run" && one.session.as_deref() == Some(&of.id));
    let run = run.ok_or_else(|| anyhow!("nothing was run in {} `{process}` yet", of.kind));
    let run = run.with_hint(format!("`coracle ps --all {id}` lists the runs"))?;
    let run = ProcessId::parse(&run.id);
    run.map(Some).context("the server named a process in a way that is not understood")
}

/// The main process, or else the newest command.
async fn default_process(server: &ServerClient, id: &SandboxId) -> Result<ProcessId> {
    // The oldest is first.
    let mut all = server.list_processes(id, true).await?;
    all.retain(|process| matches!(process.kind.as_str(), "command" | "run"));
    let main = all.iter().find(|process| process.tag.as_deref() == Some(MAIN_PROCESS_TAG));
    let chosen = main.or(all.last()).ok_or_else(|| anyhow!("nothing was run in sandbox `{id}` yet"));
    let chosen = chosen.with_hint("`coracle exec` runs a command")?;
    ProcessId::parse(&chosen.id).context("the server named a process in a way that is not understood")
}

fn exit_code(missing: u64) -> ExitCode {
    if missing > 0 { ExitCode::from(EXIT_INCOMPLETE) } else { ExitCode::SUCCESS }
}

/// One line of JSON per record.
async fn print_records(mut logs: LogStream, printer: &Printer) -> Result<ExitCode> {
    let mut missing = 0;
    while let Some(record) = logs.next_record().await? {
        match &record {
            LogRecord::Gap { length, .. } => missing += length,
            LogRecord::Error { error } => bail!("{error}"),
            LogRecord::Unknown => continue,
            LogRecord::Output { .. } | LogRecord::End { .. } => {}
        }
        printer.print_json_text(&serde_json::to_string(&record)?)?;
    }
    Ok(exit_code(missing))
}

/// The bytes as they were printed. A new line begins after a gap, so that the halves of two lines are
/// not mistaken for one.
async fn print_text(mut logs: LogStream, printer: &Printer) -> Result<ExitCode> {
    let (mut missing, mut line_begun) = (0, false);
    while let Some(record) = logs.next_record().await? {
        match record {
            LogRecord::Output { stream, text, base64, .. } if stream != "report" => {
                let bytes = decode_output(text, base64)?;
                line_begun = bytes.last().map_or(line_begun, |last| *last != b'\n');
                printer.print_bytes(&bytes)?;
            }
            LogRecord::Gap { offset, length } => {
                if std::mem::take(&mut line_begun) {
                    printer.print_bytes(b"\n")?;
                }
                missing += length;
                printer.warn(format_args!(
                    "{length} bytes of output (offsets {offset} to {}) are missing: they are no longer kept",
                    offset.saturating_add(length)
                ));
            }
            LogRecord::End { offset, running: true, .. } => {
                printer.note_on_terminal(format_args!("the next byte is at offset {offset}"));
            }
            LogRecord::Error { error } => return Err(anyhow!(error)).context("the output was lost"),
            LogRecord::Output { .. } | LogRecord::End { .. } | LogRecord::Unknown => {}
        }
    }
    Ok(exit_code(missing))
}

fn decode_output(text: Option<String>, base64: Option<String>) -> Result<Vec<u8>> {
    match (text, base64) {
        (Some(text), _) => Ok(text.into_bytes()),
        (None, Some(base64)) => STANDARD.decode(base64).context("the server sent bytes that are not base64"),
        (None, None) => Ok(Vec::new()),
    }
}
