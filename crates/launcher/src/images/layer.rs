//! A layer that is being filled from an untrusted source.
//!
//! Every entry is created beneath a [`RootDirectory`]: names that lead out, by dots or through links that an earlier entry
//! created, are rejected. Counts and sizes are limited for all layers of an image together. A removal of a file in a
//! lower layer becomes a whiteout or an opaque mark, as in an overlay with `userxattr`.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use linux::fs::RootDirectory;
use rustix::fs::{FileType, Stat, Timespec, Timestamps, XattrFlags};

use super::budget::{self, CHECK_INTERVAL_ENTRIES, ImageBudget};
use super::{ImageError, ImageErrorContext};

const MAX_DEPTH: usize = 256;
/// The kernel's limit on the length of a path.
const MAX_PATH_LENGTH: usize = 4096;
/// Sandboxes have ids up to this one.
const MAX_ID: u32 = 65_535;
/// Entries with this prefix describe what a layer removes.
const WHITEOUT_PREFIX: &[u8] = b".wh.";
const OPAQUE_MARKER: &[u8] = b".wh..wh..opq";
/// Other names with this prefix are metadata of an obsolete filesystem.
const OBSOLETE_PREFIX: &[u8] = b".wh..wh.";

/// The metadata of an entry.
#[derive(Clone, Debug, Default)]
pub(super) struct EntryMetadata {
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
pub(super) enum LayerForm {
    /// A whole root file system: there is nothing below to remove.
    Whole,
    /// One layer above others.
    Difference,
}

pub(super) struct LayerWriter<'image> {
    root: RootDirectory,
    form: LayerForm,
    /// Only root can change the owner of files; otherwise everything belongs to the caller.
    owners: FileOwners,
    /// Directories get their metadata last, when nothing has to be created in them any more.
    directories: BTreeMap<PathBuf, EntryMetadata>,
    /// Shared by all layers of the image.
    budget: &'image mut ImageBudget,
    /// The part of the budget that earlier layers have used.
    before: u64,
    progress: &'image mut dyn FnMut(&str),
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum FileOwners {
    Kept,
    Caller,
}

impl<'image> LayerWriter<'image> {
    /// Fills the empty directory `root`. Owners are kept only if `may_give_away` is set.
    pub(super) fn new(
        root: RootDirectory,
        form: LayerForm,
        may_give_away: bool,
        budget: &'image mut ImageBudget,
        progress: &'image mut dyn FnMut(&str),
    ) -> Self {
        let owners = if may_give_away { FileOwners::Kept } else { FileOwners::Caller };
        let before = budget.bytes();
        Self { root, form, owners, directories: BTreeMap::new(), budget, before, progress }
    }

    pub(super) fn add_directory(&mut self, path: &Path, marks: EntryMetadata) -> Result<(), ImageError> {
        let path = self.admit_entry(path, &marks)?;
        if path == Path::new("") {
            return Ok(());
        }
        match self.root.stat(&path) {
            Ok(found) if FileType::from_raw_mode(found.st_mode).is_dir() => {}
            Ok(found) if is_whiteout(&found) => {
                // It was removed below and created again, so its old content must not be visible.
                self.root.remove_file(&path).during("replace", &path)?;
                self.create_entry(&path, |root| root.make_directory(&path, 0o700))?;
                self.set_opaque_attribute(&path)?;
            }
            _ => self.create_entry(&path, |root| root.make_directory(&path, 0o700))?,
        }
        self.directories.insert(path, marks);
        Ok(())
    }

    pub(super) fn add_file(
        &mut self,
        path: &Path,
        marks: &EntryMetadata,
        content: &mut dyn Read,
    ) -> Result<(), ImageError> {
        let path = self.admit_entry(path, marks)?;
        if self.form == LayerForm::Difference && self.apply_removal(&path)? {
            return Ok(());
        }
        let file = self.create_entry(&path, |root| root.create_file(&path, 0o600))?;
        loop {
            let piece = self.budget.next_chunk_size();
            let written = io::copy(&mut content.take(piece), &mut &file).during("fill", &path)?;
            self.budget.spend_bytes(written)?;
            if written < piece {
                break;
            }
            budget::check_free_space(&self.root)?;
        }
        self.set_metadata(&file, marks).during("mark", &path)
    }

    pub(super) fn add_symlink(
        &mut self,
        path: &Path,
        target: &Path,
        marks: &EntryMetadata,
    ) -> Result<(), ImageError> {
        let path = self.admit_entry(path, marks)?;
        self.refuse_whiteout(&path)?;
        self.create_entry(&path, |root| root.create_symlink(target, &path))?;
        match self.owners {
            FileOwners::Kept => self.root.set_owner(&path, marks.uid, marks.gid).during("mark", &path),
            FileOwners::Caller => Ok(()),
        }
    }

