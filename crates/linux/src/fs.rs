//! Files below a directory that somebody else may have filled.
//!
//! A [`Root`] keeps the descriptor of a directory and resolves every path beneath it with
//! openat2(2): no symbolic link is followed, no `..` leads out, whatever the tree holds and
//! whoever changes it meanwhile. Names are never glued together into paths of the host.

use std::ffi::{CString, OsStr};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path};

use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, RenameFlags, ResolveFlags, Stat};
use rustix::io::Errno;

/// How often a lookup is tried again when the kernel saw the tree change under it.
const ATTEMPTS: usize = 128;
/// How many directories deep a removal descends before it brings deeper ones up.
const DEPTH: usize = 64;
/// How many names of a directory are held in memory during a removal.
const BATCH: usize = 1024;

/// A directory, and all that is opened beneath it.
#[derive(Debug)]
pub struct Root {
    directory: OwnedFd,
}

/// One name in a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    pub name: CString,
    pub kind: FileType,
}

impl Root {
    /// Opens a directory of the host by its path, which must come from ourselves.
    pub fn open(path: &Path) -> io::Result<Self> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(Self { directory: rustix::fs::openat(CWD, path, flags, Mode::empty())? })
    }

    /// A directory that somebody else has opened.
    pub fn from_descriptor(directory: OwnedFd) -> Self {
        Self { directory }
    }

    /// As [`Root::open`], but no part of the path may be a link: it was written without any, and
    /// somebody else may have put one there since. The directory need not be readable.
    pub fn open_plain(path: &Path) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let plain = ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        Ok(Self { directory: rustix::fs::openat2(CWD, path, flags, Mode::empty(), plain)? })
    }

    /// Opens what lies at `path` beneath; `mode` counts when `flags` may create it.
    pub fn open_with(&self, path: &Path, flags: OFlags, mode: u32) -> io::Result<File> {
        let beneath = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mode = Mode::from_raw_mode(mode);
        for _ in 0..ATTEMPTS {
            match rustix::fs::openat2(&self.directory, path, flags, mode, beneath) {
                // Something was renamed during the lookup, so `..` could not be judged.
                Err(Errno::AGAIN) => {}
                result => return result.map(File::from).map_err(io::Error::from),
            }
        }
        Err(Errno::AGAIN.into())
    }

    pub fn read(&self, path: &Path) -> io::Result<File> {
        // A pipe that somebody put there must not make us wait.
        self.open_with(path, OFlags::RDONLY | OFlags::NONBLOCK, 0)
    }

    /// The directory at `path` as a root of its own.
    pub fn directory(&self, path: &Path) -> io::Result<Self> {
        let file = self.open_with(path, OFlags::RDONLY | OFlags::DIRECTORY, 0)?;
        Ok(Self { directory: file.into() })
    }

    /// Makes a file that did not exist.
    pub fn create(&self, path: &Path, mode: u32) -> io::Result<File> {
        self.open_with(path, OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL, mode)
    }

    pub fn make_directory(&self, path: &Path, mode: u32) -> io::Result<()> {
        let (parent, name) = self.parent(path)?;
        Ok(rustix::fs::mkdirat(&parent, name, Mode::from_raw_mode(mode))?)
    }

    /// Makes `path` and what is missing above it; those that exist are left as they are.
    pub fn make_directories(&self, path: &Path, mode: u32) -> io::Result<()> {
        let mut so_far = std::path::PathBuf::new();
        for part in path.components() {
            so_far.push(part);
            match self.make_directory(&so_far, mode) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                result => result?,
            }
        }
        // What exists may be a link or a file; only a directory will do.
        if path == Path::new("") { Ok(()) } else { self.directory(path).map(drop) }
    }

    /// Makes a symbolic link. Its target is only text and may be anything.
    pub fn symlink(&self, target: &Path, path: &Path) -> io::Result<()> {
        let (parent, name) = self.parent(path)?;
        Ok(rustix::fs::symlinkat(target, &parent, name)?)
    }

    /// Makes `path` a second name of `existing`, which is not followed if it is a link.
    pub fn hard_link(&self, existing: &Path, path: &Path) -> io::Result<()> {
        let (from, old) = self.parent(existing)?;
        let (to, new) = self.parent(path)?;
        Ok(rustix::fs::linkat(&from, old, &to, new, AtFlags::empty())?)
    }

    pub fn make_fifo(&self, path: &Path, mode: u32) -> io::Result<()> {
        let (parent, name) = self.parent(path)?;
        Ok(rustix::fs::mknodat(&parent, name, FileType::Fifo, Mode::from_raw_mode(mode), 0)?)
    }

    /// Makes what hides a name of the layers below in an overlay. Unlike other devices it may be
    /// made by everybody. See mknod(2).
    pub fn make_whiteout(&self, path: &Path) -> io::Result<()> {
        let (parent, name) = self.parent(path)?;
        Ok(rustix::fs::mknodat(&parent, name, FileType::CharacterDevice, Mode::empty(), 0)?)
    }

    /// Renames within this root; what was at `to` is replaced.
    pub fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.rename_with(from, to, RenameFlags::empty())
    }

    /// Renames within this root, unless something is at `to` already.
    pub fn rename_new(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.rename_with(from, to, RenameFlags::NOREPLACE)
    }

    fn rename_with(&self, from: &Path, to: &Path, flags: RenameFlags) -> io::Result<()> {
        let (from, old) = self.parent(from)?;
        let (to, new) = self.parent(to)?;
        Ok(rustix::fs::renameat_with(&from, old, &to, new, flags)?)
    }

    /// What lies at `path` itself, links not followed.
    pub fn stat(&self, path: &Path) -> io::Result<Stat> {
        let (parent, name) = self.parent(path)?;
        Ok(rustix::fs::statat(&parent, name, AtFlags::SYMLINK_NOFOLLOW)?)
    }

    pub fn read_link(&self, path: &Path) -> io::Result<CString> {
        let (parent, name) = self.parent(path)?;
        Ok(rustix::fs::readlinkat(&parent, name, Vec::new())?)
    }

    /// Sets the owner of what lies at `path` itself.
    pub fn set_owner(&self, path: &Path, uid: u32, gid: u32) -> io::Result<()> {
        let (parent, name) = self.parent(path)?;
        let (uid, gid) = (rustix::fs::Uid::from_raw(uid), rustix::fs::Gid::from_raw(gid));
        Ok(rustix::fs::chownat(&parent, name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)?)
    }

    /// Sets the mode of a file or directory; a link has none.
    pub fn set_mode(&self, path: &Path, mode: u32) -> io::Result<()> {
        let file = self.open_with(path, OFlags::PATH, 0)?;
        set_mode_of(file.as_fd(), mode)
    }

    /// The names in this directory.
    pub fn entries(&self) -> io::Result<Vec<Entry>> {
        entries(&self.directory, usize::MAX)
    }

    pub fn remove_file(&self, path: &Path) -> io::Result<()> {
        let (parent, name) = self.parent(path)?;
        Ok(rustix::fs::unlinkat(&parent, name, AtFlags::empty())?)
    }

    /// Removes whatever lies at `path`, with all below it. Nothing there is no error. It takes a
    /// bounded number of descriptors however deep the tree is. A mount point in the tree fails the
    /// removal with EXDEV: nothing of a mounted filesystem is ever removed.
    pub fn remove_tree(&self, path: &Path) -> io::Result<()> {
        let (parent, name) = match self.parent(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            result => result?,
        };
        let name = CString::new(name.as_bytes())?;
        match rustix::fs::unlinkat(&parent, &name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => return Ok(()),
            Err(Errno::ISDIR | Errno::PERM) => {}
            Err(error) => return Err(error.into()),
        }
        let top = open_directory(parent.as_fd(), &name)?;
        let mut removal = Removal { top: top.as_fd(), brought_up: 0 };
        removal.empty(top.as_fd(), 0)?;
        Ok(rustix::fs::unlinkat(&parent, &name, AtFlags::REMOVEDIR)?)
    }

    /// Opens the directory that holds `path`, and says the last name of it.
    fn parent<'path>(&self, path: &'path Path) -> io::Result<(OwnedFd, &'path OsStr)> {
        let Some(Component::Normal(name)) = path.components().next_back() else {
            return Err(Errno::INVAL.into());
        };
        let above = match path.parent() {
            Some(above) if above != Path::new("") => above,
            _ => Path::new("."),
        };
        let flags = OFlags::PATH | OFlags::DIRECTORY;
        Ok((self.open_with(above, flags, 0)?.into(), name))
    }
}

