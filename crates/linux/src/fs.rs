//! Access to files below a directory whose content is not trusted.
//!
//! A [`RootDirectory`] keeps the descriptor of a directory and resolves every path beneath it with
//! openat2(2): no symbolic link is followed and no `..` leads out, regardless of the content of the
//! tree and of concurrent changes. Names are never joined into host paths.

use std::ffi::{CString, OsStr};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path};

use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, RenameFlags, ResolveFlags, Stat};
use rustix::io::Errno;

/// How often a lookup is retried when the tree changed during it.
const MAX_LOOKUP_ATTEMPTS: usize = 128;
/// How many directories deep a removal descends before it moves deeper ones up.
const MAX_REMOVAL_DEPTH: usize = 64;
/// How many names of a directory a removal holds in memory.
const REMOVAL_BATCH_SIZE: usize = 1024;

/// A directory and everything opened beneath it.
#[derive(Debug)]
pub struct RootDirectory {
    directory: OwnedFd,
}

/// One name in a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListingEntry {
    pub name: CString,
    pub kind: FileType,
}

impl RootDirectory {
    /// Opens a host directory by its path, which must be trusted.
    pub fn open(path: &Path) -> io::Result<Self> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(Self { directory: rustix::fs::openat(CWD, path, flags, Mode::empty())? })
    }

    /// Wraps a directory that the caller has opened.
    pub fn from_descriptor(directory: OwnedFd) -> Self {
        Self { directory }
    }

    /// Like [`RootDirectory::open`], but no part of the path may be a symlink: the path was written without
    /// any, and one may have been placed there since. The directory need not be readable.
    pub fn open_without_symlinks(path: &Path) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let plain = ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        Ok(Self { directory: rustix::fs::openat2(CWD, path, flags, Mode::empty(), plain)? })
    }

    /// Opens the file at `path` beneath the root; `mode` applies if `flags` may create it.
    pub fn open_with(&self, path: &Path, flags: OFlags, mode: u32) -> io::Result<File> {
        let beneath = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mode = Mode::from_raw_mode(mode);
        for _ in 0..MAX_LOOKUP_ATTEMPTS {
            match rustix::fs::openat2(&self.directory, path, flags, mode, beneath) {
                // A rename happened during the lookup, so the kernel could not resolve `..` safely.
                Err(Errno::AGAIN) => {}
                result => return result.map(File::from).map_err(io::Error::from),
            }
        }
        Err(Errno::AGAIN.into())
    }

    pub fn open_read(&self, path: &Path) -> io::Result<File> {
        // A FIFO placed there must not make us wait.
        self.open_with(path, OFlags::RDONLY | OFlags::NONBLOCK, 0)
    }

    /// Opens the directory at `path` as a new root.
    pub fn open_subdirectory(&self, path: &Path) -> io::Result<Self> {
        let file = self.open_with(path, OFlags::RDONLY | OFlags::DIRECTORY, 0)?;
        Ok(Self { directory: file.into() })
    }

    /// Creates a new file; fails if it exists.
    pub fn create_file(&self, path: &Path, mode: u32) -> io::Result<File> {
        self.open_with(path, OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL, mode)
    }

    pub fn make_directory(&self, path: &Path, mode: u32) -> io::Result<()> {
        let (parent, name) = self.open_parent(path)?;
        Ok(rustix::fs::mkdirat(&parent, name, Mode::from_raw_mode(mode))?)
    }

    /// Creates `path` and its missing parents; existing directories are left unchanged.
    pub fn make_directories(&self, path: &Path, mode: u32) -> io::Result<()> {
        let mut so_far = std::path::PathBuf::new();
        for part in path.components() {
            so_far.push(part);
            match self.make_directory(&so_far, mode) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                result => result?,
            }
        }
        // An existing entry may be a link or a file; only a directory is accepted.
        if path == Path::new("") { Ok(()) } else { self.open_subdirectory(path).map(drop) }
    }

    /// Creates a symbolic link. Its target is only text and may be anything.
    pub fn create_symlink(&self, target: &Path, path: &Path) -> io::Result<()> {
        let (parent, name) = self.open_parent(path)?;
        Ok(rustix::fs::symlinkat(target, &parent, name)?)
    }

    /// Creates `path` as a second name of `existing`, which is not followed if it is a symlink.
    pub fn create_hard_link(&self, existing: &Path, path: &Path) -> io::Result<()> {
        let (from, old) = self.open_parent(existing)?;
        let (to, new) = self.open_parent(path)?;
        Ok(rustix::fs::linkat(&from, old, &to, new, AtFlags::empty())?)
    }

    pub fn make_fifo(&self, path: &Path, mode: u32) -> io::Result<()> {
        let (parent, name) = self.open_parent(path)?;
        Ok(rustix::fs::mknodat(&parent, name, FileType::Fifo, Mode::from_raw_mode(mode), 0)?)
    }

    /// Creates a whiteout, which hides a name of the lower layers in an overlay. Unlike other
    /// devices, it can be created without privileges. See mknod(2).
    pub fn make_whiteout(&self, path: &Path) -> io::Result<()> {
        let (parent, name) = self.open_parent(path)?;
        Ok(rustix::fs::mknodat(&parent, name, FileType::CharacterDevice, Mode::empty(), 0)?)
    }

    /// Renames within this root; an existing file at `to` is replaced.
    pub fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.rename_with(from, to, RenameFlags::empty())
    }

    /// Renames within this root; fails if `to` exists.
    pub fn rename_without_replacing(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.rename_with(from, to, RenameFlags::NOREPLACE)
    }

    fn rename_with(&self, from: &Path, to: &Path, flags: RenameFlags) -> io::Result<()> {
        let (from, old) = self.open_parent(from)?;
        let (to, new) = self.open_parent(to)?;
        Ok(rustix::fs::renameat_with(&from, old, &to, new, flags)?)
    }

    /// Returns the status of `path` itself, without following a symlink.
    pub fn stat(&self, path: &Path) -> io::Result<Stat> {
        let (parent, name) = self.open_parent(path)?;
        Ok(rustix::fs::statat(&parent, name, AtFlags::SYMLINK_NOFOLLOW)?)
    }

    pub fn read_link(&self, path: &Path) -> io::Result<CString> {
        let (parent, name) = self.open_parent(path)?;
        Ok(rustix::fs::readlinkat(&parent, name, Vec::new())?)
    }

    /// Sets the owner of `path` itself, without following a symlink.
    pub fn set_owner(&self, path: &Path, uid: u32, gid: u32) -> io::Result<()> {
        let (parent, name) = self.open_parent(path)?;
        let (uid, gid) = (rustix::fs::Uid::from_raw(uid), rustix::fs::Gid::from_raw(gid));
        Ok(rustix::fs::chownat(&parent, name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)?)
    }

    /// Sets the mode of a file or directory; symlinks have none.
    pub fn set_mode(&self, path: &Path, mode: u32) -> io::Result<()> {
        let file = self.open_with(path, OFlags::PATH, 0)?;
        set_mode_of(file.as_fd(), mode)
    }

    /// Lists the names in this directory.
    pub fn list_entries(&self) -> io::Result<Vec<ListingEntry>> {
        read_entries(&self.directory, usize::MAX)
    }

    pub fn remove_file(&self, path: &Path) -> io::Result<()> {
        let (parent, name) = self.open_parent(path)?;
        Ok(rustix::fs::unlinkat(&parent, name, AtFlags::empty())?)
    }

    /// Removes `path` and everything below it. A missing path is not an error. The number of open
    /// descriptors is limited however deep the tree is. A mount point in the tree makes the removal
    /// fail with EXDEV: nothing on a mounted filesystem is ever removed.
    pub fn remove_tree(&self, path: &Path) -> io::Result<()> {
        let (parent, name) = match self.open_parent(path) {
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
        let mut removal = TreeRemoval { top: top.as_fd(), moved_count: 0 };
        removal.empty_directory(top.as_fd(), 0)?;
        Ok(rustix::fs::unlinkat(&parent, &name, AtFlags::REMOVEDIR)?)
    }

    /// Opens the parent directory of `path` and returns it with the last name.
    fn open_parent<'path>(&self, path: &'path Path) -> io::Result<(OwnedFd, &'path OsStr)> {
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

impl From<OwnedFd> for RootDirectory {
    /// Wraps an open directory.
    fn from(directory: OwnedFd) -> Self {
        Self { directory }
    }
}

impl From<RootDirectory> for OwnedFd {
    fn from(root: RootDirectory) -> Self {
        root.directory
    }
}

impl AsFd for RootDirectory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.directory.as_fd()
    }
}

