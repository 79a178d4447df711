//! Programs that the chores start, and where things are.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

/// The root of the repository.
pub(crate) fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the workspace").to_owned()
}

/// Runs a command to its end and fails if it does.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let shown = shown(command);
    let status = command.status().with_context(|| format!("could not start {shown}"))?;
    if status.success() { Ok(()) } else { bail!("{shown} failed ({status})") }
}

/// Runs a command to its end and returns what it printed.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let shown = shown(command);
    let output = command.output().with_context(|| format!("could not start {shown}"))?;
    if !output.status.success() {
        bail!("{shown} failed ({}): {}", output.status, String::from_utf8_lossy(&output.stderr).trim());
    }
    String::from_utf8(output.stdout).with_context(|| format!("{shown} did not print text"))
}

/// The words of a command, without its environment, which may hold a key.
fn shown(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    let words: Vec<String> = words.map(|word| word.to_string_lossy().into_owned()).collect();
    format!("`{}`", words.join(" "))
}

/// The cargo that runs us, at the root of the repository.
pub(crate) fn cargo(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO"));
    command.args(args).current_dir(workspace());
    command
}
