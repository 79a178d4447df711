//! Access to the parts of an image: files that were opened before, or entries of a tar archive.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use linux::fs::RootDirectory;
use tar::{Archive, EntryType};

use super::budget::{self, CHECK_INTERVAL_BYTES};
use super::layer::hostile_entry;
use super::stream::{FileSection, InflatedReader};
use super::tarball::{MAX_HEADER_SIZE, RationedReader};
use super::{ImageError, ImageErrorContext};

/// An archive of an image contains a few files per layer.
const MAX_ENTRIES: usize = 10_000;
/// Each file of a layout uses a descriptor.
const MAX_FILES: usize = 1000;
/// Manifests and configurations are smaller.
const MAX_DOCUMENT_SIZE: u64 = 8 << 20;
/// The maximum size of an archive that is decompressed before it is indexed.
const MAX_SPOOLED_SIZE: u64 = 64 << 30;

/// Opens all parts of a layout in a directory. The unpacker then needs no access to the directory,
/// and the parts can no longer be replaced.
pub(super) fn open_layout(
    root: &RootDirectory,
    owner: Option<u32>,
) -> Result<BTreeMap<PathBuf, File>, ImageError> {
    let mut files = BTreeMap::new();
    check_owner(root, Path::new("."), owner)?;
    let mut add = |path: PathBuf| {
        let file = root.open_read(&path).during("open", &path)?;
        check_file(&file, &path, owner)?;
        files.insert(path, file);
        Ok(())
    };
    add(PathBuf::from("index.json"))?;
    let blobs = Path::new("blobs/sha256");
    let directory = root.open_subdirectory(blobs).during("open", blobs)?;
    check_owner(&directory, blobs, owner)?;
    let entries = directory.list_entries().during("list", blobs)?;
    if entries.len() > MAX_FILES {
        return Err(ImageError::TooLarge("1000 blobs"));
    }
    for entry in entries {
        add(blobs.join(OsStr::from_bytes(entry.name.to_bytes())))?;
    }
    Ok(files)
}

/// Rejects a file that is not a plain file or does not belong to `owner`. Only a plain file has an end; reading a pipe
/// could wait forever.
pub(super) fn check_file(file: &File, path: &Path, owner: Option<u32>) -> Result<(), ImageError> {
    if !file.metadata().during("look at", path)?.is_file() {
        return Err(hostile_entry(path, "not a plain file"));
    }
    check_owner(file, path, owner)
}

/// Rejects a file that does not belong to `owner`, checked by its descriptor.
fn check_owner(opened: impl AsFd, path: &Path, owner: Option<u32>) -> Result<(), ImageError> {
    let Some(owner) = owner else { return Ok(()) };
    let found = rustix::fs::fstat(opened).map_err(io::Error::from).during("look at", path)?;
    if found.st_uid == owner {
        Ok(())
    } else {
        Err(hostile_entry(path, "it does not belong to the requesting user"))
    }
}

pub(super) enum ImageBlobs {
    Files(BTreeMap<PathBuf, File>),
    /// Names, and the position of their content in the file.
    Tar {
        file: File,
        entries: BTreeMap<PathBuf, (u64, u64)>,
    },
}

impl ImageBlobs {
    /// Indexes an archive. A compressed one is decompressed into `spool` first, because its parts
    /// are not read in the order of the archive.
    pub(super) fn from_tar(mut file: File, spool: &RootDirectory) -> Result<Self, ImageError> {
        let path = Path::new("the archive");
        let mut start = [0; 512];
        let length = file.read(&mut start).during("read", path)?;
        file.rewind().during("read", path)?;
        if !is_plain_tar(&start[..length]) {
            let mut content = InflatedReader::open(whole_file(&file).during("read", path)?, path)?;
            let name = Path::new("spool");
            let flags = rustix::fs::OFlags::RDWR | rustix::fs::OFlags::CREATE | rustix::fs::OFlags::EXCL;
            let mut plain = spool.open_with(name, flags, 0o600).during("make", name)?;
            // The file disappears with its descriptor, whatever happens.
            spool.remove_file(name).during("remove", name)?;
            decompress_archive(&mut content, &mut plain)?;
            plain.rewind().during("read", path)?;
            plain.read(&mut start).during("read", path)?;
            plain.rewind().during("read", path)?;
            if !is_plain_tar(&start) {
                return Err(ImageError::NotAnArchive);
            }
            file = plain;
        }
        let entries = index_archive(&file)?;
        file.rewind().during("read", path)?;
        Ok(Self::Tar { file, entries })
    }

    pub(super) fn contains(&self, path: &str) -> bool {
        match self {
            Self::Files(files) => files.contains_key(Path::new(path)),
            Self::Tar { entries, .. } => entries.contains_key(Path::new(path)),
        }
    }

