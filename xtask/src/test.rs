//! `cargo xtask test`: everything, on a fresh Debian with Rust, a C compiler and Python 3.

use std::path::PathBuf;

use anyhow::{Result, bail};

use crate::report::Report;
use crate::tools::{cargo, output, run, run_watched};
use crate::vm::{self, VmOutcome};
use crate::{bench, check, dist, docs, kernels, packages, sdk};

pub(crate) fn test() -> Result<bool> {
    let mut report = Report::default();
    report.stage("packages", packages::install);
    report.stage("Jupyter kernels", kernels::prepare);
    report.stage("invariants", |_| check::check());
    let mut binary = None;
    let built = report.stage("build", |_| {
        binary = Some(build()?);
        Ok(())
    });
    let Some(binary) = binary.filter(|_| built) else { return Ok(report.finish()) };
    report.stage("release archive", |report| dist::pack_and_verify(&binary, report));
    report.stage("cargo test", |report| {
        run_watched(
            cargo(&["test", "--workspace", "--locked", "--no-fail-fast"]).env("CORACLE_BIN", &binary),
            |line| report.read_test_line(line),
        )
    });
    report.stage("SDK tests", |report| sdk::test(&binary, report));
    report.stage("docs", |report| docs::test(&binary, &[], report));
    report.stage("bench", |report| bench::bench(&binary, report));
    report.stage("cgroup v2", |report| {
        match vm::vm(&["--binary".to_owned(), binary.display().to_string()])? {
            VmOutcome::Skipped(why) => report.skip("limit tests on cgroup v2", why),
            VmOutcome::Passed { skipped, .. } => {
                for test in skipped {
                    report.skip("on cgroup v2", test);
                }
            }
            failed @ VmOutcome::Failed { .. } => bail!(failed.line()),
        }
        Ok(())
    });
    Ok(report.finish())
}

/// Runs only the SDK tests, against the given binary or a new build.
pub(crate) fn sdk_alone(args: &[String]) -> Result<bool> {
    let binary = match args {
        [] => build()?,
        [flag, path] if flag == "--binary" => PathBuf::from(path),
        _ => bail!("usage: cargo xtask sdk [--binary PATH]"),
    };
    let mut report = Report::default();
    report.stage("SDK tests", |report| sdk::test(&binary, report));
    Ok(report.finish())
}

/// Builds the one binary as it is shipped, and returns its path.
pub(crate) fn build() -> Result<PathBuf> {
    run(&mut cargo(&["build", "--release", "--locked", "--package", "cli"]))?;
    let messages =
        output(&mut cargo(&["build", "--release", "--locked", "--package", "cli", "--message-format=json"]))?;
    let artifacts = messages.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
    let executable =
        artifacts.filter_map(|message| message["executable"].as_str().map(PathBuf::from)).next_back();
    executable.ok_or_else(|| anyhow::anyhow!("cargo built no executable"))
}
