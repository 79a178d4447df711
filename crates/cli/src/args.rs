//! The command line: every subcommand and flag, with the text of `--help`.
//!
//! Values arrive here checked (see `values`); what they mean is decided by the modules that
//! take these structures.

mod backup;
mod config;
mod kept;
mod owners;
mod processes;

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use domain::{Bytes, Cpus, Identity, Mount};

pub(crate) use self::backup::{BackupArgs, RestoreArgs};
pub(crate) use self::config::{ConfigCheckArgs, ConfigCommand, ConfigShowArgs};
pub(crate) use self::kept::{
    ForkArgs, ImageCommand, KeyCommand, PoolCommand, PoolSize, SnapshotCommand, VolumeCommand,
};
pub(crate) use self::owners::OwnerArgs;
pub(crate) use self::processes::{ExtendArgs, KillArgs, PsArgs, SandboxArgs, UrlArgs};
use crate::client::{ProcessRef, SandboxRef, SnapshotRef};
use crate::values::{self, Lifetime, Place};

/// Sandboxes for AI agents: one binary, milliseconds per sandbox.
#[derive(Debug, Parser)]
#[command(name = "coracle", version, propagate_version = true, after_help = AFTER_HELP)]
pub(crate) struct Cli {
    /// The server that the commands for sandboxes, keys and events talk to; operators on its own
    /// machine may name its socket, as `unix:/var/lib/coracle/operator.sock`, and need no key there
    #[arg(
        long,
        global = true,
        help_heading = GLOBAL,
        env = "CORACLE_URL",
        default_value = DEFAULT_URL,
        value_name = "URL"
    )]
    pub url: String,

    /// Print JSON for programs instead of text for people
    #[arg(long, global = true, help_heading = GLOBAL)]
    pub json: bool,

    #[command(subcommand)]
    pub command: Command,
}

const GLOBAL: &str = "Global options";
/// The address at which a server listens by default.
pub(crate) const DEFAULT_URL: &str = "http://127.0.0.1:8080";

const AFTER_HELP: &str = "\
The API key is read from CORACLE_API_KEY, never from a flag: flags are visible to every user of the host.";

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run the server
    Serve(ServeArgs),
    /// Run one command in a sandbox of its own, without a server
    Run(RunArgs),
    /// Make a sandbox on the server and print its id
    Create(CreateArgs),
    /// List the sandboxes of the server
    Ls(LsArgs),
    /// Run a command in a sandbox; its exit code becomes ours
    Exec(ExecArgs),
    /// Open an interactive shell in a sandbox
    Shell(ShellArgs),
    /// Copy files into or out of a sandbox
    Cp(CpArgs),
    /// Print what a command has printed, from any offset
    Logs(LogsArgs),
    /// Show what runs in a sandbox
    Ps(PsArgs),
    /// Signal commands, sessions or contexts in a sandbox
    Kill(KillArgs),
    /// Stop every process of a sandbox until it is resumed
    Pause(SandboxArgs),
    /// Let a paused sandbox run again; one that has died is restarted
    Resume(SandboxArgs),
    /// Start a sandbox again that has died, with its files
    Restart(SandboxArgs),
    /// Set when a sandbox with a timeout expires
    Extend(ExtendArgs),
    /// Print the address at which a port of a sandbox is reached
    Url(UrlArgs),
    /// Let the sandbox of a name make room for others when they need it
    Release(ReleaseArgs),
    /// Show what a sandbox is made of, what holds for it and what it uses
    Inspect {
        /// The sandbox: its id, its name, or the beginning of its id
        #[arg(value_name = "SANDBOX")]
        id: SandboxRef,
        #[command(flatten)]
        owners: OwnerArgs,
    },
    /// Show live resource usage
    Top(TopArgs),
    /// Show what was used, by the hour or sample by sample
    Usage(UsageArgs),
    /// Show lifecycle events
    Events(EventsArgs),
    /// Remove sandboxes
    Rm(RmArgs),
    /// Sandboxes that are kept warm; needs the operator's key
    #[command(subcommand)]
    Pool(PoolCommand),
    /// Files of a sandbox at one moment, kept to make others from
    #[command(subcommand)]
    Snapshot(SnapshotCommand),
    /// Make sandboxes that begin with the files of another, and print their ids
    Fork(ForkArgs),
    /// API keys of the server's owners; needs the operator's key
    #[command(subcommand)]
    Key(KeyCommand),
    /// Volumes: disks that outlive sandboxes
    #[command(subcommand)]
    Volume(VolumeCommand),
    /// Images of the server, or of this host's state directory with `--state-dir` or without a server
    #[command(subcommand)]
    Image(ImageCommand),
    /// Check or show the configuration of the server
    #[command(subcommand)]
    Config(ConfigCommand),
    /// Say what this host offers, what is enforced, and how to get what is missing
    Doctor(DoctorArgs),
    /// Save the state directory of this host to one file
    Backup(BackupArgs),
    /// Make a state directory from a backup
    Restore(RestoreArgs),
    /// Measure this host: our times beside the floor and beside other runtimes
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