    /// Opens one part, from its beginning to its end. Only one part may be read at a time, because
    /// they may share one file offset.
    pub(super) fn open(&self, path: &Path) -> Result<FileSection, ImageError> {
        let missing = || io::Error::from(io::ErrorKind::NotFound);
        let (file, place) = match self {
            Self::Files(files) => (files.get(path).ok_or_else(missing).during("open", path)?, None),
            Self::Tar { file, entries } => {
                (file, Some(*entries.get(path).ok_or_else(missing).during("open", path)?))
            }
        };
        let part = |mut file: File| {
            let (offset, length) = match place {
                Some(place) => place,
                None => (0, file.metadata()?.len()),
            };
            file.seek(SeekFrom::Start(offset))?;
            Ok(file.take(length))
        };
        file.try_clone().and_then(part).during("open", path)
    }

    /// Reads a whole document.
    pub(super) fn read_document(&self, path: &Path) -> Result<Vec<u8>, ImageError> {
        let mut text = Vec::new();
        self.open(path)?.take(MAX_DOCUMENT_SIZE + 1).read_to_end(&mut text).during("read", path)?;
        if text.len() as u64 > MAX_DOCUMENT_SIZE {
            return Err(hostile_entry(path, "it is longer than a manifest may be"));
        }
        Ok(text)
    }

    /// Returns the archive from its beginning, if it turned out to be a root file system.
    pub(super) fn into_archive(self) -> Option<File> {
        match self {
            Self::Files(_) => None,
            Self::Tar { file, .. } => Some(file),
        }
    }
}

/// Decompresses an archive into `plain` as long as there is disk space.
fn decompress_archive(content: &mut InflatedReader, plain: &mut File) -> Result<(), ImageError> {
    let mut left = MAX_SPOOLED_SIZE;
    while left > 0 {
        budget::check_free_space(&*plain)?;
        let piece = left.min(CHECK_INTERVAL_BYTES);
        let written = io::copy(&mut content.take(piece), plain).during("unpack", Path::new("the archive"))?;
        if written < piece {
            return Ok(());
        }
        left -= written;
    }
    Err(ImageError::TooLarge("64 GiB"))
}

fn is_plain_tar(start: &[u8]) -> bool {
    start.len() == 512 && start[257..].starts_with(b"ustar")
}

fn whole_file(file: &File) -> io::Result<FileSection> {
    let length = file.metadata()?.len();
    Ok(file.try_clone()?.take(length))
}

/// Records the position of the content of each plain file. Ambiguous names are rejected. Older
/// archives have links from one layer to another, which are followed once.
fn index_archive(file: &File) -> Result<BTreeMap<PathBuf, (u64, u64)>, ImageError> {
    let path = Path::new("the archive");
    let end = file.metadata().during("look at", path)?.len();
    let (content, ration) = RationedReader::new(file);
    let mut archive = Archive::new(content);
    let mut entries = BTreeMap::new();
    let mut links = Vec::new();
    let mut seen = BTreeSet::new();
    for entry in archive.entries_with_seek().during("read", path)? {
        ration.set(MAX_HEADER_SIZE);
        let entry = entry.during("read", path)?;
        let name = entry.path().during("read", path)?.into_owned();
        let Some(name) = plain_name(Path::new(""), &name) else { continue };
        let kind = entry.header().entry_type();
        let means = matches!(kind, EntryType::Regular | EntryType::Continuous | EntryType::Symlink);
        if means && seen.len() < MAX_ENTRIES && !seen.insert(name.clone()) {
            return Err(hostile_entry(&name, "it occurs twice"));
        }
        match kind {
            EntryType::Regular | EntryType::Continuous => {
                let (offset, length) = (entry.raw_file_position(), entry.size());
                if offset.checked_add(length).is_none_or(|last| last > end) {
                    return Err(hostile_entry(&name, "it is truncated"));
                }
                // Only the archive of an image has few files; for a whole system the first ones are
                // sufficient.
                if entries.len() < MAX_ENTRIES {
                    entries.insert(name, (offset, length));
                }
            }
            EntryType::Symlink if links.len() < MAX_ENTRIES => {
                let target = entry.link_name().during("read", path)?;
                let from = name.parent().unwrap_or(Path::new(""));
                let target = target.and_then(|target| plain_name(from, &target));
                links.extend(target.map(|target| (name, target)));
            }
            _ => {}
        }
    }
    for (name, target) in links {
        if let Some(place) = entries.get(&target).copied() {
            entries.entry(name).or_insert(place);
        }
    }
    Ok(entries)
}

/// Returns a name without dots, relative to `from`.
fn plain_name(from: &Path, name: &Path) -> Option<PathBuf> {
    let mut clean = from.to_owned();
    for part in name.components() {
        match part {
            Component::Normal(word) => clean.push(word),
            Component::CurDir => {}
            Component::ParentDir => clean.pop().then_some(())?,
            Component::RootDir | Component::Prefix(_) => return None,
        }
    }
    Some(clean)
}
