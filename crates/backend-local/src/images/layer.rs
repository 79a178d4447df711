//! A layer that is being filled from an untrusted source.
//!
//! Every entry is created beneath a [`Root`]: names that lead out, by dots or through links that an earlier entry
//! created, are rejected. Counts and sizes are limited for all layers of an image together. A removal of a file in a
//! lower layer becomes a whiteout or an opaque mark, as in an overlay with `userxattr`.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use linux::fs::Root;
use rustix::fs::{FileType, Stat, Timespec, Timestamps, XattrFlags};

use super::budget::{self, Budget, EVERY};
use super::{During, ImageError};

const MOST_DEPTH: usize = 256;
/// The kernel's limit on the length of a path.
const LONGEST_PATH: usize = 4096;
/// Sandboxes have ids up to this one.
const LAST_ID: u32 = 65_535;
/// Entries with this prefix describe what a layer removes.
const WHITEOUT: &[u8] = b".wh.";
const OPAQUE: &[u8] = b".wh..wh..opq";
/// Other names with this prefix are metadata of an obsolete filesystem.
const BOOKKEEPING: &[u8] = b".wh..wh.";

/// The metadata of an entry.
#[derive(Clone, Debug, Default)]
pub(super) struct Marks {
    pub(super) mode: u32,
    pub(super) uid: u32,
    pub(super) gid: u32,
    /// Seconds since 1970.
    pub(super) modified: i64,
    /// Extended attributes; only those that any user may set get this far.
    pub(super) attributes: Vec<(String, Vec<u8>)>,
}

/// Whether names with the prefix `.wh.` are interpreted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// A whole root file system: there is nothing below to remove.
    Whole,
    /// One layer above others.
    Difference,
}

pub(super) struct Layer<'image> {
    root: Root,
    form: Form,
    /// Only root can change the owner of files; otherwise everything belongs to the caller.
    owners: Owners,
    /// Directories get their metadata last, when nothing has to be created in them any more.
    directories: BTreeMap<PathBuf, Marks>,
    /// Shared by all layers of the image.
    budget: &'image mut Budget,
    /// The part of the budget that earlier layers have used.
    before: u64,
    progress: &'image mut dyn FnMut(&str),
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Owners {
    Kept,
    Caller,
}

impl<'image> Layer<'image> {
    /// Fills the empty directory `root`. Owners are kept only if `may_give_away` is set.
    pub(super) fn new(
        root: Root,
        form: Form,
        may_give_away: bool,
        budget: &'image mut Budget,
        progress: &'image mut dyn FnMut(&str),
    ) -> Self {
        let owners = if may_give_away { Owners::Kept } else { Owners::Caller };
        let before = budget.bytes();
        Self { root, form, owners, directories: BTreeMap::new(), budget, before, progress }
    }

    pub(super) fn directory(&mut self, path: &Path, marks: Marks) -> Result<(), ImageError> {
        let path = self.enter(path, &marks)?;
        if path == Path::new("") {
            return Ok(());
        }
        match self.root.stat(&path) {
            Ok(found) if FileType::from_raw_mode(found.st_mode).is_dir() => {}
            Ok(found) if is_whiteout(&found) => {
                // It was removed below and created again, so its old content must not be visible.
                self.root.remove_file(&path).during("replace", &path)?;
                self.place(&path, |root| root.make_directory(&path, 0o700))?;
                self.make_opaque(&path)?;
            }
            _ => self.place(&path, |root| root.make_directory(&path, 0o700))?,
        }
        self.directories.insert(path, marks);
        Ok(())
    }

    pub(super) fn file(
        &mut self,
        path: &Path,
        marks: &Marks,
        content: &mut dyn Read,
    ) -> Result<(), ImageError> {
        let path = self.enter(path, marks)?;
        if self.form == Form::Difference && self.removes(&path)? {
            return Ok(());
        }
        let file = self.place(&path, |root| root.create(&path, 0o600))?;
        loop {
            let piece = self.budget.piece();
            let written = io::copy(&mut content.take(piece), &mut &file).during("fill", &path)?;
            self.budget.spend(written)?;
            if written < piece {
                break;
            }
            budget::check_room(&self.root)?;
        }
        self.mark(&file, marks).during("mark", &path)
    }

