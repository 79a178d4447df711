//! Debian's kernel, taken from its package without installing it, and the memory disk with the modules that a
//! machine needs.

use std::fs::{self, File};
use std::io::BufWriter;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail};

use super::cpio::CpioArchive;
use super::{VmUnavailable, copy_files, find_program};
use crate::packages::apt_get;
use crate::tools::run_command;

/// The small kernel for virtual machines; it depends on the package of its newest version.
const PACKAGE: &str = "linux-image-cloud-amd64";

/// The oldest series that Debian supports, with which docs/hosts.md says that sandboxes run.
const OLDEST_SERIES: &str = "6.1.";

/// The directories in the kernel's tree with the modules that are loaded and their dependencies.
const MODULE_TREES: [&str; 8] = [
    "kernel/drivers/virtio",
    "kernel/drivers/block",
    "kernel/fs/overlayfs",
    "kernel/fs/btrfs",
    "kernel/lib",
    "kernel/crypto",
    "kernel/arch/x86/crypto",
    "kernel/drivers/net",
];

/// An unpacked kernel.
pub(crate) struct UnpackedKernel {
    pub(crate) image: PathBuf,
    /// `lib/modules/VERSION`.
    modules: PathBuf,
    version: String,
}

impl UnpackedKernel {
    /// The reason why tests with this kernel say nothing about the oldest one that Debian supports.
    pub(crate) fn explain_other_series(&self) -> Option<String> {
        let promised = self.version.starts_with(OLDEST_SERIES);
        (!promised).then(|| {
            format!("Debian's oldest supported kernel ({OLDEST_SERIES}x): apt offers {} here, with which the tests run", self.version)
        })
    }
}

/// Downloads and unpacks the kernel, unless an earlier run did.
pub(crate) fn fetch_kernel(directory: &Path) -> anyhow::Result<Result<UnpackedKernel, VmUnavailable>> {
    let tree = directory.join("kernel");
    if let Some(kernel) = find_unpacked(&tree) {
        return Ok(Ok(kernel));
    }
    let Some(package) =
        newest_package().or_else(|| apt_get(&["update", "--quiet"]).then(newest_package).flatten())
    else {
        return Ok(Err(VmUnavailable(format!("apt knows no package `{PACKAGE}`"))));
    };
    let downloaded = Command::new("apt-get")
        .args(["download", "--quiet", &package])
        .current_dir(directory)
        .output()
        .context("could not run apt-get")?;
    if !downloaded.status.success() {
        return Ok(Err(VmUnavailable(format!("apt-get could not download `{package}`"))));
    }
    extract_package(directory, &package, &tree)?;
    find_unpacked(&tree).map(Ok).with_context(|| format!("package `{package}` holds no kernel"))
}

/// Unpacks beside the final location and renames, so that a killed run leaves no partial tree.
fn extract_package(directory: &Path, package: &str, tree: &Path) -> anyhow::Result<()> {
    let archive = fs::read_dir(directory)?
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .find(|path| path.to_string_lossy().contains(&format!("{package}_")))
        .with_context(|| format!("the download of `{package}` left no file"))?;
    let partial = tree.with_extension("partial");
    let status = Command::new("dpkg-deb").arg("--extract").args([&archive, &partial]).status()?;
    if !status.success() {
        bail!("dpkg-deb could not unpack `{}`", archive.display());
    }
    fs::rename(&partial, tree).context("could not put the kernel in place")
}

pub(crate) fn find_unpacked(tree: &Path) -> Option<UnpackedKernel> {
    let modules = fs::read_dir(tree.join("lib/modules")).ok()?.next()?.ok()?;
    let version = modules.file_name().into_string().ok()?;
    let image = tree.join("boot").join(format!("vmlinuz-{version}"));
    image.exists().then(|| UnpackedKernel { image, modules: modules.path(), version })
}

/// The package of the newest version, which the general one depends on.
fn newest_package() -> Option<String> {
    let output = Command::new("apt-cache").args(["depends", PACKAGE]).output().ok()?;
    String::from_utf8_lossy(&output.stdout).lines().find_map(|line| {
        line.trim().strip_prefix("Depends: linux-image-").map(|rest| format!("linux-image-{rest}"))
    })
}

/// Packs busybox, the modules and `init.sh` into a memory disk. A kernel has one directory of its own.
pub(crate) fn build_initramfs(kernel: &UnpackedKernel, directory: &Path) -> anyhow::Result<PathBuf> {
    let directory = directory.join(&kernel.version);
    let root = directory.join("modules");
    let modules = root.join("lib/modules").join(&kernel.version);
    for tree in MODULE_TREES {
        copy_files(&kernel.modules.join(tree), &modules.join(tree))?;
        expand_modules(&modules.join(tree))?;
    }
    for list in ["modules.order", "modules.builtin"] {
        fs::copy(kernel.modules.join(list), modules.join(list))?;
    }
    let busybox = find_program("busybox").context("busybox is gone")?;
    let indexed = Command::new(&busybox)
        .arg("depmod")
        .arg("-b")
        .args([&root, &PathBuf::from(&kernel.version)])
        .status()?;
    if !indexed.success() {
        bail!("depmod could not index the modules");
    }
    let path = directory.join("initramfs.cpio");
    let mut archive = CpioArchive::new(BufWriter::new(File::create(&path)?));
    for name in ["bin", "dev", "proc", "sys", "disk"] {
        archive.add_directory(name)?;
    }
    archive.add_tree("lib", &root.join("lib"))?;
    archive.add_program("bin/busybox", &fs::read(&busybox)?)?;
    archive.add_program("init", include_bytes!("../../vm/init.sh"))?;
    archive.finish()?;
    Ok(path)
}

/// Expands modules that are compressed, as Ubuntu's are: busybox loads none that are.
fn expand_modules(tree: &Path) -> anyhow::Result<()> {
    let Ok(entries) = fs::read_dir(tree) else { return Ok(()) };
    for entry in entries {
        let path = entry?.path();
        if path.is_dir() {
            expand_modules(&path)?;
        } else if path.extension().is_some_and(|extension| extension == "zst") {
            run_command(
                Command::new("zstd").args(["--decompress", "--rm", "--force", "--quiet"]).arg(&path),
            )?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_of_other_series_are_named() {
        let of_version = |version: &str| UnpackedKernel {
            image: PathBuf::new(),
            modules: PathBuf::new(),
            version: version.to_owned(),
        };
        assert_eq!(of_version("6.1.0-55-cloud-amd64").explain_other_series(), None);
        for other in ["6.12.0-1-cloud-amd64", "6.10.3", "5.10.0"] {
            assert!(of_version(other).explain_other_series().is_some_and(|said| said.contains(other)));
        }
    }
}
