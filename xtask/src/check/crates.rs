//! Dependencies between crates, direct and transitive.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result};
use serde_json::Value;

use super::Findings;
use crate::tools::{cargo_command, command_output};

/// A crate, the crates it must not depend on even transitively, and why.
const FORBIDDEN_DEPENDENCIES: &[(&str, &[&str], &str)] = &[
    (
        "domain",
        &["serde", "tokio", "rustix", "libc"],
        "the domain types must not depend on a wire format, async or the kernel",
    ),
    ("wire", &["tokio"], "the agent uses it without an async runtime"),
    ("linux", &["tokio", "service", "domain"], "it only wraps the kernel"),
    (
        "agent",
        &["tokio", "service", "domain", "hyper", "rusqlite"],
        "it runs beside attackers and must stay small",
    ),
    ("backend", &["hyper", "axum", "rusqlite", "service"], "a backend must not use HTTP, SQL or commands"),
    (
        "backend-local",
        &["hyper", "axum", "rusqlite", "service"],
        "a backend must not use HTTP, SQL or commands",
    ),
    (
        "launcher",
        &["hyper", "axum", "rusqlite", "service", "backend-local"],
        "it is privileged, and must not use HTTP, SQL or commands",
    ),
    (
        "egress",
        &["axum", "rusqlite", "service", "backend", "launcher"],
        "it reads hostile bytes, and must not reach state or privileges",
    ),
    (
        "registry",
        &["axum", "rusqlite", "service", "linux"],
        "it only fetches, and must not depend on this host",
    ),
    ("kernel", &["service", "domain", "wire", "hyper"], "it runs inside a sandbox and is not trusted"),
    (
        "service",
        &["hyper", "axum", "http", "backend-local", "launcher"],
        "the core must not know HTTP or a backend by name",
    ),
];

/// A crate, the only workspace crates it may name, and why.
const ALLOWED_WORKSPACE_DEPENDENCIES: &[(&str, &[&str], &str)] = &[
    ("fronts", &["service", "domain"], "a front calls the core and nothing below it"),
    ("service", &["backend", "domain", "wire"], "requests flow one way"),
    (
        "backend-local",
        &["backend", "domain", "egress-protocol", "launcher", "linux"],
        "it is a client of the launcher and of egress",
    ),
    (
        "launcher",
        &["backend", "domain", "egress-protocol", "linux", "wire"],
        "it is privileged and must stay small",
    ),
    (
        "egress",
        &["domain", "egress-protocol", "linux"],
        "it is told policies, and knows no sandboxes but their sockets",
    ),
    ("egress-protocol", &["domain"], "both ends of the connection use it"),
    ("registry", &["backend"], "it only provides images"),
    ("agent", &["linux", "wire"], "it is built without the server"),
    ("kernel", &["linux"], "it only knows its line protocol, not the sender"),
    ("search", &["linux", "wire"], "it runs inside a sandbox and is built without the server"),
    ("domain", &[], "everything else depends on it"),
];

/// C libraries that would make the binary non-static.
const FORBIDDEN_LIBRARIES: &[&str] = &["openssl-sys", "libseccomp-sys", "aws-lc-sys"];

pub(super) fn check_dependencies() -> Result<Findings> {
    let text = command_output(&mut cargo_command(&["metadata", "--format-version", "1", "--locked"]))?;
    let metadata: Value = serde_json::from_str(&text).context("cargo's metadata is not JSON")?;
    let graph = CrateGraph::from_metadata(&metadata).context("cargo's metadata has an unexpected form")?;
    Ok(graph.check())
}

/// Packages by id, their run-time dependencies, and which of them are ours.
struct CrateGraph {
    names: BTreeMap<String, String>,
    needs: BTreeMap<String, Vec<String>>,
    ours: BTreeSet<String>,
}

impl CrateGraph {
    fn from_metadata(metadata: &Value) -> Option<Self> {
        let text = |value: &Value| value.as_str().map(str::to_owned);
        let packages = metadata["packages"].as_array()?;
        let ours = metadata["workspace_members"].as_array()?.iter().map(text);
        let ours: BTreeSet<String> = ours.collect::<Option<_>>()?;
        let names = packages.iter().map(|package| {
            let (id, name) = (text(&package["id"])?, text(&package["name"])?);
            // The rules above use the names of our crates without the prefix of their packages.
            let short = name.strip_prefix("coracle-").filter(|_| ours.contains(&id)).map(str::to_owned);
            Some((id, short.unwrap_or(name)))
        });
        let mut needs = BTreeMap::new();
        for node in metadata["resolve"]["nodes"].as_array()? {
            let built_in = node["deps"].as_array()?.iter().filter(|dependency| is_normal(dependency));
            needs.insert(text(&node["id"])?, built_in.map(|dep| text(&dep["pkg"])).collect::<Option<_>>()?);
        }
        Some(Self { names: names.collect::<Option<_>>()?, needs, ours })
    }

