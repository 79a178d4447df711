//! A crate that gives a copy of `fronts` the features that its packages have in the whole workspace.
//!
//! Cargo compiles a package once for each set of features. The copy alone needs fewer of them, so nearly all of its
//! packages would be compiled a second time. The cost: a front that lacks a feature of a package is not noticed.

use std::collections::{BTreeMap, BTreeSet};

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use crate::tools::{cargo_command, command_output};

/// The features of each package of a selection, by `name` and `version`.
type FeatureSets = BTreeMap<(String, String), BTreeSet<String>>;

/// The packages of a selection: those of the programs, and those of build scripts and macros.
struct SelectedPackages {
    target: FeatureSets,
    host: FeatureSets,
}

/// The name of the crate, and of its folder beside the copy.
const NAME: &str = "workspace-features";

/// Writes the crate into `directory`. It uses nothing of its dependencies, which have the missing features. Returns the
/// lines to append to the manifest of the copy beside it, which has only this front.
pub(super) fn write_crate(directory: &Path, front: &str) -> Result<String> {
    let workspace = SelectedPackages::read(&["--workspace"])?;
    let alone = ["--package", "coracle-fronts", "--no-default-features", "--features", front];
    let copy = SelectedPackages::read(&alone)?;
    let target = manifest_tables("dependencies", &copy.target, &workspace.target);
    let host = manifest_tables("build-dependencies", &copy.host, &workspace.host);
    let package = format!("[package]\nname = \"{NAME}\"\nedition = \"2024\"\npublish = false\n");
    let sources = directory.join(NAME).join("src");
    fs::create_dir_all(&sources)?;
    fs::write(directory.join(NAME).join("Cargo.toml"), package + &target + &host)?;
    fs::write(sources.join("lib.rs"), "")?;
    Ok(format!("\n[dev-dependencies.{NAME}]\npath = \"../{NAME}\"\n"))
}

impl SelectedPackages {
    fn read(selection: &[&str]) -> Result<Self> {
        let target = read_tree(selection, "normal,dev,no-proc-macro")?;
        let all = read_tree(selection, "normal,dev,build")?;
        // A package that both need has two sets of features if they differ.
        let only_host = all.difference(&target).cloned().collect();
        Ok(Self { target: feature_sets(target), host: feature_sets(only_host) })
    }
}

/// The lines of cargo's tree, each `name version|features`.
fn read_tree(selection: &[&str], edges: &str) -> Result<BTreeSet<String>> {
    let version = command_output(std::process::Command::new("rustc").arg("-vV"))?;
    let host = version.lines().find_map(|line| line.strip_prefix("host: "));
    let host = host.context("rustc does not print its host")?;
    let mut tree = cargo_command(&["tree", "--locked", "--prefix", "none", "--format", "{p}|{f}"]);
    tree.args(["--edges", edges, "--target", host]).args(selection);
    let lines = command_output(&mut tree)?;
    Ok(lines.lines().map(|line| line.trim_end_matches(" (*)").to_owned()).collect())
}

/// The packages of an index among the lines; those of the workspace have a path behind their version.
fn feature_sets(lines: BTreeSet<String>) -> FeatureSets {
    let sets = lines.iter().filter_map(|line| {
        let (package, features) = line.split_once('|')?;
        let (name, version) = package.split_once(" v")?;
        let features = features.split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect();
        (!version.contains(' ')).then(|| ((name.to_owned(), version.to_owned()), features))
    });
    sets.collect()
}

fn manifest_tables(section: &str, copy: &FeatureSets, workspace: &FeatureSets) -> String {
    let differing = copy.iter().filter_map(|(package, features)| {
        let wanted = workspace.get(package).filter(|wanted| *wanted != features)?;
        Some((package, wanted))
    });
    let tables = differing.enumerate().map(|(index, ((name, version), features))| {
        let features: Vec<String> = features.iter().map(|feature| format!("{feature:?}")).collect();
        format!(
            "\n[{section}.features-{index}]\npackage = {name:?}\nversion = \"={version}\"\n\
             default-features = false\nfeatures = [{}]\n",
            features.join(", ")
        )
    });
    tables.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_packages_with_other_features_are_listed() {
        let sets = |lines: &[&str]| feature_sets(lines.iter().map(|line| (*line).to_owned()).collect());
        let copy = sets(&["log v0.4.1|", "same v1.0.0|a", "coracle-wire v0.1.0 (/r/crates/wire)|"]);
        let workspace = sets(&["log v0.4.1|alloc,std", "same v1.0.0|a", "other v2.0.0|b"]);
        let expected = "\n[dependencies.features-0]\npackage = \"log\"\nversion = \"=0.4.1\"\n\
                        default-features = false\nfeatures = [\"alloc\", \"std\"]\n";
        assert_eq!(manifest_tables("dependencies", &copy, &workspace), expected);
    }
}
