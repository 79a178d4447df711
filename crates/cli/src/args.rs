//! The command line: every subcommand and flag, with the text of `--help`.
//!
//! Values arrive here checked (see `values`); their meaning is decided by the modules that
//! take these structures.

mod backup;
mod config;
mod network;
mod own_server;
mod owners;
mod processes;
mod resources;

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::PossibleValuesParser;
use clap::{Args, Parser, Subcommand, ValueEnum};
use domain::{Bytes, MilliCpus, MountSpec, PolicyTarget, UserIdentity};

pub(crate) use self::backup::{BackupArgs, RestoreArgs};
pub(crate) use self::config::{ConfigCheckArgs, ConfigCommand, ConfigShowArgs};
pub(crate) use self::network::{NetCommand, NetLogArgs, PolicyCommand, SetPolicyArgs};
pub(crate) use self::own_server::{AioArgs, OwnServerArgs};
pub(crate) use self::owners::OwnerArgs;
pub(crate) use self::processes::{ExtendArgs, KillArgs, PsArgs, SandboxArgs, UrlArgs};
pub(crate) use self::resources::{
    ForkArgs, ImageCommand, KeyCommand, PoolCommand, PoolSizeArgs, SnapshotCommand, VolumeCommand,
};
use crate::client::{ProcessRef, SandboxRef, SnapshotRef};
use crate::values::{self, CopyEndpoint, SandboxLifetime};

/// Sandboxes for AI agents: one binary, milliseconds per sandbox.
#[derive(Debug, Parser)]
#[command(name = "coracle", version, propagate_version = true, after_help = AFTER_HELP)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub global: GlobalArgs,

    #[command(subcommand)]
    pub command: CliCommand,
}

/// What every subcommand accepts.
#[derive(Debug, Args)]
pub(crate) struct GlobalArgs {
    /// Address of the server. On the server's own host, operators can use its socket without an API key:
    /// `unix:/var/lib/coracle/operator.sock`
    #[arg(
        long,
        global = true,
        help_heading = GLOBAL_HEADING,
        env = "CORACLE_URL",
        default_value = DEFAULT_URL,
        value_name = "URL"
    )]
    pub url: String,

    /// Print JSON instead of text
    #[arg(long, global = true, help_heading = GLOBAL_HEADING)]
    pub json: bool,
}

/// The part of the command line that `coracle exec` needs. A short command notices the time that describing
/// all other subcommands to clap takes.
#[derive(Debug, Parser)]
#[command(name = "coracle")]
struct ExecCli {
    #[command(flatten)]
    global: GlobalArgs,

    #[command(subcommand)]
    command: ExecCommand,
}

#[derive(Debug, Subcommand)]
enum ExecCommand {
    Exec(ExecArgs),
}

const GLOBAL_HEADING: &str = "Global options";
/// The address at which a server listens by default.
pub(crate) const DEFAULT_URL: &str = "http://127.0.0.1:8080";

const AFTER_HELP: &str = "\
The API key is read from CORACLE_API_KEY, never from a flag: flags are visible to every user of the host.";