    fn check(&self) -> Findings {
        let mut findings = Findings::new();
        for (krate, forbidden, why) in FORBIDDEN_DEPENDENCIES {
            let reached = self.transitive_dependencies(krate);
            for name in forbidden.iter().filter(|name| reached.contains(**name)) {
                findings.push(format!("{krate}: it reaches `{name}`; {why}"));
            }
        }
        for (krate, allowed, why) in ALLOWED_WORKSPACE_DEPENDENCIES {
            for name in self.direct_dependencies(krate).filter(|name| !allowed.contains(name)) {
                findings.push(format!("{krate}: it names `{name}`; {why}"));
            }
        }
        for name in FORBIDDEN_LIBRARIES.iter().filter(|name| self.names.values().any(|found| found == **name))
        {
            findings.push(format!("Cargo.lock: `{name}` is a C library; the binary stays static"));
        }
        findings
    }

    fn id(&self, krate: &str) -> Option<&String> {
        self.ours.iter().find(|id| self.names.get(*id).is_some_and(|name| name == krate))
    }

    /// The workspace crates that `krate` names directly.
    fn direct_dependencies(&self, krate: &str) -> impl Iterator<Item = &str> {
        let needs = self.id(krate).and_then(|id| self.needs.get(id)).map(Vec::as_slice).unwrap_or_default();
        needs.iter().filter(|id| self.ours.contains(*id)).map(|id| self.names[id].as_str())
    }

    /// The names of all transitive dependencies of `krate`.
    fn transitive_dependencies(&self, krate: &str) -> BTreeSet<&str> {
        let mut seen = BTreeSet::new();
        let mut pending: Vec<&String> = self.id(krate).into_iter().collect();
        while let Some(id) = pending.pop() {
            let needs = self.needs.get(id).map(Vec::as_slice).unwrap_or_default();
            pending.extend(needs.iter().filter(|id| seen.insert(*id)));
        }
        seen.into_iter().map(|id| self.names[id].as_str()).collect()
    }
}

/// Whether a dependency is part of the program, and not only of its tests or its build.
fn is_normal(dependency: &Value) -> bool {
    dependency["dep_kinds"].as_array().is_some_and(|kinds| kinds.iter().any(|kind| kind["kind"].is_null()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// `domain` needs `helper` which needs `serde`; `fronts` names `backend`, and tests with it.
    fn sample(fronts_kind: &Value) -> CrateGraph {
        let packages =
            ["domain", "fronts", "backend", "helper", "serde"].map(|name| json!({"id": name, "name": name}));
        let node = |name: &str, needs: &[(&str, &Value)]| {
            let deps: Vec<Value> =
                needs.iter().map(|(pkg, kind)| json!({"pkg": pkg, "dep_kinds": [{"kind": kind}]})).collect();
            json!({"id": name, "deps": deps})
        };
        let normal = Value::Null;
        let metadata = json!({
            "packages": packages,
            "workspace_members": ["domain", "fronts", "backend"],
            "resolve": {"nodes": [
                node("domain", &[("helper", &normal)]), node("helper", &[("serde", &normal)]), node("serde", &[]),
                node("fronts", &[("backend", fronts_kind)]), node("backend", &[]),
            ]},
        });
        CrateGraph::from_metadata(&metadata).expect("it has the right form")
    }

    #[test]
    fn a_forbidden_crate_is_found_behind_another() {
        let findings = sample(&json!("dev")).check();
        assert_eq!(findings.len(), 1, "{findings:?}");
        assert!(findings[0].starts_with("domain: it reaches `serde`"), "{findings:?}");
    }

    #[test]
    fn a_front_below_the_core_is_found_unless_only_tests_need_it() {
        let findings = sample(&Value::Null).check();
        assert!(
            findings.iter().any(|finding| finding.starts_with("fronts: it names `backend`")),
            "{findings:?}"
        );
    }

    #[test]
    fn real_workspace_follows_the_rules() {
        assert_eq!(check_dependencies().expect("cargo answers"), Findings::new());
    }
}
