//! `backup` and `restore`.

use std::path::PathBuf;

use clap::Args;
use clap::builder::{PathBufValueParser, TypedValueParser};
use domain::Bytes;

use super::StateArgs;
use crate::values;

#[derive(Debug, Args)]
#[command(after_help = "\
The server may run meanwhile. Writes to disks of sandboxes wait while the disks are copied. Disks in memory, as an \
ordinary user's sandboxes have them, are not saved; they are named.")]
pub(crate) struct BackupArgs {
    /// The file to write, which must not exist
    #[arg(value_name = "FILE", value_parser = PathBufValueParser::new().try_map(backup_file))]
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

/// A path, but not the one that means standard output elsewhere.
fn backup_file(path: PathBuf) -> Result<PathBuf, &'static str> {
    if path.as_os_str() == "-" {
        return Err("a backup is not written to standard output; name a file");
    }
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backup_is_not_written_to_standard_output() {
        let why = backup_file(PathBuf::from("-")).expect_err("it is no file");
        assert!(why.contains("standard output"), "{why}");
        assert_eq!(backup_file(PathBuf::from("./-")), Ok(PathBuf::from("./-")));
    }
}
