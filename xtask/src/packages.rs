//! What the tests need beyond Rust, a C compiler and Python: one list, with the reasons.

use std::process::{Command, Stdio};

use crate::report::Report;
use crate::vm::find;

struct Package {
    name: &'static str,
    present: fn() -> bool,
    needed_for: &'static str,
}

const WANTED: &[Package] = &[
    Package {
        name: "python3-venv",
        present: || python_has("venv") && python_has("ensurepip"),
        needed_for: "the SDK tests run in an environment of their own",
    },
    Package {
        name: "nginx-light",
        present: || find("nginx").is_some(),
        needed_for: "transfers are compared with what nginx serves",
    },
    Package {
        name: "bubblewrap",
        present: || find("bwrap").is_some(),
        needed_for: "the time of a create is compared with it",
    },
];

/// Installs what is missing, where that is possible. Whatever needs a package that stays
/// missing skips itself; here it is said why.
pub(crate) fn install(report: &mut Report) {
    let missing: Vec<&Package> = WANTED.iter().filter(|package| !(package.present)()).collect();
    if missing.is_empty() {
        return;
    }
    if let Err(why) = can_install() {
        for package in missing {
            report.skip(package.name, format_args!("{why}; {}", package.needed_for));
        }
        return;
    }
    // An old list names versions that are gone, so a failure proves something only after an
    // update.
    let mut updated = false;
    for package in missing {
        if install_one(package.name) {
            continue;
        }
        updated = updated || apt_get(&["update", "--quiet"]);
        if !updated || !install_one(package.name) {
            report.skip(package.name, format_args!("apt-get could not install it; {}", package.needed_for));
        }
    }
}

fn can_install() -> Result<(), &'static str> {
    if find("apt-get").is_none() {
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

/// Runs apt-get quietly and says whether it succeeded. Installed services are not started: the
/// tests start what they need themselves.
fn apt_get(args: &[&str]) -> bool {
    Command::new("apt-get")
        .args(args)
        .envs([("DEBIAN_FRONTEND", "noninteractive"), ("SYSTEMD_OFFLINE", "1"), ("RUNLEVEL", "1")])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

fn python_has(module: &str) -> bool {
    Command::new("python3")
        .args(["-c", &format!("import {module}")])
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}
