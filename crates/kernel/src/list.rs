//! Lists the languages, kernels and tools of an image. It only reads files: running a program to
//! ask for its version might have any effect.

mod packages;

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Result;
use serde::Serialize;

use crate::jupyter::kernel_specs;
use crate::line_protocol::{KernelEvent, MimeBundle, OrderReader, ReportWriter};
use crate::program_search;
use packages::PackageVersions;

/// Languages that do not need Jupyter, the programs that run them, and the packages of those
/// programs.
const BUILT_IN_LANGUAGES: &[(&str, &[&str], &[&str])] = &[
    ("python", &["python3"], &["python3", "python3-minimal"]),
    ("javascript", &["node", "nodejs"], &["nodejs"]),
    ("typescript", &["node", "nodejs"], &["nodejs"]),
    ("bash", &["bash", "sh"], &["bash", "dash", "busybox"]),
];

/// Tools that authors of coding agents often need.
const PROBED_TOOLS: &[&str] = &[
    "bash", "sh", "git", "curl", "wget", "tar", "unzip", "make", "gcc", "jq", "rg", "pip", "pip3", "uv",
    "npm", "pnpm", "go", "cargo", "java", "apt-get", "apk",
];

#[derive(Debug, Serialize)]
struct ImageInventory {
    languages: Vec<FoundInterpreter>,
    jupyter: Vec<FoundJupyterKernel>,
    tools: BTreeMap<&'static str, PathBuf>,
}

#[derive(Debug, Serialize)]
struct FoundInterpreter {
    language: &'static str,
    interpreter: PathBuf,
    #[serde(skip_serializing_if = "Option::is_none")]
    version: Option<String>,
}

#[derive(Debug, Serialize)]
struct FoundJupyterKernel {
    name: String,
    language: String,
    display_name: String,
    directory: PathBuf,
}

/// Prints the list.
pub(crate) fn print_inventory() -> Result<ExitCode> {
    let mut text = serde_json::to_vec_pretty(&collect_inventory())?;
    text.push(b'\n');
    io::stdout().write_all(&text)?;
    Ok(ExitCode::SUCCESS)
}

/// Serves as a kernel: the result of any run is the list.
pub(crate) fn serve_inventory(mut orders: OrderReader, reports: &mut ReportWriter) -> Result<ExitCode> {
    reports.send_ready()?;
    while let Some(line) = orders.read_next()? {
        let Some(order) = line else { continue };
        let offer = serde_json::to_string(&collect_inventory())?;
        let bundle = MimeBundle::from([("application/json".to_owned(), offer)]);
        reports.send_event(&order.key, KernelEvent::Result(bundle))?;
        reports.send_done(&order.key)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn collect_inventory() -> ImageInventory {
    let packages = PackageVersions::read();
    let find = |name: &&str| program_search::find_program(OsStr::new(name));
    let languages = BUILT_IN_LANGUAGES.iter().filter_map(|(language, programs, names)| {
        let interpreter = programs.iter().find_map(find)?;
        let version = interpreter_version(&interpreter).or_else(|| packages.version_of(&interpreter, names));
        Some(FoundInterpreter { language, interpreter, version })
    });
    let jupyter = kernel_specs::load_all().into_iter().map(|spec| FoundJupyterKernel {
        name: spec.name,
        language: spec.language,
        display_name: spec.display_name,
        directory: spec.directory,
    });
    let tools = PROBED_TOOLS.iter().filter_map(|name| Some((*name, find(name)?)));
    ImageInventory { languages: languages.collect(), jupyter: jupyter.collect(), tools: tools.collect() }
}

/// The version according to the files next to an interpreter: the target of its link, or node's
/// header.
fn interpreter_version(interpreter: &Path) -> Option<String> {
    let prefix = interpreter.parent()?.parent()?;
    let header = fs::read_to_string(prefix.join("include/node/node_version.h")).ok();
    match interpreter.file_name()?.to_str()? {
        "node" | "nodejs" => parse_node_header(&header?),
        name => {
            let target = fs::read_link(interpreter).ok()?;
            let version =
                target.file_name()?.to_str()?.strip_prefix(name.trim_end_matches(char::is_numeric))?;
            version.contains('.').then(|| version.to_owned())
        }
    }
}

fn parse_node_header(header: &str) -> Option<String> {
    let number = |part: &str| {
        let line = header.lines().find(|line| line.contains(&format!("NODE_{part}_VERSION ")))?;
        line.split_whitespace().last().map(str::to_owned)
    };
    Some(format!("{}.{}.{}", number("MAJOR")?, number("MINOR")?, number("PATCH")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_without_running_programs() {
        let root = tempfile::tempdir().expect("a temporary directory");
        let bin = root.path().join("bin");
        fs::create_dir(&bin).expect("the name is free");
        std::os::unix::fs::symlink("python3.11", bin.join("python3")).expect("the name is free");
        std::os::unix::fs::symlink("/usr/bin/dash", bin.join("sh")).expect("the name is free");
        assert_eq!(interpreter_version(&bin.join("python3")).as_deref(), Some("3.11"));
        assert_eq!(interpreter_version(&bin.join("sh")), None);
        let header =
            "#define NODE_MAJOR_VERSION 20\n#define NODE_MINOR_VERSION 1\n#define NODE_PATCH_VERSION 7\n";
        assert_eq!(parse_node_header(header).as_deref(), Some("20.1.7"));
        assert_eq!(parse_node_header(""), None);
    }

    #[test]
    fn listed_programs_exist() {
        let offer = collect_inventory();
        assert!(offer.tools.contains_key("sh"), "{offer:?}");
        assert!(offer.languages.iter().all(|found| found.interpreter.exists()), "{offer:?}");
        assert!(offer.languages.iter().any(|found| found.language == "bash"), "{offer:?}");
    }
}
