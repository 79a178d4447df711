//! `cargo xtask test`: everything, on a fresh Debian with Rust, a C compiler and Python 3.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, bail};

use crate::build_paths::BuildPaths;
use crate::report::TestReport;
use crate::side_stage::SideStage;
use crate::tools::{cargo_command, command_output, run_command, run_watched, workspace_root};
use crate::{bench, dist, docs, kernels, packages, sdk};

pub(crate) fn run_tests() -> Result<bool> {
    let mut report = TestReport::default();
    report.run_stage("packages", packages::install_packages);
    let beside = BuildsBeside::start();
    let mut binary = None;
    report.run_stage("build", |_| {
        binary = Some(build_release()?);
        Ok(())
    });
    match binary {
        Some(binary) => test_binary(&binary, beside, &mut report),
        None => beside.join_all(&mut report),
    }
    Ok(report.finish())
}

/// The stages that need no release binary. Cargo locks the directory of one profile for one command at a time,
/// so those that build for debugging run one after the other, and all of them beside the release.
struct BuildsBeside {
    downloads: SideStage,
    tests: SideStage,
    invariants: SideStage,
}

impl BuildsBeside {
    fn start() -> Self {
        let downloads = SideStage::start("downloads", &["downloads"]);
        let tests = SideStage::start("lints and tests", &["build-tests"]);
        let invariants = SideStage::start_after(&tests, "invariants", &["check"]);
        Self { downloads, tests, invariants }
    }

    fn join_all(self, report: &mut TestReport) {
        for stage in [self.downloads, self.tests, self.invariants] {
            report.join_stage(stage);
        }
    }
}

/// All stages that need the binary. The emulated machine uses little more than one processor and has a lower
/// priority: it runs beside the tests, which often wait. The benchmark runs alone, since it measures.
fn test_binary(binary: &Path, beside: BuildsBeside, report: &mut TestReport) {
    let run_tests = |more: &[&str], report: &mut TestReport| {
        run_watched(test_command(more).env("CORACLE_BIN", binary), |line| report.read_test_line(line))
    };
    report.run_stage("release archive", |report| dist::pack_and_verify(binary, report));
    report.join_stage(beside.downloads);
    report.run_stage("SDK tests", |report| sdk::test_sdk(binary, report));
    report.run_stage("docs", |report| docs::test_pages(binary, &[], report));
    report.join_stage(beside.tests);
    report.run_stage("SDK tests of networks", |report| sdk::test_networks(binary, report));
    let machine = SideStage::start("cgroup v2", &["vm", "--binary", &binary.to_string_lossy()]);
    report.run_stage("tests of crates", |report| run_tests(&["--exclude", "e2e"], report));
    report.join_stage(beside.invariants);
    report.run_stage("tests of the product", |report| run_tests(&["--test", "all"], report));
    report.join_stage(machine);
    report.run_stage("bench", |report| bench::run_bench(binary, report));
}

/// Tests of the workspace, compiled with its lints; see [`with_lints`]. `all` is the test binary of `e2e`; it is selected
/// by its name, because selecting the package could change features of its dependencies and build them again.
pub(crate) fn test_command(more: &[&str]) -> Command {
    let mut command = cargo_command(&["test", "--workspace", "--locked", "--no-fail-fast"]);
    with_lints(&mut command).args(more);
    command
}

/// A cargo command that builds parts of the tests with the same settings as [`test_command`].
pub(crate) fn build_of_tests(words: &[&str]) -> Command {
    let mut command = cargo_command(words);
    with_lints(&mut command);
    command
}

/// Lets cargo compile the crates of the workspace by clippy's compiler, with warnings as errors. `cargo clippy` would
/// compile everything once more.
fn with_lints(command: &mut Command) -> &mut Command {
    if has_lints() {
        // As `cargo clippy -- -D warnings` sets them.
        command.env("RUSTC_WORKSPACE_WRAPPER", LINTING_COMPILER);
        command.env("CLIPPY_ARGS", "-Dwarnings__CLIPPY_HACKERY__");
    }
    command
}

/// The compiler of clippy.
const LINTING_COMPILER: &str = "clippy-driver";

fn has_lints() -> bool {
    Command::new(LINTING_COMPILER).arg("--version").output().is_ok_and(|output| output.status.success())
}

/// Builds all tests without running them, and what only the lints need.
pub(crate) fn build_tests() -> Result<bool> {
    let mut report = TestReport::default();
    if !has_lints() {
        report.record_skip("lints", "there is no clippy; `rustup component add clippy` installs it");
    }
    report.print_skips();
    let mut build = cargo_command(&["build", "--workspace", "--all-targets", "--locked"]);
    run_command(with_lints(&mut build))?;
    Ok(true)
}

/// The lints of all crates alone, which is faster than building the tests with them; a warning is an error.
pub(crate) fn run_lints() -> Result<bool> {
    let words = ["clippy", "--workspace", "--all-targets", "--locked", "--", "-D", "warnings"];
    run_command(&mut cargo_command(&words))?;
    Ok(true)
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
    report.run_stage("SDK tests of networks", |report| sdk::test_networks(&binary, report));
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
