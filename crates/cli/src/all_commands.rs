//! Every command but `exec`, and the roles in which this program starts itself.

use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::CommandFactory;

use crate::args::{self, Cli, CliCommand, GlobalArgs};
use crate::client::ServerClient;
use crate::commands::{
    backup, block_on, config as config_command, copy, exec, image, key, lifecycle, logs, monitor, network,
    pool, processes, sandboxes, shell, snapshot, volume,
};
use crate::output::Printer;
use crate::{bench, doctor, egress_process, own_server, pull_process, run, serve};

/// The roles in which we start ourselves. They are not commands for people: the agent reads nothing but
/// its descriptors, and the others take over descriptors by number, which has to happen before anything
/// else is opened.
pub(crate) fn run_internal_role() -> Option<ExitCode> {
    let mut arguments = std::env::args().skip(1);
    let role = arguments.next()?;
    let arguments: Vec<String> = arguments.collect();
    let printer = Printer::new(false);
    let outcome = match role.as_str() {
        "__launcher" => serve::launcher::run_launcher(&arguments),
        serve::launcher::REMOVAL_SUBCOMMAND => serve::launcher::run_removal(&arguments),
        launcher::PULLER_SUBCOMMAND => pull_process::run_puller(&arguments),
        egress_process::EGRESS_SUBCOMMAND => egress_process::run_egress(&arguments),
        bench::floor::FLOOR_ROLE => bench::floor::run_floor(&arguments),
        kernel::KERNEL_SUBCOMMAND => kernel::run_subcommand(&arguments),
        wire::search::SEARCH_SUBCOMMAND => search::run_subcommand().map_err(Into::into),
        "__server" => serve::server::run_server(&arguments, &printer),
        _ => return None,
    };
    Some(outcome.unwrap_or_else(|error| {
        printer.print_error(&error);
        ExitCode::FAILURE
    }))
}

pub(crate) fn run_other_command(
    command: CliCommand,
    global: &GlobalArgs,
    printer: &Printer,
) -> Result<ExitCode> {
    let url = global.server_url();
    let server = || ServerClient::new(url, std::env::var("CORACLE_API_KEY").ok().as_deref());
    match command {
        CliCommand::Serve(args) => serve::run_supervisor(&args),
        CliCommand::Run(args) => run::run_oneshot(&args, printer),
        CliCommand::Aio(args) => own_server::aio::serve_aio(args, printer),
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
        CliCommand::Policy(command) => block_on(network::run_policy_command(&server()?, command, printer)),
        CliCommand::Net(command) => block_on(network::run_net_command(&server()?, command, printer)),
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
