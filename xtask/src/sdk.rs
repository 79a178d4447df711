//! The tests with the vendors' own, unmodified clients: a virtual environment with pinned versions, a
//! server, pytest.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, anyhow, bail};
use serde_json::Value;

use crate::packages::has_python;
use crate::report::TestReport;
use crate::server::{ServerAccess, ServerProcess, ServerSetup};
use crate::tools::{command_output, run_command, run_watched, workspace_root};
use crate::{npm, python, test_internet};

const TESTS_DIRECTORY: &str = "tests/sdk";
pub(crate) const REQUIREMENTS: &str = "tests/sdk/requirements.txt";
/// The tests that run in the test internet, with a server of their own.
const NETWORK_TESTS_DIRECTORY: &str = "tests/sdk/network";
/// The libraries that code inside sandboxes imports, and the interpreter that imports them.
const LIBRARIES_LIST: &str = "tests/sdk/libraries.txt";
const SANDBOX_PYTHON: &str = "/usr/bin/python3";

/// Installs the libraries for the interpreter that sandboxes have, once for each of its versions.
fn install_libraries(python: &Path) -> Result<PathBuf> {
    let root = workspace_root();
    let version = "import sys; print('%d.%d' % sys.version_info[:2])";
    let output = Command::new(SANDBOX_PYTHON).args(["-c", version]).output();
    let output = output.with_context(|| format!("could not run `{SANDBOX_PYTHON}`"))?;
    let version = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    let directory = root.join("target/libraries").join(&version);
    let wanted =
        fs::read_to_string(root.join(LIBRARIES_LIST)).context("could not read the list of libraries")?;
    let mark = directory.join("libraries.installed");
    if fs::read_to_string(&mark).is_ok_and(|installed| installed == wanted) {
        return Ok(directory);
    }
    run_command(
        python::pip_install_command(python)
            .args(["--no-warn-conflicts", "--upgrade"])
            .args([
                "--only-binary=:all:",
                "--python-version",
                &version,
                "--requirement",
                LIBRARIES_LIST,
                "--target",
            ])
            .arg(&directory),
    )?;
    fs::write(mark, wanted).context("could not record the installed packages")?;
    Ok(directory)
}

/// Installs what the suite needs, if there is a Python.
pub(crate) fn prepare_environment() -> Result<()> {
    if !has_python() {
        return Ok(());
    }
    let python = python::make_environment("venv", REQUIREMENTS)?;
    install_libraries(&python).map(drop)
}

/// Runs the suite against `binary`.
pub(crate) fn test_sdk(binary: &Path, report: &mut TestReport) -> Result<()> {
    if !workspace_root().join(REQUIREMENTS).exists() {
        report.record_skip("SDK tests", format_args!("there is no {REQUIREMENTS}"));
        return Ok(());
    }
    if !has_python() {
        report.record_skip("SDK tests", "there is no python3 on this host");
        return Ok(());
    }
    let python = python::make_environment("venv", REQUIREMENTS);
    let python = python.context("could not make the environment of the SDK tests")?;
    let libraries =
        install_libraries(&python).context("could not install the libraries for code contexts")?;
    let directories = [tempfile::tempdir(), tempfile::tempdir()];
    let [keyed, keyless] = directories.map(|made| made.context("could not make a directory for a server"));
    let (keyed, keyless) = (keyed?, keyless?);
    // Where host directories may be mounted, sandboxes make no set-id files; the other server shows that
    // elsewhere they do.
    let shared = keyless.path().join("shared");
    fs::create_dir(&shared).context("could not make a directory to share")?;
    let paths = std::env::join_paths([&shared, &libraries]).context("a directory has a colon in its name")?;
    let shares = [("CORACLE_VOLUMES_HOST_PATHS", paths.to_str().context("its name is text")?)];
    let server = ServerProcess::start(
        binary,
        keyed.path(),
        &ServerSetup { access: ServerAccess::Keyed, settings: &[] },
    )?;
    let open_server = ServerProcess::start(
        binary,
        keyless.path(),
        &ServerSetup { access: ServerAccess::Keyless, settings: &shares },
    )?;
    let secrets = keyed.path().join("secrets");
    let tested = run_watched(
        Command::new(python)
            // With `-rs` it prints a line that begins with SKIPPED for each skip.
            .args(["-m", "pytest", "--quiet", "-rs", TESTS_DIRECTORY, "--ignore", NETWORK_TESTS_DIRECTORY])
            .current_dir(workspace_root())
            .env("CORACLE_URL", &server.url)
            .envs(server.key.iter().map(|key| ("CORACLE_API_KEY", key)))
            .env("CORACLE_KEYLESS_URL", &open_server.url)
            .env("CORACLE_TEST_SHARED", &shared)
            .env("CORACLE_TEST_LIBRARIES", &libraries)
            .env("CORACLE_TEST_BINARY", binary)
            // The tests write every token they are given here, one per line.
            .env("CORACLE_TEST_SECRETS", &secrets)
            .env("PYTHONDONTWRITEBYTECODE", "1"),
        |line| report.read_test_line(line),
    );
    let in_node = npm::test_npm_package(&server, report);
    let secrets = read_secrets(&secrets);
    let searched = match secrets.is_empty() {
        true => Err(anyhow!("the tests saw no token, so the logs were searched for none")),
        false => Ok(()),
    };
    // All failures are reported, not only the first: each may be the cause of another.
    let outcomes = [tested, in_node, server.finish(&secrets), open_server.finish(&secrets), searched];
    let wrong: Vec<String> =
        outcomes.into_iter().filter_map(|outcome| Some(format!("{:#}", outcome.err()?))).collect();
    if wrong.is_empty() { Ok(()) } else { bail!(wrong.join("\n")) }
}

