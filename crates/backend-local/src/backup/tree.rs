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

/// Layers are made by ourselves and are not nearly as deep.
const MAX_DEPTH: usize = 512;
/// The attributes that are kept; layers have no others.
pub(super) const ATTRIBUTES: &str = "user.";
/// How attributes are named in tar archives.
pub(super) const IN_ARCHIVE: &str = "SCHILY.xattr.";

/// Adds what lies at `name` below `root`. Nothing there is no error.
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
    header.set_mtime(u64::try_from(facts.st_mtime).unwrap_or(0));
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
        let Some(name) = std::str::from_utf8(name).ok().filter(|name| name.starts_with(ATTRIBUTES)) else {
            continue;
        };
        let mut value = vec![0; 64 << 10];
        let length = rustix::fs::fgetxattr(&file, name, value.as_mut_slice())?;
        value.truncate(length);
        found.push((format!("{IN_ARCHIVE}{name}"), value));
    }
    Ok(found)
}

/// The path of an entry of an open directory, for calls that take no descriptor.
pub(super) fn within(directory: &File, name: &OsStr) -> PathBuf {
    Path::new("/proc/self/fd").join(directory.as_raw_fd().to_string()).join(name)
}
