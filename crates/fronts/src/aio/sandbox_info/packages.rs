//! The packages that are installed in a sandbox.

use axum::Json;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::short_command::read_command_output;
use crate::aio::envelope::{ResponseEnvelope, data_response};
use crate::aio::problem::AioProblem;
use crate::aio::target::AioTarget;

/// How many packages are listed.
const MAX_PACKAGES: usize = 10_000;
/// The longest name or version that is listed.
const MAX_TEXT_CHARS: usize = 256;

/// Prints a JSON list, without pip, which an image may lack.
const PYTHON_SCRIPT: &str = r#"command -v python3 >/dev/null && exec python3 -c '
import importlib.metadata as m, json
found = {(d.metadata["Name"] or "", d.version or "") for d in m.distributions()}
print(json.dumps([{"name": n, "version": v} for n, v in sorted(found) if n]))
'; echo '[]'"#;

/// Prints the tree of global packages as JSON.
const NODE_SCRIPT: &str =
    "command -v npm >/dev/null && exec npm ls --global --depth 0 --json 2>/dev/null; echo '{}'";

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::aio) struct InstalledPackage {
    pub(in crate::aio) name: String,
    pub(in crate::aio) version: String,
}

/// `GET /v1/sandbox/packages/python`
pub(in crate::aio) async fn list_python_packages(
    target: AioTarget,
) -> Result<Json<ResponseEnvelope<Vec<InstalledPackage>>>, AioProblem> {
    let printed = read_command_output(&target.sandbox, PYTHON_SCRIPT).await?;
    let packages = serde_json::from_str::<Vec<InstalledPackage>>(&printed);
    packages.map(|packages| data_response(bounded(packages))).map_err(|_malformed| malformed_list())
}

/// `GET /v1/sandbox/packages/nodejs`
pub(in crate::aio) async fn list_node_packages(
    target: AioTarget,
) -> Result<Json<ResponseEnvelope<Vec<InstalledPackage>>>, AioProblem> {
    let printed = read_command_output(&target.sandbox, NODE_SCRIPT).await?;
    let tree = serde_json::from_str::<Value>(&printed).map_err(|_malformed| malformed_list())?;
    Ok(data_response(bounded(packages_of_tree(&tree))))
}

/// Lists the packages at the top of npm's tree.
fn packages_of_tree(tree: &Value) -> Vec<InstalledPackage> {
    let packages = tree.get("dependencies").and_then(Value::as_object);
    let packages = packages.into_iter().flatten().map(|(name, package)| InstalledPackage {
        name: name.clone(),
        version: package.get("version").and_then(Value::as_str).unwrap_or_default().to_owned(),
    });
    packages.collect()
}

fn bounded(mut packages: Vec<InstalledPackage>) -> Vec<InstalledPackage> {
    packages.truncate(MAX_PACKAGES);
    let is_short = |text: &str| text.chars().nth(MAX_TEXT_CHARS).is_none();
    packages.retain(|package| is_short(&package.name) && is_short(&package.version));
    packages
}

fn malformed_list() -> AioProblem {
    AioProblem::bad_request("the list of packages of this sandbox cannot be read")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn packages_of_a_tree_are_listed() {
        let tree = json!({"name": "lib", "dependencies": {"npm": {"version": "11.0.1"}, "odd": 7}});
        let package =
            |name: &str, version: &str| InstalledPackage { name: name.into(), version: version.into() };
        assert_eq!(packages_of_tree(&tree), [package("npm", "11.0.1"), package("odd", "")]);
        assert_eq!(packages_of_tree(&json!([])), []);
    }

    #[test]
    fn long_texts_are_left_out() {
        let package = InstalledPackage { name: "n".repeat(MAX_TEXT_CHARS + 1), version: String::new() };
        assert_eq!(bounded(vec![package]), []);
    }
}
