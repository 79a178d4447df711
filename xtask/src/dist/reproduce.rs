//! Builds the binary once more from a copy of the sources in another directory, and compares.
//!
//! This takes as long as the first build, so `cargo xtask dist` does it only if `CORACLE_REPRODUCE` is 1.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::test::build_release_in;
use crate::tools::{command_output, workspace_root};

const VARIABLE: &str = "CORACLE_REPRODUCE";

/// Whether the user asked for the second build.
pub(super) fn is_requested() -> bool {
    std::env::var_os(VARIABLE).is_some_and(|value| value == "1")
}

/// Fails if a build of the same sources elsewhere gives another binary.
pub(super) fn check_reproducible(binary: &Path) -> Result<()> {
    let directory = tempfile::tempdir().context("could not make a directory for the second build")?;
    // Another depth and another length than the repository's, whatever those are.
    let copy = directory.path().join("another/directory-of-another-length");
    copy_sources(&copy)?;
    let again = build_release_in(&copy)?;
    let read = |path: &Path| fs::read(path).with_context(|| format!("could not read `{}`", path.display()));
    compare_binaries(&read(binary)?, &read(&again)?)
}

/// Copies the files that git knows or would add.
fn copy_sources(copy: &Path) -> Result<()> {
    let mut git = Command::new("git");
    git.args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"]).current_dir(workspace_root());
    for name in command_output(&mut git)?.split_terminator('\0') {
        let (from, to) = (workspace_root().join(name), copy.join(name));
        // A file that is removed but not committed is still listed.
        if from.exists() {
            fs::create_dir_all(to.parent().expect("a file has a parent directory"))?;
            fs::copy(&from, &to).with_context(|| format!("could not copy `{name}`"))?;
        }
    }
    Ok(())
}

fn compare_binaries(first: &[u8], second: &[u8]) -> Result<()> {
    if first == second {
        return Ok(());
    }
    let differing = first.iter().zip(second).position(|(one, other)| one != other);
    let at = differing.unwrap_or(first.len().min(second.len()));
    bail!(
        "a build in another directory gave another binary: {} and {} bytes, different from byte {at} on",
        first.len(),
        second.len()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn difference_is_found_with_its_place() {
        assert!(compare_binaries(b"same", b"same").is_ok());
        let error = compare_binaries(b"same", b"some").expect_err("they differ").to_string();
        assert!(error.ends_with("4 and 4 bytes, different from byte 1 on"), "{error}");
        let error = compare_binaries(b"same", b"same, but longer").expect_err("they differ").to_string();
        assert!(error.ends_with("different from byte 4 on"), "{error}");
    }
}