/// Runs the tests of networks in the test internet.
pub(crate) fn test_networks(binary: &Path, report: &mut TestReport) -> Result<()> {
    if let Some(why) = test_internet::missing_requirement() {
        report.record_skip("SDK tests of networks", why);
        return Ok(());
    }
    let python = python::make_environment("venv", REQUIREMENTS)?;
    let directory = tempfile::tempdir().context("could not make a directory for a certificate")?;
    let certificate = directory.path().join("authority.pem");
    run_watched(
        test_internet::command_inside(&certificate, &python)?
            .args(["-m", "pytest", "--quiet", "-rs", NETWORK_TESTS_DIRECTORY])
            .current_dir(workspace_root())
            .env("CORACLE_TEST_BINARY", binary)
            .env("CORACLE_TEST_CERTIFICATE", &certificate)
            .env("PYTHONDONTWRITEBYTECODE", "1"),
        |line| report.read_test_line(line),
    )
}

/// The directory of an ipykernel with which our own contexts can be compared.
pub(crate) fn ipykernel_directory() -> Option<PathBuf> {
    let python = has_python().then(|| python::make_environment("venv", REQUIREMENTS))?.ok()?;
    install_libraries(&python).ok()
}

/// Measures the cost of a call through the Python SDK; does nothing if there is no Python.
pub(crate) fn bench_sdk(binary: &Path, report: &mut TestReport) -> Result<Option<Value>> {
    if !has_python() {
        report.record_skip("bench of the SDK", "there is no python3 on this host");
        return Ok(None);
    }
    let python = python::make_environment("venv", REQUIREMENTS)?;
    let directory = tempfile::tempdir().context("could not make a directory for a server")?;
    let quiet = [("CORACLE_LOG", "warn")];
    let server = ServerProcess::start(
        binary,
        directory.path(),
        &ServerSetup { access: ServerAccess::Keyless, settings: &quiet },
    )?;
    let measured = command_output(
        Command::new(python)
            .arg("tests/sdk/bench_sdk.py")
            .current_dir(workspace_root())
            .env("CORACLE_URL", &server.url)
            .env("PYTHONDONTWRITEBYTECODE", "1"),
    );
    server.finish(&[])?;
    serde_json::from_str(&measured?).map(Some).context("the bench of the SDK gave no report")
}

fn read_secrets(file: &Path) -> Vec<String> {
    let text = fs::read_to_string(file).unwrap_or_default();
    text.lines().filter(|line| !line.is_empty()).map(str::to_owned).collect()
}
