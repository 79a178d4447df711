//! Unpacked root file systems in a directory, and the changes that a sandbox made to one.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use linux::fs::RootDirectory;
use rustix::fs::{AtFlags, FileType, Stat};
use rustix::io::Errno;

use super::digest::{HashingReader, PartsHasher};
use super::layer::{EntryMetadata, LayerWriter, hostile_entry};
use super::tarball::{MAX_ATTRIBUTES_SIZE, check_attributes_size, is_kept_attribute};
use super::{Digest, ImageError, ImageErrorContext};

/// The maximum depth of a source; each level holds a descriptor.
const MAX_DEPTH: usize = 200;

/// The kind of content in a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DirectoryContents {
    /// A whole root file system. It must not contain overlay attributes.
    Tree,
    /// The upper directory of an overlay with `userxattr`: whiteouts and opaque marks are interpreted.
    /// Other entries that a sandbox may have created but images do not have (pipes, sockets) are
    /// omitted.
    Upper,
}

/// The attributes in which an overlay with `userxattr` keeps its state.
const OVERLAY_PREFIX: &str = "user.overlay.";
const OPAQUE_ATTRIBUTE: &str = "user.overlay.opaque";
/// These attributes make a file refer to another one below, which a copy cannot express. Overlays with
/// `userxattr` do not write them.
const REFERENCE_ATTRIBUTES: [&str; 2] = ["user.overlay.redirect", "user.overlay.metacopy"];

/// Copies a directory into `layer` and returns a digest of its content. Mount points of other file
/// systems are copied as empty directories, and so is the directory that the copy itself is written
/// to.
pub(super) fn copy_directory(
    root: &RootDirectory,
    layer: &mut LayerWriter<'_>,
    contents: DirectoryContents,
) -> Result<Digest, ImageError> {
    let source = Path::new("the source");
    let top = rustix::fs::fstat(root).map_err(std::io::Error::from).during("look at", source)?;
    let own = rustix::fs::fstat(layer.root()).map_err(std::io::Error::from).during("look at", source)?;
    let mut copy = DirectoryCopy {
        layer,
        device: top.st_dev,
        own: (own.st_dev, own.st_ino),
        contents,
        linked: HashMap::new(),
        sum: PartsHasher::default(),
    };
    copy.copy_entries(root, Path::new(""))?;
    Ok(copy.sum.finish())
}

struct DirectoryCopy<'layer, 'progress> {
    layer: &'layer mut LayerWriter<'progress>,
    device: u64,
    own: (u64, u64),
    contents: DirectoryContents,
    /// Files with several names, by the first name found.
    linked: HashMap<u64, PathBuf>,
    sum: PartsHasher,
}

