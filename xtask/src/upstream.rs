//! The reference's own black-box suites, from an existing checkout.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::python;
use crate::server::{ServerAccess, ServerProcess, ServerSetup};
use crate::test::build_release;
use crate::tools::{run_command, workspace_root};

const USAGE: &str = "usage: cargo xtask upstream CHECKOUT [--binary PATH] [smoke|python|javascript|go]...";
const REQUIREMENTS: &str = "tests/upstream/requirements.txt";
/// The directories that the suites mount are below this; one of the suites has the path hard-coded.
const SHARED_DIRECTORY: &str = "/tmp/opensandbox-e2e";

/// Runs the given suites, or all, and prints the result of each test.
pub(crate) fn run_upstream(args: &[String]) -> Result<bool> {
    let [checkout, rest @ ..] = args else { bail!(USAGE) };
    let (binary, suites) = match rest {
        [flag, path, suites @ ..] if flag == "--binary" => (PathBuf::from(path), suites),
        suites => (build_release()?, suites),
    };
    let checkout = std::path::absolute(checkout).context("there is no such checkout")?;
    let python = python::make_environment("upstream/venv", REQUIREMENTS)?;
    let directory = tempfile::tempdir().context("could not make a directory for the server")?;
    std::fs::create_dir_all(SHARED_DIRECTORY).context("could not make the directory to share")?;
    // The suites were written for lines without their ends.
    let settings = [("CORACLE_LINES", "S"), ("CORACLE_VOLUMES_HOST_PATHS", SHARED_DIRECTORY)];
    let server = ServerProcess::start(
        &binary,
        directory.path(),
        &ServerSetup { access: ServerAccess::Keyless, settings: &settings },
    )?;
    let passed = run_command(
        Command::new(python)
            .arg("tests/upstream/run.py")
            .arg(checkout)
            .arg(workspace_root().join("target/upstream/work"))
            .arg(&server.url)
            .args(suites)
            .current_dir(workspace_root())
            .env("PYTHONDONTWRITEBYTECODE", "1"),
    );
    server.finish(&[])?;
    passed.map(|()| true)
}
