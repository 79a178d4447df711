//! `cargo xtask test`: everything, on a fresh Debian with Rust, a C compiler and Python 3.

use std::path::PathBuf;

use anyhow::{Result, bail};

use crate::report::TestReport;
use crate::tools::{cargo_command, command_output, run_command, run_watched};
use crate::vm::{self, VmOutcome};
use crate::{bench, check, dist, docs, kernels, packages, sdk};

pub(crate) fn run_tests() -> Result<bool> {
    let mut report = TestReport::default();
    report.run_stage("packages", packages::install_packages);
    report.run_stage("Jupyter kernels", kernels::prepare_kernels);
    report.run_stage("invariants", |_| check::check_invariants());
    let mut binary = None;
    let built = report.run_stage("build", |_| {
        binary = Some(build_release()?);
        Ok(())
    });
    let Some(binary) = binary.filter(|_| built) else { return Ok(report.finish()) };
    report.run_stage("release archive", |report| dist::pack_and_verify(&binary, report));
    report.run_stage("cargo test", |report| {
        run_watched(
            cargo_command(&["test", "--workspace", "--locked", "--no-fail-fast"]).env("CORACLE_BIN", &binary),
            |line| report.read_test_line(line),
        )
    });
    report.run_stage("SDK tests", |report| sdk::test_sdk(&binary, report));
    report.run_stage("docs", |report| docs::test_pages(&binary, &[], report));
    report.run_stage("bench", |report| bench::run_bench(&binary, report));
    report.run_stage("cgroup v2", |report| {
        match vm::run_vm_tests(&["--binary".to_owned(), binary.display().to_string()])? {
            VmOutcome::Skipped(why) => report.record_skip("limit tests on cgroup v2", why),
            VmOutcome::Passed { skipped, .. } => {
                for test in skipped {
                    report.record_skip("on cgroup v2", test);
                }
            }
            failed @ VmOutcome::Failed { .. } => bail!(failed.summary_line()),
        }
        Ok(())
    });
    Ok(report.finish())
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
    run_command(&mut cargo_command(&["build", "--release", "--locked", "--package", "coracle-cli"]))?;
    let messages = command_output(&mut cargo_command(&[
        "build",
        "--release",
        "--locked",
        "--package",
        "coracle-cli",
        "--message-format=json",
    ]))?;
    let artifacts = messages.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
    let executable =
        artifacts.filter_map(|message| message["executable"].as_str().map(PathBuf::from)).next_back();
    executable.ok_or_else(|| anyhow::anyhow!("cargo built no executable"))
}