    pub(super) fn add_hard_link(&mut self, path: &Path, existing: &Path) -> Result<(), ImageError> {
        let existing = clean_path(existing)?;
        let path = self.admit_entry(path, &EntryMetadata::default())?;
        self.refuse_whiteout(&path)?;
        if path == existing {
            return Ok(());
        }
        let kind = self.root.stat(&existing).map(|found| FileType::from_raw_mode(found.st_mode));
        match kind {
            Ok(FileType::RegularFile | FileType::Symlink) => {
                self.create_entry(&path, |root| root.create_hard_link(&existing, &path))
            }
            Err(error) if error.raw_os_error() == Some(rustix::io::Errno::LOOP.raw_os_error()) => {
                Err(hostile_entry(&path, "it links to a path through a symbolic link"))
            }
            _ => Err(hostile_entry(&path, "it links to nothing that came before it")),
        }
    }

    /// Hides the file at this path in the layers below.
    pub(super) fn add_whiteout(&mut self, path: &Path) -> Result<(), ImageError> {
        let path = self.admit_entry(path, &EntryMetadata::default())?;
        self.create_entry(&path, |root| root.make_whiteout(&path))
    }

    /// Hides the content of this directory in the layers below.
    pub(super) fn mark_opaque(&mut self, path: &Path) -> Result<(), ImageError> {
        self.set_opaque_attribute(&clean_path(path)?)
    }

    /// Rejects devices and pipes, which do not belong in an image: `/dev` is created anew inside. Archives of a whole
    /// system have some in `dev` and `run`, which are omitted.
    pub(super) fn reject_special(&mut self, path: &Path, reason: &'static str) -> Result<(), ImageError> {
        let path = self.admit_entry(path, &EntryMetadata::default())?;
        if path.starts_with("dev") || path.starts_with("run") || path.starts_with("var/run") {
            return Ok(());
        }
        Err(hostile_entry(&path, reason))
    }

    /// Sets the metadata of the directories and returns the size of the layer in bytes.
    pub(super) fn finish(mut self) -> Result<u64, ImageError> {
        for (path, marks) in std::mem::take(&mut self.directories).into_iter().rev() {
            let directory = self.root.open_read(&path).during("mark", &path)?;
            self.set_metadata(&directory, &marks).during("mark", &path)?;
        }
        self.report_progress();
        Ok(self.budget.bytes() - self.before)
    }

    pub(super) fn root(&self) -> &RootDirectory {
        &self.root
    }

    /// Executes an entry that describes a removal; returns `false` if it is another entry.
    fn apply_removal(&mut self, path: &Path) -> Result<bool, ImageError> {
        let parent = path.parent().unwrap_or(Path::new(""));
        let name = path.file_name().unwrap_or_default().as_bytes();
        if name == OPAQUE_MARKER {
            if parent == Path::new("") {
                return Err(hostile_entry(path, "it hides everything below this layer"));
            }
            self.make_parents(path)?;
            self.set_opaque_attribute(parent)?;
            return Ok(true);
        }
        if name.starts_with(OBSOLETE_PREFIX) {
            return Ok(true);
        }
        let Some(hidden) = name.strip_prefix(WHITEOUT_PREFIX) else { return Ok(false) };
        if hidden.is_empty() || hidden == b"." || hidden == b".." {
            return Err(hostile_entry(path, "it removes nothing that could exist"));
        }
        let hidden = parent.join(std::ffi::OsStr::from_bytes(hidden));
        match self.root.stat(&hidden) {
            // This layer has an entry there, so only the entry below is hidden.
            Ok(found) if FileType::from_raw_mode(found.st_mode).is_dir() => {
                self.set_opaque_attribute(&hidden)?
            }
            Ok(_) => {}
            Err(_) => self.create_entry(&hidden, |root| root.make_whiteout(&hidden))?,
        }
        Ok(true)
    }

    fn refuse_whiteout(&self, path: &Path) -> Result<(), ImageError> {
        let name = path.file_name().unwrap_or_default().as_bytes();
        if self.form == LayerForm::Difference && name.starts_with(WHITEOUT_PREFIX) {
            return Err(hostile_entry(path, "a whiteout must be a plain file"));
        }
        Ok(())
    }

