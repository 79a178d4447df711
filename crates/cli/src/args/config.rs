//! `coracle config`: the configuration of the server, without starting it.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::StateArgs;

#[derive(Debug, Subcommand)]
pub(crate) enum ConfigCommand {
    /// Check a configuration file as `serve` would read it; nothing is started
    Check(ConfigCheckArgs),
    /// Show every setting in force, and whether it comes from a default, the file, a variable or a flag
    Show(ConfigShowArgs),
}

#[derive(Debug, Args)]
pub(crate) struct ConfigCheckArgs {
    /// The file to check [default: the one that `serve` would read]
    #[arg(value_name = "FILE")]
    pub file: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct ConfigShowArgs {
    #[command(flatten)]
    pub state: StateArgs,

    /// Show only settings that differ from their default
    #[arg(long)]
    pub changed: bool,
}
