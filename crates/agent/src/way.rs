//! Changes a shell's directory to the one where a run starts.
//!
//! Without an env file the agent knows as much as the shell, so it checks first and refuses a
//! missing directory. With an env file, only the shell knows the values of the variables in a path.

use std::collections::BTreeMap;

use rustix::io::Errno;
use wire::process::{Directory, Missing};
use wire::{Fault, FaultKind};

use crate::agent::Agent;
use crate::command::Surroundings;
use crate::session::Session;
use crate::{fault, path, shell};

/// The shell commands that change to the directory where a run starts.
#[derive(Debug)]
pub(crate) struct Way {
    before: String,
    /// The directory, as one shell word.
    word: String,
    missing: Missing,
}

impl Way {
    pub(crate) fn to(path: &str, missing: Missing) -> Self {
        Self { before: String::new(), word: shell::quote(path), missing }
    }

    /// Changes to a path that contains the shell's own variables. The path is made absolute first,
    /// because `cd` gives some relative paths a special meaning.
    pub(crate) fn by_variables(env: &BTreeMap<String, String>, directory: &Directory) -> Self {
        let before = format!(
            "__coracle_way={}\n\
             case \"$__coracle_way\" in /*) ;; *) __coracle_way=\"$PWD/$__coracle_way\" ;; esac\n",
            path::shell_word(env, directory)
        );
        Self { before, word: "\"$__coracle_way\"".to_owned(), missing: directory.missing }
    }

    pub(crate) fn text(&self) -> String {
        let Self { before, word, missing } = self;
        match missing {
            Missing::Fail => format!("{before}cd -- {word}"),
            Missing::Create => format!("{before}mkdir -p -- {word} && cd -- {word}"),
            Missing::Ignore => format!("{before}{{ [ ! -e {word} ] || cd -- {word}; }}"),
        }
    }
}

impl Agent {
    /// Checks that the directory of a run exists before the run starts.
    pub(crate) fn check_directory(
        &self,
        session: &Session,
        directory: Option<&Directory>,
    ) -> Result<(), Fault> {
        if directory.is_some() && !session.opens_with_its_shell() {
            return Err(fault::plain(FaultKind::Invalid, "run", "a directory for a kernel"));
        }
        let Some(directory) = directory.filter(|directory| directory.missing == Missing::Fail) else {
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
    fn shell_decides(&self, directory: &Directory) -> bool {
        self.place.config.env_file.is_some() && path::has_variables(directory)
    }

    fn run_directory(&self, session: &Session, directory: &Directory) -> Result<String, Fault> {
        let around = Surroundings::new(&self.place.config, &session.open.identity, &session.open.env, None)?;
        let base = session.directory.as_deref().unwrap_or(&self.place.config.default_directory);
        Ok(path::expand_path(base, &around.env, directory))
    }

    pub(crate) fn way(&self, session: &Session, directory: &Directory) -> Option<Way> {
        if self.shell_decides(directory) {
            return Some(Way::by_variables(&session.open.env, directory));
        }
        // The directory was resolved when the run was accepted, so this succeeds.
        let path = self.run_directory(session, directory).ok()?;
        Some(Way::to(&path, directory.missing))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_way(path: &str, missing: Missing, expected: &str) {
        let directory = Directory { path: path.to_owned(), missing, expand: true };
        let way = Way::by_variables(&BTreeMap::new(), &directory);
        let mut command = std::process::Command::new("/bin/sh");
        command.args(["-c", &shell::compose("", Some(&way), "pwd")]).current_dir("/usr").env_clear();
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
        check_way("$WHOLE", Missing::Fail, "/usr/bin");
        check_way("${WHOLE}/../lib", Missing::Create, "/usr/lib");
        check_way("$PART", Missing::Fail, "/usr/bin");
        check_way("$NONE", Missing::Fail, "/usr");
        check_way("$DASH", Missing::Fail, "");
        check_way("$WHOLE/none", Missing::Fail, "");
        check_way("$WHOLE/none", Missing::Ignore, "/usr");
        check_way("$WHOLE", Missing::Ignore, "/usr/bin");
    }
}
