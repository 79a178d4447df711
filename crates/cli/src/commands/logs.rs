//! `logs`: what a command has printed, from any byte on.

use std::process::ExitCode;

use anyhow::Result;

use crate::args::LogsArgs;
use crate::client::Server;
use crate::output::Printer;

pub(crate) async fn logs(server: &Server, args: LogsArgs, printer: &Printer) -> Result<ExitCode> {
    let sandbox = server.open(&args.id).await?;
    let mut logs = sandbox.logs(&args.process, args.from, args.follow).await?;
    while let Some(chunk) = logs.next().await? {
        printer.raw(&chunk)?;
    }
    if let Some(next) = logs.next_offset {
        printer.note(format_args!("the next byte is at offset {next}"));
    }
    Ok(ExitCode::SUCCESS)
}
