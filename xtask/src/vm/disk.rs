//! The machine's disk: a small userland copied from this host, so that image `host` has some content, and
//! the programs under test.
//!
//! It is ext4 and not part of the memory disk, since layers are mounted idmapped and this kernel's tmpfs
//! does not support that.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail};

use super::ubuntu::UbuntuTree;
use super::{TestPrograms, find_program};

/// The programs that the limit tests call inside a sandbox, and those that the binary may call outside.
const USERLAND: [&str; 41] = [
    "bash",
    "sh",
    "busybox",
    "cat",
    "chmod",
    "chown",
    "cp",
    "date",
    "dd",
    "df",
    "echo",
    "env",
    "false",
    "find",
    "grep",
    "head",
    "id",
    "kill",
    "ln",
    "ls",
    "mkdir",
    "mke2fs",
    "mkfs.ext4",
    "mount",
    "mv",
    "nohup",
    "rm",
    "sed",
    "seq",
    "setpriv",
    "setsid",
    "sleep",
    "sort",
    "stat",
    "tail",
    "timeout",
    "touch",
    "tr",
    "true",
    "wc",
    "yes",
];

/// The size of the disk; it is sparse.
const DISK_SIZE: &str = "4G";

const PASSWD: &str = "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/bin/false\n";
const GROUP: &str = "root:x:0:\nnogroup:x:65534:\n";

/// Builds the image and returns its path.
pub(crate) fn build_disk(
    directory: &Path,
    programs: &TestPrograms,
    ubuntu: Option<&UbuntuTree>,
) -> anyhow::Result<PathBuf> {
    let root = directory.join("root");
    if root.exists() {
        fs::remove_dir_all(&root)?;
    }
    make_skeleton(&root)?;
    for program in USERLAND {
        if let Some(path) = find_program(program) {
            install_program(&root, &path)?;
        }
    }
    fs::copy(&programs.coracle, root.join("usr/bin/coracle"))
        .context("could not copy the binary under test")?;
    fs::copy(&programs.e2e, root.join("usr/bin/e2e"))?;
    fs::copy(&programs.attacks, root.join("usr/bin/attacks"))?;
    fs::write(root.join("checks.sh"), include_str!("../../vm/checks.sh"))?;
    fs::write(root.join("restricted.sh"), include_str!("../../vm/restricted.sh"))?;
    if let Some(ubuntu) = ubuntu {
        ubuntu.install_policy(&root)?;
    }
    make_filesystem(&root, &directory.join("disk.ext4"))
}

/// The directories of a merged-usr system and the files programs look for.
fn make_skeleton(root: &Path) -> anyhow::Result<()> {
    let directories = [
        "usr/bin",
        "usr/sbin",
        "usr/lib",
        "usr/lib64",
        "usr/local/bin",
        "etc",
        "root",
        "tmp",
        "var/lib",
        "run",
        "home",
        "dev",
        "proc",
        "sys",
        "mnt",
        "opt",
        "srv",
    ];
    for name in directories {
        fs::create_dir_all(root.join(name))?;
    }
    for name in ["bin", "sbin", "lib", "lib64"] {
        symlink(format!("usr/{name}"), root.join(name))?;
    }
    fs::write(root.join("etc/passwd"), PASSWD)?;
    fs::write(root.join("etc/group"), GROUP)?;
    fs::write(root.join("etc/hosts"), "127.0.0.1 localhost\n")?;
    fs::copy("/etc/ld.so.cache", root.join("etc/ld.so.cache"))
        .context("could not copy the loader's cache")?;
    Ok(())
}

/// Copies a program and the libraries it names to the same places below `root`.
fn install_program(root: &Path, program: &Path) -> anyhow::Result<()> {
    for path in shared_libraries(program).into_iter().chain([program.to_owned()]) {
        let merged = merged_usr_path(&path);
        let target = root.join(merged.strip_prefix("/").expect("found by absolute path"));
        let parent = target.parent().expect("a file has a parent directory");
        fs::create_dir_all(parent)?;
        if !target.exists() {
            fs::copy(&path, &target).with_context(|| format!("could not copy `{}`", path.display()))?;
        }
    }
    Ok(())
}

/// `/lib/x` and `/bin/x` are `/usr/lib/x` and `/usr/bin/x` in the machine.
fn merged_usr_path(path: &Path) -> PathBuf {
    if path.starts_with("/usr") {
        return path.to_owned();
    }
    Path::new("/usr").join(path.strip_prefix("/").expect("found by absolute path"))
}

/// The libraries a program needs, as ldd finds them; a static program needs none.
fn shared_libraries(program: &Path) -> BTreeSet<PathBuf> {
    let Ok(output) = Command::new("ldd").arg(program).output() else { return BTreeSet::new() };
    String::from_utf8_lossy(&output.stdout)
        .split_whitespace()
        .filter(|word| word.starts_with('/'))
        .map(PathBuf::from)
        .collect()
}

/// Makes a filesystem that holds `root`, without mounting anything.
fn make_filesystem(root: &Path, image: &Path) -> anyhow::Result<PathBuf> {
    if image.exists() {
        fs::remove_file(image)?;
    }
    let mke2fs = find_program("mke2fs").context("mke2fs is gone")?;
    let output = Command::new(mke2fs)
        .args(["-q", "-t", "ext4", "-E", "root_owner=0:0", "-d"])
        .args([root, image])
        .arg(DISK_SIZE)
        .output()
        .context("could not run mke2fs")?;
    if !output.status.success() {
        bail!("mke2fs failed: {}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(image.to_owned())
}
