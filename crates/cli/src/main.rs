//! The one binary. This file only parses the command line and dispatches.
#![cfg_attr(
    not(feature = "whole"),
    allow(dead_code, unused_imports, reason = "the program for `exec` is built from the same files")
)]

#[cfg(feature = "whole")]
mod all_commands;
mod args;
#[cfg(feature = "whole")]
mod bench;
mod client;
mod commands;
#[cfg(feature = "whole")]
mod config;
#[cfg(feature = "whole")]
mod doctor;
#[cfg(feature = "whole")]
mod egress_process;
#[cfg(feature = "whole")]
mod embedded_programs;
mod output;
#[cfg(feature = "whole")]
mod own_server;
#[cfg(feature = "whole")]
mod pull_process;
#[cfg(feature = "whole")]
mod run;
#[cfg(feature = "whole")]
mod serve;
#[cfg(feature = "whole")]
mod tracing_output;
mod values;

use std::io;
use std::process::ExitCode;

use anyhow::Result;
use clap::CommandFactory;

use args::{Cli, CliCommand};
use client::ServerClient;
use commands::{ProgramStartError, block_on, exec};
use output::Printer;

#[cfg(target_env = "musl")]
#[global_allocator]
static ALLOCATOR: dlmalloc::GlobalDlmalloc = dlmalloc::GlobalDlmalloc;

fn main() -> ExitCode {
    #[cfg(feature = "whole")]
    if let Some(code) = all_commands::run_internal_role() {
        return code;
    }
    let cli = Cli::parse_arguments().unwrap_or_else(|error| with_subcommand_usage(error).exit());
    let printer = Printer::new(cli.global.json);
    let usual = failure_code(&cli.command);
    match run_command(cli, &printer) {
        Ok(code) => code,
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            printer.print_error(&error);
            error.downcast_ref::<ProgramStartError>().map_or(usual, |failed| ExitCode::from(failed.code))
        }
    }
}

/// Shows the usage of the subcommand as `--help` does. By default, clap lists every option that is set
/// as if it were required, including `--url` set by its variable.
fn with_subcommand_usage(mut error: clap::Error) -> clap::Error {
    use clap::error::{ContextKind, ContextValue};
    if let Some(ContextValue::String(word)) = error.get(ContextKind::InvalidSubcommand)
        && let Some(advice) = suggest_command(word)
    {
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![advice.into()]));
        error.remove(ContextKind::SuggestedSubcommand);
    }
    if error.get(ContextKind::Usage).is_none() {
        return error;
    }
    let mut command = Cli::command();
    command.build();
    let mut found = &mut command;
    for word in std::env::args().skip(1) {
        if found.find_subcommand(&word).is_some() {
            found = found.find_subcommand_mut(&word).expect("it was just found");
        }
    }
    error.insert(ContextKind::Usage, ContextValue::StyledStr(found.render_usage()));
    error
}

/// Our name for a command that other tools name differently.
fn suggest_command(word: &str) -> Option<&'static str> {
    match word {
        "delete" | "remove" => Some("`coracle rm` removes sandboxes"),
        "stop" => Some("`coracle pause` stops the processes of a sandbox, `coracle rm` removes it"),
        _ => None,
    }
}

/// Runs the command. A build without the feature `whole` is the program that `exec` starts faster with.
fn run_command(cli: Cli, printer: &Printer) -> Result<ExitCode> {
    match cli.command {
        CliCommand::Exec(args) => {
            let server =
                ServerClient::new(cli.global.server_url(), std::env::var("CORACLE_API_KEY").ok().as_deref())?;
            block_on(exec::exec_command(&server, args, printer))
        }
        #[cfg(feature = "whole")]
        command => all_commands::run_other_command(command, &cli.global, printer),
        #[cfg(not(feature = "whole"))]
        _ => anyhow::bail!("this program has only the command `exec`"),
    }
}

/// Our exit code when we fail ourselves. Where the exit code is that of the user's command, ours must
/// not be mistaken for it.
fn failure_code(command: &CliCommand) -> ExitCode {
    match command {
        CliCommand::Run(_) | CliCommand::Exec(_) | CliCommand::Shell(_) => {
            ExitCode::from(commands::EXIT_NOT_RUN)
        }
        _ => ExitCode::FAILURE,
    }
}

/// Whether the reader of our output is gone, as with `head`; that is not an error.
fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}
