//! `cargo xtask test`: everything, on a fresh Debian with Rust, a C compiler and Python 3.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};

use crate::build_paths::BuildPaths;
use crate::report::TestReport;
use crate::side_stage::SideStage;
use crate::tools::{cargo_command, command_output, run_command, run_watched, workspace_root};
use crate::{bench, check, dist, docs, kernels, packages, sdk};

pub(crate) fn run_tests() -> Result<bool> {
    let mut report = TestReport::default();
    report.run_stage("packages", packages::install_packages);
    // Downloads need the network, builds the processors.
    let downloads = SideStage::start("downloads", &["downloads"]);
    report.run_stage("invariants", |_| check::check_invariants());
    let mut binary = None;
    report.run_stage("build", |_| {
        binary = Some(build_release()?);
        Ok(())
    });
    report.join_stage(downloads);
    if let Some(binary) = binary {
        test_binary(&binary, &mut report);
    }
    Ok(report.finish())
}

/// All stages that need the binary. The emulated machine uses little more than one processor: it runs
/// beside tests that leave the other one mostly idle. The rest runs alone, since it measures or loads
/// the host. `all` is the test binary of `e2e`; it is selected by its name, because selecting the package could
/// change features of its dependencies and build them again.
fn test_binary(binary: &Path, report: &mut TestReport) {
    let tests = |more: &[&str]| {
        let mut command = cargo_command(&["test", "--workspace", "--locked", "--no-fail-fast"]);
        command.args(more).env("CORACLE_BIN", binary);
        command
    };
    report.run_stage("build tests", |_| run_command(&mut tests(&["--no-run"])));
    let machine = SideStage::start("cgroup v2", &["vm", "--binary", &binary.to_string_lossy()]);
    report.run_stage("release archive", |report| dist::pack_and_verify(binary, report));
    report.run_stage("SDK tests", |report| sdk::test_sdk(binary, report));
    report.run_stage("docs", |report| docs::test_pages(binary, &[], report));
    report.run_stage("tests of crates", |report| {
        run_watched(&mut tests(&["--exclude", "e2e"]), |line| report.read_test_line(line))
    });
    report.join_stage(machine);
    report.run_stage("tests of the product", |report| {
        run_watched(&mut tests(&["--test", "all"]), |line| report.read_test_line(line))
    });
    report.run_stage("bench", |report| bench::run_bench(binary, report));
}

/// Fetches everything that later stages would otherwise wait for: Jupyter kernels and Python packages.
pub(crate) fn run_downloads() -> Result<bool> {
    let mut report = TestReport::default();
    kernels::prepare_kernels(&mut report);
    sdk::prepare_environment()?;
    report.print_skips();
    Ok(true)
}

/// Runs only the SDK tests, against the given binary or a new build.
pub(crate) fn run_sdk_tests(args: &[String]) -> Result<bool> {
    let binary = match args {
        [] => build_release()?,
        [flag, path] if flag == "--binary" => PathBuf::from(path),
        _ => bail!("usage: cargo xtask sdk [--binary PATH]"),
    };
    let mut report = TestReport::default();
    report.run_stage("SDK tests", |report| sdk::test_sdk(&binary, report));
    Ok(report.finish())
}

/// Builds the one binary as it is shipped, and returns its path.
pub(crate) fn build_release() -> Result<PathBuf> {
    build_release_in(&workspace_root())
}

/// Like [`build_release`], from a copy of the repository. A copy has a target directory of its own.
pub(crate) fn build_release_in(root: &Path) -> Result<PathBuf> {
    let paths = BuildPaths::find_for(root)?;
    let build = |more: &[&str]| {
        let mut command = cargo_command(&["build", "--release", "--locked", "--package", "coracle-cli"]);
        paths.hide_in(&mut command).args(more).current_dir(root);
        if root != workspace_root() {
            command.env_remove("CARGO_TARGET_DIR");
        }
        command
    };
    run_command(&mut build(&[]))?;
    let messages = command_output(&mut build(&["--message-format=json"]))?;
    let artifacts = messages.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
    let executable =
        artifacts.filter_map(|message| message["executable"].as_str().map(PathBuf::from)).next_back();
    executable.ok_or_else(|| anyhow::anyhow!("cargo built no executable"))
}
