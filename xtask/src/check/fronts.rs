//! Builds each front by itself, and the others without it.
//!
//! A front that compiles only together with another depends on it. A front that cannot be removed by
//! deleting its folder, its row in the registry and its `mod` line is known elsewhere.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::Findings;
use super::sources::FRONTS;
use crate::tools::{cargo_command, command_output, workspace_root};

pub(super) fn check_fronts() -> Result<Findings> {
    let text =
        command_output(&mut cargo_command(&["metadata", "--format-version", "1", "--locked", "--no-deps"]))?;
    let metadata: Value = serde_json::from_str(&text).context("cargo's metadata is not JSON")?;
    let names = front_features(&metadata).context("`coracle-fronts` is not in cargo's metadata")?;
    let mut findings = Findings::new();
    if names != FRONTS {
        findings.push(format!("xtask/src/check/sources.rs: the fronts are {names:?}, not {FRONTS:?}"));
    }
    for front in &names {
        let others: Vec<&str> = names.iter().filter(|name| *name != front).map(String::as_str).collect();
        if let Err(error) = build_without_front(front, &others.join(",")) {
            findings.push(format!("fronts: `{front}` cannot be removed by its folder and row ({error:#})"));
        }
    }
    for feature in names {
        let words = [
            "check",
            "--quiet",
            "--locked",
            "--package",
            "coracle-fronts",
            "--no-default-features",
            "--features",
        ];
        let mut alone = cargo_command(&words);
        alone.arg(&feature);
        if let Err(error) = command_output(&mut alone) {
            findings.push(format!(
                "fronts: `{feature}` does not build alone; no front knows another ({error:#})"
            ));
        }
    }
    Ok(findings)
}

/// Removes a front from a copy of the crate and checks what is left, with its tests. The other crates
/// are used in place, so that only the copy is compiled.
fn build_without_front(front: &str, others: &str) -> Result<()> {
    let root = workspace_root();
    let copy = root.join("target/check/without-front").join(front);
    if copy.exists() {
        fs::remove_dir_all(&copy)?;
    }
    let crate_dir = copy.join("crates/fronts");
    copy_tree(&root.join("crates/fronts"), &crate_dir)?;
    fs::copy(root.join("Cargo.lock"), copy.join("Cargo.lock"))?;
    let manifest = fs::read_to_string(root.join("Cargo.toml"))?;
    fs::write(copy.join("Cargo.toml"), workspace_of_copy(&manifest, &root))?;
    fs::remove_dir_all(crate_dir.join("src").join(front))?;
    remove_lines(&crate_dir.join("src/registry.rs"), &format!("&crate::{front}::FRONT,"))?;
    remove_lines(&crate_dir.join("src/lib.rs"), &format!("mod {front};"))?;
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from);
    let mut check = cargo_command(&["check", "--quiet", "--tests", "--package", "coracle-fronts"]);
    check.args(["--no-default-features", "--features", others]).arg("--manifest-path");
    check.arg(copy.join("Cargo.toml")).arg("--target-dir").arg(target);
    command_output(&mut check).map(drop)
}

/// Converts the workspace's manifest to one with `fronts` alone, which uses the other crates in place.
fn workspace_of_copy(manifest: &str, root: &Path) -> String {
    let in_place = format!("path = \"{}/crates/", root.display());
    let lines = manifest.lines().filter(|line| !line.starts_with("default-members"));
    let lines = lines.map(|line| match line {
        _ if line.starts_with("members") => "members = [\"crates/fronts\"]".to_owned(),
        _ if line.starts_with("fronts ") => line.to_owned(),
        _ => line.replace("path = \"crates/", &in_place),
    });
    lines.map(|line| line + "\n").collect()
}

fn copy_tree(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let there = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy_tree(&entry.path(), &there)?;
        } else {
            fs::copy(entry.path(), there)?;
        }
    }
    Ok(())
}

/// Removes the lines with exactly this text, each with the condition on the line before it.
fn remove_lines(path: &Path, text: &str) -> Result<()> {
    let mut kept: Vec<&str> = Vec::new();
    let content = fs::read_to_string(path)?;
    for line in content.lines() {
        if line.trim() != text {
            kept.push(line);
        } else if kept.last().is_some_and(|before| before.trim().starts_with("#[cfg(feature")) {
            kept.pop();
        }
    }
    ensure!(kept.len() < content.lines().count(), "{} has no line `{text}`", path.display());
    Ok(fs::write(path, kept.join("\n") + "\n")?)
}

/// The names of the fronts: every feature except `default`.
fn front_features(metadata: &Value) -> Option<Vec<String>> {
    let packages = metadata["packages"].as_array()?;
    let fronts = packages.iter().find(|package| package["name"] == "coracle-fronts")?;
    let names = fronts["features"].as_object()?.keys().filter(|name| *name != "default");
    Some(names.cloned().collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn copied_workspace_has_one_member() {
        let manifest = "members = [\"crates/*\"]\ndefault-members = [\"x\"]\n\
                        fronts = { path = \"crates/fronts\" }\nwire = { path = \"crates/wire\" }\n";
        let expected = "members = [\"crates/fronts\"]\nfronts = { path = \"crates/fronts\" }\n\
                        wire = { path = \"/r/crates/wire\" }\n";
        assert_eq!(workspace_of_copy(manifest, Path::new("/r")), expected);
    }

    #[test]
    fn every_feature_but_the_default_is_a_front() {
        let features_of = |named: Value| {
            front_features(&json!({"packages": [{"name": "coracle-fronts", "features": named}]}))
        };
        let found = features_of(json!({"default": ["a"], "a": [], "b": []}));
        assert_eq!(found, Some(vec!["a".to_owned(), "b".to_owned()]));
        assert_eq!(front_features(&json!({"packages": []})), None);
    }
}
