//! The tests with vendors' own, unmodified clients: a virtual environment with pinned versions,
//! a server, pytest.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, anyhow, bail};
use serde_json::Value;

use crate::packages::has_python;
use crate::report::Report;
use crate::server::{Access, Server, Setup};
use crate::tools::{output, run, workspace};
use crate::{npm, python};

const TESTS: &str = "tests/sdk";
const REQUIREMENTS: &str = "tests/sdk/requirements.txt";

/// Runs the suite against `binary`.
pub(crate) fn test(binary: &Path, report: &mut Report) -> Result<()> {
    if !workspace().join(REQUIREMENTS).exists() {
        report.skip("SDK tests", format_args!("there is no {REQUIREMENTS}"));
        return Ok(());
    }
    if !has_python() {
        report.skip("SDK tests", "there is no python3 on this host");
        return Ok(());
    }
    let python = python::environment("venv", REQUIREMENTS);
    let python = python.context("could not make the environment of the SDK tests")?;
    let directories = [tempfile::tempdir(), tempfile::tempdir()];
    let [keyed, keyless] = directories.map(|made| made.context("could not make a directory for a server"));
    let (keyed, keyless) = (keyed?, keyless?);
    // Where directories of the host may be mounted, sandboxes make no set-id files; the other
    // server shows that elsewhere they do.
    let shared = keyless.path().join("shared");
    fs::create_dir(&shared).context("could not make a directory to share")?;
    let shares = [("CORACLE_VOLUMES_HOST_PATHS", shared.to_str().context("its name is text")?)];
    let server = Server::start(binary, keyed.path(), &Setup { access: Access::Keyed, settings: &[] })?;
    let open_server =
        Server::start(binary, keyless.path(), &Setup { access: Access::Keyless, settings: &shares })?;
    let secrets = keyed.path().join("secrets");
    let tested = run(Command::new(python)
        .args(["-m", "pytest", "--quiet", TESTS])
        .current_dir(workspace())
        .env("CORACLE_URL", &server.url)
        .envs(server.key.iter().map(|key| ("CORACLE_API_KEY", key)))
        .env("CORACLE_KEYLESS_URL", &open_server.url)
        .env("CORACLE_TEST_SHARED", &shared)
        // The tests write every token they are given here, one per line.
        .env("CORACLE_TEST_SECRETS", &secrets)
        .env("PYTHONDONTWRITEBYTECODE", "1"));
    let in_node = npm::test(&server, report);
    let secrets = read_secrets(&secrets);
    let searched = match secrets.is_empty() {
        true => Err(anyhow!("the tests saw no token, so the logs were searched for none")),
        false => Ok(()),
    };
    // All are told, not only the first: each may be the reason for another.
    let outcomes = [tested, in_node, server.finish(&secrets), open_server.finish(&secrets), searched];
    let wrong: Vec<String> =
        outcomes.into_iter().filter_map(|outcome| Some(format!("{:#}", outcome.err()?))).collect();
    if wrong.is_empty() { Ok(()) } else { bail!(wrong.join("\n")) }
}

/// What a call costs through the Python SDK; nothing where there is no Python.
pub(crate) fn bench(binary: &Path, report: &mut Report) -> Result<Option<Value>> {
    if !has_python() {
        report.skip("bench of the SDK", "there is no python3 on this host");
        return Ok(None);
    }
    let python = python::environment("venv", REQUIREMENTS)?;
    let directory = tempfile::tempdir().context("could not make a directory for a server")?;
    let quiet = [("CORACLE_LOG", "warn")];
    let server =
        Server::start(binary, directory.path(), &Setup { access: Access::Keyless, settings: &quiet })?;
    let measured = output(
        Command::new(python)
            .arg("tests/sdk/bench_sdk.py")
            .current_dir(workspace())
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
