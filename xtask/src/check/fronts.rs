//! Tests each front by itself, in a copy from which all others are removed.
//!
//! A front that works only together with another depends on it. A front that cannot be removed by
//! deleting its folders, its row in the registry and its `mod` lines is known elsewhere.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::Findings;
use super::sources::FRONTS;
use super::tree::TextFile;
use super::workspace_features;
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
        if let Err(error) = test_alone(front, &others) {
            let others = others.join("`, `");
            findings.push(format!("fronts: `{front}` fails once `{others}` is removed ({error:#})"));
        }
    }
    Ok(findings)
}

/// Finds items of shared code that exist only with one front: a condition `#[cfg(feature = "...")]` on a line of its own.
/// If there are none, the binary compiles with any set of fronts, so it need not be built for each.
pub(super) fn check_conditions(files: &[TextFile]) -> Findings {
    let shared = files.iter().filter(|file| is_shared_code(&file.path));
    shared.flat_map(|file| conditional_items(&file.path, &file.text)).collect()
}

fn is_shared_code(path: &str) -> bool {
    let Some(path) = path.strip_prefix("crates/fronts/src/") else { return false };
    path != "registry.rs" && !FRONTS.iter().any(|front| path.starts_with(&format!("{front}/")))
}

/// The items behind the feature of a front, except the declaration of the front's own module.
fn conditional_items(path: &str, text: &str) -> Findings {
    let lines = text.lines().map(str::trim).enumerate();
    let pairs = lines.zip(text.lines().map(str::trim).skip(1));
    let found = pairs.filter_map(|((index, line), next)| {
        let front = line.strip_prefix("#[cfg(feature = \"")?.strip_suffix("\")]")?;
        let is_foreign = FRONTS.contains(&front) && next != format!("mod {front};");
        is_foreign.then(|| {
            format!(
                "{path}:{}: `{next}` exists only with the front `{front}`; give it a feature `kit-…`",
                index + 1
            )
        })
    });
    found.collect()
}

/// Removes all other fronts from a copy of the crate and runs the tests that are left. The other crates
/// are used in place, so that only the copy is compiled for each front.
fn test_alone(front: &str, others: &[&str]) -> Result<()> {
    let root = workspace_root();
    let copy = root.join("target/check/front-alone").join(front);
    if copy.exists() {
        fs::remove_dir_all(&copy)?;
    }
    // The same path below another root would give the artifacts of the copy the names of the real ones.
    let crate_dir = copy.join(front);
    copy_tree(&root.join("crates/fronts"), &crate_dir)?;
    fs::copy(root.join("Cargo.lock"), copy.join("Cargo.lock"))?;
    for (from, to, member) in [
        (root.join("Cargo.toml"), copy.join("Cargo.toml"), Some(front)),
        (root.join("crates/fronts/Cargo.toml"), crate_dir.join("Cargo.toml"), None),
    ] {
        fs::write(to, manifest_of_copy(&fs::read_to_string(from)?, &root, member))?;
    }
    let manifest = crate_dir.join("Cargo.toml");
    let features = workspace_features::write_crate(&copy, front)?;
    fs::write(&manifest, fs::read_to_string(&manifest)? + &features)?;
    for other in others {
        remove_front(&crate_dir, other)?;
    }
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from);
    let cargo = |words: &[&str]| {
        let mut command = cargo_command(words);
        command.args([
            "--quiet",
            "--package",
            "coracle-fronts",
            "--no-default-features",
            "--features",
            front,
        ]);
        command.arg("--manifest-path").arg(copy.join("Cargo.toml")).arg("--target-dir").arg(&target);
        command_output(&mut command)
    };
    // The program that the tests start.
    cargo(&["build", "--examples"])?;
    // Unit tests of the library would have it compiled twice; they run with all fronts.
    cargo(&["test", "--test", "http"]).map(drop)
}

/// Deletes a front as ARCHITECTURE.md says, and its tests in the same way.
fn remove_front(crate_dir: &Path, front: &str) -> Result<()> {
    for folder in ["src", "tests/http"] {
        fs::remove_dir_all(crate_dir.join(folder).join(front))?;
    }
    // A folder may hold the rows of several APIs.
    remove_lines(&crate_dir.join("src/registry.rs"), &format!("&crate::{front}::"))?;
    for file in ["src/lib.rs", "tests/http/main.rs"] {
        remove_lines(&crate_dir.join(file), &format!("mod {front};"))?;
    }
    Ok(())
}

