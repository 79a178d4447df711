//! Tools that describe the sandbox.

use axum::extract::State;
use serde::Deserialize;
use serde_json::json;

use super::{ToolContext, read_arguments};
use crate::aio::sandbox_info::{self, InstalledPackage};
use crate::kit::mcp::{ToolArguments, ToolFuture, ToolOutput};

/// `sandbox_get_context`
pub(super) fn get_context(context: ToolContext, _: ToolArguments) -> ToolFuture {
    Box::pin(async move {
        let described = sandbox_info::get_context(State(context.state), context.target).await?.0;
        let described = serde_json::to_value(described).expect("the context consists of texts");
        let [info, home_dir, workspace, version] =
            ["data", "home_dir", "workspace", "version"].map(|field| described[field].clone());
        let data = json!({"info": info, "home_dir": home_dir, "workspace": workspace, "version": version});
        Ok(ToolOutput::from_data(data))
    })
}

#[derive(Deserialize)]
struct PackagesArguments {
    language: Option<PackageLanguage>,
}

/// Other names that models use are understood.
#[derive(Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum PackageLanguage {
    #[serde(alias = "py")]
    Python,
    #[serde(alias = "node", alias = "javascript", alias = "js")]
    NodeJs,
}

/// `sandbox_get_packages`
pub(super) fn get_packages(context: ToolContext, arguments: ToolArguments) -> ToolFuture {
    Box::pin(async move {
        let PackagesArguments { language } = read_arguments(arguments)?;
        let mut lists = Vec::new();
        if language != Some(PackageLanguage::NodeJs) {
            let listed = sandbox_info::list_python_packages(context.target.clone()).await?.0;
            lists.push(("python", "Python", listed.data.unwrap_or_default()));
        }
        if language != Some(PackageLanguage::Python) {
            let listed = sandbox_info::list_node_packages(context.target).await?.0;
            lists.push(("nodejs", "Node.js", listed.data.unwrap_or_default()));
        }
        let texts: Vec<String> =
            lists.iter().map(|(_, title, packages)| packages_text(title, packages)).collect();
        let data = lists.into_iter().map(|(name, _, packages)| (name.to_owned(), json!(packages))).collect();
        Ok(ToolOutput { text: texts.join("\n"), data, images: Vec::new() })
    })
}

fn packages_text(title: &str, packages: &[InstalledPackage]) -> String {
    let lines = packages.iter().map(|package| format!("  - {}=={}", package.name, package.version));
    let lines: Vec<String> = std::iter::once(format!("{title} Packages:")).chain(lines).collect();
    lines.join("\n")
}
