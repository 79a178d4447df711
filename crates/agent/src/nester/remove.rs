//! Removing a tree that somebody else has made, who decided how deep it is.
//!
//! One descriptor is open for each directory on the way down, so the way is bounded. What lies
//! deeper stays, and with it the directories that lead there.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;

use rustix::fs::{AtFlags, Dir, Mode, OFlags};
use rustix::io::Errno;

/// How deep a tree can be that is removed whole.
const DEEPEST: usize = 256;

/// Removes what has a name in a directory, as far as that goes. No link is followed.
pub(super) fn tree(parent: &Path, name: &str) -> io::Result<()> {
    let parent = rustix::fs::open(parent, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    Ok(remove(parent.as_fd(), &CString::new(name)?, DEEPEST)?)
}

/// The first error is told, and does not keep the rest from being removed.
fn remove(parent: BorrowedFd<'_>, name: &CStr, depth: usize) -> rustix::io::Result<()> {
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
            Err(Errno::ISDIR) => remove(here, entry.file_name(), depth),
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

    fn nest(from: &Path, depth: usize) {
        let mut here = rustix::fs::open(from, OFlags::PATH, Mode::empty()).expect("it is there");
        for _ in 0..depth {
            rustix::fs::mkdirat(&here, "d", Mode::RWXU).expect("it is new");
            here = rustix::fs::openat(&here, "d", OFlags::PATH, Mode::empty()).expect("it was made");
        }
    }

    #[test]
    fn a_tree_goes_with_all_that_is_in_it_and_nothing_that_it_links_to() {
        let place = tempfile::tempdir().expect("a directory");
        fs::create_dir_all(place.path().join("1/upper0/a/b")).expect("they are new");
        fs::write(place.path().join("1/upper0/a/file"), "x").expect("it is new");
        fs::write(place.path().join("kept"), "x").expect("it is new");
        std::os::unix::fs::symlink("/", place.path().join("1/upper0/root")).expect("it is new");
        std::os::unix::fs::symlink("../kept", place.path().join("1/kept")).expect("it is new");
        tree(place.path(), "1").expect("nothing is in the way");
        assert!(!place.path().join("1").exists());
        assert!(place.path().join("kept").exists());
    }

    #[test]
    fn a_tree_that_is_too_deep_is_left_and_what_lies_beside_it_is_not() {
        let place = tempfile::tempdir().expect("a directory");
        fs::create_dir(place.path().join("1")).expect("it is new");
        nest(&place.path().join("1"), 400);
        for number in 0..20 {
            fs::write(place.path().join(format!("1/{number}")), "x").expect("it is new");
        }
        tree(place.path(), "1").expect_err("it is too deep");
        assert_eq!(fs::read_dir(place.path().join("1")).expect("it is there").count(), 1);
    }
}