/// Where the state directory is; shared by all that work on this host without a server.
#[derive(Debug, Default, Args)]
pub(crate) struct StateArgs {
    /// Where sandboxes, images and the database live [default: /var/lib/coracle as root, else
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
    /// The address to listen on; other than loopback needs an API key [default: 127.0.0.1:8080]
    #[arg(long, value_name = "ADDRESS")]
    pub listen: Option<SocketAddr>,

    #[command(flatten)]
    pub state: StateArgs,
}

/// The limits of one sandbox.
#[derive(Debug, Default, Args)]
pub(crate) struct LimitArgs {
    /// The most memory all its processes may use together, such as 256m
    #[arg(long, value_name = "SIZE", value_parser = values::bytes)]
    pub memory: Option<Bytes>,

    /// The most processor time, in cores, such as 0.5
    #[arg(long, value_name = "CORES", value_parser = values::cpus)]
    pub cpus: Option<Cpus>,

    /// The most processes and threads
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..))]
    pub pids: Option<u32>,

    /// The most it may write to its disk, such as 100m
    #[arg(long, value_name = "SIZE", value_parser = values::bytes)]
    pub disk: Option<Bytes>,
}

#[derive(Debug, Args)]
#[command(after_help = RUN_HELP)]
pub(crate) struct RunArgs {
    #[command(flatten)]
    pub limits: LimitArgs,

    /// Kill the whole tree after this long, such as 5s; the exit code is then 124
    #[arg(long, value_name = "TIME", value_parser = values::duration)]
    pub timeout: Option<Duration>,

    /// Show a directory of the host inside; its owner there is the sandbox's user
    #[arg(long = "mount", value_name = "SRC:DST[:ro]", value_parser = values::mount)]
    pub mounts: Vec<Mount>,

    /// Set a variable; without a value, pass the caller's own
    #[arg(long = "env", short = 'e', value_name = "K=V", value_parser = values::variable)]
    pub env: Vec<(String, String)>,

    /// Start in this directory inside
    #[arg(long, short = 'w', value_name = "DIR")]
    pub workdir: Option<String>,

    /// The image to run in
    #[arg(long, default_value = "host")]
    pub image: String,

    /// What the sandbox can reach
    #[arg(long, value_enum, default_value_t = NetworkChoice::Off)]
    pub network: NetworkChoice,

    /// Run as this user inside: a name, UID or UID:GID
    #[arg(long, short = 'u', value_name = "USER", value_parser = values::identity)]
    pub user: Option<Identity>,

    /// Leave what the command wrote behind, and say where
    #[arg(long)]
    pub keep: bool,

    /// Fail if this host cannot enforce a default limit, instead of warning that it does not hold
    #[arg(long)]
    pub require_limits: bool,

    /// Print no warnings and remarks of our own; errors are still printed
    #[arg(long, short = 'q')]
    pub quiet: bool,

    #[command(flatten)]
    pub state: StateArgs,

    /// The command and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "CMD")]
    pub command: Vec<OsString>,
}

const RUN_HELP: &str = "\
Input, output and exit code are those of the command; 124 means the timeout, 137 that memory \
ran out, 127 that there is no such program, 126 that it cannot be executed, 125 that the sandbox \
itself could not be made. Flags of the command come after its name; a name that begins with a \
hyphen needs `--` before it.";

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
    /// Other machines, but not this host and its private networks
    On,
    /// `on` where this host can do it, else `off`
    Auto,
    /// Not offered yet
    Filtered,
}

impl From<NetworkChoice> for domain::Network {
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

    /// Take it from this pool; image and limits are then the pool's unless limits are named here
    #[arg(long, value_name = "NAME")]
    pub pool: Option<String>,

    /// Begin with the files of this snapshot instead of an image; network, limits, timeouts,
    /// variables and labels are those of its sandbox unless they are named here
    #[arg(long, value_name = "SNAPSHOT", conflicts_with = "image")]
    pub snapshot: Option<SnapshotRef>,

    /// Find the sandbox of this name again, and make it only if there is none
    #[arg(long, value_name = "NAME")]
    pub key: Option<String>,

    /// What becomes of it when it has died and is wanted again: it restarts with its files, or is
    /// replaced by one with an empty disk and the same volumes [default: the snapshot's, else restart]
    #[arg(long, value_enum, value_name = "CHOICE")]
    pub on_death: Option<OnDeathChoice>,

