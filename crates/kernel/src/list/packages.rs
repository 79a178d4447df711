//! Versions from the package database of a distribution: Debian's or Alpine's.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

/// The versions by package name.
#[derive(Debug, Default)]
pub(super) struct PackageVersions(HashMap<String, String>);

impl PackageVersions {
    pub(super) fn read() -> Self {
        let debian = fs::read_to_string("/var/lib/dpkg/status")
            .map(|text| parse_package_database(&text, "Package: ", "Version: "));
        let alpine = || {
            fs::read_to_string("/lib/apk/db/installed").map(|text| parse_package_database(&text, "P:", "V:"))
        };
        debian.or_else(|_none| alpine()).unwrap_or_default()
    }

    /// The version of a program in a directory where packages install theirs.
    pub(super) fn version_of(&self, program: &Path, names: &[&str]) -> Option<String> {
        let packaged =
            ["/usr/bin", "/bin"].iter().any(|directory| program.parent() == Some(Path::new(directory)));
        names.iter().filter(|_| packaged).find_map(|name| self.0.get(*name)).cloned()
    }
}

/// Both databases consist of paragraphs whose lines begin with a field name.
fn parse_package_database(text: &str, name_field: &str, version_field: &str) -> PackageVersions {
    let paragraphs = text.split("\n\n").filter_map(|paragraph| {
        let field =
            |field: &str| paragraph.lines().find_map(|line| line.strip_prefix(field)).map(str::to_owned);
        Some((field(name_field)?, upstream_version(&field(version_field)?)))
    });
    PackageVersions(paragraphs.collect())
}

/// The version without the additions of the distribution.
fn upstream_version(version: &str) -> String {
    let after_epoch = version.split_once(':').map_or(version, |(_, rest)| rest);
    let end = after_epoch.find(['-', '+', '~']).unwrap_or(after_epoch.len());
    after_epoch[..end].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_databases_are_parsed() {
        let debian =
            "Package: bash\nStatus: ok\nVersion: 5.2.15-2+b8\n\nPackage: nodejs\nVersion: 1:20.1.0~dfsg\n";
        let packages = parse_package_database(debian, "Package: ", "Version: ");
        let bash = Path::new("/usr/bin/bash");
        assert_eq!(packages.version_of(bash, &["other", "bash"]).as_deref(), Some("5.2.15"));
        assert_eq!(packages.version_of(Path::new("/usr/bin/node"), &["nodejs"]).as_deref(), Some("20.1.0"));
        // A program elsewhere is not the packaged one.
        assert_eq!(packages.version_of(Path::new("/opt/bash"), &["bash"]), None);
        let alpine = parse_package_database("C:x\nP:busybox\nV:1.36.1-r2\n", "P:", "V:");
        assert_eq!(alpine.version_of(Path::new("/bin/sh"), &["busybox"]).as_deref(), Some("1.36.1"));
    }
}
