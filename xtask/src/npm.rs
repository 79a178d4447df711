//! The tests with the npm package of the reference: a directory with the packages of its lock file, and
//! node's own test runner.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result};

use crate::report::TestReport;
use crate::server::ServerProcess;
use crate::tools::{run_command, workspace_root};

const TESTS_DIRECTORY: &str = "tests/npm";
const LOCK: &str = "package-lock.json";

/// Runs the suite against a server.
pub(crate) fn test_npm_package(server: &ServerProcess, report: &mut TestReport) -> Result<()> {
    for program in ["node", "npm"] {
        let found = Command::new(program).arg("--version").output();
        if !found.is_ok_and(|output| output.status.success()) {
            report.record_skip("npm tests", format_args!("there is no {program} on this host"));
            return Ok(());
        }
    }
    let directory = install_package().context("could not install the npm package")?;
    run_command(
        Command::new("node")
            .args(["--test", "--test-reporter=dot"])
            .current_dir(directory)
            .env("CORACLE_URL", &server.url)
            .envs(server.key.iter().map(|key| ("CORACLE_API_KEY", key))),
    )
}

/// Packages must be beside the tests that import them, so both are copied out of the repository.
fn install_package() -> Result<PathBuf> {
    let (source, directory) = (workspace_root().join(TESTS_DIRECTORY), workspace_root().join("target/npm"));
    fs::create_dir_all(&directory)?;
    let wanted = fs::read_to_string(source.join(LOCK)).context("could not read the lock file")?;
    for entry in fs::read_dir(&source)? {
        let entry = entry?;
        fs::copy(entry.path(), directory.join(entry.file_name()))?;
    }
    let mark = directory.join("lock.installed");
    if fs::read_to_string(&mark).is_ok_and(|installed| installed == wanted) {
        return Ok(directory);
    }
    run_command(
        Command::new("npm")
            .args(["ci", "--silent", "--no-audit", "--no-fund", "--fetch-retries=5", "--fetch-timeout=60000"])
            .current_dir(&directory),
    )?;
    fs::write(mark, wanted).context("could not record the installed packages")?;
    Ok(directory)
}
