//! Making mounts read-only one by one, with the classic mount(2) call.
//!
//! mount_setattr(2) does it for a whole tree at once, but its flags are passed in memory, where a seccomp
//! filter cannot inspect them. The flags of mount(2) are in a register: a process can keep the right to
//! make mounts read-only without the right to make them writable.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, StatxFlags};
use rustix::mount::{MountFlags, mount_remount};

/// How often writable mounts are searched for again. Their parent directories may be renamed meanwhile.
const MAX_PASSES: usize = 8;

/// Makes a mount and all mounts below it read-only, except those below one of `except`. It also disables
/// set-id bits and devices there.
///
/// A mount that is covered by another is left unchanged, because it cannot be reached.
pub fn make_read_only(root: BorrowedFd<'_>, except: &[&Path]) -> io::Result<()> {
    let root = rustix::fs::statx(root, "", AtFlags::EMPTY_PATH, StatxFlags::MNT_ID)?.stx_mnt_id;
    let mut failed = None;
    for _ in 0..MAX_PASSES {
        let mounts = MountInfo::read_all()?;
        let left: Vec<&MountInfo> = writable_below(&mounts, root, except).collect();
        if left.is_empty() {
            return Ok(());
        }
        for mount in left {
            failed = restrict_mount(&mount.point, mount.no_exec).err().or(failed);
        }
    }
    Err(failed.unwrap_or_else(|| io::Error::other("the mounts keep changing")))
}

/// Disables writing, set-id bits and devices on the mount at a path, and execution if requested.
pub(crate) fn restrict_mount(path: &Path, no_exec: bool) -> io::Result<()> {
    let mut flags = MountFlags::BIND | MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NODEV;
    if no_exec {
        flags |= MountFlags::NOEXEC;
    }
    mount_remount(path, flags, "").map_err(Into::into)
}

/// A line of `/proc/PID/mountinfo`. See proc_pid_mountinfo(5).
#[derive(Debug)]
struct MountInfo {
    id: u64,
    parent: u64,
    point: PathBuf,
    read_only: bool,
    no_exec: bool,
}

impl MountInfo {
    fn read_all() -> io::Result<Vec<Self>> {
        let text = fs::read("/proc/thread-self/mountinfo")?;
        let lines = text.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
        let read =
            |line| Self::parse_line(line).ok_or_else(|| io::Error::other("a line of mountinfo is malformed"));
        lines.map(read).collect()
    }

    fn parse_line(line: &[u8]) -> Option<Self> {
        let mut words = line.split(|byte| *byte == b' ');
        let mut number = || std::str::from_utf8(words.next()?).ok()?.parse().ok();
        let (id, parent) = (number()?, number()?);
        let point = PathBuf::from(OsString::from_vec(unescape_octal(words.nth(2)?)));
        let options: Vec<&[u8]> = words.next()?.split(|byte| *byte == b',').collect();
        let has = |option: &[u8]| options.contains(&option);
        Some(Self { id, parent, point, read_only: has(b"ro"), no_exec: has(b"noexec") })
    }
}

/// Decodes blanks and similar characters, which are written as a backslash and three octal digits.
fn unescape_octal(word: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(word.len());
    let mut rest = word;
    while let Some((&byte, after)) = rest.split_first() {
        let digits = after.get(..3).and_then(|digits| std::str::from_utf8(digits).ok());
        match digits.and_then(|digits| u8::from_str_radix(digits, 8).ok()).filter(|_| byte == b'\\') {
            Some(escaped) => {
                plain.push(escaped);
                rest = &after[3..];
            }
            None => {
                plain.push(byte);
                rest = after;
            }
        }
    }
    plain
}

/// Returns the mounts of a tree that are reachable and writable.
fn writable_below<'a>(
    mounts: &'a [MountInfo],
    root: u64,
    except: &'a [&Path],
) -> impl Iterator<Item = &'a MountInfo> {
    let covered = |mount: &MountInfo| {
        mounts
            .iter()
            .any(|other| other.parent == mount.id && other.id != mount.id && other.point == mount.point)
    };
    let spared =
        |mount: &MountInfo| except.iter().any(|path| mount.point.starts_with(path) && mount.point != **path);
    let wanted = move |mount: &&MountInfo| !mount.read_only && !spared(mount) && !covered(mount);
    mounts.iter().filter(move |mount| is_reachable(mounts, mount, root)).filter(wanted)
}

