//! The one binary. This file only parses the command line and dispatches.

mod args;
mod bench;
mod client;
mod commands;
mod config;
mod doctor;
mod output;
mod run;
mod serve;
mod tracing_output;
mod values;

use std::io;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::CommandFactory;
use launcher::network::userspace;

use args::{Cli, CliCommand};
use client::ServerClient;
use commands::{
    ProgramStartError, backup, block_on, config as config_command, copy, exec, image, key, lifecycle, logs,
    monitor, pool, processes, sandboxes, shell, snapshot, volume,
};
use output::Printer;

fn main() -> ExitCode {
    if let Some(code) = run_internal_role() {
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

/// The roles in which we start ourselves. They are not commands for people: the agent reads nothing but
/// its descriptors, and the others take over descriptors by number, which has to happen before anything
/// else is opened.
fn run_internal_role() -> Option<ExitCode> {
    let mut arguments = std::env::args().skip(1);
    let role = arguments.next()?;
    let arguments: Vec<String> = arguments.collect();
    let printer = Printer::new(false);
    let outcome = match role.as_str() {
        // Its standard error leads nowhere; the process that started it sees that it ended.
        "__agent" => return Some(agent::run().map_or(ExitCode::FAILURE, |never| match never {})),
        "__launcher" => serve::launcher::run_launcher(&arguments),
        userspace::KEEPER_SUBCOMMAND => {
            userspace::run_keeper().map(|()| ExitCode::SUCCESS).map_err(Into::into)
        }
        bench::floor::FLOOR_ROLE => bench::floor::run_floor(&arguments),
        kernel::KERNEL_SUBCOMMAND => kernel::run_subcommand(&arguments),
        "__server" => serve::server::run_server(&arguments, &printer),
        _ => return None,
    };
    Some(outcome.unwrap_or_else(|error| {
        printer.print_error(&error);
        ExitCode::FAILURE
    }))
}

fn run_command(cli: Cli, printer: &Printer) -> Result<ExitCode> {
    let url = cli.server_url().to_owned();
    let server = || ServerClient::new(&url, std::env::var("CORACLE_API_KEY").ok().as_deref());
    match cli.command {
        CliCommand::Serve(args) => serve::run_supervisor(&args),
        CliCommand::Run(args) => run::run_oneshot(&args, printer),
        CliCommand::Config(command) => config_command::run_config_command(&command, printer),
        CliCommand::Doctor(args) => doctor::run_doctor(&args, printer),
        CliCommand::Backup(args) => backup::create_backup(&args, printer),
        CliCommand::Restore(args) => backup::restore_backup(&args, printer),
        CliCommand::Bench(args) => bench::run_benchmarks(&args, printer),
        CliCommand::Create(args) => block_on(sandboxes::create_sandbox(&server()?, args, printer)),
        CliCommand::Ls(args) => block_on(sandboxes::list_sandboxes(&server()?, args, printer)),
        CliCommand::Inspect { id, owners } => {
            block_on(monitor::inspect_sandbox(&server()?, &id, &owners.scope(), printer))
        }
        CliCommand::Top(args) => block_on(monitor::show_live_usage(&server()?, &args, printer)),
        CliCommand::Usage(args) => block_on(monitor::show_past_usage(&server()?, &args, printer)),
        CliCommand::Events(args) => block_on(monitor::show_events(&server()?, &args, printer)),
        CliCommand::Ps(args) => block_on(processes::list_processes(&server()?, &args, printer)),
        CliCommand::Kill(args) => block_on(processes::kill_processes(&server()?, &args, printer)),
        CliCommand::Pause(args) => block_on(lifecycle::pause_sandbox(&server()?, &args, printer)),
        CliCommand::Resume(args) => block_on(lifecycle::resume_sandbox(&server()?, &args, printer)),
        CliCommand::Restart(args) => block_on(lifecycle::restart_sandbox(&server()?, &args, printer)),
        CliCommand::Extend(args) => block_on(lifecycle::extend_timeout(&server()?, &args, printer)),
        CliCommand::Url(args) => block_on(lifecycle::print_port_url(&server()?, &args, printer)),
        CliCommand::Release(args) => block_on(sandboxes::release_sandbox(&server()?, &args, printer)),
        CliCommand::Rm(args) => block_on(sandboxes::remove_sandboxes(&server()?, args, printer)),
        CliCommand::Exec(args) => block_on(exec::exec_command(&server()?, args, printer)),
        CliCommand::Shell(args) => block_on(shell::open_shell(&server()?, args, printer)),
        CliCommand::Cp(args) => block_on(copy::copy_files(&server()?, args, printer)),
        CliCommand::Logs(args) => block_on(logs::print_logs(&server()?, args, printer)),
        CliCommand::Pool(command) => block_on(pool::run_pool_command(&server()?, command, printer)),
        CliCommand::Snapshot(command) => {
            block_on(snapshot::run_snapshot_command(&server()?, command, printer))
        }
        CliCommand::Fork(args) => block_on(snapshot::fork_sandbox(&server()?, args, printer)),
        CliCommand::Key(command) => block_on(key::run_key_command(&server()?, command, printer)),
        CliCommand::Volume(command) => block_on(volume::run_volume_command(&server()?, command, printer)),
        CliCommand::Image(command) => {
            image::run_image_command(&server()?, url == args::DEFAULT_URL, &command, printer)
        }
        CliCommand::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "coracle", &mut script);
            printer.print_bytes(&script)?;
            Ok(ExitCode::SUCCESS)
        }
        CliCommand::Man { directory } => {
            clap_mangen::generate_to(Cli::command(), &directory)
                .with_context(|| format!("could not write manual pages to `{}`", directory.display()))?;
            Ok(ExitCode::SUCCESS)
        }
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