impl From<OwnedFd> for Root {
    /// A directory that is open already.
    fn from(directory: OwnedFd) -> Self {
        Self { directory }
    }
}

impl From<Root> for OwnedFd {
    fn from(root: Root) -> Self {
        root.directory
    }
}

impl AsFd for Root {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.directory.as_fd()
    }
}

/// A tree that is being removed.
struct Removal<'top> {
    top: BorrowedFd<'top>,
    brought_up: u64,
}

impl Removal<'_> {
    /// Empties `directory`. What is brought up from the depths meanwhile lands in the top one,
    /// whose own turn ends only when nothing is left in it.
    fn empty(&mut self, directory: BorrowedFd<'_>, depth: usize) -> io::Result<()> {
        loop {
            let batch = entries(directory, BATCH)?;
            if batch.is_empty() {
                return Ok(());
            }
            for Entry { name, .. } in batch {
                self.remove(directory, &name, depth)?;
            }
        }
    }

    fn remove(&mut self, directory: BorrowedFd<'_>, name: &CString, depth: usize) -> io::Result<()> {
        match rustix::fs::unlinkat(directory, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => return Ok(()),
            Err(Errno::ISDIR | Errno::PERM) => {}
            Err(error) => return Err(error.into()),
        }
        if depth == DEPTH {
            return self.bring_up(directory, name);
        }
        let below = open_directory(directory, name)?;
        self.empty(below.as_fd(), depth + 1)?;
        Ok(rustix::fs::unlinkat(directory, name, AtFlags::REMOVEDIR)?)
    }

    fn bring_up(&mut self, directory: BorrowedFd<'_>, name: &CString) -> io::Result<()> {
        loop {
            self.brought_up += 1;
            let place = format!("{}", self.brought_up);
            match rustix::fs::renameat_with(directory, name, self.top, place, RenameFlags::NOREPLACE) {
                Err(Errno::EXIST) => {}
                result => return Ok(result?),
            }
        }
    }
}

