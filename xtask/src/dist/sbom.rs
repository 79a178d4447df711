//! The software bill of materials: every crate that becomes part of the binary, as CycloneDX 1.5.
//!
//! It is made from cargo's own resolution, without crates that only tests use.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::sha256_hex;
use crate::tools::workspace_root;

/// The package of the binary.
const ROOT_PACKAGE: &str = "coracle-cli";
/// The package of the program that the binary contains besides a part of itself.
const EMBEDDED_PACKAGE: &str = "coracle-agent";

pub(super) fn build_sbom(metadata: &Value, version: &str, time: u64) -> Result<Vec<u8>> {
    let lock =
        std::fs::read_to_string(workspace_root().join("Cargo.lock")).context("could not read Cargo.lock")?;
    let checksums = lock_checksums(&lock)?;
    let root = package_named(metadata, ROOT_PACKAGE).context("there is no package of the binary")?;
    let root = root["id"].as_str().context("a package has an id")?;
    let edges = dependency_edges(metadata);
    let embedded = package_named(metadata, EMBEDDED_PACKAGE).context("there is no package of the agent")?;
    let embedded = embedded["id"].as_str().context("a package has an id")?;
    let used = reachable_packages(&[root, embedded], &edges);
    let packages = metadata["packages"].as_array().context("metadata has packages")?;
    let by_id: BTreeMap<&str, &Value> =
        packages.iter().filter_map(|package| Some((package["id"].as_str()?, package))).collect();
    let reference = |id: &str| by_id.get(id).map(|package| package_url(package)).unwrap_or_default();
    let mut components: Vec<Value> = Vec::new();
    let mut dependencies: Vec<Value> = Vec::new();
    for id in &used {
        let package = by_id.get(id.as_str()).context("a package that is used is described")?;
        if id != root {
            components.push(sbom_component(package, &checksums));
        }
        let mut below: Vec<String> =
            edges.get(id.as_str()).into_iter().flatten().map(|id| reference(id)).collect();
        below.sort();
        dependencies.push(json!({ "ref": reference(id), "dependsOn": below }));
    }
    components.sort_by_key(|component| component["purl"].as_str().unwrap_or_default().to_owned());
    dependencies.sort_by_key(|entry| entry["ref"].as_str().unwrap_or_default().to_owned());
    let serial = sha256_hex(serde_json::to_string(&components)?.as_bytes());
    let document = json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": format!(
            "urn:uuid:{}-{}-5{}-8{}-{}", &serial[..8], &serial[8..12], &serial[13..16], &serial[17..20], &serial[20..32]
        ),
        "version": 1,
        "metadata": {
            "properties": [{ "name": "coracle:source-time", "value": time.to_string() }],
            "component": {
                "type": "application",
                "bom-ref": reference(root),
                "name": "coracle",
                "version": version,
                "licenses": [{ "expression": by_id[root]["license"].as_str().unwrap_or("Apache-2.0") }],
            },
        },
        "components": components,
        "dependencies": dependencies,
    });
    let mut bytes = serde_json::to_vec_pretty(&document)?;
    bytes.push(b'\n');
    Ok(bytes)
}

/// The member of this workspace with that name.
pub(super) fn package_named<'a>(metadata: &'a Value, name: &str) -> Option<&'a Value> {
    let packages = metadata["packages"].as_array()?;
    packages.iter().find(|package| package["name"] == name && package["source"].is_null())
}

fn sbom_component(package: &Value, checksums: &BTreeMap<(String, String), String>) -> Value {
    let text = |field: &str| package[field].as_str().unwrap_or_default().to_owned();
    let mut component = json!({
        "type": "library",
        "bom-ref": package_url(package),
        "name": text("name"),
        "version": text("version"),
        "purl": package_url(package),
    });
    if let Some(license) = package["license"].as_str() {
        // Before SPDX expressions, a slash meant a choice.
        component["licenses"] = json!([{ "expression": license.replace('/', " OR ") }]);
    }
    if let Some(checksum) = checksums.get(&(text("name"), text("version"))) {
        component["hashes"] = json!([{ "alg": "SHA-256", "content": checksum }]);
    }
    if let Some(repository) = package["repository"].as_str() {
        component["externalReferences"] = json!([{ "type": "vcs", "url": repository }]);
    }
    component
}

