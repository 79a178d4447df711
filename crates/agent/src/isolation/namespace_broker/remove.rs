//! Removes a directory tree whose creator is untrusted and decided how deep it is.
//!
//! One descriptor is open for each level, so the depth is bounded. Anything deeper stays, together
//! with the directories above it.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;

use rustix::fs::{AtFlags, Dir, Mode, OFlags};
use rustix::io::Errno;

/// The maximum depth of a tree that is removed completely.
const MAX_DEPTH: usize = 256;

/// Removes an entry of a directory as far as possible. Links are not followed.
pub(super) fn remove_tree(parent: &Path, name: &str) -> io::Result<()> {
    let parent = rustix::fs::open(parent, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    Ok(remove_directory(parent.as_fd(), &CString::new(name)?, MAX_DEPTH)?)
}

/// The first error is returned, but does not stop the removal of the rest.
fn remove_directory(parent: BorrowedFd<'_>, name: &CStr, depth: usize) -> rustix::io::Result<()> {
    let depth = depth.checked_sub(1).ok_or(Errno::NAMETOOLONG)?;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut directory = Dir::new(rustix::fs::openat(parent, name, flags, Mode::empty())?)?;
    let mut outcome = Ok(());
    while let Some(entry) = directory.read() {
        let entry = entry?;
        if matches!(entry.file_name().to_bytes(), b"." | b"..") {
            continue;
        }
        let here = directory.fd()?;
        let removed = match rustix::fs::unlinkat(here, entry.file_name(), AtFlags::empty()) {
            Err(Errno::ISDIR) => remove_directory(here, entry.file_name(), depth),
            removed => removed,
        };
        outcome = outcome.and(removed);
    }
    outcome?;
    rustix::fs::unlinkat(parent, name, AtFlags::REMOVEDIR)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn make_nested_directories(from: &Path, depth: usize) {
        let mut here = rustix::fs::open(from, OFlags::PATH, Mode::empty()).expect("the directory exists");
        for _ in 0..depth {
            rustix::fs::mkdirat(&here, "d", Mode::RWXU).expect("the name is free");
            here = rustix::fs::openat(&here, "d", OFlags::PATH, Mode::empty()).expect("it was just created");
        }
    }

    #[test]
    fn tree_is_removed_without_following_links() {
        let dir = tempfile::tempdir().expect("a directory");
        fs::create_dir_all(dir.path().join("1/upper0/a/b")).expect("the names are free");
        fs::write(dir.path().join("1/upper0/a/file"), "x").expect("the name is free");
        fs::write(dir.path().join("kept"), "x").expect("the name is free");
        std::os::unix::fs::symlink("/", dir.path().join("1/upper0/root")).expect("the name is free");
        std::os::unix::fs::symlink("../kept", dir.path().join("1/kept")).expect("the name is free");
        remove_tree(dir.path(), "1").expect("the tree can be removed");
        assert!(!dir.path().join("1").exists());
        assert!(dir.path().join("kept").exists());
    }

    #[test]
    fn too_deep_tree_stays_but_its_siblings_are_removed() {
        let dir = tempfile::tempdir().expect("a directory");
        fs::create_dir(dir.path().join("1")).expect("the name is free");
        make_nested_directories(&dir.path().join("1"), 400);
        for number in 0..20 {
            fs::write(dir.path().join(format!("1/{number}")), "x").expect("the name is free");
        }
        remove_tree(dir.path(), "1").expect_err("the tree is too deep");
        assert_eq!(fs::read_dir(dir.path().join("1")).expect("the directory exists").count(), 1);
    }
}
