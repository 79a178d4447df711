//! The packages that may become part of the binary: bans, licences and sources, with deny.toml as the data.
//!
//! Where `cargo deny` is installed it runs as well, and adds the advisories. Building it takes longer than the
//! rest of the invariants together, so it is not installed for this; what it would find in deny.toml is found
//! here, from cargo's own metadata.

mod licences;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::process::{Command, Stdio};

use anyhow::{Context, Result};
use serde_json::Value;

use self::licences::LicenceExpression;
use super::Findings;
use crate::report::say;
use crate::tools::{cargo_command, command_output, workspace_root};

/// The index of crates.io, as cargo names it.
const PUBLIC_INDEX: &str = "registry+https://github.com/rust-lang/crates.io-index";
/// The outcome of `cargo deny` without its database.
const NO_DATABASE: &str = "failed to fetch advisory database";

/// The checks of `cargo deny` that need no database.
const CHECKS_WITHOUT_DATABASE: [&str; 3] = ["bans", "licenses", "sources"];

/// The rules of deny.toml that are checked here.
struct PackageRules {
    targets: Vec<String>,
    licences: BTreeSet<String>,
    /// Banned packages, with the reason.
    banned: BTreeMap<String, String>,
}

impl PackageRules {
    fn parse(text: &str) -> Result<Self> {
        let rules: toml::Table = text.parse().context("deny.toml is not TOML")?;
        let list = |section: &str, name: &str| -> Result<Vec<toml::Value>> {
            let found =
                rules.get(section).and_then(|section| section.get(name)).and_then(toml::Value::as_array);
            Ok(found.with_context(|| format!("deny.toml has no list {section}.{name}"))?.clone())
        };
        let words = |values: Vec<toml::Value>| -> Vec<String> {
            values.iter().filter_map(|value| value.as_str().map(str::to_owned)).collect()
        };
        let banned = list("bans", "deny")?.into_iter().filter_map(|ban| {
            let field = |name: &str| ban.get(name).and_then(toml::Value::as_str).map(str::to_owned);
            Some((field("crate")?, field("reason").unwrap_or_default()))
        });
        Ok(Self {
            targets: words(list("graph", "targets")?),
            licences: words(list("licenses", "allow")?).into_iter().collect(),
            banned: banned.collect(),
        })
    }
}

pub(super) fn check_packages() -> Result<Findings> {
    let text = fs::read_to_string(workspace_root().join("deny.toml")).context("could not read deny.toml")?;
    let rules = PackageRules::parse(&text)?;
    let mut command = cargo_command(&["metadata", "--format-version=1", "--locked"]);
    for target in &rules.targets {
        command.arg(format!("--filter-platform={target}"));
    }
    let metadata: Value =
        serde_json::from_str(&command_output(&mut command)?).context("cargo's metadata is not JSON")?;
    let mut findings = check_metadata(&rules, &metadata);
    findings.extend(run_cargo_deny()?);
    Ok(findings)
}

/// Checks each package that one of the targets needs.
fn check_metadata(rules: &PackageRules, metadata: &Value) -> Findings {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let used: BTreeSet<String> =
        list(&metadata["resolve"]["nodes"]).iter().map(|node| text(&node["id"])).collect();
    let ours: BTreeSet<String> = list(&metadata["workspace_members"]).iter().map(text).collect();
    let mut findings = Findings::new();
    for package in list(&metadata["packages"]).iter().filter(|package| used.contains(&text(&package["id"]))) {
        let shown = format!("{} {}", text(&package["name"]), text(&package["version"]));
        let is_ours = ours.contains(&text(&package["id"]));
        if let Some(reason) = rules.banned.get(&text(&package["name"])) {
            findings.push(format!("Cargo.lock: `{shown}` is banned; {reason}"));
        }
        for dependency in list(&package["dependencies"]).iter().filter(|_| is_ours) {
            // A path dependency of the workspace has no version.
            if text(&dependency["req"]) == "*" && dependency["path"].is_null() {
                findings.push(format!("{shown}: any version of `{}` is allowed", text(&dependency["name"])));
            }
        }
        if is_ours {
            continue;
        }
        if package["source"] != PUBLIC_INDEX {
            findings.push(format!("Cargo.lock: `{shown}` comes from {}", package["source"]));
        }
        match LicenceExpression::parse(&text(&package["license"])) {
            Some(licence) if licence.is_allowed(&rules.licences) => {}
            _ => findings.push(format!("Cargo.lock: the licence of `{shown}` is {}", package["license"])),
        }
    }
    findings
}

