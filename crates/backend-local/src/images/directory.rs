//! Unpacked root file systems in a directory, and the changes that a sandbox made to one.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use linux::fs::Root;
use rustix::fs::{AtFlags, FileType, Stat};
use rustix::io::Errno;

use super::digest::{Hashing, Sum};
use super::layer::{Layer, Marks, hostile};
use super::tarball::{MOST_ATTRIBUTES, check_length, is_kept};
use super::{Digest, During, ImageError};

/// The maximum depth of a source; each level holds a descriptor.
const MOST_DEPTH: usize = 200;

/// The kind of content in a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Contents {
    /// A whole root file system. It must not contain overlay attributes.
    Tree,
    /// The upper directory of an overlay with `userxattr`: whiteouts and opaque marks are interpreted.
    /// Other entries that a sandbox may have created but images do not have (pipes, sockets) are
    /// omitted.
    Upper,
}

/// The attributes in which an overlay with `userxattr` keeps its state.
const OVERLAY: &str = "user.overlay.";
const OPAQUE: &str = "user.overlay.opaque";
/// These attributes make a file refer to another one below, which a copy cannot express. Overlays with
/// `userxattr` do not write them.
const REFERENCES: [&str; 2] = ["user.overlay.redirect", "user.overlay.metacopy"];

/// Copies a directory into `layer` and returns a digest of its content. Mount points of other file
/// systems are copied as empty directories, and so is the directory that the copy itself is written
/// to.
pub(super) fn copy(root: &Root, layer: &mut Layer<'_>, contents: Contents) -> Result<Digest, ImageError> {
    let source = Path::new("the source");
    let top = rustix::fs::fstat(root).map_err(std::io::Error::from).during("look at", source)?;
    let own = rustix::fs::fstat(layer.root()).map_err(std::io::Error::from).during("look at", source)?;
    let mut copy = Copy {
        layer,
        device: top.st_dev,
        own: (own.st_dev, own.st_ino),
        contents,
        linked: HashMap::new(),
        sum: Sum::default(),
    };
    copy.fill(root, Path::new(""))?;
    Ok(copy.sum.finish())
}

struct Copy<'layer, 'progress> {
    layer: &'layer mut Layer<'progress>,
    device: u64,
    own: (u64, u64),
    contents: Contents,
    /// Files with several names, by the first name found.
    linked: HashMap<u64, PathBuf>,
    sum: Sum,
}

