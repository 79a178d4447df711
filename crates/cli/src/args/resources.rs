//! The flags of the commands for pools, snapshots and forks, keys, volumes and images.

use std::num::ParseIntError;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};
use domain::{Bytes, MilliCpus};

use super::{LimitArgs, NetworkChoice, OnDeathChoice, OwnerArgs, StateArgs};
use crate::client::{SandboxRef, SnapshotRef};
use crate::values::{self, SandboxLifetime};

#[derive(Debug, Subcommand)]
pub(crate) enum PoolCommand {
    /// List pools and their number of warm sandboxes
    Ls,
    /// Create a pool of warm sandboxes of one image
    Create {
        /// Name of the pool, as used in `create --pool` and `poolRef`
        name: String,
        /// The image of the warm sandboxes
        #[arg(long, default_value = "host")]
        image: String,
        #[command(flatten)]
        size: PoolSizeArgs,
        /// Memory limit of the warm sandboxes, such as 256m; a request for a sandbox can set another limit
        #[arg(long, value_name = "SIZE", value_parser = values::parse_bytes)]
        memory: Option<Bytes>,
        /// CPU limit of the warm sandboxes, in cores
        #[arg(long, value_name = "CORES", value_parser = values::parse_cpus)]
        cpus: Option<MilliCpus>,
        /// Disk limit of the warm sandboxes
        #[arg(long, value_name = "SIZE", value_parser = values::parse_bytes)]
        disk: Option<Bytes>,
        /// Maximum number of sandboxes to start per second
        #[arg(long, value_name = "COUNT")]
        per_second: Option<u32>,
        /// Maximum number of sandboxes to create at the same time
        #[arg(long, value_name = "COUNT")]
        at_once: Option<u32>,
    },
    /// Change the size of a pool
    Set {
        name: String,
        #[command(flatten)]
        size: PoolSizeArgs,
    },
    /// Show the settings and state of a pool
    Inspect { name: String },
    /// Remove pools and their warm sandboxes; sandboxes already taken from a pool are kept
    Rm {
        #[arg(required = true, value_name = "NAME")]
        names: Vec<String>,
    },
}

/// The size of a pool.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct PoolSizeArgs {
    /// Number of sandboxes to keep warm
    #[arg(long, value_name = "COUNT")]
    pub level: u32,
    /// Maximum number of sandboxes, warm and taken together; `none` for no limit [default: no limit for a new
    /// pool, unchanged for an existing one]
    #[arg(long, value_name = "COUNT", value_parser = parse_count_or_none)]
    pub max: Option<u32>,
}

/// A count; `none` is the largest, which the API treats as no limit.
fn parse_count_or_none(text: &str) -> Result<u32, ParseIntError> {
    if text == "none" { Ok(u32::MAX) } else { text.parse() }
}

#[derive(Debug, Subcommand)]
pub(crate) enum SnapshotCommand {
    /// Take a snapshot of the files of a sandbox, running or dead, and print its id
    Create {
        /// The sandbox: its id, its name, or the beginning of its id
        #[arg(value_name = "SANDBOX")]
        id: SandboxRef,
        /// Name of the snapshot
        #[arg(long)]
        name: Option<String>,
    },
    /// List snapshots
    Ls {
        /// Show only snapshots of this sandbox
        #[arg(long, value_name = "SANDBOX")]
        sandbox: Option<SandboxRef>,
        #[command(flatten)]
        owners: OwnerArgs,
    },
    /// Show a snapshot
    Inspect {
        /// The snapshot: its id, its name, or the beginning of its id
        #[arg(value_name = "SNAPSHOT")]
        id: SnapshotRef,
        #[command(flatten)]
        owners: OwnerArgs,
    },
    /// Delete snapshots; sandboxes created from them keep their files
    Rm {
        #[arg(required = true, value_name = "SNAPSHOT")]
        ids: Vec<SnapshotRef>,
        #[command(flatten)]
        owners: OwnerArgs,
    },
}

#[derive(Debug, Args)]
#[command(after_help = FORK_HELP)]
pub(crate) struct ForkArgs {
    /// The sandbox: its id, its name, or the beginning of its id
    #[arg(value_name = "SANDBOX")]
    pub id: SandboxRef,

    /// Number of sandboxes to create
    #[arg(long, short = 'n', default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub count: u32,

    /// Name of the fork: an existing sandbox with this name is returned, otherwise a fork is created
    #[arg(long, value_name = "NAME", conflicts_with = "count")]
    pub key: Option<String>,

    /// Remove each fork after this time, at least 60s [default: the timeout of the parent]
    #[arg(long, value_name = "TIME|never", value_parser = values::parse_lifetime)]
    pub timeout: Option<SandboxLifetime>,

    /// Remove each fork after this time without activity [default: as in the parent]
    #[arg(long, value_name = "TIME|never", value_parser = values::parse_lifetime)]
    pub idle_timeout: Option<SandboxLifetime>,