    pub(super) fn symlink(&mut self, path: &Path, target: &Path, marks: &Marks) -> Result<(), ImageError> {
        let path = self.enter(path, marks)?;
        self.refuse_whiteout(&path)?;
        self.place(&path, |root| root.symlink(target, &path))?;
        match self.owners {
            Owners::Kept => self.root.set_owner(&path, marks.uid, marks.gid).during("mark", &path),
            Owners::Caller => Ok(()),
        }
    }

    pub(super) fn hard_link(&mut self, path: &Path, existing: &Path) -> Result<(), ImageError> {
        let existing = beneath(existing)?;
        let path = self.enter(path, &Marks::default())?;
        self.refuse_whiteout(&path)?;
        if path == existing {
            return Ok(());
        }
        let kind = self.root.stat(&existing).map(|found| FileType::from_raw_mode(found.st_mode));
        match kind {
            Ok(FileType::RegularFile | FileType::Symlink) => {
                self.place(&path, |root| root.hard_link(&existing, &path))
            }
            Err(error) if error.raw_os_error() == Some(rustix::io::Errno::LOOP.raw_os_error()) => {
                Err(hostile(&path, "it links to a path through a symbolic link"))
            }
            _ => Err(hostile(&path, "it links to nothing that came before it")),
        }
    }

    /// Hides the file at this path in the layers below.
    pub(super) fn whiteout(&mut self, path: &Path) -> Result<(), ImageError> {
        let path = self.enter(path, &Marks::default())?;
        self.place(&path, |root| root.make_whiteout(&path))
    }

    /// Hides the content of this directory in the layers below.
    pub(super) fn opaque(&mut self, path: &Path) -> Result<(), ImageError> {
        self.make_opaque(&beneath(path)?)
    }

    /// Rejects devices and pipes, which do not belong in an image: `/dev` is created anew inside. Archives of a whole
    /// system have some in `dev` and `run`, which are omitted.
    pub(super) fn special(&mut self, path: &Path, reason: &'static str) -> Result<(), ImageError> {
        let path = self.enter(path, &Marks::default())?;
        if path.starts_with("dev") || path.starts_with("run") || path.starts_with("var/run") {
            return Ok(());
        }
        Err(hostile(&path, reason))
    }

    /// Sets the metadata of the directories and returns the size of the layer in bytes.
    pub(super) fn finish(mut self) -> Result<u64, ImageError> {
        for (path, marks) in std::mem::take(&mut self.directories).into_iter().rev() {
            let directory = self.root.read(&path).during("mark", &path)?;
            self.mark(&directory, &marks).during("mark", &path)?;
        }
        self.tell();
        Ok(self.budget.bytes() - self.before)
    }

    pub(super) fn root(&self) -> &Root {
        &self.root
    }

    /// Executes an entry that describes a removal; returns `false` if it is another entry.
    fn removes(&mut self, path: &Path) -> Result<bool, ImageError> {
        let parent = path.parent().unwrap_or(Path::new(""));
        let name = path.file_name().unwrap_or_default().as_bytes();
        if name == OPAQUE {
            if parent == Path::new("") {
                return Err(hostile(path, "it hides everything below this layer"));
            }
            self.make_parents(path)?;
            self.make_opaque(parent)?;
            return Ok(true);
        }
        if name.starts_with(BOOKKEEPING) {
            return Ok(true);
        }
        let Some(hidden) = name.strip_prefix(WHITEOUT) else { return Ok(false) };
        if hidden.is_empty() || hidden == b"." || hidden == b".." {
            return Err(hostile(path, "it removes nothing that could exist"));
        }
        let hidden = parent.join(std::ffi::OsStr::from_bytes(hidden));
        match self.root.stat(&hidden) {
            // This layer has an entry there, so only the entry below is hidden.
            Ok(found) if FileType::from_raw_mode(found.st_mode).is_dir() => self.make_opaque(&hidden)?,
            Ok(_) => {}
            Err(_) => self.place(&hidden, |root| root.make_whiteout(&hidden))?,
        }
        Ok(true)
    }

    fn refuse_whiteout(&self, path: &Path) -> Result<(), ImageError> {
        let name = path.file_name().unwrap_or_default().as_bytes();
        if self.form == Form::Difference && name.starts_with(WHITEOUT) {
            return Err(hostile(path, "a whiteout must be a plain file"));
        }
        Ok(())
    }

    fn make_opaque(&self, path: &Path) -> Result<(), ImageError> {
        let directory = self.root.read(path).during("mark", path)?;
        rustix::fs::fsetxattr(&directory, "user.overlay.opaque", b"y", XattrFlags::empty())
            .map_err(io::Error::from)
            .during("mark", path)
    }

