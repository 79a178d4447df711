//! The packages that the tests need beyond Rust, a C compiler and Python: one list, with the reasons.

use std::process::{Command, Stdio};

use anyhow::{Result, bail};

use crate::report::TestReport;
use crate::vm::find_program;

struct AptPackage {
    name: &'static str,
    present: fn() -> bool,
    /// Whether required tests cannot run without it. Tests that need any other package skip themselves.
    required: fn() -> bool,
    needed_for: &'static str,
}

/// Another apt-get may be running, and a download may fail.
const APT_RETRY_OPTIONS: [&str; 4] = ["-o", "DPkg::Lock::Timeout=120", "-o", "Acquire::Retries=3"];

const WANTED_PACKAGES: &[AptPackage] = &[
    AptPackage {
        name: "python3-venv",
        present: || python_has("venv") && python_has("ensurepip"),
        // Without Python there are no SDK tests; with it they must run.
        required: has_python,
        needed_for: "the SDK tests run in an environment of their own",
    },
    AptPackage {
        name: "nginx-light",
        present: || find_program("nginx").is_some(),
        required: || false,
        needed_for: "transfers are compared with what nginx serves",
    },
    AptPackage {
        name: "docker-registry",
        present: || find_program("docker-registry").is_some(),
        required: || false,
        needed_for: "images are pulled from a real registry",
    },
    AptPackage {
        name: "slirp4netns",
        present: || find_program("slirp4netns").is_some(),
        required: || false,
        needed_for: "pages whose commands need the internet",
    },
    AptPackage {
        name: "ripgrep",
        present: || find_program("rg").is_some(),
        required: || false,
        needed_for: "the search in files is compared with it",
    },
    AptPackage {
        name: "runc",
        present: || find_program("runc").is_some(),
        required: || false,
        needed_for: "sandboxes are made inside containers",
    },
    AptPackage {
        name: "systemd",
        present: || find_program("systemd-analyze").is_some(),
        required: || false,
        needed_for: "the units are checked by `systemd-analyze verify`",
    },
    AptPackage {
        name: "bubblewrap",
        present: || find_program("bwrap").is_some(),
        required: || false,
        needed_for: "the time of a create is compared with it",
    },
];

/// Installs missing packages if possible, and reports why others stay missing.
pub(crate) fn install_packages(report: &mut TestReport) -> Result<()> {
    install_musl_target(report);
    let missing: Vec<&AptPackage> = WANTED_PACKAGES.iter().filter(|package| !(package.present)()).collect();
    let (required, optional): (Vec<_>, Vec<_>) =
        try_to_install(&missing).into_iter().partition(|(package, _)| (package.required)());
    for (package, why) in optional {
        report.record_skip(package.name, format_args!("{why}; {}", package.needed_for));
    }
    let required: Vec<String> = required
        .into_iter()
        .map(|(package, why)| format!("`{}` is missing: {why}; {}", package.name, package.needed_for))
        .collect();
    if required.is_empty() { Ok(()) } else { bail!(required.join("\n")) }
}

/// Installs the C library with which the programs inside `coracle` start faster. Without it they are built too.
fn install_musl_target(report: &mut TestReport) {
    const TARGET: &str = "x86_64-unknown-linux-musl";
    let added = Command::new("rustup").args(["target", "add", TARGET]).output();
    if !added.is_ok_and(|output| output.status.success()) {
        report.record_skip(TARGET, "rustup could not install it; sandboxes start faster with it");
    }
}

/// Returns the packages that could not be installed, with the reason.
fn try_to_install<'a>(missing: &[&'a AptPackage]) -> Vec<(&'a AptPackage, &'static str)> {
    if let Err(why) = can_install() {
        return missing.iter().map(|package| (*package, why)).collect();
    }
    // An old list names versions that are gone, so a failure is final only after an update.
    let mut updated = false;
    let mut failed = Vec::new();
    for package in missing {
        if install_one(package.name) {
            continue;
        }
        updated = updated || apt_get(&["update", "--quiet"]);
        if !updated || !install_one(package.name) {
            failed.push((*package, "apt-get failed to install it"));
        }
    }
    failed
}

fn can_install() -> Result<(), &'static str> {
    if find_program("apt-get").is_none() {
        return Err("this is no Debian to install it on");
    }
    if !rustix::process::geteuid().is_root() {
        return Err("only root can install it");
    }
    Ok(())
}

fn install_one(package: &str) -> bool {
    apt_get(&["install", "--yes", "--quiet", "--no-install-recommends", package])
}

/// Runs apt-get quietly and returns whether it succeeded. Installed services are not started: the tests
/// start what they need themselves.
pub(crate) fn apt_get(args: &[&str]) -> bool {
    Command::new("apt-get")
        .args(APT_RETRY_OPTIONS)
        .args(args)
        .envs([("DEBIAN_FRONTEND", "noninteractive"), ("SYSTEMD_OFFLINE", "1"), ("RUNLEVEL", "1")])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

/// Whether there is a Python to run at all.
pub(crate) fn has_python() -> bool {
    python_has("sys")
}

fn python_has(module: &str) -> bool {
    Command::new("python3")
        .args(["-c", &format!("import {module}")])
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}
