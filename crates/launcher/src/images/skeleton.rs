//! A skeleton as data: its entries, the name derived from them, and writing it.
//!
//! The name is a hash over the plan, in which a copied file is represented by its size, times and
//! inode. So an existing skeleton is recognised without reading a single file.

use std::collections::BTreeMap;
use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use linux::fs::RootDirectory;

use super::layer::write_text;
use super::{ImageError, ImageErrorContext};

/// Changes when the same plan would be written differently.
pub(super) const FORMAT_VERSION: u64 = 1;

/// The maximum size of a copied file in bytes.
pub(super) const MAX_FILE_SIZE: u64 = 16 << 20;

/// The entries of a skeleton, by path without the leading `/`.
#[derive(Debug, Default)]
pub(super) struct SkeletonPlan {
    items: BTreeMap<PathBuf, SkeletonEntry>,
}

#[derive(Debug)]
enum SkeletonEntry {
    Directory { mode: u32 },
    Link { target: PathBuf },
    Text { mode: u32, text: String },
    Copy { source: PathBuf, mode: u32, stamp: [u64; 6] },
}

impl SkeletonPlan {
    pub(super) fn add_directory(&mut self, path: &Path, mode: u32) {
        self.items.entry(path.to_owned()).or_insert(SkeletonEntry::Directory { mode });
    }

    pub(super) fn add_link(&mut self, path: &Path, target: &Path) {
        self.items.insert(path.to_owned(), SkeletonEntry::Link { target: target.to_owned() });
    }

    pub(super) fn add_text(&mut self, path: &Path, mode: u32, text: &str) {
        self.items.insert(path.to_owned(), SkeletonEntry::Text { mode, text: text.to_owned() });
    }

    /// Plans a copy of `source`, whose metadata is `found`.
    pub(super) fn add_copy(&mut self, path: &Path, source: &Path, found: &Metadata) {
        let mode = 0o644 | (found.mode() & 0o111);
        let times = [found.mtime(), found.mtime_nsec(), found.ctime()].map(i64::cast_unsigned);
        let stamp = [found.dev(), found.ino(), found.len(), times[0], times[1], times[2]];
        self.items.insert(path.to_owned(), SkeletonEntry::Copy { source: source.to_owned(), mode, stamp });
    }

    pub(super) fn len(&self) -> usize {
        self.items.len()
    }

    /// The directories of the host's `/etc` whose entries were planned.
    pub(super) fn directories_of_etc(&self) -> impl Iterator<Item = PathBuf> {
        let directories =
            self.items.iter().filter(|(_, item)| matches!(item, SkeletonEntry::Directory { .. }));
        directories.filter(|(path, _)| path.starts_with("etc")).map(|(path, _)| Path::new("/").join(path))
    }

    /// The files of the host that are copied.
    pub(super) fn copied_files(&self) -> impl Iterator<Item = &Path> {
        self.items.values().filter_map(|item| match item {
            SkeletonEntry::Copy { source, .. } => Some(source.as_path()),
            SkeletonEntry::Directory { .. } | SkeletonEntry::Link { .. } | SkeletonEntry::Text { .. } => None,
        })
    }

    /// The name derived from the content.
    pub(super) fn version(&self) -> String {
        let mut hash = blake3::Hasher::new();
        hash.update(&FORMAT_VERSION.to_le_bytes());
        for (path, item) in &self.items {
            hash_part(&mut hash, path.as_os_str().as_bytes());
            match item {
                SkeletonEntry::Directory { mode } => hash_part(&mut hash, &mode.to_le_bytes()),
                SkeletonEntry::Link { target } => hash_part(&mut hash, target.as_os_str().as_bytes()),
                SkeletonEntry::Text { mode, text } => {
                    hash_part(&mut hash, &mode.to_le_bytes());
                    hash_part(&mut hash, text.as_bytes());
                }
                SkeletonEntry::Copy { source, mode, stamp } => {
                    hash_part(&mut hash, source.as_os_str().as_bytes());
                    hash_part(&mut hash, &mode.to_le_bytes());
                    stamp.iter().for_each(|number| hash_part(&mut hash, &number.to_le_bytes()));
                }
            }
        }
        hash.finalize().to_hex().as_str()[..16].to_owned()
    }

    /// Writes all entries below `tree`, which is empty. A directory sorts before its entries.
    pub(super) fn write(&self, tree: &RootDirectory) -> Result<(), ImageError> {
        for (path, item) in &self.items {
            match item {
                SkeletonEntry::Directory { mode } => {
                    let made = tree.make_directory(path, *mode);
                    made.and_then(|()| tree.set_mode(path, *mode)).during("make", path)?;
                }
                SkeletonEntry::Link { target } => tree.create_symlink(target, path).during("make", path)?,
                SkeletonEntry::Text { mode, text } => {
                    write_text(tree, path, *mode, text.as_bytes()).during("write", path)?;
                }
                SkeletonEntry::Copy { source, mode, .. } => {
                    let text = read_public_file(source).during("copy", source)?;
                    write_text(tree, path, *mode, &text).during("write", path)?;
                }
            }
        }
        Ok(())
    }
}

/// Hashes the length as well, so that the parts stay unambiguous.
fn hash_part(hash: &mut blake3::Hasher, part: &[u8]) {
    hash.update(&part.len().to_le_bytes());
    hash.update(part);
}

/// Opens a host file without waiting if it is a pipe.
pub(super) fn open_nonblocking(path: &Path) -> io::Result<File> {
    let flags = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
    OpenOptions::new().read(true).custom_flags(flags).open(path)
}

/// Reads a file that everyone may read; it may have changed since it was planned.
fn read_public_file(path: &Path) -> io::Result<Vec<u8>> {
    let file = open_nonblocking(path)?;
    let found = file.metadata()?;
    if !found.is_file() || found.mode() & 0o004 == 0 {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    let mut text = Vec::new();
    file.take(MAX_FILE_SIZE).read_to_end(&mut text)?;
    Ok(text)
}