    /// Remove the sandbox after this long, at least 60s [default: the snapshot's, else never]
    #[arg(long, value_name = "TIME|never", value_parser = values::lifetime)]
    pub timeout: Option<Lifetime>,

    /// Remove the sandbox when nothing has happened in it for this long [default: the snapshot's, else never]
    #[arg(long, value_name = "TIME|never", value_parser = values::lifetime)]
    pub idle_timeout: Option<Lifetime>,

    #[command(flatten)]
    pub limits: LimitArgs,

    /// What the sandbox can reach [default: the snapshot's, else what the server chooses]
    #[arg(long, value_enum)]
    pub network: Option<NetworkChoice>,

    /// Set a variable in every process
    #[arg(long = "env", short = 'e', value_name = "K=V", value_parser = values::variable)]
    pub env: Vec<(String, String)>,

    /// Hang a label on the sandbox
    #[arg(long = "label", short = 'l', value_name = "K=V", value_parser = values::label)]
    pub labels: Vec<(String, String)>,

    /// Show a volume, made if there is none, or a directory of the server's host that its operator allows
    #[arg(long = "volume", short = 'v', value_name = "NAME|PATH:DST[:ro]", value_parser = values::volume)]
    pub volumes: Vec<serde_json::Value>,

    /// The main process, if there is to be one
    #[arg(trailing_var_arg = true, value_name = "CMD")]
    pub entrypoint: Vec<String>,
}

impl Cli {
    /// The server that is meant; an empty address, as `CORACLE_URL=` gives it, is none.
    pub(crate) fn server_url(&self) -> &str {
        if self.url.is_empty() { DEFAULT_URL } else { &self.url }
    }
}

impl CreateArgs {
    /// The options that were given and that shape a new sandbox, as they are written.
    pub(crate) fn named_settings(&self) -> Vec<&'static str> {
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
            ("--env", !self.env.is_empty()),
            ("--label", !self.labels.is_empty()),
            ("--volume", !self.volumes.is_empty()),
            ("CMD", !self.entrypoint.is_empty()),
        ];
        all.into_iter().filter(|(_, given)| *given).map(|(name, _)| name).collect()
    }

    /// The volumes that were named; directories of the host are none.
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
    /// How long to wait between two looks
    #[arg(long, value_name = "TIME", value_parser = values::duration, default_value = "2s")]
    pub every: Duration,

    /// Look once, over one such time
    #[arg(long)]
    pub once: bool,
}

#[derive(Debug, Args)]
pub(crate) struct UsageArgs {
    /// Show the last hour of this sandbox instead of what owners used
    #[arg(value_name = "SANDBOX")]
    pub id: Option<SandboxRef>,

    /// How many hours to look back
    #[arg(long, value_name = "COUNT", default_value_t = 24, value_parser = clap::value_parser!(u64).range(1..=744), conflicts_with = "id")]
    pub hours: u64,
}

#[derive(Debug, Args)]
pub(crate) struct EventsArgs {
    /// Begin after the event of this number instead of with the oldest one that is remembered
    #[arg(long, value_name = "NUMBER")]
    pub after: Option<u64>,

    /// Show only the last COUNT events, and with --follow those that come after them
    #[arg(long, value_name = "COUNT", conflicts_with = "after")]
    pub tail: Option<usize>,

    /// Go on with what happens from now on
    #[arg(long, short = 'f')]
    pub follow: bool,
}

#[derive(Debug, Args)]
pub(crate) struct LsArgs {
    /// Only those with this label
    #[arg(long = "label", short = 'l', value_name = "K=V", value_parser = values::label)]
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

    /// Run this text in a shell, instead of a command with arguments
    #[arg(short = 'c', value_name = "TEXT")]
    pub text: Option<String>,

    /// Print the id of the process and leave it running
    #[arg(long, short = 'd', conflicts_with_all = ["interactive", "tty"])]
    pub detach: bool,

    /// Pass standard input on even if it is a terminal
    #[arg(long, short = 'i')]
    pub interactive: bool,

    /// Give the command a terminal of the size of ours
    #[arg(long, short = 't')]
    pub tty: bool,

    /// How much of its output is kept for `coracle logs`, such as 64m [default: what the server says]
    #[arg(long, value_name = "SIZE", value_parser = values::bytes)]
    pub keep_output: Option<Bytes>,

    /// Kill the whole tree after this long; the exit code is then 124
    #[arg(long, value_name = "TIME", value_parser = values::duration)]
    pub timeout: Option<Duration>,

