//! Probes the features that this host offers to sandboxes by trying each of them.
//!
//! Each check does exactly what a jail will do, in a child process, and reports the consequence and
//! the fix if it fails. The caller must be single-threaded, because a check forks.

mod attempt;
mod container_facts;
mod groups;
mod host_files;
mod host_resources;
mod kernel;
mod namespaces;
mod network;
mod storage;

use std::collections::BTreeSet;
use std::path::Path;

use domain::{Bytes, SandboxId};
use serde::{Deserialize, Serialize};

use crate::jail::plan::LimitName;
use crate::network::NetworkSettings;
use crate::settings::{TotalLimits, TotalOrigin};

use self::container_facts::ContainerFacts;
pub use self::container_facts::{ContainerNeed, ContainerSpec};

pub(crate) use namespaces::user_namespace_fix;

pub use host_resources::{HostResource, SandboxCapacity, compare_resources};

/// The results of all checks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProbeReport {
    pub checks: Vec<HostCheck>,
    pub enforced: Vec<EnforcedLimit>,
    pub sandboxes_can_run: bool,
    /// Resources that no control group divides, filled in by [`compare_resources`].
    #[serde(default)]
    pub host_tables: Vec<HostResource>,
    /// Whether sandboxes are created by an unprivileged user.
    pub rootless: bool,
    /// The lines of this container's specification that would give it what is missing, or else what is
    /// weaker.
    #[serde(default)]
    pub container: Option<ContainerSpec>,
    /// The limits of all sandboxes of a server together.
    #[serde(default)]
    pub totals: Vec<TotalCheck>,
}

/// A limit of all sandboxes together.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TotalCheck {
    pub what: String,
    pub amount: String,
    /// Whether the operator or the container set it.
    pub origin: TotalOrigin,
    /// The name of the mechanism, or `None` if nothing but the container itself enforces it.
    pub by: Option<String>,
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
    /// What a container has to be given to fix it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub needs: Vec<ContainerNeed>,
    /// The files of the host that the check found; `detail` may name only the first of them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub paths: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CheckStatus {
    Ok,
    /// Sandboxes run, but some limit or protection is weaker than it could be.
    Weaker,
    /// Without this, no sandbox can be created.
    Missing,
    /// Something is missing without which this cannot be tried.
    Untried,
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
    let rootless = !linux::privileges::is_host_root();
    let facts = ContainerFacts::collect();
    let groups = groups::probe_cgroups(state, rootless, facts.in_container);
    let disk = if facts.check_blocked_calls().is_some() && !rootless {
        storage::untried_disk()
    } else {
        storage::probe_disk(state, rootless)
    };
    let mut checks = kernel::run_checks();
    checks.extend(namespaces::run_checks(state, uid_base, rootless, &facts));
    checks.extend(groups.checks);
    checks.push(disk.check);
    checks.push(storage::check_free_space(state, floor));
    checks.extend(network::run_checks(network, rootless));
    checks.push(host_files::check_hidden_files());
    let mut enforced = groups.enforced;
    enforced.push(EnforcedLimit { what: "disk".to_owned(), by: disk.by });
    let sandboxes_can_run = checks.iter().all(|check| check.status != CheckStatus::Missing);
    let worst = if sandboxes_can_run { CheckStatus::Weaker } else { CheckStatus::Missing };
    let needs: BTreeSet<ContainerNeed> =
        checks.iter().filter(|check| check.status == worst).flat_map(|check| check.needs.clone()).collect();
    let container = if facts.in_container { ContainerSpec::for_needs(needs) } else { None };
    ProbeReport {
        checks,
        enforced,
        sandboxes_can_run,
        host_tables: Vec::new(),
        rootless,
        container,
        totals: Vec::new(),
    }
}

impl ProbeReport {
    /// Adds the limits of all sandboxes together, and what enforces each of them.
    pub fn with_totals(mut self, totals: &TotalLimits) -> Self {
        for (limit, what) in
            [(LimitName::Memory, "memory"), (LimitName::Cpus, "cpu"), (LimitName::Pids, "pids")]
        {
            let Some(total) = totals.get(limit) else { continue };
            let by_group =
                |held: &&EnforcedLimit| held.what == what && held.by.as_deref() != Some("RLIMIT_NPROC");
            self.totals.push(TotalCheck {
                what: what.to_owned(),
                amount: total.shown(limit),
                origin: total.origin,
                by: self.enforced.iter().find(by_group).and_then(|held| held.by.clone()),
            });
        }
        self
    }
}

impl HostCheck {
    fn ok(name: &str, detail: impl Into<String>) -> Self {
        let (name, detail) = (name.to_owned(), detail.into());
        let (consequence, needs, paths) = (String::new(), Vec::new(), Vec::new());
        Self { name, status: CheckStatus::Ok, detail, consequence, fix: None, needs, paths }
    }

    fn weaker(name: &str, detail: impl Into<String>, consequence: &str) -> Self {
        let consequence = consequence.to_owned();
        Self { status: CheckStatus::Weaker, consequence, ..Self::ok(name, detail) }
    }

    fn missing(name: &str, detail: impl Into<String>) -> Self {
        let consequence = "no sandbox can be created".to_owned();
        Self { status: CheckStatus::Missing, consequence, ..Self::ok(name, detail) }
    }

    /// A check that cannot be tried because another one failed.
    fn untried(name: &str, cause: &str) -> Self {
        Self { status: CheckStatus::Untried, ..Self::ok(name, format!("not tried: needs `{cause}`")) }
    }

    fn with_needs(self, needs: &[ContainerNeed]) -> Self {
        Self { needs: needs.to_vec(), ..self }
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
