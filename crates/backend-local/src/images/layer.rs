//! A tree that is being filled from a source nobody vouches for.
//!
//! Every entry is made beneath a [`Root`]: names that lead out, by dots or through links that an
//! earlier entry made, are refused. Counts and sizes are bounded.

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Component, Path, PathBuf};

use linux::fs::Root;
use rustix::fs::{FileType, Timespec, Timestamps};

use super::{During, ImageError};

const MOST_ENTRIES: u64 = 4_000_000;
const MOST_BYTES: u64 = 64 << 30;
const MOST_DEPTH: usize = 256;
/// A host that is nearly full must not be filled up.
const LEAST_FREE: u64 = 256 << 20;
/// How often room and progress are looked at, in entries.
const EVERY: u64 = 1000;
/// Ids above this do not exist inside a sandbox.
const NOBODY: u32 = 65534;

/// What an entry is marked with.
#[derive(Clone, Copy, Debug)]
pub(super) struct Marks {
    pub(super) mode: u32,
    pub(super) uid: u32,
    pub(super) gid: u32,
    /// Seconds since 1970.
    pub(super) modified: i64,
}

pub(super) struct Layer<'progress> {
    root: Root,
    /// Only root can give files away; otherwise everything belongs to the caller.
    owners: Owners,
    /// Directories get their marks last, when nothing has to be made in them any more.
    directories: Vec<(PathBuf, Marks)>,
    entries: u64,
    bytes: u64,
    progress: &'progress mut dyn FnMut(&str),
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Owners {
    Kept,
    Caller,
}

impl<'progress> Layer<'progress> {
    pub(super) fn new(path: &Path, progress: &'progress mut dyn FnMut(&str)) -> Result<Self, ImageError> {
        let root = Root::open(path).during("open", path)?;
        let is_root = rustix::process::geteuid().is_root();
        let owners = if is_root { Owners::Kept } else { Owners::Caller };
        Ok(Self { root, owners, directories: Vec::new(), entries: 0, bytes: 0, progress })
    }

    pub(super) fn directory(&mut self, path: &Path, marks: Marks) -> Result<(), ImageError> {
        let path = self.enter(path)?;
        if path == Path::new("") {
            return Ok(());
        }
        let is_directory =
            |root: &Root| root.stat(&path).is_ok_and(|found| FileType::from_raw_mode(found.st_mode).is_dir());
        if !is_directory(&self.root) {
            self.place(&path, |root| root.make_directory(&path, 0o700))?;
        }
        self.directories.push((path, marks));
        Ok(())
    }

    pub(super) fn file(
        &mut self,
        path: &Path,
        marks: Marks,
        content: &mut dyn Read,
    ) -> Result<(), ImageError> {
        let path = self.enter(path)?;
        let file = self.place(&path, |root| root.create(&path, 0o600))?;
        let room = MOST_BYTES - self.bytes;
        let written =
            io::copy(&mut content.take(room.saturating_add(1)), &mut &file).during("fill", &path)?;
        if written > room {
            return Err(ImageError::TooLarge("64 GiB"));
        }
        self.bytes += written;
        self.mark(&file, marks).during("mark", &path)
    }

    pub(super) fn symlink(&mut self, path: &Path, target: &Path, marks: Marks) -> Result<(), ImageError> {
        let path = self.enter(path)?;
        self.place(&path, |root| root.symlink(target, &path))?;
        match self.owners {
            Owners::Kept => {
                self.root.set_owner(&path, sane(marks.uid), sane(marks.gid)).during("mark", &path)
            }
            Owners::Caller => Ok(()),
        }
    }

    pub(super) fn hard_link(&mut self, path: &Path, existing: &Path) -> Result<(), ImageError> {
        let existing = beneath(existing)?;
        let path = self.enter(path)?;
        if path == existing {
            return Ok(());
        }
        self.place(&path, |root| root.hard_link(&existing, &path))
    }

    pub(super) fn fifo(&mut self, path: &Path, marks: Marks) -> Result<(), ImageError> {
        let path = self.enter(path)?;
        self.place(&path, |root| root.make_fifo(&path, marks.mode & 0o777))
    }

    /// A device has no place in an image: inside, `/dev` is made afresh. Archives of a whole
    /// system have some in `dev`, which are left out.
    pub(super) fn device(&mut self, path: &Path) -> Result<(), ImageError> {
        let path = self.enter(path)?;
        if path.starts_with("dev") {
            return Ok(());
        }
        Err(hostile(&path, "it is a device"))
    }

