//! The software in the image `host`, as far as the names of other images promise some of it.

use std::fmt;

/// The operating system of the host, and its programs that images are named after.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostSoftware {
    pub os_release: Option<OsRelease>,
    pub python: Option<HostProgram>,
    pub node: Option<HostProgram>,
}

/// A program that a sandbox of the image `host` can start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostProgram {
    /// `None` if no file states its version.
    pub version: Option<String>,
}

/// The content of `os-release`. See os-release(5).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OsRelease {
    pub id: String,
    pub version_id: Option<String>,
    pub codename: Option<String>,
    /// The human-readable name, without the version.
    pub name: Option<String>,
}

impl HostSoftware {
    /// Returns names and versions of the detected programs.
    pub fn versions(&self) -> Vec<(String, String)> {
        let system = self.os_release.as_ref().map(ToString::to_string);
        let version = |found: &HostProgram| found.version.clone().unwrap_or_else(|| "unknown".to_owned());
        let (python, node) = (self.python.as_ref().map(version), self.node.as_ref().map(version));
        let parts = [("system", system), ("python", python), ("node", node)];
        parts.into_iter().filter_map(|(name, found)| Some((name.to_owned(), found?))).collect()
    }

    /// Describes the operating system and the versions of the programs that clients ask for, in one
    /// line.
    pub fn summary(&self) -> String {
        let system = self.os_release.as_ref().map(ToString::to_string);
        let python = self.python.as_ref().map(|found| found.describe("Python"));
        let node = self.node.as_ref().map(|found| found.describe("Node"));
        let parts: Vec<String> = [system, python, node].into_iter().flatten().collect();
        if parts.is_empty() { "an unknown system".to_owned() } else { parts.join(", ") }
    }
}

impl HostProgram {
    /// The name with the version, if known.
    pub fn describe(&self, name: &str) -> String {
        match &self.version {
            Some(version) => format!("{name} {version}"),
            None => format!("{name} of an unknown version"),
        }
    }
}

impl fmt::Display for OsRelease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name.as_ref().unwrap_or(&self.id))?;
        self.version_id.iter().try_for_each(|version| write!(f, " {version}"))
    }
}

/// Returns the digits and dots that a text begins with.
pub fn leading_version(text: &str) -> Option<String> {
    let end = text.find(|letter: char| !letter.is_ascii_digit() && letter != '.').unwrap_or(text.len());
    let version = text[..end].trim_end_matches('.');
    version.starts_with(|letter: char| letter.is_ascii_digit()).then(|| version.to_owned())
}

/// Returns the first number of a version.
pub fn major_version(version: &str) -> &str {
    version.split('.').next().unwrap_or(version)
}
