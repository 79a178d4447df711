//! `logs`: what a command has printed, from any byte on.

use std::process::ExitCode;

use anyhow::Result;
use http::StatusCode;

use crate::args::LogsArgs;
use crate::client::{Server, refused_with};
use crate::output::{Printer, WithHint};

pub(crate) async fn logs(server: &Server, args: LogsArgs, printer: &Printer) -> Result<ExitCode> {
    let sandbox = server.open(&server.resolve(&args.id).await?).await?;
    let mut logs = match sandbox.logs(&args.process, args.from, args.follow).await {
        Err(error) if refused_with(&error, StatusCode::NOT_FOUND) => {
            return Err(error).hint("`coracle exec --detach` prints the id of a process");
        }
        logs => logs?,
    };
    while let Some(chunk) = logs.next().await? {
        printer.raw(&chunk)?;
    }
    if let Some(next) = logs.next_offset {
        printer.note(format_args!("the next byte is at offset {next}"));
    }
    Ok(ExitCode::SUCCESS)
}
