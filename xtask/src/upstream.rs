//! The reference's own black-box suites, from an existing checkout.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::python;
use crate::server::{Access, Server, Setup};
use crate::test::build;
use crate::tools::{run, workspace};

const USAGE: &str = "usage: cargo xtask upstream CHECKOUT [--binary PATH] [smoke|python|javascript|go]...";
const REQUIREMENTS: &str = "tests/upstream/requirements.txt";
/// The directories that the suites mount are below this; one of the suites has the path hard-coded.
const SHARED: &str = "/tmp/opensandbox-e2e";

/// Runs the given suites, or all, and prints the result of each test.
pub(crate) fn upstream(args: &[String]) -> Result<bool> {
    let [checkout, rest @ ..] = args else { bail!(USAGE) };
    let (binary, suites) = match rest {
        [flag, path, suites @ ..] if flag == "--binary" => (PathBuf::from(path), suites),
        suites => (build()?, suites),
    };
    let checkout = std::path::absolute(checkout).context("there is no such checkout")?;
    let python = python::environment("upstream/venv", REQUIREMENTS)?;
    let directory = tempfile::tempdir().context("could not make a directory for the server")?;
    std::fs::create_dir_all(SHARED).context("could not make the directory to share")?;
    // The suites were written for lines without their ends.
    let settings = [("CORACLE_LINES", "S"), ("CORACLE_VOLUMES_HOST_PATHS", SHARED)];
    let server =
        Server::start(&binary, directory.path(), &Setup { access: Access::Keyless, settings: &settings })?;
    let passed = run(Command::new(python)
        .arg("tests/upstream/run.py")
        .arg(checkout)
        .arg(workspace().join("target/upstream/work"))
        .arg(&server.url)
        .args(suites)
        .current_dir(workspace())
        .env("PYTHONDONTWRITEBYTECODE", "1"));
    server.finish(&[])?;
    passed.map(|()| true)
}