    /// Counts an entry and returns its path beneath the root.
    fn enter(&mut self, path: &Path, marks: &Marks) -> Result<PathBuf, ImageError> {
        let length = |(name, value): &(String, Vec<u8>)| (name.len() + value.len()) as u64;
        self.count(marks.attributes.iter().map(length).sum())?;
        if marks.uid > LAST_ID || marks.gid > LAST_ID {
            return Err(hostile(path, "its owner has an id above 65535, which no sandbox has"));
        }
        let clean = beneath(path)?;
        let parents = clean.parent().into_iter().flat_map(Path::components);
        let removed = |part: Component<'_>| part.as_os_str().as_bytes().starts_with(WHITEOUT);
        if self.form == Form::Difference && parents.into_iter().any(removed) {
            return Err(hostile(path, "it is below something that is removed"));
        }
        Ok(clean)
    }

    fn count(&mut self, attributes: u64) -> Result<(), ImageError> {
        self.budget.enter(attributes)?;
        if self.budget.entries().is_multiple_of(EVERY) {
            self.tell();
            budget::check_room(&self.root)?;
        }
        Ok(())
    }

    fn tell(&mut self) {
        (self.progress)(&format!("{} entries, {} MiB", self.budget.entries(), self.budget.bytes() >> 20));
    }

    /// Creates the directories above `path` that have no entry. Each counts like an entry; otherwise one deep path
    /// could create hundreds of them for free.
    fn make_parents(&mut self, path: &Path) -> Result<(), ImageError> {
        let parent = path.parent().unwrap_or(Path::new(""));
        let above = parent.ancestors().filter(|above| !above.as_os_str().is_empty());
        let missing = above.take_while(|above| self.root.stat(above).is_err()).count();
        for _ in 0..missing {
            self.count(0)?;
        }
        self.root.make_directories(parent, 0o755).during("make the parents of", path)
    }

    /// Creates a new entry at `path`; missing parents are created.
    fn place<T>(&mut self, path: &Path, make: impl Fn(&Root) -> io::Result<T>) -> Result<T, ImageError> {
        let mut result = make(&self.root);
        if let Err(error) = &result {
            match error.kind() {
                io::ErrorKind::AlreadyExists => {
                    if !self.root.stat(path).is_ok_and(|found| is_whiteout(&found)) {
                        return Err(hostile(path, "it occurs twice"));
                    }
                    self.root.remove_file(path).during("replace", path)?;
                    result = make(&self.root);
                }
                io::ErrorKind::NotFound => {
                    self.make_parents(path)?;
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

    /// Sets the owner first, because changing it clears setuid bits.
    fn mark(&self, file: &File, marks: &Marks) -> io::Result<()> {
        if self.owners == Owners::Kept {
            let (uid, gid) = (rustix::fs::Uid::from_raw(marks.uid), rustix::fs::Gid::from_raw(marks.gid));
            rustix::fs::fchown(file, Some(uid), Some(gid))?;
        }
        for (name, value) in &marks.attributes {
            rustix::fs::fsetxattr(file, name, value, XattrFlags::empty())?;
        }
        rustix::fs::fchmod(file, rustix::fs::Mode::from_raw_mode(marks.mode & 0o7777))?;
        let time = Timespec { tv_sec: marks.modified, tv_nsec: 0 };
        Ok(rustix::fs::futimens(file, &Timestamps { last_access: time, last_modification: time })?)
    }
}

fn is_whiteout(found: &Stat) -> bool {
    FileType::from_raw_mode(found.st_mode) == FileType::CharacterDevice && found.st_rdev == 0
}

pub(super) fn hostile(path: &Path, reason: &'static str) -> ImageError {
    let entry: String = path.to_string_lossy().chars().take(200).collect();
    ImageError::Hostile { entry, reason }
}

/// Returns the path without its leading `./`; anything but plain names is rejected.
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
        return Err(hostile(path, "it is nested too deep"));
    }
    if clean.as_os_str().len() > LONGEST_PATH {
        return Err(hostile(path, "its path is too long"));
    }
    Ok(clean)
}

/// Writes a text file that belongs to the current user.
pub(super) fn write_text(root: &Root, path: &Path, mode: u32, text: &[u8]) -> io::Result<()> {
    let mut file = root.create(path, mode)?;
    file.write_all(text)?;
    Ok(rustix::fs::fchmod(&file, rustix::fs::Mode::from_raw_mode(mode))?)
}