/// Runs `cargo deny` if it is installed, and says what stays unchecked otherwise.
fn run_cargo_deny() -> Result<Findings> {
    let skipped = |why: &str| say(format_args!("SKIPPED advisories of packages: {why}"));
    let here =
        Command::new("cargo-deny").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    if !here.is_ok_and(|status| status.success()) {
        skipped("cargo-deny is not installed (`cargo install --locked cargo-deny`)");
        return Ok(Findings::new());
    }
    let said = deny_complaints(&[])?;
    if said.as_ref().is_some_and(|said| said.contains(NO_DATABASE)) {
        skipped("the advisory database cannot be fetched");
        return Ok(to_findings(deny_complaints(&CHECKS_WITHOUT_DATABASE)?));
    }
    Ok(to_findings(said))
}

/// Runs these checks of `cargo deny`, or all, and returns what it says if one fails.
fn deny_complaints(checks: &[&str]) -> Result<Option<String>> {
    let mut command = cargo_command(&["deny", "--color=never", "check", "--hide-inclusion-graph"]);
    let ended = command.args(checks).output().context("could not start `cargo deny`")?;
    let failed = !ended.status.success();
    Ok(failed.then(|| String::from_utf8_lossy(&ended.stderr).into_owned()))
}

fn to_findings(complaints: Option<String>) -> Findings {
    complaints.map(|said| format!("cargo deny check: {said}")).into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const RULES: &str = r#"
        [graph]
        targets = ["x86_64-unknown-linux-gnu"]
        [licenses]
        allow = ["MIT", "Apache-2.0"]
        [bans]
        deny = [{ crate = "openssl-sys", reason = "a C library" }]
    "#;

    /// The findings about one foreign package with these fields.
    fn findings(name: &str, licence: &str, source: &str) -> Findings {
        let package = json!({
            "id": "p", "name": name, "version": "1.0.0", "license": licence, "source": source, "dependencies": [],
        });
        let metadata = json!({
            "packages": [package], "workspace_members": [], "resolve": {"nodes": [{"id": "p"}]},
        });
        check_metadata(&PackageRules::parse(RULES).expect("the rules parse"), &metadata)
    }

    #[test]
    fn packages_that_break_a_rule_are_found() {
        assert_eq!(findings("a", "MIT OR Apache-2.0", PUBLIC_INDEX), Findings::new());
        for (name, licence, source, words) in [
            ("openssl-sys", "MIT", PUBLIC_INDEX, "is banned; a C library"),
            ("a", "GPL-3.0", PUBLIC_INDEX, "the licence"),
            ("a", "MIT AND GPL-3.0", PUBLIC_INDEX, "the licence"),
            ("a", "", PUBLIC_INDEX, "the licence"),
            ("a", "MIT", "git+https://example.com/a", "comes from"),
        ] {
            let found = findings(name, licence, source);
            assert!(found.len() == 1 && found[0].contains(words), "{name} {licence} {source}: {found:?}");
        }
    }

    #[test]
    fn own_dependency_on_any_version_is_found() {
        let dependency = |path: Value| json!({"name": "d", "req": "*", "path": path});
        let own = |path: Value| {
            let package = json!({
                "id": "p", "name": "own", "version": "1.0.0", "dependencies": [dependency(path)],
            });
            let metadata = json!({"packages": [package], "workspace_members": ["p"], "resolve": {"nodes": [{"id": "p"}]}});
            check_metadata(&PackageRules::parse(RULES).expect("the rules parse"), &metadata)
        };
        assert_eq!(own(Value::Null).len(), 1);
        assert_eq!(own(json!("/somewhere")), Findings::new());
    }
}