impl Copy<'_, '_> {
    fn fill(&mut self, directory: &Root, below: &Path) -> Result<(), ImageError> {
        if below.components().count() > MOST_DEPTH {
            return Err(hostile(below, "it is nested too deep"));
        }
        let mut entries = directory.entries().during("list", below)?;
        entries.sort_by(|one, other| one.name.cmp(&other.name));
        for entry in entries {
            let name = Path::new(OsStr::from_bytes(entry.name.to_bytes()));
            let path = below.join(name);
            let found = rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW)
                .map_err(std::io::Error::from)
                .during("look at", &path)?;
            self.place(directory, name, &path, &found)?;
        }
        Ok(())
    }

    fn place(&mut self, directory: &Root, name: &Path, path: &Path, found: &Stat) -> Result<(), ImageError> {
        let (marks, opaque) = self.marks(directory, name, path, found)?;
        self.sum.note(path.as_os_str().as_bytes());
        for number in [marks.mode, marks.uid, marks.gid] {
            self.sum.note(&number.to_le_bytes());
        }
        self.sum.note(&marks.modified.to_le_bytes());
        for (name, value) in &marks.attributes {
            self.sum.note(name.as_bytes());
            self.sum.note(value);
        }
        match FileType::from_raw_mode(found.st_mode) {
            FileType::Directory => {
                self.layer.directory(path, marks)?;
                if opaque {
                    self.sum.note(OPAQUE.as_bytes());
                    self.layer.opaque(path)?;
                }
                if found.st_dev != self.device || (found.st_dev, found.st_ino) == self.own {
                    return Ok(());
                }
                let below = directory.directory(name).during("open", path)?;
                self.fill(&below, path)
            }
            FileType::RegularFile => self.file(directory, name, path, found, &marks),
            FileType::Symlink => {
                let target = directory.read_link(name).during("read the link", path)?;
                self.sum.note(target.to_bytes());
                self.layer.symlink(path, Path::new(OsStr::from_bytes(target.to_bytes())), &marks)
            }
            FileType::CharacterDevice if self.contents == Contents::Upper && found.st_rdev == 0 => {
                self.sum.note(b"whiteout");
                self.layer.whiteout(path)
            }
            FileType::Fifo | FileType::CharacterDevice | FileType::BlockDevice
                if self.contents == Contents::Upper =>
            {
                Ok(())
            }
            FileType::Fifo => self.layer.special(path, "it is a pipe"),
            FileType::CharacterDevice | FileType::BlockDevice => self.layer.special(path, "it is a device"),
            // A socket is useless without the process that listened on it.
            _ => Ok(()),
        }
    }

    /// Returns the metadata of an entry, and whether it hides everything below it.
    fn marks(
        &self,
        directory: &Root,
        name: &Path,
        path: &Path,
        found: &Stat,
    ) -> Result<(Marks, bool), ImageError> {
        let (attributes, opaque) = match FileType::from_raw_mode(found.st_mode) {
            FileType::Directory | FileType::RegularFile => {
                attributes(directory.read(name).during("open", path)?.as_fd(), path, self.contents)?
            }
            _ => (Vec::new(), false),
        };
        let marks = Marks {
            mode: found.st_mode,
            uid: found.st_uid,
            gid: found.st_gid,
            modified: found.st_mtime,
            attributes,
        };
        Ok((marks, opaque))
    }

    fn file(
        &mut self,
        directory: &Root,
        name: &Path,
        path: &Path,
        found: &Stat,
        marks: &Marks,
    ) -> Result<(), ImageError> {
        if found.st_nlink > 1 {
            if let Some(first) = self.linked.get(&found.st_ino) {
                self.sum.note(first.as_os_str().as_bytes());
                return self.layer.hard_link(path, first);
            }
            self.linked.insert(found.st_ino, path.to_owned());
        }
        let mut content = Hashing::new(directory.read(name).during("open", path)?);
        self.layer.file(path, marks, &mut content)?;
        let (digest, _) = content.finish().during("read", path)?;
        self.sum.note(digest.hex().as_bytes());
        Ok(())
    }
}

/// Returns the attributes that any user may set, sorted by name, and whether the entry hides
/// everything below it.
fn attributes(file: BorrowedFd<'_>, path: &Path, contents: Contents) -> Result<Attributes, ImageError> {
    let mut buffer = vec![0; MOST_ATTRIBUTES];
    let length = match rustix::fs::flistxattr(file, &mut buffer[..]) {
        // The file system does not support attributes, so there are none.
        Err(Errno::OPNOTSUPP) => 0,
        Err(Errno::RANGE) => return Err(hostile(path, "its attributes are too large")),
        length => length.map_err(std::io::Error::from).during("read the attributes of", path)?,
    };
    let names = buffer[..length].split(|byte| *byte == 0).filter_map(|name| std::str::from_utf8(name).ok());
    let mut names: Vec<String> = names.map(str::to_owned).collect();
    names.sort_unstable();
    let mut found = Vec::new();
    let mut opaque = false;
    for name in names {
        if contents == Contents::Upper && name.starts_with(OVERLAY) {
            if REFERENCES.contains(&name.as_str()) {
                return Err(hostile(path, "it refers to another file below it"));
            }
            opaque |= name == OPAQUE;
            continue;
        }
        if is_kept(&name, path)? {
            let length = rustix::fs::fgetxattr(file, &name, &mut buffer[..]);
            let length = length.map_err(std::io::Error::from).during("read the attributes of", path)?;
            found.push((name, buffer[..length].to_vec()));
        }
    }
    check_length(&found, path)?;
    Ok((found, opaque))
}

type Attributes = (Vec<(String, Vec<u8>)>, bool);
