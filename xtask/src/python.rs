//! Virtual environments with pinned packages, one for each list of requirements.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::tools::{run_command, workspace_root};

/// A list beside the requirements: packages that declare dependencies which they do not import.
const WITHOUT_DEPENDENCIES: &str = "without-dependencies.txt";

/// Makes `target/NAME`, or reuses the one that was made for the same requirements, and returns its interpreter.
pub(crate) fn make_environment(name: &str, requirements: &str) -> Result<PathBuf> {
    make_environment_with("python3", name, requirements)
}

/// Like [`make_environment`], with this interpreter.
pub(crate) fn make_environment_with(interpreter: &str, name: &str, requirements: &str) -> Result<PathBuf> {
    let root = workspace_root();
    let directory = root.join("target").join(name);
    let python = directory.join("bin/python");
    let mut wanted =
        fs::read_to_string(root.join(requirements)).context("could not read the requirements")?;
    let alone = Path::new(requirements).with_file_name(WITHOUT_DEPENDENCIES);
    let alone = Some(alone).filter(|list| root.join(list).exists());
    if let Some(list) = &alone {
        wanted += &fs::read_to_string(root.join(list)).context("could not read the requirements")?;
    }
    let mark = directory.join("requirements.installed");
    if python.exists() && fs::read_to_string(&mark).is_ok_and(|installed| installed == wanted) {
        return Ok(python);
    }
    run_command(Command::new(interpreter).args(["-m", "venv", "--clear"]).arg(&directory))?;
    run_command(pip_install_command(&python).arg("--requirement").arg(requirements))?;
    if let Some(list) = alone {
        run_command(pip_install_command(&python).arg("--no-deps").arg("--requirement").arg(list))?;
    }
    fs::write(mark, wanted).context("could not record the installed packages")?;
    Ok(python)
}

/// The command that installs packages with an interpreter's pip, with retries.
pub(crate) fn pip_install_command(python: &Path) -> Command {
    let mut command = Command::new(python);
    command.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--retries=10"]);
    command.current_dir(workspace_root());
    command
}
