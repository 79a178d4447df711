//! `backup` and `restore`.

use std::path::PathBuf;

use clap::Args;
use clap::builder::{PathBufValueParser, TypedValueParser};
use domain::Bytes;

use super::StateArgs;
use crate::values;

#[derive(Debug, Args)]
#[command(after_help = "\
The server can keep running during the backup. Writes to sandbox disks block while the disks are copied. \
In-memory disks, which sandboxes of an ordinary user have, are not saved; the command lists them.")]
pub(crate) struct BackupArgs {
    /// File to write; it must not exist
    #[arg(value_name = "FILE", value_parser = PathBufValueParser::new().try_map(check_backup_path))]
    pub file: PathBuf,

    /// Abort if the backup becomes larger than this, such as 10g
    #[arg(long, value_name = "SIZE", value_parser = values::parse_bytes)]
    pub max_size: Option<Bytes>,

    /// Include the secret from which sandbox tokens are derived; without it, a restored server creates a new
    /// one
    #[arg(long)]
    pub with_secrets: bool,

    #[command(flatten)]
    pub state: StateArgs,
}

#[derive(Debug, Args)]
#[command(after_help = "\
The state directory must be empty or absent; it gets a new identity. Its sandboxes are stopped after the \
restore.")]
pub(crate) struct RestoreArgs {
    /// Backup file written by `coracle backup`
    #[arg(value_name = "FILE")]
    pub file: PathBuf,

    #[command(flatten)]
    pub state: StateArgs,
}

/// A path, but not the one that means standard output elsewhere.
fn check_backup_path(path: PathBuf) -> Result<PathBuf, &'static str> {
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
        let why = check_backup_path(PathBuf::from("-")).expect_err("it is no file");
        assert!(why.contains("standard output"), "{why}");
        assert_eq!(check_backup_path(PathBuf::from("./-")), Ok(PathBuf::from("./-")));
    }
}