#[derive(Debug, Subcommand)]
pub(crate) enum CliCommand {
    /// Run the server
    Serve(ServeArgs),
    /// Run one command in a new sandbox, without a server
    Run(RunArgs),
    /// Serve the API of AIO Sandbox with one sandbox of your own, without a server, until a signal
    Aio(AioArgs),
    /// Create a sandbox on the server and print its id
    Create(CreateArgs),
    /// List sandboxes
    Ls(LsArgs),
    /// Run a command in a sandbox and exit with its exit code
    Exec(ExecArgs),
    /// Open an interactive shell in a sandbox
    Shell(ShellArgs),
    /// Copy files into or out of a sandbox
    Cp(CpArgs),
    /// Print the output of a command, from any offset
    Logs(LogsArgs),
    /// List the processes of a sandbox
    Ps(PsArgs),
    /// Send a signal to commands, sessions or contexts in a sandbox
    Kill(KillArgs),
    /// Freeze all processes of a sandbox until it is resumed
    Pause(SandboxArgs),
    /// Resume a paused sandbox, or restart a dead one
    Resume(SandboxArgs),
    /// Restart a dead sandbox with its files
    Restart(SandboxArgs),
    /// Change when a sandbox with a timeout expires
    Extend(ExtendArgs),
    /// Print the URL of a port of a sandbox, or of its API
    Url(UrlArgs),
    /// Release a named sandbox: it may be removed when other sandboxes need its place
    Release(ReleaseArgs),
    /// Show the settings, enforced limits and resource usage of a sandbox
    Inspect {
        /// The sandbox: its id, its name, or the beginning of its id
        #[arg(value_name = "SANDBOX")]
        id: SandboxRef,
        #[command(flatten)]
        owners: OwnerArgs,
    },
    /// Show live resource usage
    Top(TopArgs),
    /// Show past resource usage, per hour or per sample
    Usage(UsageArgs),
    /// Show lifecycle events
    Events(EventsArgs),
    /// Remove sandboxes
    Rm(RmArgs),
    /// Show or change what a sandbox may reach
    #[command(subcommand)]
    Policy(PolicyCommand),
    /// Show the network activity of a sandbox
    #[command(subcommand)]
    Net(NetCommand),
    /// Manage pools of warm sandboxes (requires the operator's API key)
    #[command(subcommand)]
    Pool(PoolCommand),
    /// Manage snapshots: saved files of a sandbox, from which new sandboxes can be created
    #[command(subcommand)]
    Snapshot(SnapshotCommand),
    /// Create sandboxes with the files of an existing one, and print their ids
    Fork(ForkArgs),
    /// Manage API keys (requires the operator's API key)
    #[command(subcommand)]
    Key(KeyCommand),
    /// Manage volumes: disks that outlive sandboxes
    #[command(subcommand)]
    Volume(VolumeCommand),
    /// Manage images of the server, or of this host's state directory if `--state-dir` is given or no server
    /// runs
    #[command(subcommand)]
    Image(ImageCommand),
    /// Check or show the configuration of the server
    #[command(subcommand)]
    Config(ConfigCommand),
    /// Check which features this host supports, which limits are enforced, and how to enable what is missing
    Doctor(DoctorArgs),
    /// Back up the state directory of this host to a file
    Backup(BackupArgs),
    /// Restore a state directory from a backup
    Restore(RestoreArgs),
    /// Run benchmarks on this host: times of Coracle, of the bare kernel operations and of other runtimes
    Bench(BenchArgs),
    /// Print a completion script for a shell
    Completions {
        #[arg(value_enum)]
        shell: clap_complete::Shell,
    },
    /// Write manual pages for all commands to a directory
    Man {
        /// The directory; it must exist
        #[arg(value_name = "DIR")]
        directory: PathBuf,
    },
}

/// The location of the state directory, for commands that work on this host without a server.
#[derive(Debug, Default, Args)]
pub(crate) struct StateArgs {
    /// State directory with sandboxes, images and the database [default: /var/lib/coracle as root, else
    /// $XDG_STATE_HOME/coracle]
    #[arg(long, value_name = "DIR")]
    pub state_dir: Option<PathBuf>,

    /// The configuration file [default: /etc/coracle/coracle.toml as root, else
    /// $XDG_CONFIG_HOME/coracle/coracle.toml, if it exists]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    /// Address to listen on; any address other than loopback requires an API key [default: 127.0.0.1:8080]
    #[arg(long, value_name = "ADDRESS")]
    pub listen: Option<SocketAddr>,

    #[command(flatten)]
    pub state: StateArgs,
}

/// The limits of one sandbox.
#[derive(Debug, Default, Args)]
pub(crate) struct LimitArgs {
    /// Memory limit for all processes together, such as 256m
    #[arg(long, value_name = "SIZE", value_parser = values::parse_bytes)]
    pub memory: Option<Bytes>,

    /// CPU limit in cores, such as 0.5
    #[arg(long, value_name = "CORES", value_parser = values::parse_cpus)]
    pub cpus: Option<MilliCpus>,

