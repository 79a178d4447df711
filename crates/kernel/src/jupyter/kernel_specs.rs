//! The Jupyter kernels of an image, from their kernelspec files.
//!
//! They are searched where Jupyter itself searches, by reading files only. The directory of a
//! Python installation follows from the location of its interpreter.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use serde::Deserialize;

/// The maximum size of a kernelspec file; a larger one is ignored.
const MAX_SPEC_BYTES: u64 = 1 << 20;

/// How one kernel is started.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(crate) struct JupyterKernelSpec {
    pub argv: Vec<String>,
    pub display_name: String,
    pub language: String,
    pub interrupt_mode: Option<String>,
    pub env: BTreeMap<String, String>,
    /// The name by which it is requested: that of its directory.
    #[serde(skip)]
    pub name: String,
    #[serde(skip)]
    pub directory: PathBuf,
}

/// The kernel with this name, or one for this language.
pub(crate) fn find_spec(wanted: &str) -> Option<JupyterKernelSpec> {
    choose_spec(load_all(), wanted)
}

fn choose_spec(mut specs: Vec<JupyterKernelSpec>, wanted: &str) -> Option<JupyterKernelSpec> {
    let by_name = specs.iter().position(|spec| spec.name.eq_ignore_ascii_case(wanted));
    let by_language = || specs.iter().position(|spec| spec.language.eq_ignore_ascii_case(wanted));
    by_name.or_else(by_language).map(|index| specs.swap_remove(index))
}

/// All kernels by name; if a name occurs twice, the one that Jupyter would choose.
pub(crate) fn load_all() -> Vec<JupyterKernelSpec> {
    let environment = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    let mut found = BTreeMap::new();
    for directory in data_directories(&environment) {
        let kernels = fs::read_dir(directory.join("kernels")).into_iter().flatten().flatten();
        for spec in kernels.filter_map(|entry| read_spec(&entry.path())) {
            found.entry(spec.name.to_lowercase()).or_insert(spec);
        }
    }
    found.into_values().collect()
}

/// Jupyter's data directories, the most specific first.
fn data_directories(environment: &dyn Fn(&str) -> Option<std::ffi::OsString>) -> Vec<PathBuf> {
    let mut places: Vec<PathBuf> = Vec::new();
    places.extend(environment("JUPYTER_PATH").iter().flat_map(std::env::split_paths));
    places.extend(environment("JUPYTER_DATA_DIR").map(PathBuf::from));
    places.extend(environment("XDG_DATA_HOME").map(|data| Path::new(&data).join("jupyter")));
    places.extend(environment("HOME").map(|home| Path::new(&home).join(".local/share/jupyter")));
    let prefixes = ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(environment).map(PathBuf::from);
    let path = environment("PATH").unwrap_or_default();
    let installed: Vec<PathBuf> = std::env::split_paths(&path).filter_map(|bin| prefix_of(&bin)).collect();
    places.extend(prefixes.chain(installed).map(|prefix| prefix.join("share/jupyter")));
    places.extend(["/usr/local/share/jupyter", "/usr/share/jupyter"].map(PathBuf::from));
    let mut seen = BTreeSet::new();
    places.into_iter().filter(|directory| directory.is_absolute() && seen.insert(directory.clone())).collect()
}

/// The installation prefix of a directory of programs, if it contains Python.
fn prefix_of(bin: &Path) -> Option<PathBuf> {
    let has_python = ["python3", "python"].iter().any(|name| bin.join(name).exists());
    (has_python && bin.file_name() == Some(OsStr::new("bin"))).then(|| bin.parent().map(Path::to_owned))?
}

fn read_spec(directory: &Path) -> Option<JupyterKernelSpec> {
    let file = File::open(directory.join("kernel.json")).ok()?;
    let mut text = String::new();
    file.take(MAX_SPEC_BYTES).read_to_string(&mut text).ok()?;
    let mut spec: JupyterKernelSpec = serde_json::from_str(&text).ok()?;
    spec.name = directory.file_name()?.to_str()?.to_owned();
    spec.directory = directory.to_owned();
    (!spec.argv.is_empty()).then_some(spec)
}

impl JupyterKernelSpec {
    /// The command line for a connection file.
    pub(crate) fn command_line(&self, file: &Path) -> Vec<String> {
        let file = file.to_string_lossy();
        let directory = self.directory.to_string_lossy();
        let fill =
            |word: &String| word.replace("{connection_file}", &file).replace("{resource_dir}", &directory);
        self.argv.iter().map(fill).collect()
    }

    /// Whether it is interrupted by a message; most kernels are by a signal.
    pub(crate) fn is_interrupted_by_message(&self) -> bool {
        self.interrupt_mode.as_deref() == Some("message")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(name: &str, language: &str) -> JupyterKernelSpec {
        JupyterKernelSpec {
            name: name.to_owned(),
            language: language.to_owned(),
            ..JupyterKernelSpec::default()
        }
    }

    #[test]
    fn name_takes_precedence_over_language() {
        let specs = vec![spec("gonb", "go"), spec("go", "other"), spec("ir", "R")];
        let chosen = |wanted: &str| choose_spec(specs.clone(), wanted).map(|spec| spec.name);
        assert_eq!(chosen("go").as_deref(), Some("go"));
        assert_eq!(chosen("r").as_deref(), Some("ir"));
        assert_eq!(chosen("GONB").as_deref(), Some("gonb"));
        assert_eq!(chosen("java"), None);
    }

    #[test]
    fn specific_directory_precedes_the_common_one() {
        let environment = |name: &str| match name {
            "JUPYTER_PATH" => Some("/first:relative:/second".into()),
            "HOME" => Some("/users/me".into()),
            "VIRTUAL_ENV" => Some("/venv".into()),
            _ => None,
        };
        let places = data_directories(&environment);
        let expected = [
            "/first",
            "/second",
            "/users/me/.local/share/jupyter",
            "/venv/share/jupyter",
            "/usr/local/share/jupyter",
            "/usr/share/jupyter",
        ];
        assert_eq!(places, expected.map(PathBuf::from));
    }

    #[test]
    fn invalid_kernelspecs_are_skipped() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let make = |name: &str, text: &str| {
            let directory = directory.path().join(name);
            fs::create_dir(&directory).expect("the name is free");
            fs::write(directory.join("kernel.json"), text).expect("the file is written");
            read_spec(&directory)
        };
        assert_eq!(make("broken", "{"), None);
        assert_eq!(make("empty", "{}"), None);
        assert_eq!(make("wrong", r#"{"argv": "sh"}"#), None);
        let good =
            make("Good", r#"{"argv": ["k", "-f", "{connection_file}", "{resource_dir}/x"], "extra": 1}"#);
        let good = good.expect("the kernelspec is valid");
        let directory = good.directory.display().to_string();
        assert_eq!(
            good.command_line(Path::new("/c.json")),
            ["k", "-f", "/c.json", &format!("{directory}/x")]
        );
        assert!(!good.is_interrupted_by_message());
    }
}