fn package_url(package: &Value) -> String {
    let text = |field: &str| package[field].as_str().unwrap_or_default();
    format!("pkg:cargo/{}@{}", text("name"), text("version").replace('+', "%2B"))
}

/// The dependencies of each package, except those of tests.
fn dependency_edges(metadata: &Value) -> BTreeMap<&str, Vec<&str>> {
    let nodes = metadata["resolve"]["nodes"].as_array().into_iter().flatten();
    let is_built = |dependency: &&Value| {
        let kinds = dependency["dep_kinds"].as_array();
        kinds.is_none_or(|kinds| kinds.iter().any(|kind| kind["kind"] != "dev"))
    };
    nodes
        .filter_map(|node| {
            let below = node["deps"].as_array()?.iter().filter(is_built);
            Some((node["id"].as_str()?, below.filter_map(|dependency| dependency["pkg"].as_str()).collect()))
        })
        .collect()
}

fn reachable_packages(roots: &[&str], edges: &BTreeMap<&str, Vec<&str>>) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut open = roots.to_vec();
    while let Some(id) = open.pop() {
        if found.insert(id.to_owned()) {
            open.extend(edges.get(id).into_iter().flatten());
        }
    }
    found
}

/// The checksums of Cargo.lock, by name and version.
fn lock_checksums(lock: &str) -> Result<BTreeMap<(String, String), String>> {
    let lock: toml::Table = toml::from_str(lock).context("Cargo.lock is not TOML")?;
    let packages = lock.get("package").and_then(toml::Value::as_array).into_iter().flatten();
    Ok(packages
        .filter_map(|package| {
            let text = |field: &str| package.get(field).and_then(toml::Value::as_str).map(str::to_owned);
            Some(((text("name")?, text("version")?), text("checksum")?))
        })
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metadata() -> Value {
        let package = |name: &str, source: Value| json!({ "id": name, "name": name, "version": "1.0.0", "source": source, "license": "MIT/Apache-2.0" });
        let built = |name: &str| json!({ "pkg": name, "dep_kinds": [{ "kind": null }] });
        let tested = |name: &str| json!({ "pkg": name, "dep_kinds": [{ "kind": "dev" }] });
        json!({
            "packages": [
                package("coracle-cli", Value::Null), package("used", json!("registry")),
                package("below", json!("registry")), package("of-tests", json!("registry")),
                package("coracle-agent", Value::Null), package("inside", json!("registry")),
            ],
            "resolve": { "nodes": [
                { "id": "coracle-cli", "deps": [built("used"), tested("of-tests")] },
                { "id": "used", "deps": [built("below")] },
                { "id": "coracle-agent", "deps": [built("inside")] }, { "id": "inside", "deps": [] },
                { "id": "below", "deps": [] }, { "id": "of-tests", "deps": [] },
            ]},
        })
    }

    #[test]
    fn crates_of_the_binary_are_listed_and_those_of_tests_are_not() {
        let bytes = build_sbom(&metadata(), "1.0.0", 0).expect("it is described");
        let document: Value = serde_json::from_slice(&bytes).expect("it is JSON");
        let names: Vec<&str> = document["components"]
            .as_array()
            .expect("a list")
            .iter()
            .filter_map(|component| component["name"].as_str())
            .collect();
        assert_eq!(names, ["below", "coracle-agent", "inside", "used"]);
        assert_eq!(document["components"][0]["licenses"][0]["expression"], "MIT OR Apache-2.0");
        let root = &document["dependencies"][2];
        assert_eq!(
            root,
            &json!({ "ref": "pkg:cargo/coracle-cli@1.0.0", "dependsOn": ["pkg:cargo/used@1.0.0"] })
        );
    }

    #[test]
    fn checksums_are_found_by_name_and_version() {
        let lock = "[[package]]\nname = \"a\"\nversion = \"1.0.0\"\nchecksum = \"ff\"\n[[package]]\nname = \"cli\"\nversion = \"0\"\n";
        let found = lock_checksums(lock).expect("it is TOML");
        assert_eq!(found, BTreeMap::from([(("a".to_owned(), "1.0.0".to_owned()), "ff".to_owned())]));
    }
}
