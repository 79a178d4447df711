//! The test internet of the end-to-end tests, for suites in other languages.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::packages::has_python;
use crate::test::build_of_tests;
use crate::tools::command_output;

const PROGRAM: &str = "test-internet";

/// Why no suite can run in the test internet here.
pub(crate) fn missing_requirement() -> Option<&'static str> {
    if !rustix::process::geteuid().is_root() {
        return Some("only root can make the test internet");
    }
    (!has_python()).then_some("there is no python3 on this host")
}

/// A command that starts a program in the test internet; the certificate of its authority is written to a file.
pub(crate) fn command_inside(certificate: &Path, program: &Path) -> Result<Command> {
    let mut command = Command::new(build_program()?);
    command.arg(certificate).arg(program);
    Ok(command)
}

/// Builds the program as the tests are built, so that nothing is compiled twice.
fn build_program() -> Result<PathBuf> {
    let words = ["build", "--workspace", "--locked", "--bin", PROGRAM, "--message-format=json"];
    let messages = command_output(&mut build_of_tests(&words))?;
    let artifacts = messages.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
    let mut built = artifacts.filter(|message| message["target"]["name"] == PROGRAM);
    let path = built.find_map(|message| message["executable"].as_str().map(PathBuf::from));
    path.with_context(|| format!("cargo built no `{PROGRAM}`"))
}