/// Whether a mount is the root or lies below it, and no later mount hides the path to it.
fn is_reachable(mounts: &[MountInfo], mount: &MountInfo, root: u64) -> bool {
    let mut here = mount;
    // The root, if it is an ancestor, is reached in at most as many steps as there are mounts.
    for _ in 0..mounts.len() {
        if here.id == root {
            return true;
        }
        let hides = |other: &MountInfo| {
            other.parent == here.parent && other.point != here.point && here.point.starts_with(&other.point)
        };
        if mounts.iter().any(hides) {
            return false;
        }
        let Some(parent) = mounts.iter().find(|other| other.id == here.parent) else { return false };
        here = parent;
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mounts::{self, MountAttrs, MountDepth};
    use crate::namespaces::{self, NamespaceSet};
    use std::os::fd::AsFd;

    const LINES: &str = "\
1 0 0:1 / / rw,relatime shared:1 - ext4 /dev/sda rw
2 1 0:2 / /a\\040b rw,noexec - tmpfs tmpfs rw
3 2 0:3 / /a\\040b/c ro,nosuid - tmpfs tmpfs rw
4 1 0:4 / /x rw - tmpfs tmpfs rw
5 4 0:5 / /x/y rw - tmpfs tmpfs rw
6 4 0:6 / /x rw - tmpfs tmpfs rw
7 1 0:7 / /dev rw - tmpfs tmpfs rw
8 7 0:8 / /dev/null rw - tmpfs tmpfs rw
";

    fn numbers(root: u64, except: &[&Path]) -> Vec<u64> {
        let mounts: Vec<MountInfo> = LINES
            .lines()
            .map(|line| MountInfo::parse_line(line.as_bytes()).expect("the line is valid"))
            .collect();
        assert_eq!(mounts[1].point, Path::new("/a b"));
        assert!(mounts[1].no_exec);
        writable_below(&mounts, root, except).map(|mount| mount.id).collect()
    }

    #[test]
    fn writable_reachable_mounts_are_found() {
        assert_eq!(numbers(1, &[]), [1, 2, 6, 7, 8]);
        assert_eq!(numbers(1, &[Path::new("/dev")]), [1, 2, 6, 7]);
        assert_eq!(numbers(2, &[]), [2]);
        assert_eq!(numbers(3, &[]), [0u64; 0]);
    }

    #[test]
    fn malformed_lines_are_rejected() {
        for line in ["", "x", "1", "1 2 3 4 5", "a b c d e f"] {
            assert!(MountInfo::parse_line(line.as_bytes()).is_none(), "{line}");
        }
        assert_eq!(unescape_octal(b"a\\134\\1"), b"a\\\\1");
    }

    /// Runs a test in a thread with its own mount namespace.
    fn alone(test: impl FnOnce(&Path) + Send + 'static) {
        if !testkit::needs_root() {
            return;
        }
        let run = || {
            let place = tempfile::tempdir().expect("a directory");
            namespaces::unshare_namespaces(NamespaceSet::MOUNT).expect("root may");
            mounts::make_private().expect("root may");
            mounts::mount_filesystem("tmpfs", place.path(), MountAttrs::default(), "").expect("root may");
            test(place.path());
            mounts::detach_mount(place.path()).expect("the directory was mounted");
        };
        std::thread::spawn(run).join().expect("the test succeeds");
    }

    #[test]
    fn mount_tree_becomes_read_only() {
        alone(|place| {
            let inner = place.join("in side");
            fs::create_dir(&inner).expect("the directory is new");
            mounts::mount_filesystem("tmpfs", &inner, MountAttrs::default(), "").expect("root may");
            let shown = place.join("shown");
            fs::create_dir(&shown).expect("the directory is new");
            let copy = mounts::clone_tree(place, MountDepth::Recursive).expect("root may");
            mounts::attach_mount(copy.as_fd(), &shown).expect("root may");
            make_read_only(copy.as_fd(), &[]).expect("the tree becomes read-only");
            for path in [&shown, &shown.join("in side")] {
                let error = fs::write(path.join("file"), "x").expect_err("the mount is read-only");
                assert_eq!(error.kind(), io::ErrorKind::ReadOnlyFilesystem);
            }
            fs::write(inner.join("file"), "x").expect("the original mount is still writable");
        });
    }
}