    /// Maximum number of processes and threads
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..))]
    pub pids: Option<u32>,

    /// Disk limit, such as 100m
    #[arg(long, value_name = "SIZE", value_parser = values::parse_bytes)]
    pub disk: Option<Bytes>,
}

#[derive(Debug, Args)]
#[command(after_help = RUN_HELP)]
pub(crate) struct RunArgs {
    #[command(flatten)]
    pub limits: LimitArgs,

    /// Kill the command and all its descendants after this time, such as 5s; the exit code is then 124
    #[arg(long, value_name = "TIME", value_parser = values::parse_duration)]
    pub timeout: Option<Duration>,

    /// Mount a host directory in the sandbox; inside, it belongs to the sandbox's user
    #[arg(long = "mount", value_name = "SRC:DST[:ro]", value_parser = values::parse_mount)]
    pub mounts: Vec<MountSpec>,

    /// Set an environment variable; without a value, pass on the caller's value
    #[arg(long = "env", short = 'e', value_name = "K=V", value_parser = values::parse_variable)]
    pub env: Vec<(String, String)>,

    /// Working directory in the sandbox
    #[arg(long, short = 'w', value_name = "DIR")]
    pub workdir: Option<String>,

    /// The image to run in
    #[arg(long, default_value = "host")]
    pub image: String,

    /// Network access of the sandbox [default: off, or filtered if `--allow` or `--deny` is given]
    #[arg(long, value_enum)]
    pub network: Option<NetworkChoice>,

    /// Allow connections to this name, to all names below it (`*.example.org`), or to an address or range; can be
    /// repeated. What no `--allow` names is denied
    #[arg(long, value_name = "TARGET[:PORT]", value_parser = values::parse_policy_target)]
    pub allow: Vec<PolicyTarget>,

    /// Deny connections to this target, even if `--allow` names it; can be repeated. Without `--allow`, everything else
    /// is allowed
    #[arg(long, value_name = "TARGET[:PORT]", value_parser = values::parse_policy_target)]
    pub deny: Vec<PolicyTarget>,

    /// Run as this user in the sandbox: a name, UID or UID:GID
    #[arg(long, short = 'u', value_name = "USER", value_parser = values::parse_identity)]
    pub user: Option<UserIdentity>,

    /// Keep the files that the command wrote, and print their location
    #[arg(long)]
    pub keep: bool,

    /// Fail if this host cannot enforce a default limit, instead of printing a warning
    #[arg(long)]
    pub require_limits: bool,

    /// Suppress warnings and notes; errors are still printed
    #[arg(long, short = 'q')]
    pub quiet: bool,

    #[command(flatten)]
    pub state: StateArgs,

    /// The command and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "CMD")]
    pub command: Vec<OsString>,
}

const RUN_HELP: &str = "\
Input, output and exit code are those of the command. Other exit codes: 124 timeout reached, 125 the sandbox \
could not be created, 126 the program cannot be executed, 127 the program was not found, 137 out of memory. \
Options of the command follow its name; a command name that begins with a hyphen needs `--` before it.";

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum OnDeathChoice {
    Restart,
    Replace,
}