/// A removal in progress.
struct TreeRemoval<'top> {
    top: BorrowedFd<'top>,
    moved_count: u64,
}

impl TreeRemoval<'_> {
    /// Empties `directory`. Directories moved up from below the depth limit end up in the top
    /// directory, which is emptied until nothing is left in it.
    fn empty_directory(&mut self, directory: BorrowedFd<'_>, depth: usize) -> io::Result<()> {
        loop {
            let batch = read_entries(directory, REMOVAL_BATCH_SIZE)?;
            if batch.is_empty() {
                return Ok(());
            }
            for ListingEntry { name, .. } in batch {
                self.remove_entry(directory, &name, depth)?;
            }
        }
    }

    fn remove_entry(&mut self, directory: BorrowedFd<'_>, name: &CString, depth: usize) -> io::Result<()> {
        match rustix::fs::unlinkat(directory, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => return Ok(()),
            Err(Errno::ISDIR | Errno::PERM) => {}
            Err(error) => return Err(error.into()),
        }
        if depth == MAX_REMOVAL_DEPTH {
            return self.move_to_top(directory, name);
        }
        let below = open_directory(directory, name)?;
        self.empty_directory(below.as_fd(), depth + 1)?;
        Ok(rustix::fs::unlinkat(directory, name, AtFlags::REMOVEDIR)?)
    }

    fn move_to_top(&mut self, directory: BorrowedFd<'_>, name: &CString) -> io::Result<()> {
        loop {
            self.moved_count += 1;
            let place = format!("{}", self.moved_count);
            match rustix::fs::renameat_with(directory, name, self.top, place, RenameFlags::NOREPLACE) {
                Err(Errno::EXIST) => {}
                result => return Ok(result?),
            }
        }
    }
}

/// Returns at most `most` names of a directory.
fn read_entries(directory: impl AsFd, most: usize) -> io::Result<Vec<ListingEntry>> {
    let mut found = Vec::new();
    for entry in Dir::read_from(directory)? {
        let entry = entry?;
        if found.len() == most {
            break;
        }
        if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
            found.push(ListingEntry { name: entry.file_name().to_owned(), kind: entry.file_type() });
        }
    }
    Ok(found)
}

/// Opens a directory below `parent` in order to empty it, unless something is mounted on it.
/// Overlays leave directories with mode 0 behind, whose mode must be changed first.
fn open_directory(parent: BorrowedFd<'_>, name: &CString) -> io::Result<OwnedFd> {
    let open = |access: OFlags| {
        let flags = access | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        // Compares mounts and not device numbers, so a bind mount is rejected and a subvolume is
        // not.
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

/// Changes the mode of the file behind an `O_PATH` descriptor, which fchmod(2) rejects.
fn set_mode_of(file: BorrowedFd<'_>, mode: u32) -> io::Result<()> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    Ok(rustix::fs::chmodat(CWD, path, Mode::from_raw_mode(mode), AtFlags::empty())?)
}

#[cfg(test)]
mod tests;
