//! What this host offers to sandboxes, found out by trying.
//!
//! Each check does the very thing a jail will do, in a child of its own, and says what follows
//! when it cannot be done and how to get it. The caller must be single-threaded, since a check
//! forks.

mod attempt;
mod groups;
mod kernel;
mod namespaces;
mod network;
mod storage;

use std::path::Path;

use domain::Bytes;
use serde::{Deserialize, Serialize};

use crate::images::HostPrograms;
use crate::network::NetworkSettings;

/// Everything that was found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    pub checks: Vec<Check>,
    pub enforced: Vec<Enforced>,
    pub sandboxes_can_run: bool,
    /// Whether sandboxes are made by an ordinary user.
    pub rootless: bool,
}

/// One thing that was tried.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Check {
    pub name: String,
    pub status: Status,
    /// What was found.
    pub detail: String,
    /// What follows from it; empty when all is well.
    pub consequence: String,
    /// How to get it, as exactly as we can say.
    pub fix: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    Ok,
    /// Sandboxes run, but something holds less than it could.
    Weaker,
    /// Without it no sandbox can be made.
    Missing,
}

/// What bounds a sandbox in one respect.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Enforced {
    pub what: String,
    /// By what means, or none at all.
    pub by: Option<String>,
}

/// Tries everything for sandboxes kept below `state`, with this floor of free space and uid
/// ranges from this base on.
pub fn probe(state: &Path, floor: Bytes, uid_base: u32, network: &NetworkSettings) -> Report {
    let rootless = !rustix::process::geteuid().is_root();
    let groups = groups::look(state, rootless);
    let disk = storage::look(state, rootless);
    let mut checks = kernel::checks();
    checks.extend(namespaces::checks(state, uid_base, rootless));
    checks.extend(groups.checks);
    checks.push(disk.check);
    checks.push(storage::free_space(state, floor));
    checks.extend(network::checks(network, rootless));
    checks.push(Check::ok("image host", HostPrograms::of_this_host().summary()));
    let mut enforced = groups.enforced;
    enforced.push(Enforced { what: "disk".to_owned(), by: disk.by });
    let sandboxes_can_run = checks.iter().all(|check| check.status != Status::Missing);
    Report { checks, enforced, sandboxes_can_run, rootless }
}

impl Check {
    fn ok(name: &str, detail: impl Into<String>) -> Self {
        let (name, detail) = (name.to_owned(), detail.into());
        Self { name, status: Status::Ok, detail, consequence: String::new(), fix: None }
    }

    fn weaker(name: &str, detail: impl Into<String>, consequence: &str) -> Self {
        let consequence = consequence.to_owned();
        Self { status: Status::Weaker, consequence, ..Self::ok(name, detail) }
    }

    fn missing(name: &str, detail: impl Into<String>) -> Self {
        let consequence = "no sandbox can be made".to_owned();
        Self { status: Status::Missing, consequence, ..Self::ok(name, detail) }
    }

    fn fix(self, fix: impl Into<String>) -> Self {
        Self { fix: Some(fix.into()), ..self }
    }

    /// What was tried must succeed.
    fn required(name: &str, tried: Result<String, String>) -> Self {
        match tried {
            Ok(detail) => Self::ok(name, detail),
            Err(detail) => Self::missing(name, detail),
        }
    }
}

/// The trimmed content of a small file of the kernel, if it is there.
fn setting(path: &str) -> Option<String> {
    std::fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}