impl From<OnDeathChoice> for domain::OnDeath {
    fn from(choice: OnDeathChoice) -> Self {
        match choice {
            OnDeathChoice::Restart => Self::Restart,
            OnDeathChoice::Replace => Self::Replace,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum NetworkChoice {
    /// Loopback only
    Off,
    /// Access to other machines, but not to this host or its private networks
    On,
    /// `on` if this host supports it, else `off`
    Auto,
    /// Only what a policy allows, by name and address
    Filtered,
}

impl From<NetworkChoice> for domain::NetworkAccess {
    fn from(choice: NetworkChoice) -> Self {
        match choice {
            NetworkChoice::Off => Self::Off,
            NetworkChoice::On => Self::On,
            NetworkChoice::Auto => Self::Auto,
            NetworkChoice::Filtered => Self::Filtered,
        }
    }
}

#[derive(Debug, Args)]
pub(crate) struct CreateArgs {
    /// The image to run in [default: host]
    #[arg(long)]
    pub image: Option<String>,

    /// Take a warm sandbox from this pool; its image and, unless given here, its limits are those of the pool
    #[arg(long, value_name = "NAME")]
    pub pool: Option<String>,

    /// Create from this snapshot instead of an image; network, limits, timeouts, variables and labels default
    /// to those of the snapshot's sandbox
    #[arg(long, value_name = "SNAPSHOT", conflicts_with = "image")]
    pub snapshot: Option<SnapshotRef>,

    /// Create the sandbox for clients of this API: its user, its directories, and an address that
    /// `coracle url SANDBOX` prints
    #[arg(
        long,
        value_name = "API",
        value_parser = PossibleValuesParser::new(guest_names()),
        conflicts_with_all = ["pool", "snapshot", "volumes", "entrypoint", "on_death"]
    )]
    pub guest: Option<String>,

    /// Name of the sandbox: an existing sandbox with this name is returned, otherwise a new one is created
    #[arg(long, value_name = "NAME")]
    pub key: Option<String>,

    /// What to do when the sandbox has died and is requested again: restart it with its files, or replace it
    /// with one that has an empty disk and the same volumes [default: as in the snapshot, else restart]
    #[arg(long, value_enum, value_name = "CHOICE")]
    pub on_death: Option<OnDeathChoice>,

    /// Remove the sandbox after this time, at least 60s [default: as in the snapshot, else never]
    #[arg(long, value_name = "TIME|never", value_parser = values::parse_lifetime)]
    pub timeout: Option<SandboxLifetime>,

    /// Remove the sandbox after this time without activity [default: as in the snapshot, else never]
    #[arg(long, value_name = "TIME|never", value_parser = values::parse_lifetime)]
    pub idle_timeout: Option<SandboxLifetime>,

    #[command(flatten)]
    pub limits: LimitArgs,

    /// Network access of the sandbox [default: as in the snapshot, else the server's default]
    #[arg(long, value_enum)]
    pub network: Option<NetworkChoice>,

    /// Allow connections to this name, to all names below it (`*.example.org`), or to an address or range; can be
    /// repeated. What no `--allow` names is denied; implies `--network filtered`
    #[arg(long, value_name = "TARGET[:PORT]", value_parser = values::parse_policy_target, conflicts_with = "guest")]
    pub allow: Vec<PolicyTarget>,

    /// Deny connections to this target, even if `--allow` names it; can be repeated. Without `--allow`, everything else
    /// is allowed; implies `--network filtered`
    #[arg(long, value_name = "TARGET[:PORT]", value_parser = values::parse_policy_target, conflicts_with = "guest")]
    pub deny: Vec<PolicyTarget>,

    /// Set an environment variable for all processes
    #[arg(long = "env", short = 'e', value_name = "K=V", value_parser = values::parse_variable)]
    pub env: Vec<(String, String)>,

    /// Add a label to the sandbox
    #[arg(long = "label", short = 'l', value_name = "K=V", value_parser = values::parse_label)]
    pub labels: Vec<(String, String)>,

    /// Mount a volume, which is created if it does not exist, or a directory of the server's host that the
    /// operator allows
    #[arg(long = "volume", short = 'v', value_name = "NAME|PATH:DST[:ro]", value_parser = values::parse_volume)]
    pub volumes: Vec<serde_json::Value>,

    /// Command of the main process (optional)
    #[arg(trailing_var_arg = true, value_name = "CMD")]
    pub entrypoint: Vec<String>,
}

/// The APIs that a sandbox can be created for.
#[cfg(feature = "whole")]
fn guest_names() -> Vec<&'static str> {
    fronts::sandbox_guests().collect()
}

/// The program for `exec` has no fronts, and creates no sandbox.
#[cfg(not(feature = "whole"))]
fn guest_names() -> Vec<&'static str> {
    Vec::new()
}

