//! A set of wheels installed by pip inside a sandbox and on the bare host, in turn.
//!
//! The wheels are made by the same script on both sides and need no network. The bare host
//! installs into a directory beside the state directory, so both write to one disk.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::json;

use super::RoundCounts;
use super::report::BenchReport;
use super::server::BenchServer;
use super::statistics::TimeSamples;

/// The host's own Python, which is also the one of the sandbox.
const PYTHON: &str = "/usr/bin/python3";

/// Makes twelve wheels of forty modules each in the directory that is its argument.
const MAKE_WHEELS_SCRIPT: &str = r#"
import os, sys, zipfile
os.makedirs(sys.argv[1], exist_ok=True)
for n in range(12):
    name = f"wheel{n}"
    info = f"{name}-1.dist-info"
    body = "".join(f"def f{i}(x):\n    return [x + {i}, '{'ab' * 20}']\n\n" for i in range(120))
    with zipfile.ZipFile(f"{sys.argv[1]}/{name}-1-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as whl:
        for m in range(40):
            whl.writestr(f"{name}/m{m}.py", body)
        whl.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        whl.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        whl.writestr(f"{info}/RECORD", "")
"#;

pub(crate) fn measure_pip(server: &BenchServer, rounds: RoundCounts, report: &mut BenchReport) -> Result<()> {
    if !succeeds(Command::new(PYTHON).args(["-m", "pip", "--version"])) {
        report.add_unmeasured(format!("pip inside a sandbox: `{PYTHON} -m pip` is not there"));
        return Ok(());
    }
    let bare = BareHost { directory: server.directory() };
    bare.make_wheels()?;
    let mut client = server.client()?;
    let mut sandbox = client.create_with_size("8", "4Gi", &json!({}))?;
    client.resolve_endpoint(&mut sandbox)?;
    client.run_command(&sandbox, &[PYTHON, "-c", MAKE_WHEELS_SCRIPT, "/root/wheels"])?;
    let (mut outside, mut inside) = (TimeSamples::default(), TimeSamples::default());
    for run in 0..=rounds.long {
        let host = bare.time_install()?;
        let argv = pip_install_arguments("/root/wheels", &format!("/root/installed{run}"));
        let began = Instant::now();
        client.run_command(&sandbox, &argv)?;
        if run > 0 {
            outside.push(host);
            inside.push(began.elapsed());
        }
    }
    client.delete_sandbox(&sandbox)?;
    report.add_time("pip install of 12 wheels on the bare host", outside.summary());
    report.add_time("pip install of 12 wheels inside", inside.summary());
    let ratio = outside.summary().p50 / inside.summary().p50;
    report.require_at_least("pip install of wheels inside", ratio, 0.95, "of the speed on the bare host");
    Ok(())
}

struct BareHost<'a> {
    directory: &'a Path,
}

impl BareHost<'_> {
    fn make_wheels(&self) -> Result<()> {
        let made =
            Command::new(PYTHON).args(["-c", MAKE_WHEELS_SCRIPT]).arg(self.directory.join("wheels")).status();
        ensure!(made.context("could not start python")?.success(), "the wheels could not be made");
        Ok(())
    }

    fn time_install(&self) -> Result<Duration> {
        let target = self.directory.join("installed");
        let (wheels, into) = (self.directory.join("wheels"), target.display().to_string());
        let argv = pip_install_arguments(&wheels.display().to_string(), &into);
        let began = Instant::now();
        let installed = succeeds(Command::new(&argv[0]).args(&argv[1..]).env("HOME", self.directory));
        let time = began.elapsed();
        ensure!(installed, "pip failed on the bare host");
        std::fs::remove_dir_all(&target).context("could not remove what pip installed")?;
        Ok(time)
    }
}

fn pip_install_arguments(wheels: &str, target: &str) -> Vec<String> {
    let names = (0..12).map(|number| format!("wheel{number}"));
    let options = [
        PYTHON,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-index",
        "--no-cache-dir",
        "--disable-pip-version-check",
        "--root-user-action=ignore",
        "--find-links",
        wheels,
        "--target",
        target,
    ];
    options.into_iter().map(str::to_owned).chain(names).collect()
}

fn succeeds(command: &mut Command) -> bool {
    let quiet = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    quiet.status().is_ok_and(|status| status.success())
}