    /// Marks the directories and answers how many bytes the layer holds.
    pub(super) fn finish(mut self) -> Result<u64, ImageError> {
        while let Some((path, marks)) = self.directories.pop() {
            let directory = self.root.read(&path).during("mark", &path)?;
            self.mark(&directory, marks).during("mark", &path)?;
        }
        self.tell();
        Ok(self.bytes)
    }

    pub(super) fn root(&self) -> &Root {
        &self.root
    }

    /// Counts an entry and says where it belongs.
    fn enter(&mut self, path: &Path) -> Result<PathBuf, ImageError> {
        self.entries += 1;
        if self.entries > MOST_ENTRIES {
            return Err(ImageError::TooLarge("four million entries"));
        }
        if self.entries.is_multiple_of(EVERY) {
            self.tell();
            let status = rustix::fs::fstatvfs(&self.root).map_err(io::Error::from).during("measure", path)?;
            if status.f_bavail.saturating_mul(status.f_frsize) < LEAST_FREE {
                return Err(ImageError::TooLarge("this disk has room for"));
            }
        }
        beneath(path)
    }

    fn tell(&mut self) {
        (self.progress)(&format!("{} entries, {} MiB", self.entries, self.bytes >> 20));
    }

    /// Makes something at `path`. A later entry replaces an earlier one, as tar does it, but
    /// nothing replaces a directory; missing parents are made.
    fn place<T>(&self, path: &Path, make: impl Fn(&Root) -> io::Result<T>) -> Result<T, ImageError> {
        let mut result = make(&self.root);
        if let Err(error) = &result {
            match error.kind() {
                io::ErrorKind::AlreadyExists => {
                    self.root.remove_file(path).during("replace", path)?;
                    result = make(&self.root);
                }
                io::ErrorKind::NotFound => {
                    let parent = path.parent().unwrap_or(Path::new(""));
                    self.root.make_directories(parent, 0o755).during("make the parents of", path)?;
                    result = make(&self.root);
                }
                _ => {}
            }
        }
        match result {
            Err(error) if error.raw_os_error() == Some(rustix::io::Errno::LOOP.raw_os_error()) => {
                Err(hostile(path, "its path leads through a symbolic link"))
            }
            result => result.during("make", path),
        }
    }

    /// The owner comes first, since changing it takes setuid bits away.
    fn mark(&self, file: &File, marks: Marks) -> io::Result<()> {
        if self.owners == Owners::Kept {
            let (uid, gid) = (sane(marks.uid), sane(marks.gid));
            let (uid, gid) = (rustix::fs::Uid::from_raw(uid), rustix::fs::Gid::from_raw(gid));
            rustix::fs::fchown(file, Some(uid), Some(gid))?;
        }
        rustix::fs::fchmod(file, rustix::fs::Mode::from_raw_mode(marks.mode & 0o7777))?;
        let time = Timespec { tv_sec: marks.modified, tv_nsec: 0 };
        Ok(rustix::fs::futimens(file, &Timestamps { last_access: time, last_modification: time })?)
    }
}

fn sane(id: u32) -> u32 {
    if id > NOBODY { NOBODY } else { id }
}

pub(super) fn hostile(path: &Path, reason: &'static str) -> ImageError {
    let entry: String = path.to_string_lossy().chars().take(200).collect();
    ImageError::Hostile { entry, reason }
}

/// The path without its leading `./`; anything but plain names is refused.
fn beneath(path: &Path) -> Result<PathBuf, ImageError> {
    let mut clean = PathBuf::new();
    for part in path.components() {
        match part {
            Component::Normal(name) => clean.push(name),
            Component::CurDir => {}
            Component::RootDir | Component::Prefix(_) => return Err(hostile(path, "its path is absolute")),
            Component::ParentDir => return Err(hostile(path, "its path leads out")),
        }
    }
    if clean.components().count() > MOST_DEPTH {
        return Err(hostile(path, "it lies too deep"));
    }
    Ok(clean)
}

/// Writes a text file that belongs to whoever runs this.
pub(super) fn write_text(root: &Root, path: &Path, mode: u32, text: &[u8]) -> io::Result<()> {
    let mut file = root.create(path, mode)?;
    file.write_all(text)?;
    Ok(rustix::fs::fchmod(&file, rustix::fs::Mode::from_raw_mode(mode))?)
}
