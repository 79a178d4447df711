//! `backup` and `restore`.

use std::path::PathBuf;

use clap::Args;
use domain::Bytes;

use super::StateArgs;
use crate::values;

#[derive(Debug, Args)]
#[command(after_help = "\
The server may run meanwhile. Writes to disks of sandboxes wait while the disks are copied. Disks in memory, as an \
ordinary user's sandboxes have them, are not saved; they are named.")]
pub(crate) struct BackupArgs {
    /// The file to write, which must not exist
    #[arg(value_name = "FILE")]
    pub file: PathBuf,

    /// Give up when the backup becomes larger than this, such as 10g
    #[arg(long, value_name = "SIZE", value_parser = values::bytes)]
    pub max_size: Option<Bytes>,

    /// Save the secret from which the tokens of sandboxes are derived, too; otherwise a restored
    /// server makes a new one
    #[arg(long)]
    pub with_secrets: bool,

    #[command(flatten)]
    pub state: StateArgs,
}

#[derive(Debug, Args)]
#[command(after_help = "\
The state directory must be empty or absent, and gets an identity of its own. Its sandboxes have stopped.")]
pub(crate) struct RestoreArgs {
    /// A file that `coracle backup` wrote
    #[arg(value_name = "FILE")]
    pub file: PathBuf,

    #[command(flatten)]
    pub state: StateArgs,
}