impl Cli {
    /// Parses the arguments of this process.
    pub(crate) fn parse_arguments() -> Result<Self, clap::Error> {
        let arguments: Vec<OsString> = std::env::args_os().collect();
        // Help and errors come from the whole description.
        Self::parse_exec(&arguments).map_or_else(|| Self::try_parse_from(&arguments), Ok)
    }

    /// Parses the arguments of `exec`; `None` if they are those of another subcommand, or not right.
    fn parse_exec(arguments: &[OsString]) -> Option<Self> {
        if !arguments.iter().any(|word| word == "exec") {
            return None;
        }
        let ExecCli { global, command: ExecCommand::Exec(args) } = ExecCli::try_parse_from(arguments).ok()?;
        Some(Self { global, command: CliCommand::Exec(args) })
    }
}

impl GlobalArgs {
    /// The address of the server. An empty address, as set by `CORACLE_URL=`, counts as unset.
    pub(crate) fn server_url(&self) -> &str {
        if self.url.is_empty() { DEFAULT_URL } else { &self.url }
    }
}

impl CreateArgs {
    /// The given options that affect only a new sandbox, as they are spelled on the command line.
    pub(crate) fn given_options(&self) -> Vec<&'static str> {
        let limits = &self.limits;
        let all = [
            ("--image", self.image.is_some()),
            ("--pool", self.pool.is_some()),
            ("--snapshot", self.snapshot.is_some()),
            ("--on-death", self.on_death.is_some()),
            ("--timeout", self.timeout.is_some()),
            ("--idle-timeout", self.idle_timeout.is_some()),
            ("--memory", limits.memory.is_some()),
            ("--cpus", limits.cpus.is_some()),
            ("--pids", limits.pids.is_some()),
            ("--disk", limits.disk.is_some()),
            ("--network", self.network.is_some()),
            ("--allow", !self.allow.is_empty()),
            ("--deny", !self.deny.is_empty()),
            ("--env", !self.env.is_empty()),
            ("--label", !self.labels.is_empty()),
            ("--volume", !self.volumes.is_empty()),
            ("CMD", !self.entrypoint.is_empty()),
        ];
        all.into_iter().filter(|(_, given)| *given).map(|(name, _)| name).collect()
    }

    /// The volumes that were named, without directories of the host.
    pub(crate) fn volume_names(&self) -> Vec<String> {
        let name = |volume: &serde_json::Value| volume["pvc"]["claimName"].as_str().map(str::to_owned);
        self.volumes.iter().filter_map(name).collect()
    }
}

#[derive(Debug, Args)]
pub(crate) struct ReleaseArgs {
    /// The sandbox: the name that `create --key` was given, its id, or the beginning of its id
    #[arg(value_name = "SANDBOX")]
    pub key: SandboxRef,
}

#[derive(Debug, Args)]
pub(crate) struct TopArgs {
    /// Time between two updates
    #[arg(long, value_name = "TIME", value_parser = values::parse_duration, default_value = "2s")]
    pub every: Duration,

    /// Print one measurement, taken over one such interval, and exit
    #[arg(long)]
    pub once: bool,
}

#[derive(Debug, Args)]
pub(crate) struct UsageArgs {
    /// Show the last hour of this sandbox instead of usage per owner
    #[arg(value_name = "SANDBOX")]
    pub id: Option<SandboxRef>,

    /// Number of hours to show
    #[arg(long, value_name = "COUNT", default_value_t = 24, value_parser = clap::value_parser!(u64).range(1..=744), conflicts_with = "id")]
    pub hours: u64,
}

#[derive(Debug, Args)]
pub(crate) struct EventsArgs {
    /// Start after the event with this number [default: the oldest stored event]
    #[arg(long, value_name = "NUMBER")]
    pub after: Option<u64>,

    /// Show only the last COUNT events; with --follow, also new ones
    #[arg(long, value_name = "COUNT", conflicts_with = "after")]
    pub tail: Option<usize>,

    /// Keep printing new events
    #[arg(long, short = 'f')]
    pub follow: bool,
}

