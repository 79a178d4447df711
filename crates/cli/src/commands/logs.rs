//! `logs`: what a command has printed, from any byte on.

use std::process::ExitCode;

use anyhow::{Context, Result, anyhow, bail};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use http::StatusCode;

use crate::args::LogsArgs;
use crate::client::{LogRecord, Logs, Server, refused_with};
use crate::output::{Printer, WithHint};

/// The exit code when some of the output is no longer kept.
const INCOMPLETE: u8 = 3;

pub(crate) async fn logs(server: &Server, args: LogsArgs, printer: &Printer) -> Result<ExitCode> {
    let sandbox = server.open(&server.resolve(&args.id).await?).await?;
    let logs = match sandbox.logs(&args.process, args.from, args.follow).await {
        Err(error) if refused_with(&error, StatusCode::NOT_FOUND) => {
            return Err(error).hint("`coracle exec --detach` prints the id of a process");
        }
        logs => logs?,
    };
    if printer.json() { print_records(logs, printer).await } else { print_text(logs, printer).await }
}

fn exit_code(missing: u64) -> ExitCode {
    if missing > 0 { ExitCode::from(INCOMPLETE) } else { ExitCode::SUCCESS }
}

/// One line of JSON per record.
async fn print_records(mut logs: Logs, printer: &Printer) -> Result<ExitCode> {
    let mut missing = 0;
    while let Some(record) = logs.next().await? {
        match &record {
            LogRecord::Gap { length, .. } => missing += length,
            LogRecord::Error { error } => bail!("{error}"),
            LogRecord::Unknown => continue,
            LogRecord::Output { .. } | LogRecord::End { .. } => {}
        }
        printer.line(serde_json::to_string(&record)?)?;
    }
    Ok(exit_code(missing))
}

/// The bytes as they were printed. Behind a gap a new line begins, so that the halves of two
/// lines are not taken for one.
async fn print_text(mut logs: Logs, printer: &Printer) -> Result<ExitCode> {
    let (mut missing, mut line_begun) = (0, false);
    while let Some(record) = logs.next().await? {
        match record {
            LogRecord::Output { stream, text, base64, .. } if stream != "report" => {
                let bytes = bytes_of(text, base64)?;
                line_begun = bytes.last().map_or(line_begun, |last| *last != b'\n');
                printer.raw(&bytes)?;
            }
            LogRecord::Gap { offset, length } => {
                if std::mem::take(&mut line_begun) {
                    printer.raw(b"\n")?;
                }
                missing += length;
                printer.warn(format_args!(
                    "{length} bytes of output (offsets {offset} to {}) are missing: they are no longer kept",
                    offset.saturating_add(length)
                ));
            }
            LogRecord::End { offset, running: true, .. } => {
                printer.note(format_args!("the next byte is at offset {offset}"));
            }
            LogRecord::Error { error } => return Err(anyhow!(error)).context("the output was lost"),
            LogRecord::Output { .. } | LogRecord::End { .. } | LogRecord::Unknown => {}
        }
    }
    Ok(exit_code(missing))
}

fn bytes_of(text: Option<String>, base64: Option<String>) -> Result<Vec<u8>> {
    match (text, base64) {
        (Some(text), _) => Ok(text.into_bytes()),
        (None, Some(base64)) => STANDARD.decode(base64).context("the server sent bytes that are not base64"),
        (None, None) => Ok(Vec::new()),
    }
}
