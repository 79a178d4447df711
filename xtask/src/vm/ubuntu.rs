//! Ubuntu 24.04's kernel, whose AppArmor restricts user namespaces, and the parser that loads profiles there.
//!
//! The kernels of Debian and of the upstream project have no such setting. The packages come from Ubuntu's archive by
//! an apt configuration of their own, so that the host's is neither used nor changed, and are only unpacked. They are
//! verified with the key of the archive, which is beside `restricted.sh`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail};

use super::kernel::{UnpackedKernel, find_unpacked};
use super::{VmUnavailable, copy_files};

/// The small set of Ubuntu's kernel packages; it depends on the package of its newest version.
const KERNEL_PACKAGE: &str = "linux-image-virtual";

/// The parser, the profile that restricts, and the C library for the parser, which may be newer than the host's.
const POLICY_PACKAGES: [&str; 2] = ["apparmor", "libc6"];

/// Processes in user namespaces of programs without a profile get this one.
const RESTRICTING_PROFILE: &str = "unprivileged_userns";

/// Fingerprint F6EC B376 2474 EDA9 D21B 7022 8719 20D1 991B C93C.
const ARCHIVE_KEY: &str = include_str!("../../vm/ubuntu-archive-key.asc");

/// Unpacked packages of Ubuntu.
pub(crate) struct UbuntuTree {
    root: PathBuf,
    pub(crate) kernel: UnpackedKernel,
}

/// Downloads and unpacks the packages, unless an earlier run did.
pub(crate) fn fetch_packages(directory: &Path) -> anyhow::Result<Result<UbuntuTree, VmUnavailable>> {
    let root = directory.join("ubuntu");
    if !root.exists() {
        let scratch = tempfile::tempdir_in(directory).context("could not make a directory for apt")?;
        let archive = AptArchive::configure(scratch.path())?;
        if let Err(unavailable) = archive.download_packages()? {
            return Ok(Err(unavailable));
        }
        archive.extract_packages(&root)?;
    }
    let kernel = find_unpacked(&root).context("Ubuntu's packages hold no kernel")?;
    Ok(Ok(UbuntuTree { root, kernel }))
}

impl UbuntuTree {
    /// Installs the parser and the profiles it includes below the root of a disk.
    pub(crate) fn install_policy(&self, disk: &Path) -> anyhow::Result<()> {
        let library = disk.join("opt/apparmor");
        fs::create_dir_all(&library)?;
        let libraries = self.root.join("usr/lib/x86_64-linux-gnu");
        for name in ["libc.so.6", "ld-linux-x86-64.so.2"] {
            fs::copy(libraries.join(name), library.join(name)).with_context(|| missing_file(name))?;
        }
        let parser = ["sbin/apparmor_parser", "usr/sbin/apparmor_parser"]
            .into_iter()
            .map(|path| self.root.join(path))
            .find(|path| path.exists())
            .with_context(|| missing_file("apparmor_parser"))?;
        fs::copy(parser, library.join("apparmor_parser"))?;
        let (from, to) = (self.root.join("etc/apparmor.d"), disk.join("etc/apparmor.d"));
        for name in ["abi", "tunables"] {
            copy_files(&from.join(name), &to.join(name))?;
        }
        fs::copy(from.join(RESTRICTING_PROFILE), to.join(RESTRICTING_PROFILE))
            .with_context(|| missing_file(RESTRICTING_PROFILE))?;
        Ok(())
    }
}

fn missing_file(name: &str) -> String {
    format!("Ubuntu's packages hold no `{name}`")
}

/// Ubuntu's archive, as an apt that knows nothing else sees it.
struct AptArchive {
    directory: PathBuf,
    config: PathBuf,
}

impl AptArchive {
    fn configure(directory: &Path) -> anyhow::Result<Self> {
        for name in ["lists/partial", "cache/archives/partial", "sources", "packages"] {
            fs::create_dir_all(directory.join(name))?;
        }
        let key = directory.join("key.asc");
        fs::write(&key, ARCHIVE_KEY)?;
        let source = format!(
            "Types: deb\nURIs: http://archive.ubuntu.com/ubuntu\nSuites: noble noble-updates\nComponents: main\n\
             Architectures: amd64\nSigned-By: {}\n",
            key.display()
        );
        fs::write(directory.join("sources/ubuntu.sources"), source)?;
        let config = directory.join("apt.conf");
        // As root, apt would become a user who cannot open this directory.
        let text = format!(
            "Dir::Etc::sourcelist \"/dev/null\";\nDir::Etc::sourceparts \"{0}/sources\";\n\
             Dir::Etc::preferencesparts \"/dev/null\";\nDir::State::status \"/dev/null\";\n\
             Dir::State::lists \"{0}/lists\";\nDir::Cache \"{0}/cache\";\nAPT::Sandbox::User \"root\";\n\
             Acquire::Languages \"none\";\nAcquire::Retries \"3\";\nAcquire::IndexTargets::deb::DEP-11::DefaultEnabled \"false\";\n",
            directory.display()
        );
        fs::write(&config, text)?;
        Ok(Self { directory: directory.to_owned(), config })
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.env("APT_CONFIG", &self.config).current_dir(self.directory.join("packages"));
        command
    }

    fn download_packages(&self) -> anyhow::Result<Result<(), VmUnavailable>> {
        // Without `--error-on=any`, a list that could not be fetched is only a warning.
        let updated = self.command("apt-get").args(["update", "--quiet", "--error-on=any"]).output()?;
        if !updated.status.success() {
            let reason = "apt-get could not read the lists of archive.ubuntu.com";
            return Ok(Err(VmUnavailable(reason.to_owned())));
        }
        let depends = self.command("apt-cache").args(["depends", KERNEL_PACKAGE]).output()?;
        let Some(version) = newest_version(&String::from_utf8_lossy(&depends.stdout)) else {
            return Ok(Err(VmUnavailable(format!("Ubuntu's archive has no package `{KERNEL_PACKAGE}`"))));
        };
        let downloaded = self
            .command("apt-get")
            .args(["download", "--quiet"])
            .args([format!("linux-image-{version}"), format!("linux-modules-{version}")])
            .args(POLICY_PACKAGES)
            .output()?;
        if downloaded.status.success() {
            return Ok(Ok(()));
        }
        Ok(Err(VmUnavailable(format!("apt-get could not download Ubuntu's kernel {version}"))))
    }

    /// Unpacks beside the final location and renames, so that a killed run leaves no partial tree.
    fn extract_packages(&self, root: &Path) -> anyhow::Result<()> {
        let partial = self.directory.join("partial");
        for entry in fs::read_dir(self.directory.join("packages"))? {
            let archive = entry?.path();
            let status = Command::new("dpkg-deb").arg("--extract").args([&archive, &partial]).status()?;
            if !status.success() {
                bail!("dpkg-deb could not unpack `{}`", archive.display());
            }
        }
        fs::rename(&partial, root).context("could not put Ubuntu's packages in place")
    }
}

/// The version that a general kernel package depends on, such as `6.8.0-31-generic`.
fn newest_version(depends: &str) -> Option<String> {
    depends.lines().find_map(|line| line.trim().strip_prefix("Depends: linux-image-").map(str::to_owned))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn newest_kernel_is_what_the_general_package_depends_on() {
        let printed = "linux-image-virtual\n  Depends: linux-image-6.8.0-31-generic\n";
        assert_eq!(newest_version(printed).as_deref(), Some("6.8.0-31-generic"));
        assert_eq!(newest_version("E: No packages found\n"), None);
    }
}
