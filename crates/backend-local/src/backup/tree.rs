//! Directory trees in an archive: layers of images, with owners, links and attributes.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use linux::fs::Root;
use rustix::fs::{FileType, OFlags, Stat};
use tar::{EntryType, Header};

use super::archive::{self, ArchiveWriter};

/// We make the layers ourselves, and they are far less deep.
const MAX_DEPTH: usize = 512;
/// The attributes that are kept; layers have no others.
pub(super) const ATTRIBUTES: &str = "user.";
/// Attributes in the archive: this prefix, then the name in hexadecimal digits; the value is encoded in
/// the same way. Records of tar archives end at a line feed and names end at an equals sign, and both
/// may be part of an attribute.
pub(super) const IN_ARCHIVE: &str = "CORACLE.xattr.";
/// The prefix of attributes in archives of version 1, which are not encoded.
pub(super) const IN_ARCHIVE_1: &str = "SCHILY.xattr.";

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
pub(super) fn add(archive: &mut ArchiveWriter<'_>, root: &Root, name: &str) -> io::Result<()> {
    let name = Path::new(name);
    let facts = match root.stat(name) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        facts => facts?,
    };
    let mut walk = Walk { archive, links: HashMap::new() };
    walk.add(root, name, name, &facts, 0)
}

struct Walk<'a, 'b> {
    archive: &'a mut ArchiveWriter<'b>,
    /// The first name of each file that has several.
    links: HashMap<(u64, u64), PathBuf>,
}

impl Walk<'_, '_> {
    /// Adds `place` below `root` as `name`.
    fn add(&mut self, root: &Root, place: &Path, name: &Path, facts: &Stat, depth: usize) -> io::Result<()> {
        if depth > MAX_DEPTH {
            return Err(io::Error::other(format!("`{}` is nested too deeply", name.display())));
        }
        match FileType::from_raw_mode(facts.st_mode) {
            FileType::Directory => self.add_directory(root, place, name, facts, depth),
            FileType::RegularFile => self.add_file(root, place, name, facts),
            FileType::Symlink => {
                let target = root.read_link(place)?;
                let target = Path::new(OsStr::from_bytes(target.as_bytes())).to_owned();
                self.archive.add_link(header(EntryType::Symlink, facts), name, &target)
            }
            FileType::CharacterDevice if facts.st_rdev == 0 => self.add_empty(EntryType::Char, name, facts),
            FileType::Fifo => self.add_empty(EntryType::Fifo, name, facts),
            kind => Err(io::Error::other(format!("`{}` is of kind {kind:?}", name.display()))),
        }
    }

    fn add_directory(
        &mut self,
        root: &Root,
        place: &Path,
        name: &Path,
        facts: &Stat,
        depth: usize,
    ) -> io::Result<()> {
        let directory = root.directory(place)?;
        let attributes = attributes(&directory)?;
        self.archive.add_attributes(&attributes)?;
        self.add_empty(EntryType::Directory, name, facts)?;
        for entry in directory.entries()? {
            let own = Path::new(OsStr::from_bytes(entry.name.as_bytes()));
            let facts = directory.stat(own)?;
            self.add(&directory, own, &name.join(own), &facts, depth + 1)?;
        }
        Ok(())
    }

    fn add_file(&mut self, root: &Root, place: &Path, name: &Path, facts: &Stat) -> io::Result<()> {
        if facts.st_nlink > 1 {
            let key = (facts.st_dev, facts.st_ino);
            if let Some(first) = self.links.get(&key) {
                return self.archive.add_link(header(EntryType::Link, facts), name, &first.clone());
            }
            self.links.insert(key, name.to_owned());
        }
        let mut file: File = root.open_with(place, OFlags::RDONLY | OFlags::NONBLOCK, 0)?;
        let attributes = attributes(&file)?;
        self.archive.add_attributes(&attributes)?;
        self.archive.add_open_file(name, &mut file)
    }

    fn add_empty(&mut self, kind: EntryType, name: &Path, facts: &Stat) -> io::Result<()> {
        self.archive.add(header(kind, facts), name, io::empty())
    }
}

fn header(kind: EntryType, facts: &Stat) -> Header {
    let mut header = archive::entry(kind, facts.st_mode & 0o7777);
    header.set_uid(facts.st_uid.into());
    header.set_gid(facts.st_gid.into());
    // The archive writes the time of a file before 1970 in the same way.
    header.set_mtime(facts.st_mtime.cast_unsigned());
    header
}

/// The attributes of an open file or directory, named as in an archive.
fn attributes(file: impl AsFd) -> io::Result<Vec<(String, Vec<u8>)>> {
    let mut names = vec![0; 64 << 10];
    let length = match rustix::fs::flistxattr(&file, names.as_mut_slice()) {
        Err(rustix::io::Errno::NOTSUP) => 0,
        length => length?,
    };
    let mut found = Vec::new();
    for name in names[..length].split(|byte| *byte == 0) {
        if !name.starts_with(ATTRIBUTES.as_bytes()) {
            continue;
        }
        let mut value = vec![0; 64 << 10];
        let length = rustix::fs::fgetxattr(&file, name, value.as_mut_slice())?;
        value.truncate(length);
        found.push((format!("{IN_ARCHIVE}{}", to_hex(name)), to_hex(&value).into_bytes()));
    }
    Ok(found)
}

/// The path of an entry of an open directory, for calls that take no descriptor.
pub(super) fn within(directory: &File, name: &OsStr) -> PathBuf {
    Path::new("/proc/self/fd").join(directory.as_raw_fd().to_string()).join(name)
}