/// Converts a manifest to that of the copy: its one member is in the folder `member`, and all other crates
/// are used in place.
fn manifest_of_copy(manifest: &str, root: &Path, member: Option<&str>) -> String {
    let crates = format!("{}/crates/", root.display());
    let member = member.unwrap_or_default();
    let lines = manifest.lines().filter(|line| !line.starts_with("default-members"));
    let lines = lines.map(|line| match line {
        _ if line.starts_with("members") => format!("members = [\"{member}\"]"),
        _ if line.starts_with("fronts ") => line.replace("\"crates/fronts\"", &format!("\"{member}\"")),
        _ => line
            .replace("path = \"crates/", &format!("path = \"{crates}"))
            .replace("path = \"../", &format!("path = \"{crates}")),
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

/// Removes the lines that begin with this text, each with the condition on the line before it.
fn remove_lines(path: &Path, text: &str) -> Result<()> {
    let mut kept: Vec<&str> = Vec::new();
    let content = fs::read_to_string(path)?;
    for line in content.lines() {
        if !line.trim().starts_with(text) {
            kept.push(line);
        } else if kept.last().is_some_and(|before| before.trim().starts_with("#[cfg(feature")) {
            kept.pop();
        }
    }
    ensure!(kept.len() < content.lines().count(), "{} has no line `{text}`", path.display());
    Ok(fs::write(path, kept.join("\n") + "\n")?)
}

/// The names of the fronts: every feature except `default` and those of the kit.
fn front_features(metadata: &Value) -> Option<Vec<String>> {
    let packages = metadata["packages"].as_array()?;
    let fronts = packages.iter().find(|package| package["name"] == "coracle-fronts")?;
    let names =
        fronts["features"].as_object()?.keys().filter(|name| *name != "default" && !name.starts_with("kit-"));
    Some(names.cloned().collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn copied_manifests_use_all_other_crates_in_place() {
        let workspace = "members = [\"crates/*\"]\ndefault-members = [\"x\"]\n\
                         fronts = { path = \"crates/fronts\" }\nwire = { path = \"crates/wire\" }\n";
        let expected = "members = [\"one\"]\nfronts = { path = \"one\" }\n\
                        wire = { path = \"/r/crates/wire\" }\n";
        assert_eq!(manifest_of_copy(workspace, Path::new("/r"), Some("one")), expected);
        let (member, expected) = ("path = \"../agent/x.rs\"\n", "path = \"/r/crates/agent/x.rs\"\n");
        assert_eq!(manifest_of_copy(member, Path::new("/r"), None), expected);
    }

    #[test]
    fn shared_code_does_not_depend_on_the_feature_of_a_front() {
        let module = "#[cfg(feature = \"aio\")]\nmod aio;\n#[cfg(feature = \"kit-mcp\")]\nmod mcp;\n";
        assert_eq!(conditional_items("lib.rs", module), Findings::new());
        let found = conditional_items("kit/mod.rs", "\n#[cfg(feature = \"aio\")]\npub(crate) mod mcp;\n");
        assert!(
            matches!(&found[..], [one] if one.starts_with("kit/mod.rs:2: `pub(crate) mod mcp;`")),
            "{found:?}"
        );
        for (path, expected) in [("kit/mod.rs", true), ("registry.rs", false), ("aio/mod.rs", false)] {
            assert_eq!(is_shared_code(&format!("crates/fronts/src/{path}")), expected, "{path}");
        }
    }

    #[test]
    fn every_feature_but_the_default_and_the_kits_is_a_front() {
        let features_of = |named: Value| {
            front_features(&json!({"packages": [{"name": "coracle-fronts", "features": named}]}))
        };
        let found = features_of(json!({"default": ["a"], "a": ["kit-x"], "b": [], "kit-x": []}));
        assert_eq!(found, Some(vec!["a".to_owned(), "b".to_owned()]));
        assert_eq!(front_features(&json!({"packages": []})), None);
    }
}
