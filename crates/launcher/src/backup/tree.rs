//! Directory trees in an archive: layers of images, with owners, links and attributes.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use linux::fs::RootDirectory;
use rustix::fs::{FileType, OFlags, Stat};
use tar::{EntryType, Header};

use super::archive::{self, ArchiveWriter};

/// We make the layers ourselves, and they are far less deep.
const MAX_DEPTH: usize = 512;
/// The attributes that are kept; layers have no others.
pub(super) const KEPT_ATTRIBUTE_PREFIX: &str = "user.";
/// Attributes in the archive: this prefix, then the name in hexadecimal digits; the value is encoded in
/// the same way. Records of tar archives end at a line feed and names end at an equals sign, and both
/// may be part of an attribute.
pub(super) const ATTRIBUTE_KEY_PREFIX: &str = "CORACLE.xattr.";
/// The prefix of attributes in archives of version 1, which are not encoded.
pub(super) const ATTRIBUTE_KEY_PREFIX_V1: &str = "SCHILY.xattr.";

/// Bytes as hexadecimal digits.
pub(super) fn to_hex(bytes: &[u8]) -> String {
    let digit = |value: u8| char::from(b"0123456789abcdef"[usize::from(value & 0xf)]);
    bytes.iter().flat_map(|byte| [digit(byte >> 4), digit(*byte)]).collect()
}

/// The bytes that hexadecimal digits stand for; `None` if they are not pairs of such digits.
pub(super) fn from_hex(text: &[u8]) -> Option<Vec<u8>> {
    let digit = |byte: u8| char::from(byte).to_digit(16).and_then(|value| u8::try_from(value).ok());
    let (pairs, rest) = text.as_chunks::<2>();
    let bytes = pairs.iter().map(|[high, low]| Some(digit(*high)? << 4 | digit(*low)?)).collect();
    if rest.is_empty() { bytes } else { None }
}

/// Adds the file or directory `name` below `root`. It is not an error if it does not exist.
pub(super) fn add_tree(archive: &mut ArchiveWriter<'_>, root: &RootDirectory, name: &str) -> io::Result<()> {
    let name = Path::new(name);
    let facts = match root.stat(name) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        facts => facts?,
    };
    let mut walk = TreeWalk { archive, links: HashMap::new() };
    walk.add_entry(root, name, name, &facts, 0)
}

struct TreeWalk<'a, 'b> {
    archive: &'a mut ArchiveWriter<'b>,
    /// The first name of each file that has several.
    links: HashMap<(u64, u64), PathBuf>,
}

impl TreeWalk<'_, '_> {
    /// Adds `place` below `root` as `name`.
    fn add_entry(
        &mut self,
        root: &RootDirectory,
        place: &Path,
        name: &Path,
        facts: &Stat,
        depth: usize,
    ) -> io::Result<()> {
        if depth > MAX_DEPTH {
            return Err(io::Error::other(format!("`{}` is nested too deeply", name.display())));
        }
        match FileType::from_raw_mode(facts.st_mode) {
            FileType::Directory => self.add_directory(root, place, name, facts, depth),
            FileType::RegularFile => self.add_file(root, place, name, facts),
            FileType::Symlink => {
                let target = root.read_link(place)?;
                let target = Path::new(OsStr::from_bytes(target.as_bytes())).to_owned();
                self.archive.add_link(header_from_stat(EntryType::Symlink, facts), name, &target)
            }
            FileType::CharacterDevice if facts.st_rdev == 0 => self.add_empty(EntryType::Char, name, facts),
            FileType::Fifo => self.add_empty(EntryType::Fifo, name, facts),
            kind => Err(io::Error::other(format!("`{}` is of kind {kind:?}", name.display()))),
        }
    }

    fn add_directory(
        &mut self,
        root: &RootDirectory,
        place: &Path,
        name: &Path,
        facts: &Stat,
        depth: usize,
    ) -> io::Result<()> {
        let directory = root.open_subdirectory(place)?;
        let attributes = read_attributes(&directory)?;
        self.archive.add_attributes(&attributes)?;
        self.add_empty(EntryType::Directory, name, facts)?;
        for entry in directory.list_entries()? {
            let own = Path::new(OsStr::from_bytes(entry.name.as_bytes()));
            let facts = directory.stat(own)?;
            self.add_entry(&directory, own, &name.join(own), &facts, depth + 1)?;
        }
        Ok(())
    }

    fn add_file(&mut self, root: &RootDirectory, place: &Path, name: &Path, facts: &Stat) -> io::Result<()> {
        if facts.st_nlink > 1 {
            let key = (facts.st_dev, facts.st_ino);
            if let Some(first) = self.links.get(&key) {
                return self.archive.add_link(header_from_stat(EntryType::Link, facts), name, &first.clone());
            }
            self.links.insert(key, name.to_owned());
        }
        let mut file: File = root.open_with(place, OFlags::RDONLY | OFlags::NONBLOCK, 0)?;
        let attributes = read_attributes(&file)?;
        self.archive.add_attributes(&attributes)?;
        self.archive.add_open_file(name, &mut file)
    }

    fn add_empty(&mut self, kind: EntryType, name: &Path, facts: &Stat) -> io::Result<()> {
        self.archive.add_entry(header_from_stat(kind, facts), name, io::empty())
    }
}

fn header_from_stat(kind: EntryType, facts: &Stat) -> Header {
    let mut header = archive::entry_header(kind, facts.st_mode & 0o7777);
    header.set_uid(facts.st_uid.into());
    header.set_gid(facts.st_gid.into());
    // The archive writes the time of a file before 1970 in the same way.
    header.set_mtime(facts.st_mtime.cast_unsigned());
    header
}

/// The attributes of an open file or directory, named as in an archive.
fn read_attributes(file: impl AsFd) -> io::Result<Vec<(String, Vec<u8>)>> {
    let mut names = vec![0; 64 << 10];
    let length = match rustix::fs::flistxattr(&file, names.as_mut_slice()) {
        Err(rustix::io::Errno::NOTSUP) => 0,
        length => length?,
    };
    let mut found = Vec::new();
    for name in names[..length].split(|byte| *byte == 0) {
        if !name.starts_with(KEPT_ATTRIBUTE_PREFIX.as_bytes()) {
            continue;
        }
        let mut value = vec![0; 64 << 10];
        let length = rustix::fs::fgetxattr(&file, name, value.as_mut_slice())?;
        value.truncate(length);
        found.push((format!("{ATTRIBUTE_KEY_PREFIX}{}", to_hex(name)), to_hex(&value).into_bytes()));
    }
    Ok(found)
}

/// The path of an entry of an open directory, for calls that take no descriptor.
pub(super) fn path_in_directory(directory: &File, name: &OsStr) -> PathBuf {
    Path::new("/proc/self/fd").join(directory.as_raw_fd().to_string()).join(name)
}