    /// What to do when a fork has died and is requested again [default: as in the parent]
    #[arg(long, value_enum, value_name = "CHOICE")]
    pub on_death: Option<OnDeathChoice>,

    #[command(flatten)]
    pub limits: LimitArgs,

    /// Network access of each fork [default: as in the parent]
    #[arg(long, value_enum)]
    pub network: Option<NetworkChoice>,

    /// Set an environment variable for all processes, in addition to those of the parent
    #[arg(long = "env", short = 'e', value_name = "K=V", value_parser = values::parse_variable)]
    pub env: Vec<(String, String)>,

    /// Add a label to each fork, in addition to those of the parent
    #[arg(long = "label", short = 'l', value_name = "K=V", value_parser = values::parse_label)]
    pub labels: Vec<(String, String)>,

    /// Mount a volume, which is created if it does not exist, or a directory of the server's host that the
    /// operator allows
    #[arg(long = "volume", short = 'v', value_name = "NAME|PATH:DST[:ro]", value_parser = values::parse_volume)]
    pub volumes: Vec<serde_json::Value>,

    /// Command of the main process (optional)
    #[arg(last = true, value_name = "CMD")]
    pub entrypoint: Vec<String>,
}

const FORK_HELP: &str = "\
A fork starts with the files of its parent, but without its processes. Network, limits, timeouts, \
--on-death, variables, user and labels are inherited from the parent unless given here. Mounts, volumes and \
the main process are not inherited.";

#[derive(Debug, Subcommand)]
pub(crate) enum KeyCommand {
    /// Create an API key for an owner and print it; it is not shown again
    Create {
        /// Owner whose sandboxes the key gives access to; the owner is created with its first key
        owner: String,
        /// Time until the key expires, such as 30d [default: never]
        #[arg(long, value_name = "TIME", value_parser = values::parse_duration)]
        expires: Option<Duration>,
    },
    /// List keys, without their secret values
    Ls,
    /// Revoke keys
    Rm {
        /// Ids of the keys, or beginnings of ids, as shown by `coracle key ls`
        #[arg(required = true, value_name = "ID")]
        ids: Vec<String>,
        /// Also remove all sandboxes of the key's owner if the owner has no other valid key; snapshots and
        /// volumes are kept
        #[arg(long)]
        and_sandboxes: bool,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum VolumeCommand {
    /// List your volumes
    Ls {
        #[command(flatten)]
        owners: OwnerArgs,
    },
    /// Create a volume; succeeds if one with the same size already exists
    Create {
        /// Name of the volume
        name: String,
        /// Size, such as 10g [default: the server's `volumes.default_size`]
        #[arg(long, value_name = "BYTES", value_parser = values::parse_bytes)]
        size: Option<Bytes>,
    },
    /// Show a volume and the sandboxes that use it
    Inspect {
        /// The volume: its name, its id, or the beginning of its id
        name: String,
        #[command(flatten)]
        owners: OwnerArgs,
    },
    /// Remove volumes and their data; a volume that is used by a sandbox is not removed
    Rm {
        #[arg(required = true, value_name = "NAME")]
        names: Vec<String>,
        #[command(flatten)]
        owners: OwnerArgs,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum ImageCommand {
    /// Import an image from a root filesystem (a directory or a tar), a `docker save` tar or an OCI layout
    Import {
        /// Name of the image
        name: String,
        /// Directory or tar archive (plain, gzip or zstd)
        #[arg(value_name = "PATH")]
        source: PathBuf,
        #[command(flatten)]
        state: StateArgs,
    },
    /// Create an image from the files of a sandbox or a snapshot; every owner of the server can use it
    Commit {
        /// Sandbox: its id, its name, or the beginning of its id; or the id of a snapshot
        #[arg(value_name = "ID")]
        source: SandboxRef,
        /// Name of the image
        name: String,
        /// Treat ID as a snapshot: its id, its name, or the beginning of its id
        #[arg(long)]
        snapshot: bool,
    },
    /// List the images
    Ls {
        #[command(flatten)]
        state: StateArgs,
    },
    /// Pull an image from a registry; `NAME@sha256:…` selects an exact version
    Pull {
        /// `[registry[:port]/]path[:tag][@sha256:…]`
        name: String,
        /// User name for the registry; requires --password-stdin
        #[arg(long, requires = "password_stdin")]
        username: Option<String>,
        /// Read the password from standard input
        #[arg(long, requires = "username")]
        password_stdin: bool,
        #[command(flatten)]
        state: StateArgs,
    },
    /// Show the layers and the start configuration of an image
    Inspect {
        name: String,
        #[command(flatten)]
        state: StateArgs,
    },
    /// Remove unused layers, and the least recently used images if all images exceed `images.max_bytes`
    Gc {
        #[command(flatten)]
        state: StateArgs,
    },
    /// Remove images; sandboxes that use one keep its files
    Rm {
        #[arg(required = true, value_name = "NAME")]
        names: Vec<String>,
        #[command(flatten)]
        state: StateArgs,
    },
}
