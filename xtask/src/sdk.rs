//! The tests with vendors' own, unmodified clients: a virtual environment with pinned versions,
//! a server, pytest.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::report::Report;
use crate::server::Server;
use crate::tools::{run, workspace};

const TESTS: &str = "tests/sdk";
const REQUIREMENTS: &str = "tests/sdk/requirements.txt";

/// Makes the environment, or uses the one that was made for the same requirements.
pub(crate) fn environment() -> Result<PathBuf> {
    let root = workspace();
    let directory = root.join("target/venv");
    let python = directory.join("bin/python");
    let wanted = fs::read_to_string(root.join(REQUIREMENTS)).context("could not read the requirements")?;
    let mark = directory.join("requirements.installed");
    if python.exists() && fs::read_to_string(&mark).is_ok_and(|installed| installed == wanted) {
        return Ok(python);
    }
    run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&directory))?;
    run(Command::new(&python)
        .args([
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--requirement",
            REQUIREMENTS,
        ])
        .current_dir(&root))?;
    fs::write(mark, wanted).context("could not note what was installed")?;
    Ok(python)
}

/// Runs the suite against `binary`.
pub(crate) fn test(binary: &Path, report: &mut Report) -> Result<()> {
    if !workspace().join(REQUIREMENTS).exists() {
        report.skip("SDK tests", format_args!("there is no {REQUIREMENTS}"));
        return Ok(());
    }
    let python = match environment() {
        Ok(python) => python,
        Err(why) => {
            report.skip("SDK tests", format_args!("{why:#}"));
            return Ok(());
        }
    };
    let directory = tempfile::tempdir().context("could not make a directory for the server")?;
    let server = Server::start(binary, directory.path())?;
    let secrets = directory.path().join("secrets");
    let tested = run(Command::new(python)
        .args(["-m", "pytest", "--quiet", "-p", "no:cacheprovider", TESTS])
        .current_dir(workspace())
        .env("CORACLE_URL", &server.url)
        .env("CORACLE_API_KEY", server.key())
        .env("CORACLE_BIN", binary)
        // The tests write every token they are given here, one per line.
        .env("CORACLE_TEST_SECRETS", &secrets)
        .env("PYTHONDONTWRITEBYTECODE", "1"));
    let secrets = fs::read_to_string(secrets).unwrap_or_default();
    let secrets: Vec<String> = secrets.lines().filter(|line| !line.is_empty()).map(str::to_owned).collect();
    let finished = server.finish(&secrets);
    tested.and(finished)
}
