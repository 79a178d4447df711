//! `cargo xtask vm`: tests on other kernels than the host's. Limits are tested with cgroup v2 only, and what an
//! ordinary user is told with restricted user namespaces.
//!
//! The present host may have v1 groups, and a directory that imitates cgroup files would prove nothing. So
//! Debian's kernel is booted under qemu's software emulation, with the real static binary and the
//! end-to-end tests on its disk. The machine has no network; it reports over its serial console and
//! switches itself off. At the end it is reset once and booted again from the same disk, to test what a
//! reboot of the host leaves of a sandbox. Another machine boots Ubuntu's kernel from that disk, without changing
//! it, since only that kernel has a switch that restricts user namespaces by AppArmor.
//!
//! ```text
//!  kernel.rs: the package ─► vmlinuz, modules     disk.rs: userland, coracle, e2e ─► ext4 image
//!  ubuntu.rs: the same ──┴──► cpio.rs ─► initramfs ─► console.rs: qemu ─► VM PASS | VM FAIL ◄─┘
//! ```

mod console;
mod cpio;
mod disk;
mod kernel;
mod ubuntu;

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, bail};

use crate::packages::apt_get;
use crate::report::say;
use crate::test::test_command;
use crate::tools::command_output;
use console::{DiskWrites, VirtualMachine};

/// The boot takes some ten seconds, all tests some ten minutes.
const TEST_TIMEOUT: Duration = Duration::from_secs(1200);

/// The machine with restricted user namespaces takes less than a minute.
const RESTRICTED_TEST_TIMEOUT: Duration = Duration::from_secs(300);

/// The value of `--only` that boots only the machine with restricted user namespaces.
const RESTRICTED_TESTS: &str = "restricted";

/// How a run of the machine ended.
#[derive(Debug)]
pub(crate) enum VmOutcome {
    Passed {
        checks: usize,
        /// Tests that were skipped there, and why.
        skipped: Vec<String>,
    },
    Failed {
        checks: usize,
        failures: Vec<String>,
    },
    /// The machine could not be made here; the text is the reason.
    Skipped(String),
}

impl VmOutcome {
    /// The one line for the end of a log.
    pub(crate) fn summary_line(&self) -> String {
        match self {
            Self::Passed { checks, .. } => format!("vm: all {checks} checks passed"),
            Self::Failed { checks, failures } => {
                format!("vm: {} of {checks} checks FAILED: {}", failures.len(), failures.join("; "))
            }
            Self::Skipped(reason) => format!("vm: SKIPPED, {reason}"),
        }
    }

    /// Joins the outcomes of two machines. A machine that could not run is a skipped test of the other.
    fn join(self, other: Self) -> Self {
        match (self, other) {
            (Self::Failed { checks, mut failures }, Self::Failed { checks: more, failures: others }) => {
                failures.extend(others);
                Self::Failed { checks: checks + more, failures }
            }
            (Self::Failed { checks, failures }, Self::Passed { checks: more, .. })
            | (Self::Passed { checks: more, .. }, Self::Failed { checks, failures }) => {
                Self::Failed { checks: checks + more, failures }
            }
            (Self::Failed { checks, mut failures }, Self::Skipped(reason))
            | (Self::Skipped(reason), Self::Failed { checks, mut failures }) => {
                failures.push(format!("not run: {reason}"));
                Self::Failed { checks, failures }
            }
            (Self::Passed { checks, mut skipped }, Self::Passed { checks: more, skipped: others }) => {
                skipped.extend(others);
                Self::Passed { checks: checks + more, skipped }
            }
            (Self::Passed { checks, mut skipped }, Self::Skipped(reason))
            | (Self::Skipped(reason), Self::Passed { checks, mut skipped }) => {
                skipped.push(reason);
                Self::Passed { checks, skipped }
            }
            (Self::Skipped(reason), Self::Skipped(other)) => Self::Skipped(format!("{reason}; {other}")),
        }
    }
}

/// The reason why there is no machine: the host lacks something, or something broke.
///
/// Only the first is a reason to skip; the second is our own error.
pub(crate) struct VmUnavailable(pub(crate) String);

