//! The source of each setting: the file, a variable or a flag, merged in this order.

use std::fmt;
use std::path::PathBuf;

use anyhow::Result;
use serde::Serialize;
use toml::{Table, Value};

use super::{Config, config_file, env_settings, environment_variables, read_file};
use crate::args::StateArgs;

/// The written settings, still separated by their source.
pub(crate) struct ConfigLayers {
    /// The file that was read, if there is one.
    pub file: Option<PathBuf>,
    in_file: Table,
    in_environment: Table,
    in_flags: Table,
}

/// The source of a setting's value; later ones override earlier ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum SettingSource {
    Default,
    File,
    Env,
    Flag,
}

impl fmt::Display for SettingSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Default => "default",
            Self::File => "file",
            Self::Env => "env",
            Self::Flag => "flag",
        })
    }
}

impl ConfigLayers {
    /// Reads the file and the environment; `flags` are those of the command line.
    pub(super) fn read(args: &StateArgs, flags: Table) -> Result<Self> {
        let file = config_file(args)?;
        let in_file = file.as_deref().map(read_file).transpose()?.unwrap_or_default();
        Ok(Self {
            file,
            in_file,
            in_environment: env_settings::table_from_variables(environment_variables())?,
            in_flags: flags,
        })
    }

    /// The effective settings, checked.
    pub(super) fn effective_config(&self) -> Result<Config> {
        let mut table = self.in_file.clone();
        env_settings::merge_tables(&mut table, self.in_environment.clone());
        env_settings::merge_tables(&mut table, self.in_flags.clone());
        Config::from_table(table)
    }

    /// The source of a setting's value; `path` is its name in segments.
    pub(crate) fn source(&self, path: &[String]) -> SettingSource {
        let layers = [
            (&self.in_flags, SettingSource::Flag),
            (&self.in_environment, SettingSource::Env),
            (&self.in_file, SettingSource::File),
        ];
        let found = layers.into_iter().find(|(table, _)| contains_setting(table, path));
        found.map_or(SettingSource::Default, |(_, source)| source)
    }
}

fn contains_setting(table: &Table, path: &[String]) -> bool {
    match path {
        [] => false,
        [key] => table.contains_key(key),
        [key, rest @ ..] => match table.get(key) {
            Some(Value::Table(below)) => contains_setting(below, rest),
            // Pools are a list of tables; the whole list comes from one source.
            Some(_) => true,
            None => false,
        },
    }
}
