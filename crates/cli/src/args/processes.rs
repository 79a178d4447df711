//! The flags of the commands about the processes, the ports and the lifetime of a sandbox.

use std::time::Duration;

use clap::Args;

use super::OwnerArgs;
use crate::client::{ProcessRef, SandboxRef};
use crate::values;

#[derive(Debug, Args)]
#[command(after_help = PS_HELP)]
pub(crate) struct PsArgs {
    /// The sandbox: its id, its name, or the beginning of its id
    #[arg(value_name = "SANDBOX")]
    pub id: SandboxRef,

    /// Also show ended commands that the server still remembers
    #[arg(long, short = 'a')]
    pub all: bool,

    #[command(flatten)]
    pub owners: OwnerArgs,
}

const PS_HELP: &str = "\
Each line is a command, a session (a shell that stays open), a context (an interpreter that stays open) or a \
run (code executed in a session or context). CPU and MEMORY include all descendants; memory is resident \
memory, with shared pages counted once per process. `coracle kill` and `coracle logs` accept these ids; for \
a session or context, `logs` shows its newest run.";

#[derive(Debug, Args)]
#[command(after_help = KILL_HELP)]
pub(crate) struct KillArgs {
    /// The sandbox: its id, its name, or the beginning of its id
    #[arg(value_name = "SANDBOX")]
    pub id: SandboxRef,

    /// Ids of commands, sessions or contexts, or beginnings of ids, as shown by `coracle ps`
    #[arg(value_name = "PROCESS", required = true)]
    pub processes: Vec<ProcessRef>,

    /// The signal: a name such as TERM, KILL or INT, or a number
    #[arg(long, short = 's', value_name = "SIGNAL", default_value = "TERM", value_parser = values::parse_signal)]
    pub signal: String,
}

const KILL_HELP: &str = "\
The signal is sent to all processes that the command, session or context has started. If it ends the shell \
or interpreter of a session or context, the next run starts a new one.";

/// One sandbox and nothing else.
#[derive(Debug, Args)]
pub(crate) struct SandboxArgs {
    /// The sandbox: its id, its name, or the beginning of its id
    #[arg(value_name = "SANDBOX")]
    pub id: SandboxRef,
}

#[derive(Debug, Args)]
pub(crate) struct ExtendArgs {
    /// The sandbox: its id, its name, or the beginning of its id
    #[arg(value_name = "SANDBOX")]
    pub id: SandboxRef,

    /// New time until the sandbox expires, counted from now, such as 1h; it can be shorter than the remaining
    /// time
    #[arg(value_name = "TIME", value_parser = values::parse_duration)]
    pub time: Duration,
}

#[derive(Debug, Args)]
pub(crate) struct UrlArgs {
    /// The sandbox: its id, its name, or the beginning of its id
    #[arg(value_name = "SANDBOX")]
    pub id: SandboxRef,

    /// The port inside the sandbox; without it, the URL of the API of a sandbox that was created with
    /// `--guest` or by a provisioner, which gives access without an API key
    #[arg(value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    pub port: Option<u16>,

    /// Print a signed URL that gives access without an API key for this time, such as 1h; without this
    /// option, requests need the API key
    #[arg(long, value_name = "TIME", requires = "port", value_parser = values::parse_duration)]
    pub signed: Option<Duration>,
}
