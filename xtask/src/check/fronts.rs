//! Builds each front by itself: a front that compiles only together with another depends on it.

use anyhow::{Context, Result};
use serde_json::Value;

use super::Findings;
use crate::tools::{cargo, output};

pub(super) fn check() -> Result<Findings> {
    let text = output(&mut cargo(&["metadata", "--format-version", "1", "--locked", "--no-deps"]))?;
    let metadata: Value = serde_json::from_str(&text).context("cargo's metadata is not JSON")?;
    let names = features(&metadata).context("`fronts` is not in cargo's metadata")?;
    let mut findings = Findings::new();
    for feature in names {
        let words =
            ["check", "--quiet", "--locked", "--package", "fronts", "--no-default-features", "--features"];
        let mut alone = cargo(&words);
        alone.arg(&feature);
        if let Err(error) = output(&mut alone) {
            findings.push(format!(
                "fronts: `{feature}` does not build alone; no front knows another ({error:#})"
            ));
        }
    }
    Ok(findings)
}

/// The names of the fronts: every feature except `default`.
fn features(metadata: &Value) -> Option<Vec<String>> {
    let packages = metadata["packages"].as_array()?;
    let fronts = packages.iter().find(|package| package["name"] == "fronts")?;
    let names = fronts["features"].as_object()?.keys().filter(|name| *name != "default");
    Some(names.cloned().collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn every_feature_but_the_default_is_a_front() {
        let features_of =
            |named: Value| features(&json!({"packages": [{"name": "fronts", "features": named}]}));
        let found = features_of(json!({"default": ["a"], "a": [], "b": []}));
        assert_eq!(found, Some(vec!["a".to_owned(), "b".to_owned()]));
        assert_eq!(features(&json!({"packages": []})), None);
    }
}
