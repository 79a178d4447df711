//! The flags of commands about what runs in a sandbox, and about how long it lives.

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

    /// Also show commands that have ended and are remembered
    #[arg(long, short = 'a')]
    pub all: bool,

    #[command(flatten)]
    pub owners: OwnerArgs,
}

const PS_HELP: &str = "\
A line is a command, a session (a shell that is kept open), a context (an interpreter that is kept open) or a run (code given \
to one of those). CPU and MEMORY are those of everything it has started; memory is resident memory, in which shared pages count \
for each process. `coracle kill` and `coracle logs` take the ids; the logs of a session or context are those of its newest run.";

#[derive(Debug, Args)]
#[command(after_help = KILL_HELP)]
pub(crate) struct KillArgs {
    /// The sandbox: its id, its name, or the beginning of its id
    #[arg(value_name = "SANDBOX")]
    pub id: SandboxRef,

    /// The commands, sessions or contexts, as `coracle ps` shows them: ids or beginnings of ids
    #[arg(value_name = "PROCESS", required = true)]
    pub processes: Vec<ProcessRef>,

    /// The signal: a name such as TERM, KILL or INT, or a number
    #[arg(long, short = 's', value_name = "SIGNAL", default_value = "TERM", value_parser = values::signal)]
    pub signal: String,
}

const KILL_HELP: &str = "\
The signal goes to everything that the command, session or context has started. A session or context whose shell or interpreter \
ends by it starts a new one with its next run.";

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

    /// How long from now it is to live, such as 1h; this may also be less than what is left
    #[arg(value_name = "TIME", value_parser = values::duration)]
    pub time: Duration,
}

#[derive(Debug, Args)]
pub(crate) struct UrlArgs {
    /// The sandbox: its id, its name, or the beginning of its id
    #[arg(value_name = "SANDBOX")]
    pub id: SandboxRef,

    /// The port inside the sandbox
    #[arg(value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    pub port: u16,

    /// Print an address that opens the port by itself for this long, such as 1h, for browsers and
    /// for others; without it requests need the API key
    #[arg(long, value_name = "TIME", value_parser = values::duration)]
    pub signed: Option<Duration>,
}