impl DirectoryCopy<'_, '_> {
    fn copy_entries(&mut self, directory: &RootDirectory, below: &Path) -> Result<(), ImageError> {
        if below.components().count() > MAX_DEPTH {
            return Err(hostile_entry(below, "it is nested too deep"));
        }
        let mut entries = directory.list_entries().during("list", below)?;
        entries.sort_by(|one, other| one.name.cmp(&other.name));
        for entry in entries {
            let name = Path::new(OsStr::from_bytes(entry.name.to_bytes()));
            let path = below.join(name);
            let found = rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW)
                .map_err(std::io::Error::from)
                .during("look at", &path)?;
            self.copy_entry(directory, name, &path, &found)?;
        }
        Ok(())
    }

    fn copy_entry(
        &mut self,
        directory: &RootDirectory,
        name: &Path,
        path: &Path,
        found: &Stat,
    ) -> Result<(), ImageError> {
        let (marks, opaque) = self.read_metadata(directory, name, path, found)?;
        self.sum.add_part(path.as_os_str().as_bytes());
        for number in [marks.mode, marks.uid, marks.gid] {
            self.sum.add_part(&number.to_le_bytes());
        }
        self.sum.add_part(&marks.modified.to_le_bytes());
        for (name, value) in &marks.attributes {
            self.sum.add_part(name.as_bytes());
            self.sum.add_part(value);
        }
        match FileType::from_raw_mode(found.st_mode) {
            FileType::Directory => {
                self.layer.add_directory(path, marks)?;
                if opaque {
                    self.sum.add_part(OPAQUE_ATTRIBUTE.as_bytes());
                    self.layer.mark_opaque(path)?;
                }
                if found.st_dev != self.device || (found.st_dev, found.st_ino) == self.own {
                    return Ok(());
                }
                let below = directory.open_subdirectory(name).during("open", path)?;
                self.copy_entries(&below, path)
            }
            FileType::RegularFile => self.copy_file(directory, name, path, found, &marks),
            FileType::Symlink => {
                let target = directory.read_link(name).during("read the link", path)?;
                self.sum.add_part(target.to_bytes());
                self.layer.add_symlink(path, Path::new(OsStr::from_bytes(target.to_bytes())), &marks)
            }
            FileType::CharacterDevice if self.contents == DirectoryContents::Upper && found.st_rdev == 0 => {
                self.sum.add_part(b"whiteout");
                self.layer.add_whiteout(path)
            }
            FileType::Fifo | FileType::CharacterDevice | FileType::BlockDevice
                if self.contents == DirectoryContents::Upper =>
            {
                Ok(())
            }
            FileType::Fifo => self.layer.reject_special(path, "it is a pipe"),
            FileType::CharacterDevice | FileType::BlockDevice => {
                self.layer.reject_special(path, "it is a device")
            }
            // A socket is useless without the process that listened on it.
            _ => Ok(()),
        }
    }

    /// Returns the metadata of an entry, and whether it hides everything below it.
    fn read_metadata(
        &self,
        directory: &RootDirectory,
        name: &Path,
        path: &Path,
        found: &Stat,
    ) -> Result<(EntryMetadata, bool), ImageError> {
        let (attributes, opaque) = match FileType::from_raw_mode(found.st_mode) {
            FileType::Directory | FileType::RegularFile => {
                read_attributes(directory.open_read(name).during("open", path)?.as_fd(), path, self.contents)?
            }
            _ => (Vec::new(), false),
        };
        let marks = EntryMetadata {
            mode: found.st_mode,
            uid: found.st_uid,
            gid: found.st_gid,
            modified: found.st_mtime,
            attributes,
        };
        Ok((marks, opaque))
    }

    fn copy_file(
        &mut self,
        directory: &RootDirectory,
        name: &Path,
        path: &Path,
        found: &Stat,
        marks: &EntryMetadata,
    ) -> Result<(), ImageError> {
        if found.st_nlink > 1 {
            if let Some(first) = self.linked.get(&found.st_ino) {
                self.sum.add_part(first.as_os_str().as_bytes());
                return self.layer.add_hard_link(path, first);
            }
            self.linked.insert(found.st_ino, path.to_owned());
        }
        let mut content = HashingReader::new(directory.open_read(name).during("open", path)?);
        self.layer.add_file(path, marks, &mut content)?;
        let (digest, _) = content.finish().during("read", path)?;
        self.sum.add_part(digest.hex().as_bytes());
        Ok(())
    }
}

/// Returns the attributes that any user may set, sorted by name, and whether the entry hides
/// everything below it.
fn read_attributes(
    file: BorrowedFd<'_>,
    path: &Path,
    contents: DirectoryContents,
) -> Result<EntryAttributes, ImageError> {
    let mut buffer = vec![0; MAX_ATTRIBUTES_SIZE];
    let length = match rustix::fs::flistxattr(file, &mut buffer[..]) {
        // The file system does not support attributes, so there are none.
        Err(Errno::OPNOTSUPP) => 0,
        Err(Errno::RANGE) => return Err(hostile_entry(path, "its attributes are too large")),
        length => length.map_err(std::io::Error::from).during("read the attributes of", path)?,
    };
    let names = buffer[..length].split(|byte| *byte == 0).filter_map(|name| std::str::from_utf8(name).ok());
    let mut names: Vec<String> = names.map(str::to_owned).collect();
    names.sort_unstable();
    let mut found = Vec::new();
    let mut opaque = false;
    for name in names {
        if contents == DirectoryContents::Upper && name.starts_with(OVERLAY_PREFIX) {
            if REFERENCE_ATTRIBUTES.contains(&name.as_str()) {
                return Err(hostile_entry(path, "it refers to another file below it"));
            }
            opaque |= name == OPAQUE_ATTRIBUTE;
            continue;
        }
        if is_kept_attribute(&name, path)? {
            let length = rustix::fs::fgetxattr(file, &name, &mut buffer[..]);
            let length = length.map_err(std::io::Error::from).during("read the attributes of", path)?;
            found.push((name, buffer[..length].to_vec()));
        }
    }
    check_attributes_size(&found, path)?;
    Ok((found, opaque))
}

type EntryAttributes = (Vec<(String, Vec<u8>)>, bool);
