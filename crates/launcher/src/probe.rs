//! Probes the features that this host offers to sandboxes by trying each of them.
//!
//! Each check does exactly what a jail will do, in a child process, and reports the consequence and
//! the fix if it fails. The caller must be single-threaded, because a check forks.

mod attempt;
mod groups;
mod kernel;
mod namespaces;
mod network;
mod storage;

use std::path::Path;

use domain::{Bytes, SandboxId};
use serde::{Deserialize, Serialize};

use crate::images::HostPrograms;
use crate::network::NetworkSettings;

/// The results of all checks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProbeReport {
    pub checks: Vec<HostCheck>,
    pub enforced: Vec<EnforcedLimit>,
    pub sandboxes_can_run: bool,
    /// Whether sandboxes are created by an unprivileged user.
    pub rootless: bool,
}

/// The result of one check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostCheck {
    pub name: String,
    pub status: CheckStatus,
    /// The observed result.
    pub detail: String,
    /// The consequence for sandboxes; empty if the check passed.
    pub consequence: String,
    /// How to fix it, as exactly as we know.
    pub fix: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CheckStatus {
    Ok,
    /// Sandboxes run, but some limit or protection is weaker than it could be.
    Weaker,
    /// Without this, no sandbox can be created.
    Missing,
}

/// The mechanism that limits one resource of a sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EnforcedLimit {
    pub what: String,
    /// The name of the mechanism, or `None` if nothing limits it.
    pub by: Option<String>,
}

/// Runs all checks for sandboxes stored below `state`, with a required amount of free space and
/// with uid ranges starting at `uid_base`.
pub fn probe_host(state: &Path, floor: Bytes, uid_base: u32, network: &NetworkSettings) -> ProbeReport {
    let rootless = !rustix::process::geteuid().is_root();
    let groups = groups::probe_cgroups(state, rootless);
    let disk = storage::probe_disk(state, rootless);
    let mut checks = kernel::run_checks();
    checks.extend(namespaces::run_checks(state, uid_base, rootless));
    checks.extend(groups.checks);
    checks.push(disk.check);
    checks.push(storage::check_free_space(state, floor));
    checks.extend(network::run_checks(network, rootless));
    checks.push(HostCheck::ok("image host", HostPrograms::of_this_host().summary()));
    let mut enforced = groups.enforced;
    enforced.push(EnforcedLimit { what: "disk".to_owned(), by: disk.by });
    let sandboxes_can_run = checks.iter().all(|check| check.status != CheckStatus::Missing);
    ProbeReport { checks, enforced, sandboxes_can_run, rootless }
}

impl HostCheck {
    fn ok(name: &str, detail: impl Into<String>) -> Self {
        let (name, detail) = (name.to_owned(), detail.into());
        Self { name, status: CheckStatus::Ok, detail, consequence: String::new(), fix: None }
    }

    fn weaker(name: &str, detail: impl Into<String>, consequence: &str) -> Self {
        let consequence = consequence.to_owned();
        Self { status: CheckStatus::Weaker, consequence, ..Self::ok(name, detail) }
    }

    fn missing(name: &str, detail: impl Into<String>) -> Self {
        let consequence = "no sandbox can be created".to_owned();
        Self { status: CheckStatus::Missing, consequence, ..Self::ok(name, detail) }
    }

    fn with_fix(self, fix: impl Into<String>) -> Self {
        Self { fix: Some(fix.into()), ..self }
    }

    /// A check whose attempt must succeed.
    fn from_attempt(name: &str, tried: Result<String, String>) -> Self {
        match tried {
            Ok(detail) => Self::ok(name, detail),
            Err(detail) => Self::missing(name, detail),
        }
    }
}

/// The id of what a check makes and removes again.
fn probe_id() -> SandboxId {
    SandboxId::parse("doctor00000000000000").expect("a letter and nineteen letters or digits")
}

/// Returns the trimmed content of a small kernel file, if it exists.
fn read_kernel_setting(path: &str) -> Option<String> {
    std::fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}
