//! Changes a shell's directory to the one where a run starts.
//!
//! Without an env file the agent knows as much as the shell, so it checks first and refuses a
//! missing directory. With an env file, only the shell knows the values of the variables in a path.

use std::collections::BTreeMap;

use rustix::io::Errno;
use wire::process::{MissingDirectory, WorkingDirectory};
use wire::{AgentConfig, Fault, FaultKind};

use crate::process::command::ExecEnvironment;
use crate::session::Session;
use crate::session::shell;
use crate::{fault, path};

/// The shell commands that change to the directory where a run starts.
#[derive(Debug)]
pub(crate) struct ChangeDir {
    before: String,
    /// The directory, as one shell word.
    word: String,
    missing: MissingDirectory,
}

impl ChangeDir {
    pub(crate) fn to_path(path: &str, missing: MissingDirectory) -> Self {
        Self { before: String::new(), word: shell::quote_word(path), missing }
    }

    /// Changes to a path that contains the shell's own variables. The path is made absolute first,
    /// because `cd` gives some relative paths a special meaning.
    pub(crate) fn with_shell_variables(env: &BTreeMap<String, String>, directory: &WorkingDirectory) -> Self {
        let before = format!(
            "__coracle_way={}\n\
             case \"$__coracle_way\" in /*) ;; *) __coracle_way=\"$PWD/$__coracle_way\" ;; esac\n",
            path::shell_word(env, directory)
        );
        Self { before, word: "\"$__coracle_way\"".to_owned(), missing: directory.missing }
    }

    pub(crate) fn to_shell_text(&self) -> String {
        let Self { before, word, missing } = self;
        match missing {
            MissingDirectory::Fail => format!("{before}cd -- {word}"),
            MissingDirectory::Create => format!("{before}mkdir -p -- {word} && cd -- {word}"),
            MissingDirectory::Ignore => format!("{before}{{ [ ! -e {word} ] || cd -- {word}; }}"),
        }
    }
}

impl Session {
    /// Checks that the directory of a run exists before the run starts.
    pub(crate) fn check_run_directory(
        &self,
        config: &AgentConfig,
        directory: Option<&WorkingDirectory>,
    ) -> Result<(), Fault> {
        if directory.is_some() && !self.opens_with_its_shell() {
            return Err(fault::from_kind(FaultKind::Invalid, "run", "a directory for a kernel"));
        }
        let Some(directory) = directory.filter(|directory| directory.missing == MissingDirectory::Fail)
        else {
            return Ok(());
        };
        if shell_decides(config, directory) {
            return Ok(());
        }
        let path = self.run_directory(config, directory)?;
        check_directory_exists(&path)
    }

    fn run_directory(&self, config: &AgentConfig, directory: &WorkingDirectory) -> Result<String, Fault> {
        let environment = ExecEnvironment::new(config, &self.open.identity, &self.open.env, None)?;
        let base = self.directory.as_deref().unwrap_or(&config.default_directory);
        Ok(path::expand_path(base, &environment.env, directory))
    }

    pub(crate) fn run_change_dir(
        &self,
        config: &AgentConfig,
        directory: &WorkingDirectory,
    ) -> Option<ChangeDir> {
        if shell_decides(config, directory) {
            return Some(ChangeDir::with_shell_variables(&self.open.env, directory));
        }
        // The directory was resolved when the run was accepted, so this succeeds.
        let path = self.run_directory(config, directory).ok()?;
        Some(ChangeDir::to_path(&path, directory.missing))
    }
}

/// Refuses a missing directory as its use would. Whether the user may enter it is found out later.
pub(super) fn check_directory_exists(path: &str) -> Result<(), Fault> {
    match rustix::fs::stat(path) {
        Err(errno @ (Errno::NOENT | Errno::NOTDIR)) => {
            Err(fault::from_errno(errno, "change directory", path))
        }
        _ => Ok(()),
    }
}

/// Whether only the shell knows the path: it has read the env file, the agent has not.
fn shell_decides(config: &AgentConfig, directory: &WorkingDirectory) -> bool {
    config.env_file.is_some() && path::has_variables(directory)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_directory(path: &str, missing: MissingDirectory, expected: &str) {
        let directory = WorkingDirectory { path: path.to_owned(), missing, expand: true };
        let change_dir = ChangeDir::with_shell_variables(&BTreeMap::new(), &directory);
        let mut command = std::process::Command::new("/bin/sh");
        command
            .args(["-c", &shell::compose_run_text("", Some(&change_dir), "pwd")])
            .current_dir("/usr")
            .env_clear();
        command.envs([
            ("WHOLE", "/usr/bin"),
            ("PART", "bin"),
            ("DASH", "-"),
            ("OLDPWD", "/"),
            ("CDPATH", "/"),
        ]);
        let output = command.output().expect("every host has a shell");
        assert_eq!(String::from_utf8_lossy(&output.stdout).trim_end(), expected, "{path}");
        assert_eq!(output.status.success(), !expected.is_empty(), "{path}");
    }

    #[test]
    fn shell_changes_to_the_directory_of_its_variables() {
        check_directory("$WHOLE", MissingDirectory::Fail, "/usr/bin");
        check_directory("${WHOLE}/../lib", MissingDirectory::Create, "/usr/lib");
        check_directory("$PART", MissingDirectory::Fail, "/usr/bin");
        check_directory("$NONE", MissingDirectory::Fail, "/usr");
        check_directory("$DASH", MissingDirectory::Fail, "");
        check_directory("$WHOLE/none", MissingDirectory::Fail, "");
        check_directory("$WHOLE/none", MissingDirectory::Ignore, "/usr");
        check_directory("$WHOLE", MissingDirectory::Ignore, "/usr/bin");
    }
}
