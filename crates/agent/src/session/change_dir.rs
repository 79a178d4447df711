//! Changes a shell's directory to the one where a run starts.
//!
//! Without an env file the agent knows as much as the shell, so it checks first and refuses a
//! missing directory. With an env file, only the shell knows the values of the variables in a path.

use std::collections::BTreeMap;

use rustix::io::Errno;
use wire::process::{MissingDirectory, WorkingDirectory};
use wire::{Fault, FaultKind};

use crate::event_loop::agent::Agent;
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

impl Agent {
    /// Checks that the directory of a run exists before the run starts.
    pub(crate) fn check_run_directory(
        &self,
        session: &Session,
        directory: Option<&WorkingDirectory>,
    ) -> Result<(), Fault> {
        if directory.is_some() && !session.opens_with_its_shell() {
            return Err(fault::from_kind(FaultKind::Invalid, "run", "a directory for a kernel"));
        }
        let Some(directory) = directory.filter(|directory| directory.missing == MissingDirectory::Fail)
        else {
            return Ok(());
        };
        if self.shell_decides(directory) {
            return Ok(());
        }
        let path = self.run_directory(session, directory)?;
        match rustix::fs::stat(path.as_str()) {
            Err(errno @ (Errno::NOENT | Errno::NOTDIR)) => {
                Err(fault::from_errno(errno, "change directory", &path))
            }
            _ => Ok(()),
        }
    }

    /// Whether only the shell knows the path: it has read the env file, the agent has not.
    fn shell_decides(&self, directory: &WorkingDirectory) -> bool {
        self.context.config.env_file.is_some() && path::has_variables(directory)
    }

    fn run_directory(&self, session: &Session, directory: &WorkingDirectory) -> Result<String, Fault> {
        let environment =
            ExecEnvironment::new(&self.context.config, &session.open.identity, &session.open.env, None)?;
        let base = session.directory.as_deref().unwrap_or(&self.context.config.default_directory);
        Ok(path::expand_path(base, &environment.env, directory))
    }

    pub(crate) fn run_change_dir(
        &self,
        session: &Session,
        directory: &WorkingDirectory,
    ) -> Option<ChangeDir> {
        if self.shell_decides(directory) {
            return Some(ChangeDir::with_shell_variables(&session.open.env, directory));
        }
        // The directory was resolved when the run was accepted, so this succeeds.
        let path = self.run_directory(session, directory).ok()?;
        Some(ChangeDir::to_path(&path, directory.missing))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_way(path: &str, missing: MissingDirectory, expected: &str) {
        let directory = WorkingDirectory { path: path.to_owned(), missing, expand: true };
        let way = ChangeDir::with_shell_variables(&BTreeMap::new(), &directory);
        let mut command = std::process::Command::new("/bin/sh");
        command.args(["-c", &shell::compose_run_text("", Some(&way), "pwd")]).current_dir("/usr").env_clear();
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
        check_way("$WHOLE", MissingDirectory::Fail, "/usr/bin");
        check_way("${WHOLE}/../lib", MissingDirectory::Create, "/usr/lib");
        check_way("$PART", MissingDirectory::Fail, "/usr/bin");
        check_way("$NONE", MissingDirectory::Fail, "/usr");
        check_way("$DASH", MissingDirectory::Fail, "");
        check_way("$WHOLE/none", MissingDirectory::Fail, "");
        check_way("$WHOLE/none", MissingDirectory::Ignore, "/usr");
        check_way("$WHOLE", MissingDirectory::Ignore, "/usr/bin");
    }
}
