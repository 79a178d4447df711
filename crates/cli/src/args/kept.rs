//! The flags of what a server keeps beside sandboxes: pools, snapshots and forks, keys, volumes, images.

use std::num::ParseIntError;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};
use domain::{Bytes, Cpus};

use super::{LimitArgs, NetworkChoice, OnDeathChoice, OwnerArgs, StateArgs};
use crate::client::{SandboxRef, SnapshotRef};
use crate::values::{self, Lifetime};

#[derive(Debug, Subcommand)]
pub(crate) enum PoolCommand {
    /// List the pools and how many sandboxes are warm
    Ls,
    /// Keep sandboxes of an image warm
    Create {
        /// What `create --pool` and `poolRef` name
        name: String,
        /// The image of the warm sandboxes
        #[arg(long, default_value = "host")]
        image: String,
        #[command(flatten)]
        size: PoolSize,
        /// The memory they are made with, such as 256m; whoever takes one may ask for another amount
        #[arg(long, value_name = "SIZE", value_parser = values::bytes)]
        memory: Option<Bytes>,
        /// The processor time they are made with, in cores
        #[arg(long, value_name = "CORES", value_parser = values::cpus)]
        cpus: Option<Cpus>,
        /// The disk they are made with
        #[arg(long, value_name = "SIZE", value_parser = values::bytes)]
        disk: Option<Bytes>,
        /// How many may be begun in one second
        #[arg(long, value_name = "COUNT")]
        per_second: Option<u32>,
        /// How many may be made at the same time
        #[arg(long, value_name = "COUNT")]
        at_once: Option<u32>,
    },
    /// Change how many sandboxes a pool has
    Set {
        name: String,
        #[command(flatten)]
        size: PoolSize,
    },
    /// Show all about one pool
    Inspect { name: String },
    /// Remove pools with their warm sandboxes; those that were taken stay
    Rm {
        #[arg(required = true, value_name = "NAME")]
        names: Vec<String>,
    },
}

/// How many sandboxes a pool has.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct PoolSize {
    /// So many are kept warm
    #[arg(long, value_name = "COUNT")]
    pub level: u32,
    /// There are never more, those that were taken and still live included; `none` for no bound
    /// [default: no bound for a new pool, as it is for another]
    #[arg(long, value_name = "COUNT", value_parser = count_or_none)]
    pub max: Option<u32>,
}

/// A count; `none` is the largest, which the API takes for no bound.
fn count_or_none(text: &str) -> Result<u32, ParseIntError> {
    if text == "none" { Ok(u32::MAX) } else { text.parse() }
}