#[derive(Debug, Args)]
pub(crate) struct LsArgs {
    /// Show only sandboxes with this label
    #[arg(long = "label", short = 'l', value_name = "K=V", value_parser = values::parse_label)]
    pub labels: Vec<(String, String)>,

    /// Print ids only
    #[arg(long, short = 'q')]
    pub quiet: bool,

    #[command(flatten)]
    pub owners: OwnerArgs,
}

#[derive(Debug, Args)]
#[command(after_help = EXEC_HELP)]
// The generated usage has the group of CMD and -c before SANDBOX.
#[command(override_usage = "coracle exec [OPTIONS] <SANDBOX> <-- CMD...|-c TEXT>")]
#[command(group = clap::ArgGroup::new("what").required(true).args(["command", "text"]))]
pub(crate) struct ExecArgs {
    /// The sandbox: its id, its name, or the beginning of its id
    #[arg(value_name = "SANDBOX")]
    pub id: SandboxRef,

    /// Run this shell command line instead of a command with arguments
    #[arg(short = 'c', value_name = "TEXT")]
    pub text: Option<String>,

    /// Run in the background and print the process id
    #[arg(long, short = 'd', conflicts_with_all = ["interactive", "tty"])]
    pub detach: bool,

    /// Forward standard input even if it is a terminal
    #[arg(long, short = 'i')]
    pub interactive: bool,

    /// Allocate a terminal for the command, with the size of this one
    #[arg(long, short = 't')]
    pub tty: bool,

    /// How much output to keep for `coracle logs`, such as 64m [default: the server's setting]
    #[arg(long, value_name = "SIZE", value_parser = values::parse_bytes)]
    pub keep_output: Option<Bytes>,

    /// Kill the command and all its descendants after this time; the exit code is then 124
    #[arg(long, value_name = "TIME", value_parser = values::parse_duration)]
    pub timeout: Option<Duration>,

    /// Set an environment variable
    #[arg(long = "env", short = 'e', value_name = "K=V", value_parser = values::parse_variable)]
    pub env: Vec<(String, String)>,

    /// Working directory of the command
    #[arg(long, short = 'w', value_name = "DIR")]
    pub workdir: Option<String>,

    /// Run as this user: UID or UID:GID
    #[arg(long, short = 'u', value_name = "UID[:GID]", value_parser = values::parse_numeric_identity)]
    pub user: Option<(u32, u32)>,

    /// The command and its arguments
    #[arg(trailing_var_arg = true, value_name = "CMD")]
    pub command: Vec<String>,
}

const EXEC_HELP: &str = "\
Output is forwarded byte for byte. Standard input is forwarded if it is not a terminal, so in a `while read` \
loop of a shell the command reads the lines of the loop, as with ssh; `</dev/null` avoids this. The exit \
code is that of the command, or: 128 plus the signal number if a signal ended it, 124 timeout reached, 137 \
out of memory, 127 program not found, 126 program cannot be executed, 125 if the command could not be \
started, or if it succeeded but part of its output is missing because it was not read in time. INT, TERM, \
HUP and QUIT are forwarded to the command; a third Ctrl-C leaves the command running and returns.";

#[derive(Debug, Args)]
pub(crate) struct ShellArgs {
    /// The sandbox: its id, its name, or the beginning of its id
    #[arg(value_name = "SANDBOX")]
    pub id: SandboxRef,

    /// Working directory of the command
    #[arg(long, short = 'w', value_name = "DIR")]
    pub workdir: Option<String>,

    /// Run this shell command line instead of an interactive shell
    #[arg(short = 'c', value_name = "TEXT")]
    pub text: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct CpArgs {
    /// A local path, SANDBOX:/PATH for a path in a sandbox, or - for standard input
    #[arg(value_name = "SRC", value_parser = values::parse_copy_endpoint)]
    pub source: CopyEndpoint,

    /// A local path, SANDBOX:/PATH for a path in a sandbox, or - for standard output
    #[arg(value_name = "DST", value_parser = values::parse_copy_endpoint)]
    pub destination: CopyEndpoint,
}

#[derive(Debug, Args)]
#[command(after_help = LOGS_HELP)]
pub(crate) struct LogsArgs {
    /// The sandbox: its id, its name, or the beginning of its id
    #[arg(value_name = "SANDBOX")]
    pub id: SandboxRef,

