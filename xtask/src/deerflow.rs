//! DeerFlow's own provider, from an existing checkout, against our provisioner.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::python;
use crate::server::{ServerAccess, ServerProcess, ServerSetup};
use crate::test::build_release;
use crate::tools::{command_output, run_command, workspace_root};

const USAGE: &str = "usage: cargo xtask deerflow CHECKOUT [--binary PATH] [--python PROGRAM]";
const REQUIREMENTS: &str = "tests/deerflow/requirements.txt";
/// The first version that understands DeerFlow's source.
const OLDEST_PYTHON: &str = "import sys; sys.exit(sys.version_info < (3, 12))";

/// Runs the provider twice: with user data on the server alone, and shared with a directory of this host.
pub(crate) fn run_deerflow(args: &[String]) -> Result<bool> {
    let [checkout, rest @ ..] = args else { bail!(USAGE) };
    let (mut binary, mut interpreter) = (None, "python3".to_owned());
    let mut rest = rest.iter();
    while let Some(flag) = rest.next() {
        match (flag.as_str(), rest.next()) {
            ("--binary", Some(path)) => binary = Some(PathBuf::from(path)),
            ("--python", Some(program)) => interpreter = program.clone(),
            _ => bail!(USAGE),
        }
    }
    let binary = binary.map_or_else(build_release, Ok)?;
    let checkout = std::path::absolute(checkout).context("there is no such checkout")?;
    let supported = command_output(Command::new(&interpreter).args(["-c", OLDEST_PYTHON]));
    supported
        .with_context(|| format!("`{interpreter}` is not Python 3.12 or later; name one with --python"))?;
    let python = python::make_environment_with(&interpreter, "deerflow/venv", REQUIREMENTS)?;
    let shared = tempfile::tempdir().context("could not make a directory to share")?;
    let shared = shared.path().to_str().context("the directory has a name that is not text")?;
    let mounted = [("CORACLE_DEERFLOW_USER_DATA", "host"), ("CORACLE_DEERFLOW_STATE_ROOT", shared)];
    let mut passed = true;
    for settings in [&[][..], &mounted[..]] {
        let state = tempfile::tempdir().context("could not make a directory for the server")?;
        let setup = ServerSetup { access: ServerAccess::Keyed, settings };
        let server = ServerProcess::start(&binary, state.path(), &setup)?;
        let mut drive = Command::new(&python);
        drive.arg("tests/deerflow/drive_provider.py").arg(&checkout).arg(&server.url);
        drive.args(&server.key).current_dir(workspace_root()).env("PYTHONDONTWRITEBYTECODE", "1");
        if !settings.is_empty() {
            drive.args(["--state-root", shared]);
        }
        passed &= run_command(&mut drive).is_ok();
        server.finish(&[])?;
    }
    Ok(passed)
}
