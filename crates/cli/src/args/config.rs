//! `coracle config`: the configuration of the server, without starting it.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::StateArgs;

#[derive(Debug, Subcommand)]
pub(crate) enum ConfigCommand {
    /// Check a configuration file as `serve` would read it, without starting anything
    Check(ConfigCheckArgs),
    /// Show all effective settings and their source: default, file, environment variable or flag
    Show(ConfigShowArgs),
}

#[derive(Debug, Args)]
pub(crate) struct ConfigCheckArgs {
    /// File to check [default: the file that `serve` would read]
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