    /// Set a variable
    #[arg(long = "env", short = 'e', value_name = "K=V", value_parser = values::variable)]
    pub env: Vec<(String, String)>,

    /// Start in this directory
    #[arg(long, short = 'w', value_name = "DIR")]
    pub workdir: Option<String>,

    /// Run as this user: UID or UID:GID
    #[arg(long, short = 'u', value_name = "UID[:GID]", value_parser = values::numeric_identity)]
    pub user: Option<(u32, u32)>,

    /// The command and its arguments
    #[arg(trailing_var_arg = true, value_name = "CMD")]
    pub command: Vec<String>,
}

const EXEC_HELP: &str = "\
Output is passed on byte for byte; standard input is passed on if it is not a terminal. In a `while read` loop of \
a shell the command therefore reads the lines of the loop, as with ssh; `</dev/null` avoids it. The exit code is that of \
the command, 128 and the signal's number if a signal ended it, 124 at the timeout, 137 if memory ran out, 127 if \
there is no such program, 126 if it cannot be executed, or 125 if nothing could be started, or if the command \
succeeded but output is missing because it was not read in time. INT, TERM, HUP and QUIT are passed on to the \
command; the third Ctrl-C leaves it running and returns.";

#[derive(Debug, Args)]
pub(crate) struct ShellArgs {
    /// The sandbox: its id, its name, or the beginning of its id
    #[arg(value_name = "SANDBOX")]
    pub id: SandboxRef,

    /// Start in this directory
    #[arg(long, short = 'w', value_name = "DIR")]
    pub workdir: Option<String>,

    /// Run this text instead of a shell
    #[arg(short = 'c', value_name = "TEXT")]
    pub text: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct CpArgs {
    /// A path here, SANDBOX:/PATH in a sandbox, or - for standard input
    #[arg(value_name = "SRC", value_parser = values::place)]
    pub source: Place,

    /// A path here, SANDBOX:/PATH in a sandbox, or - for standard output
    #[arg(value_name = "DST", value_parser = values::place)]
    pub destination: Place,
}

#[derive(Debug, Args)]
#[command(after_help = LOGS_HELP)]
pub(crate) struct LogsArgs {
    /// The sandbox: its id, its name, or the beginning of its id
    #[arg(value_name = "SANDBOX")]
    pub id: SandboxRef,

    /// The process, as `exec --detach` or `ps` shows it: its id or the beginning of its id [default: the main
    /// process, or else the newest command]
    #[arg(value_name = "PROCESS")]
    pub process: Option<ProcessRef>,

    /// Go on until the process ends
    #[arg(long, short = 'f')]
    pub follow: bool,

    /// Begin at this byte
    #[arg(long, value_name = "OFFSET", default_value_t = 0)]
    pub from: u64,

    #[command(flatten)]
    pub owners: OwnerArgs,
}

const LOGS_HELP: &str = "\
Output that is no longer kept is reported on standard error, the output goes on in a new line behind it, and the \
exit code is 3. With --json each record is one line: output with its stream, offset and text (or base64 where it \
is not UTF-8), gaps with offset and length, and the end.";

#[derive(Debug, Args)]
pub(crate) struct RmArgs {
    /// The sandboxes: ids, names, or beginnings of ids
    #[arg(value_name = "SANDBOX", required_unless_present = "all")]
    pub ids: Vec<SandboxRef>,

    /// Remove every sandbox of your own; the operator names others with --owner or --all-owners
    #[arg(long, conflicts_with = "ids")]
    pub all: bool,

    #[command(flatten)]
    pub owners: OwnerArgs,
}

#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    #[command(flatten)]
    pub state: StateArgs,

    /// Say instead what this image offers: languages, Jupyter kernels, tools
    #[arg(long, value_name = "NAME")]
    pub image: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    /// Fewer rounds, for a first look
    #[arg(long)]
    pub quick: bool,

    /// Only the measurements whose name contains this word
    #[arg(long, value_name = "WORD")]
    pub only: Option<String>,

    /// A directory with ipykernel for the sandbox's python, to be measured beside our own contexts
    ///
    /// `pip install --target DIR ipykernel` makes one.
    #[arg(long, value_name = "DIR")]
    pub ipykernel: Option<PathBuf>,
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
        let Command::Run(run) = cli.command else { panic!("another command") };
        assert_eq!(run.limits.memory, Some(Bytes::mib(256)));
        assert_eq!(run.limits.cpus, Some(Cpus(500)));
        assert_eq!(run.limits.pids, Some(64));
        assert_eq!(run.limits.disk, Some(Bytes::mib(100)));
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
            let Command::Run(run) = cli.command else { panic!("another command") };
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
        let url = |words: &[&str]| parse(words).expect("it parses").server_url().to_owned();
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