    /// Id of the process, or the beginning of it, as printed by `exec --detach` or `ps` [default: the main
    /// process, else the newest command]
    #[arg(value_name = "PROCESS")]
    pub process: Option<ProcessRef>,

    /// Keep printing new output until the process ends
    #[arg(long, short = 'f')]
    pub follow: bool,

    /// Start at this byte offset
    #[arg(long, value_name = "OFFSET", default_value_t = 0)]
    pub from: u64,

    #[command(flatten)]
    pub owners: OwnerArgs,
}

const LOGS_HELP: &str = "\
If part of the output is no longer stored, a warning is printed on standard error, the output continues on a \
new line, and the exit code is 3. With --json, each record is one line: output with its stream, offset and \
text (or base64 if it is not UTF-8), gaps with offset and length, and the end.";

#[derive(Debug, Args)]
pub(crate) struct RmArgs {
    /// The sandboxes: ids, names, or beginnings of ids
    #[arg(value_name = "SANDBOX", required_unless_present = "all")]
    pub ids: Vec<SandboxRef>,

    /// Remove all your sandboxes; operators can select those of other owners with --owner or --all-owners
    #[arg(long, conflicts_with = "ids")]
    pub all: bool,

    #[command(flatten)]
    pub owners: OwnerArgs,
}

#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    #[command(flatten)]
    pub state: StateArgs,

    /// Show what this image contains instead: languages, Jupyter kernels, tools
    #[arg(long, value_name = "NAME")]
    pub image: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    /// Run fewer rounds, for a quick result
    #[arg(long)]
    pub quick: bool,

    /// Run only measurements whose name contains this word
    #[arg(long, value_name = "WORD")]
    pub only: Option<String>,

    /// Directory with ipykernel for the sandbox's python, to compare with Coracle's own contexts
    ///
    /// `pip install --target DIR ipykernel` creates one.
    #[arg(long, value_name = "DIR")]
    pub ipykernel: Option<PathBuf>,

    /// Print where the time of a create goes, stage by stage, and measure nothing else
    #[arg(long)]
    pub breakdown: bool,

    /// Another OpenSandbox server to measure with the same calls, as `http://HOST:PORT`
    ///
    /// Its key is taken from CORACLE_BENCH_PEER_KEY. Belongs to `--only peers`.
    #[arg(long, value_name = "URL")]
    pub peer: Option<String>,

    /// The image of the other server's sandboxes
    #[arg(long, value_name = "IMAGE", default_value = "python:3.11-slim")]
    pub peer_image: String,

    /// How many sandboxes are created and removed for `--only age` [default: 500, or 60 with --quick]
    #[arg(long, value_name = "COUNT")]
    pub sandboxes: Option<usize>,

    /// How often the server is restarted for `--only age` [default: 10, or 3 with --quick]
    #[arg(long, value_name = "COUNT")]
    pub restarts: Option<usize>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn parse(words: &[&str]) -> Result<Cli, clap::Error> {
        Cli::try_parse_from(std::iter::once("coracle").chain(words.iter().copied()))
    }

    #[test]
    fn the_definition_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn run_takes_every_limit_and_leaves_the_command_alone() {
        let words = "run --memory 256m --cpus 0.5 --pids 64 --disk 100m --timeout 5s --mount /a:/b:ro \
                     --env K=V --workdir /tmp --image host --network off --keep --require-limits --user 0 \
                     -- ls -la --memory 1";
        let cli = parse(&words.split_whitespace().collect::<Vec<_>>()).expect("it parses");
        let CliCommand::Run(run) = cli.command else { panic!("another command") };
        assert_eq!(run.limits.memory, Some(Bytes::from_mib(256)));
        assert_eq!(run.limits.cpus, Some(MilliCpus(500)));
        assert_eq!(run.limits.pids, Some(64));
        assert_eq!(run.limits.disk, Some(Bytes::from_mib(100)));
        assert_eq!(run.timeout, Some(Duration::from_secs(5)));
        assert_eq!(run.env, [("K".to_owned(), "V".to_owned())]);
        assert_eq!(run.command, ["ls", "-la", "--memory", "1"]);
        assert!(run.keep && run.require_limits);
    }