    fn set_opaque_attribute(&self, path: &Path) -> Result<(), ImageError> {
        let directory = self.root.open_read(path).during("mark", path)?;
        rustix::fs::fsetxattr(&directory, "user.overlay.opaque", b"y", XattrFlags::empty())
            .map_err(io::Error::from)
            .during("mark", path)
    }

    /// Counts an entry and returns its path beneath the root.
    fn admit_entry(&mut self, path: &Path, marks: &EntryMetadata) -> Result<PathBuf, ImageError> {
        let length = |(name, value): &(String, Vec<u8>)| (name.len() + value.len()) as u64;
        self.count_entry(marks.attributes.iter().map(length).sum())?;
        if marks.uid > MAX_ID || marks.gid > MAX_ID {
            return Err(hostile_entry(path, "its owner has an id above 65535, which no sandbox has"));
        }
        let clean = clean_path(path)?;
        let parents = clean.parent().into_iter().flat_map(Path::components);
        let removed = |part: Component<'_>| part.as_os_str().as_bytes().starts_with(WHITEOUT_PREFIX);
        if self.form == LayerForm::Difference && parents.into_iter().any(removed) {
            return Err(hostile_entry(path, "it is below something that is removed"));
        }
        Ok(clean)
    }

    fn count_entry(&mut self, attributes: u64) -> Result<(), ImageError> {
        self.budget.count_entry(attributes)?;
        if self.budget.entries().is_multiple_of(CHECK_INTERVAL_ENTRIES) {
            self.report_progress();
            budget::check_free_space(&self.root)?;
        }
        Ok(())
    }

    fn report_progress(&mut self) {
        (self.progress)(&format!("{} entries, {} MiB", self.budget.entries(), self.budget.bytes() >> 20));
    }

    /// Creates the directories above `path` that have no entry. Each counts like an entry; otherwise one deep path
    /// could create hundreds of them for free.
    fn make_parents(&mut self, path: &Path) -> Result<(), ImageError> {
        let parent = path.parent().unwrap_or(Path::new(""));
        let above = parent.ancestors().filter(|above| !above.as_os_str().is_empty());
        let missing = above.take_while(|above| self.root.stat(above).is_err()).count();
        for _ in 0..missing {
            self.count_entry(0)?;
        }
        self.root.make_directories(parent, 0o755).during("make the parents of", path)
    }

    /// Creates a new entry at `path`; missing parents are created.
    fn create_entry<T>(
        &mut self,
        path: &Path,
        make: impl Fn(&RootDirectory) -> io::Result<T>,
    ) -> Result<T, ImageError> {
        let mut result = make(&self.root);
        if let Err(error) = &result {
            match error.kind() {
                io::ErrorKind::AlreadyExists => {
                    if !self.root.stat(path).is_ok_and(|found| is_whiteout(&found)) {
                        return Err(hostile_entry(path, "it occurs twice"));
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
                Err(hostile_entry(path, "its path leads through a symbolic link"))
            }
            result => result.during("make", path),
        }
    }

    /// Sets the owner first, because changing it clears setuid bits.
    fn set_metadata(&self, file: &File, marks: &EntryMetadata) -> io::Result<()> {
        if self.owners == FileOwners::Kept {
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

pub(super) fn hostile_entry(path: &Path, reason: &'static str) -> ImageError {
    let entry: String = path.to_string_lossy().chars().take(200).collect();
    ImageError::Hostile { entry, reason }
}

/// Returns the path without its leading `./`; anything but plain names is rejected.
fn clean_path(path: &Path) -> Result<PathBuf, ImageError> {
    let mut clean = PathBuf::new();
    for part in path.components() {
        match part {
            Component::Normal(name) => clean.push(name),
            Component::CurDir => {}
            Component::RootDir | Component::Prefix(_) => {
                return Err(hostile_entry(path, "its path is absolute"));
            }
            Component::ParentDir => return Err(hostile_entry(path, "its path leads out")),
        }
    }
    if clean.components().count() > MAX_DEPTH {
        return Err(hostile_entry(path, "it is nested too deep"));
    }
    if clean.as_os_str().len() > MAX_PATH_LENGTH {
        return Err(hostile_entry(path, "its path is too long"));
    }
    Ok(clean)
}

/// Writes a text file that belongs to the current user.
pub(super) fn write_text(root: &RootDirectory, path: &Path, mode: u32, text: &[u8]) -> io::Result<()> {
    let mut file = root.create_file(path, mode)?;
    file.write_all(text)?;
    Ok(rustix::fs::fchmod(&file, rustix::fs::Mode::from_raw_mode(mode))?)
}