/// Boots the machines, runs the tests in them and returns their result.
///
/// `--binary PATH` names the static binary; without it the release build is made and used.
/// `--only restricted` boots only the machine with restricted user namespaces; another word boots only the other one,
/// and leaves out the tests whose names do not contain it.
pub(crate) fn run_vm_tests(args: &[String]) -> anyhow::Result<VmOutcome> {
    let options = VmOptions::parse(args)?;
    let directory = workspace_root().join("target/vm");
    std::fs::create_dir_all(&directory).context("could not make target/vm")?;
    if let Err(VmUnavailable(reason)) = install_tools() {
        return Ok(VmOutcome::Skipped(reason));
    }
    let ubuntu = ubuntu::fetch_packages(&directory)?;
    let disk = disk::build_disk(&directory, &build_programs(options.binary)?, ubuntu.as_ref().ok())?;
    let restricted = || match &ubuntu {
        Ok(ubuntu) => test_restricted_namespaces(&ubuntu.kernel, &directory, &disk),
        Err(VmUnavailable(reason)) => Ok(VmOutcome::Skipped(format!("restricted user namespaces: {reason}"))),
    };
    match options.only.as_deref() {
        Some(RESTRICTED_TESTS) => restricted(),
        Some(word) => test_limits(&directory, &disk, &format!("coracle.only={word}")),
        None => Ok(restricted()?.join(test_limits(&directory, &disk, "")?)),
    }
}

/// Runs the limit tests on Debian's kernel.
fn test_limits(directory: &Path, disk: &Path, options: &str) -> anyhow::Result<VmOutcome> {
    let kernel = match kernel::fetch_kernel(directory)? {
        Ok(kernel) => kernel,
        Err(VmUnavailable(reason)) => return Ok(VmOutcome::Skipped(format!("limit tests: {reason}"))),
    };
    if let Some(reason) = kernel.explain_other_series() {
        say(format_args!("SKIPPED {reason}"));
    }
    console::boot_machine(&VirtualMachine {
        kernel: &kernel.image,
        initramfs: &kernel::build_initramfs(&kernel, directory)?,
        disk,
        options: options.to_owned(),
        disk_writes: DiskWrites::Kept,
        processors: 2,
        timeout: TEST_TIMEOUT,
    })
}

/// Runs `restricted.sh` on Ubuntu's kernel.
fn test_restricted_namespaces(
    kernel: &kernel::UnpackedKernel,
    directory: &Path,
    disk: &Path,
) -> anyhow::Result<VmOutcome> {
    console::boot_machine(&VirtualMachine {
        kernel: &kernel.image,
        initramfs: &kernel::build_initramfs(kernel, directory)?,
        disk,
        options: "coracle.checks=restricted".to_owned(),
        disk_writes: DiskWrites::Dropped,
        // A kernel changes its own code while it runs. Emulated with several processors, Ubuntu's has crashed when one of
        // them executed an instruction that another was just changing.
        processors: 1,
        timeout: RESTRICTED_TEST_TIMEOUT,
    })
}

/// The options from the command line.
#[derive(Debug, Default, PartialEq, Eq)]
struct VmOptions {
    binary: Option<PathBuf>,
    only: Option<String>,
}

impl VmOptions {
    fn parse(mut args: &[String]) -> anyhow::Result<Self> {
        let mut options = Self::default();
        while let [flag, value, rest @ ..] = args {
            match flag.as_str() {
                "--binary" => options.binary = Some(PathBuf::from(value)),
                "--only" => options.only = Some(value.clone()),
                _ => break,
            }
            args = rest;
        }
        if args.is_empty() {
            Ok(options)
        } else {
            bail!("usage: cargo xtask vm [--binary PATH] [--only WORD]")
        }
    }
}

/// The programs that are tested in the machine.
pub(crate) struct TestPrograms {
    pub(crate) coracle: PathBuf,
    pub(crate) e2e: PathBuf,
    pub(crate) attacks: PathBuf,
}

fn build_programs(binary: Option<PathBuf>) -> anyhow::Result<TestPrograms> {
    let coracle = match binary {
        Some(path) => path,
        None => crate::test::build_release()?,
    };
    // As `cargo xtask test` has just built them; the tests need `attacks`, so it is built with them.
    let words = ["--test", "all", "--no-run", "--message-format=json-render-diagnostics"];
    let built = command_output(test_command(&words).stderr(Stdio::inherit()))?;
    let executable = |name| find_executable(&built, name).with_context(|| no_executable(name));
    Ok(TestPrograms { coracle, e2e: executable("all")?, attacks: executable("attacks")? })
}