#[derive(Debug, Subcommand)]
pub(crate) enum SnapshotCommand {
    /// Keep the files of a sandbox, running or dead, and print the id of the snapshot
    Create {
        /// The sandbox: its id, its name, or the beginning of its id
        #[arg(value_name = "SANDBOX")]
        id: SandboxRef,
        /// What to call it
        #[arg(long)]
        name: Option<String>,
    },
    /// List the snapshots of the server
    Ls {
        /// Only those of this sandbox
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
    /// Delete snapshots; sandboxes that were made from them keep their files
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

    /// How many to make
    #[arg(long, short = 'n', default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub count: u32,

    /// Find the sandbox of this name again, and fork only if there is none
    #[arg(long, value_name = "NAME", conflicts_with = "count")]
    pub key: Option<String>,

    /// Remove each after this long, at least 60s [default: as long as its parent was given]
    #[arg(long, value_name = "TIME|never", value_parser = values::lifetime)]
    pub timeout: Option<Lifetime>,

    /// Remove each when nothing has happened in it for this long [default: the parent's]
    #[arg(long, value_name = "TIME|never", value_parser = values::lifetime)]
    pub idle_timeout: Option<Lifetime>,

    /// What becomes of each when it has died and is wanted again [default: the parent's]
    #[arg(long, value_enum, value_name = "CHOICE")]
    pub on_death: Option<OnDeathChoice>,

    #[command(flatten)]
    pub limits: LimitArgs,

    /// What each can reach [default: what the parent can reach]
    #[arg(long, value_enum)]
    pub network: Option<NetworkChoice>,

    /// Set a variable in every process, beside those of the parent
    #[arg(long = "env", short = 'e', value_name = "K=V", value_parser = values::variable)]
    pub env: Vec<(String, String)>,

    /// Hang a label on each, beside those of the parent
    #[arg(long = "label", short = 'l', value_name = "K=V", value_parser = values::label)]
    pub labels: Vec<(String, String)>,

    /// Show a volume, made if there is none, or a directory of the server's host that its operator allows
    #[arg(long = "volume", short = 'v', value_name = "NAME|PATH:DST[:ro]", value_parser = values::volume)]
    pub volumes: Vec<serde_json::Value>,

    /// The main process, if there is to be one
    #[arg(last = true, value_name = "CMD")]
    pub entrypoint: Vec<String>,
}

const FORK_HELP: &str = "\
A fork has the files of its parent and none of its processes. Network, limits, timeouts, --on-death, variables, user and labels are the \
parent's unless they are named here. Mounts, volumes and the main process are only those that are named here.";

#[derive(Debug, Subcommand)]
pub(crate) enum KeyCommand {
    /// Hand out a key for an owner, and print it this once
    Create {
        /// Whose sandboxes the key opens; an owner exists from its first key on
        owner: String,
        /// Refuse the key after this long, such as 30d [default: never]
        #[arg(long, value_name = "TIME", value_parser = values::duration)]
        expires: Option<Duration>,
    },
    /// List the keys, never themselves
    Ls,
    /// Refuse keys from now on
    Rm {
        /// The keys, as `coracle key ls` shows them: ids or beginnings of ids
        #[arg(required = true, value_name = "ID")]
        ids: Vec<String>,
        /// Also remove all sandboxes of the key's owner if the owner has no other valid key;
        /// snapshots and volumes stay
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
    /// Make a volume; one of the same size may be there already
    Create {
        /// What sandboxes will call it
        name: String,
        /// What it can hold, such as 10g [default: what the server's configuration says]
        #[arg(long, value_name = "BYTES", value_parser = values::bytes)]
        size: Option<Bytes>,
    },
    /// Show one volume and which sandboxes use it
    Inspect {
        /// The volume: its name, its id, or the beginning of its id
        name: String,
        #[command(flatten)]
        owners: OwnerArgs,
    },
    /// Remove volumes that no sandbox uses, with all they hold
    Rm {
        #[arg(required = true, value_name = "NAME")]
        names: Vec<String>,
        #[command(flatten)]
        owners: OwnerArgs,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum ImageCommand {
    /// Make an image from a root filesystem (a directory or a tar), a `docker save` tar or an OCI layout
    Import {
        /// What sandboxes will call it
        name: String,
        /// The directory or the tar (plain, gzip or zstd)
        #[arg(value_name = "PATH")]
        source: PathBuf,
        #[command(flatten)]
        state: StateArgs,
    },
    /// Make an image of the files of a sandbox or a snapshot; every owner of the server can use it
    Commit {
        /// A sandbox by id, name or the beginning of its id; or the id of a snapshot
        #[arg(value_name = "ID")]
        source: SandboxRef,
        /// What sandboxes will call it
        name: String,
        /// ID is a snapshot, by id, name or the beginning of its id
        #[arg(long)]
        snapshot: bool,
    },
    /// List the images
    Ls {
        #[command(flatten)]
        state: StateArgs,
    },
    /// Fetch an image from a registry; `NAME@sha256:…` takes exactly that one
    Pull {
        /// `[registry[:port]/]path[:tag][@sha256:…]`
        name: String,
        /// Who asks the registry; the password comes with --password-stdin
        #[arg(long, requires = "password_stdin")]
        username: Option<String>,
        /// Read the password from standard input
        #[arg(long, requires = "username")]
        password_stdin: bool,
        #[command(flatten)]
        state: StateArgs,
    },
    /// Show what an image is made of and how it wants to be started
    Inspect {
        name: String,
        #[command(flatten)]
        state: StateArgs,
    },
    /// Remove layers that nobody needs, and the least recently used images beyond `images.max_bytes`
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
