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
use backend_local::network::userspace;
use clap::{CommandFactory, Parser};

use args::{Cli, Command};
use client::Server;
use commands::{
    NotStarted, backup, block_on, config as config_command, copy, exec, image, key, life, logs, pool,
    processes, sandboxes, shell, snapshot, volume, watch,
};
use output::Printer;

fn main() -> ExitCode {
    if let Some(code) = other_role() {
        return code;
    }
    let cli = Cli::try_parse().unwrap_or_else(|error| plain_usage(error).exit());
    let printer = Printer::new(cli.json);
    let usual = failure_code(&cli.command);
    match dispatch(cli, &printer) {
        Ok(code) => code,
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            printer.error(&error);
            error.downcast_ref::<NotStarted>().map_or(usual, |failed| ExitCode::from(failed.code))
        }
    }
}

/// Shows the usage of the subcommand as `--help` does. By default, clap lists every option that is set
/// as if it were required, including `--url` set by its variable.
fn plain_usage(mut error: clap::Error) -> clap::Error {
    use clap::error::{ContextKind, ContextValue};
    if let Some(ContextValue::String(word)) = error.get(ContextKind::InvalidSubcommand)
        && let Some(advice) = our_word_for(word)
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
fn our_word_for(word: &str) -> Option<&'static str> {
    match word {
        "delete" | "remove" => Some("`coracle rm` removes sandboxes"),
        "stop" => Some("`coracle pause` stops the processes of a sandbox, `coracle rm` removes it"),
        _ => None,
    }
}

/// The roles in which we start ourselves. They are not commands for people: the agent reads nothing but
/// its descriptors, and the others take over descriptors by number, which has to happen before anything
/// else is opened.
fn other_role() -> Option<ExitCode> {
    let mut arguments = std::env::args().skip(1);
    let role = arguments.next()?;
    let arguments: Vec<String> = arguments.collect();
    let printer = Printer::new(false);
    let outcome = match role.as_str() {
        // Its standard error leads nowhere; the process that started it sees that it ended.
        "__agent" => return Some(agent::run().map_or(ExitCode::FAILURE, |never| match never {})),
        "__launcher" => serve::launcher::launcher(&arguments),
        userspace::WORD => userspace::keep().map(|()| ExitCode::SUCCESS).map_err(Into::into),
        bench::floor::WORD => bench::floor::serve(&arguments),
        kernel::WORD => kernel::run(&arguments),
        "__server" => serve::server::server(&arguments, &printer),
        _ => return None,
    };
    Some(outcome.unwrap_or_else(|error| {
        printer.error(&error);
        ExitCode::FAILURE
    }))
}

fn dispatch(cli: Cli, printer: &Printer) -> Result<ExitCode> {
    let url = cli.server_url().to_owned();
    let server = || Server::new(&url, std::env::var("CORACLE_API_KEY").ok().as_deref());
    match cli.command {
        Command::Serve(args) => serve::serve(&args),
        Command::Run(args) => run::run(&args, printer),
        Command::Config(command) => config_command::config(&command, printer),
        Command::Doctor(args) => doctor::doctor(&args, printer),
        Command::Backup(args) => backup::backup(&args, printer),
        Command::Restore(args) => backup::restore(&args, printer),
        Command::Bench(args) => bench::bench(&args, printer),
        Command::Create(args) => block_on(sandboxes::create(&server()?, args, printer)),
        Command::Ls(args) => block_on(sandboxes::list(&server()?, args, printer)),
        Command::Inspect { id, owners } => {
            block_on(watch::inspect(&server()?, &id, &owners.scope(), printer))
        }
        Command::Top(args) => block_on(watch::top(&server()?, &args, printer)),
        Command::Usage(args) => block_on(watch::usage(&server()?, &args, printer)),
        Command::Events(args) => block_on(watch::events(&server()?, &args, printer)),
        Command::Ps(args) => block_on(processes::list(&server()?, &args, printer)),
        Command::Kill(args) => block_on(processes::kill(&server()?, &args, printer)),
        Command::Pause(args) => block_on(life::pause(&server()?, &args, printer)),
        Command::Resume(args) => block_on(life::resume(&server()?, &args, printer)),
        Command::Restart(args) => block_on(life::restart(&server()?, &args, printer)),
        Command::Extend(args) => block_on(life::extend(&server()?, &args, printer)),
        Command::Url(args) => block_on(life::url(&server()?, &args, printer)),
        Command::Release(args) => block_on(sandboxes::release(&server()?, &args, printer)),
        Command::Rm(args) => block_on(sandboxes::remove(&server()?, args, printer)),
        Command::Exec(args) => block_on(exec::exec(&server()?, args, printer)),
        Command::Shell(args) => block_on(shell::shell(&server()?, args, printer)),
        Command::Cp(args) => block_on(copy::copy(&server()?, args, printer)),
        Command::Logs(args) => block_on(logs::logs(&server()?, args, printer)),
        Command::Pool(command) => block_on(pool::pool(&server()?, command, printer)),
        Command::Snapshot(command) => block_on(snapshot::snapshot(&server()?, command, printer)),
        Command::Fork(args) => block_on(snapshot::fork(&server()?, args, printer)),
        Command::Key(command) => block_on(key::key(&server()?, command, printer)),
        Command::Volume(command) => block_on(volume::volume(&server()?, command, printer)),
        Command::Image(command) => image::image(&server()?, url == args::DEFAULT_URL, &command, printer),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "coracle", &mut script);
            printer.raw(&script)?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Man { directory } => {
            clap_mangen::generate_to(Cli::command(), &directory)
                .with_context(|| format!("could not write manual pages to `{}`", directory.display()))?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// Our exit code when we fail ourselves. Where the exit code is that of the user's command, ours must
/// not be mistaken for it.
fn failure_code(command: &Command) -> ExitCode {
    match command {
        Command::Run(_) | Command::Exec(_) | Command::Shell(_) => ExitCode::from(commands::NOT_RUN),
        _ => ExitCode::FAILURE,
    }
}

/// Whether the reader of our output is gone, as with `head`; that is not an error.
fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}