fn no_executable(name: &str) -> String {
    format!("cargo built no executable `{name}`")
}

/// Finds the executable of target `name` in cargo's messages, one JSON object per line.
fn find_executable(messages: &str, name: &str) -> Option<PathBuf> {
    let target = format!("\"name\":\"{name}\"");
    let line = messages.lines().rfind(|line| line.contains(&target) && line.contains("\"executable\":\""))?;
    let (_, rest) = line.split_once("\"executable\":\"")?;
    let (path, _) = rest.split_once('"')?;
    Some(PathBuf::from(path))
}

/// Makes sure that qemu, a static busybox and mke2fs are installed, by apt if this is root.
fn install_tools() -> Result<(), VmUnavailable> {
    if !cfg!(target_arch = "x86_64") {
        return Err(VmUnavailable("the machine is made for x86-64 hosts only".to_owned()));
    }
    let wanted = [
        ("qemu-system-x86_64", "qemu-system-x86"),
        ("busybox", "busybox-static"),
        ("mke2fs", "e2fsprogs"),
        ("dpkg-deb", "dpkg"),
        ("zstd", "zstd"),
        ("apt-get", "apt"),
    ];
    let packages: Vec<&str> = wanted
        .into_iter()
        .filter(|(program, _)| find_program(program).is_none())
        .map(|(_, package)| package)
        .collect();
    if packages.is_empty() {
        return Ok(());
    }
    if find_program("apt-get").is_none() {
        return Err(VmUnavailable(
            "qemu is not installed, and this is no Debian to install it on".to_owned(),
        ));
    }
    let install = ["install", "--yes", "--quiet", "--no-install-recommends"];
    let installed = apt_get(&[&install, packages.as_slice()].concat())
        || (apt_get(&["update", "--quiet"]) && apt_get(&[&install, packages.as_slice()].concat()));
    if installed {
        return Ok(());
    }
    Err(VmUnavailable(format!("apt-get could not install {} (as root it might)", packages.join(", "))))
}

/// Finds a program in the usual directories.
pub(crate) fn find_program(program: &str) -> Option<PathBuf> {
    ["/usr/bin", "/usr/sbin", "/bin", "/sbin"]
        .into_iter()
        .map(|directory| Path::new(directory).join(program))
        .find(|path| path.exists())
}

/// Copies the files of a directory and of those below it. A directory that does not exist has none.
pub(crate) fn copy_files(from: &Path, to: &Path) -> anyhow::Result<()> {
    let Ok(entries) = std::fs::read_dir(from) else { return Ok(()) };
    std::fs::create_dir_all(to)?;
    for entry in entries {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy_files(&entry.path(), &target)?;
        } else {
            std::fs::copy(entry.path(), target)?;
        }
    }
    Ok(())
}

fn workspace_root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the workspace").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_come_in_pairs_and_unknown_ones_are_refused() {
        let read = |words: &[&str]| {
            VmOptions::parse(&words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>())
        };
        let both = VmOptions { binary: Some("/b".into()), only: Some("disk".to_owned()) };
        assert_eq!(read(&["--only", "disk", "--binary", "/b"]).expect("both are known"), both);
        assert!(read(&["--binary"]).is_err());
        assert!(read(&["--fast", "yes"]).is_err());
    }

    #[test]
    fn the_executable_is_found_among_cargos_messages() {
        let messages = concat!(
            r#"{"reason":"compiler-artifact","target":{"name":"other"},"executable":"/t/other"}"#,
            "\n",
            r#"{"reason":"compiler-artifact","target":{"name":"all"},"executable":"/t/all-123"}"#,
            "\n",
            r#"{"reason":"compiler-artifact","target":{"name":"all"},"executable":null}"#,
        );
        assert_eq!(find_executable(messages, "all"), Some(PathBuf::from("/t/all-123")));
        assert_eq!(find_executable(messages, "none"), None);
    }
}