    #[test]
    fn an_unknown_flag_is_refused_and_not_taken_for_a_program() {
        for words in ["run --bogus -- true", "run --bogus true", "run -la", "create --bogus sh"] {
            let refused = parse(&words.split(' ').collect::<Vec<_>>()).expect_err(words);
            assert_eq!(refused.kind(), clap::error::ErrorKind::UnknownArgument, "{words}");
        }
        for (words, command) in [
            ("run ls -la --memory 1", ["ls", "-la", "--memory", "1"]),
            ("run -- -ls -a --memory 1", ["-ls", "-a", "--memory", "1"]),
        ] {
            let cli = parse(&words.split(' ').collect::<Vec<_>>()).expect(words);
            let CliCommand::Run(run) = cli.command else { panic!("another command") };
            assert_eq!(run.command, command);
            assert_eq!(run.limits.memory, None, "{words}");
        }
    }

    #[test]
    fn exec_takes_a_command_or_text_but_not_both_or_neither() {
        let id = "abcdefghijklmnopqrst";
        assert!(parse(&["exec", id, "--", "ls"]).is_ok());
        assert!(parse(&["exec", id, "-c", "ls | wc"]).is_ok());
        let neither = parse(&["exec", id]).expect_err("nothing is to be run").to_string();
        assert!(neither.contains("CMD") && neither.contains("-c <TEXT>"), "{neither}");
        assert!(parse(&["exec", id, "-c", "ls", "--", "ls"]).is_err());
        assert!(parse(&["exec", "a-name", "--", "ls"]).is_ok());
        assert!(parse(&["exec", "", "--", "ls"]).is_err());
    }

    #[test]
    fn exec_alone_parses_as_among_all_subcommands() {
        let words = |text: &str| -> Vec<OsString> { text.split(' ').map(OsString::from).collect() };
        for text in [
            "coracle exec web -- ls -l",
            "coracle --json --url http://h:1 exec web -c true",
            "coracle exec -i web --timeout 5s -- sh --url x",
        ] {
            let whole = Cli::try_parse_from(words(text)).expect(text);
            let alone = Cli::parse_exec(&words(text)).expect(text);
            assert_eq!(format!("{alone:?}"), format!("{whole:?}"), "{text}");
        }
        for text in ["coracle run -- exec x", "coracle exec --help", "coracle exec", "coracle rm exec"] {
            assert!(Cli::parse_exec(&words(text)).is_none(), "{text}");
        }
    }

    #[test]
    fn help_is_wrapped_once() {
        for name in ["exec", "logs", "run", "ps", "kill"] {
            let command = Cli::command();
            let command = command.find_subcommand(name).expect("there is such a command");
            let help = command.get_after_help().expect("it has one").to_string();
            assert!(!help.contains('\n'), "{name}: {help}");
        }
    }

    #[test]
    fn rm_takes_ids_or_all() {
        assert!(parse(&["rm"]).is_err());
        assert!(parse(&["rm", "--all"]).is_ok());
        assert!(parse(&["rm", "abcdefghijklmnopqrst", "abcdefghijklmnopqrsu"]).is_ok());
    }

    #[test]
    fn an_empty_address_counts_as_unset() {
        let url = |words: &[&str]| parse(words).expect("it parses").global.server_url().to_owned();
        assert_eq!(url(&["--url", "", "ls"]), DEFAULT_URL);
        assert_eq!(url(&["--url", "http://a:1", "ls"]), "http://a:1");
    }

    #[test]
    fn no_flag_takes_the_key() {
        let mut command = Cli::command();
        let help = command.render_long_help().to_string();
        assert!(!help.contains("--api-key"), "{help}");
        assert!(help.contains("CORACLE_API_KEY"), "{help}");
    }
}