/// At most `most` names of a directory.
fn entries(directory: impl AsFd, most: usize) -> io::Result<Vec<Entry>> {
    let mut found = Vec::new();
    for entry in Dir::read_from(directory)? {
        let entry = entry?;
        if found.len() == most {
            break;
        }
        if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
            found.push(Entry { name: entry.file_name().to_owned(), kind: entry.file_type() });
        }
    }
    Ok(found)
}

/// Opens a directory below `parent` to be emptied, unless something is mounted on it. An overlay
/// leaves ones with mode 0, which their owner must open up first.
fn open_directory(parent: BorrowedFd<'_>, name: &CString) -> io::Result<OwnedFd> {
    let open = |access: OFlags| {
        let flags = access | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        // Compares mounts and not device numbers, so a bind mount counts and a subvolume does not.
        let same_mount = ResolveFlags::NO_XDEV | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        rustix::fs::openat2(parent, name, flags, Mode::empty(), same_mount)
    };
    match open(OFlags::RDONLY) {
        Err(Errno::ACCESS) => {
            let closed = open(OFlags::PATH)?;
            set_mode_of(closed.as_fd(), 0o700)?;
            Ok(open(OFlags::RDONLY)?)
        }
        result => Ok(result?),
    }
}

/// Changes the mode of what a path descriptor stands for; fchmod(2) refuses those.
fn set_mode_of(file: BorrowedFd<'_>, mode: u32) -> io::Result<()> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    Ok(rustix::fs::chmodat(CWD, path, Mode::from_raw_mode(mode), AtFlags::empty())?)
}

#[cfg(test)]
mod tests;
