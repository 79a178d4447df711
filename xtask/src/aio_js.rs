//! The JavaScript SDK of AIO Sandbox, built from an existing checkout, against a sandbox of our provisioner. It is on no
//! package registry.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::server::{ServerAccess, ServerProcess, ServerSetup};
use crate::test::build_release;
use crate::tools::{run_command, workspace_root};

const USAGE: &str = "usage: cargo xtask aio-js CHECKOUT [--binary PATH]";
const TESTS: &str = "tests/aio-js/sdk.test.mjs";
/// The part of the checkout that is built.
const SDK_DIRECTORY: &str = "sdk/js";
/// What the SDK's own build needs.
const BUILD_PACKAGES: [&str; 3] = ["@rslib/core@0.17.1", "typescript@5.9.3", "@types/node@20.19.24"];

/// Builds the SDK outside of its checkout and runs our tests with it.
pub(crate) fn run_aio_js(args: &[String]) -> Result<bool> {
    let (checkout, binary) = match args {
        [checkout] => (checkout, None),
        [checkout, flag, path] if flag == "--binary" => (checkout, Some(PathBuf::from(path))),
        _ => bail!(USAGE),
    };
    let binary = binary.map_or_else(build_release, Ok)?;
    let sdk = build_sdk(&Path::new(checkout).join(SDK_DIRECTORY))?;
    let state = tempfile::tempdir().context("could not make a directory for the server")?;
    let setup = ServerSetup { access: ServerAccess::Keyed, settings: &[] };
    let server = ServerProcess::start(&binary, state.path(), &setup)?;
    let mut tests = Command::new("node");
    tests.args(["--test", TESTS]).current_dir(workspace_root()).env("AIO_SDK", sdk);
    tests.env("CORACLE_URL", &server.url).envs(server.key.iter().map(|key| ("CORACLE_API_KEY", key)));
    let passed = run_command(&mut tests).is_ok();
    server.finish(&[])?;
    Ok(passed)
}

/// Copies the SDK's source below `target` and builds it there. Returns the file to import.
fn build_sdk(source: &Path) -> Result<PathBuf> {
    let directory = workspace_root().join("target/aio-js");
    if directory.exists() {
        fs::remove_dir_all(&directory).context("could not remove the former build")?;
    }
    fs::create_dir_all(&directory).context("could not make a directory for the build")?;
    let copied = run_command(
        Command::new("cp")
            .arg("-R")
            .args(["src", "rslib.config.ts", "tsconfig.json"].map(|name| source.join(name)))
            .arg(&directory),
    );
    copied.with_context(|| format!("`{}` is not the JavaScript SDK", source.display()))?;
    // Without its development packages, most of which are for its own tests. They have no fixed versions.
    fs::write(
        directory.join("package.json"),
        "{\"private\": true}
",
    )
    .context("could not describe the build")?;
    let mut install = Command::new("npm");
    install.args(["install", "--silent", "--no-audit", "--no-fund", "--ignore-scripts"]).args(BUILD_PACKAGES);
    run_command(install.current_dir(&directory)).context("could not install what builds the SDK")?;
    run_command(Command::new("npx").args(["rslib", "build"]).current_dir(&directory))?;
    Ok(directory.join("dist/esm/index.mjs"))
}
