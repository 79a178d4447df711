//! A directory as a tar archive, made while it is sent: nothing is written to this disk.
//!
//! A server treats the archive as it would treat the directory itself: links stay links, other file
//! systems mounted below stay empty, and the server refuses the same files.

use std::collections::HashMap;
use std::fs::{self, File, Metadata};
use std::io::{self, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use tar::{Builder, EntryType, Header};

/// Attributes that any user may set; a server keeps no others.
const USER_ATTRIBUTE_PREFIX: &str = "user.";
/// The prefix of an extended attribute in a tar archive.
const PAX_ATTRIBUTE_PREFIX: &str = "SCHILY.xattr.";
const MAX_ATTRIBUTE_BYTES: usize = 64 << 10;

/// Writes everything below `source` as an archive.
pub(super) fn write_archive(source: &Path, into: impl Write) -> io::Result<()> {
    let device = fs::metadata(source)?.dev();
    let mut writer = TarWriter { builder: Builder::new(into), device, linked: HashMap::new() };
    writer.add_directory(source, Path::new(""))?;
    writer.builder.into_inner()?.flush()
}

struct TarWriter<W: Write> {
    builder: Builder<W>,
    device: u64,
    /// The first name of each file that has several.
    linked: HashMap<u64, PathBuf>,
}

impl<W: Write> TarWriter<W> {
    fn add_directory(&mut self, directory: &Path, below: &Path) -> io::Result<()> {
        let mut names = fs::read_dir(directory)?
            .map(|entry| entry.map(|entry| entry.file_name()))
            .collect::<io::Result<Vec<_>>>()?;
        names.sort();
        for name in names {
            let (path, inside) = (directory.join(&name), below.join(&name));
            let found = fs::symlink_metadata(&path)?;
            self.add_entry(&path, &inside, &found).map_err(|error| {
                io::Error::new(error.kind(), format!("`{}` could not be read: {error}", path.display()))
            })?;
            if found.is_dir() && found.dev() == self.device {
                self.add_directory(&path, &inside)?;
            }
        }
        Ok(())
    }

    fn add_entry(&mut self, path: &Path, inside: &Path, found: &Metadata) -> io::Result<()> {
        let kind = found.file_type();
        // A socket means nothing without the process that listened on it.
        if kind.is_socket() {
            return Ok(());
        }
        let mut header = Header::new_gnu();
        header.set_metadata(found);
        header.set_size(0);
        if kind.is_file() && found.nlink() > 1 {
            if let Some(first) = self.linked.get(&found.ino()) {
                header.set_entry_type(EntryType::Link);
                return self.builder.append_link(&mut header, inside, first);
            }
            self.linked.insert(found.ino(), inside.to_owned());
        }
        if kind.is_symlink() {
            header.set_entry_type(EntryType::Symlink);
            return self.builder.append_link(&mut header, inside, fs::read_link(path)?);
        }
        if kind.is_file() || kind.is_dir() {
            let attributes = read_attributes(path)?;
            let named = attributes.iter().map(|(name, value)| (name.as_str(), value.as_slice()));
            self.builder.append_pax_extensions(named)?;
        }
        if kind.is_file() {
            // A file that shrinks meanwhile would shift everything after it.
            header.set_size(found.len());
            let content = ExactSizeFile { file: File::open(path)?, left: found.len() };
            return self.builder.append_data(&mut header, inside, content);
        }
        self.builder.append_data(&mut header, inside, io::empty())
    }
}

/// A file that must still have as many bytes as when its size was read.
struct ExactSizeFile {
    file: File,
    left: u64,
}

impl io::Read for ExactSizeFile {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let most = usize::try_from(self.left).unwrap_or(usize::MAX).min(buffer.len());
        if most == 0 {
            return Ok(0);
        }
        let read = self.file.read(&mut buffer[..most])?;
        if read == 0 {
            return Err(io::Error::other("it became shorter while it was read"));
        }
        self.left -= u64::try_from(read).unwrap_or(u64::MAX);
        Ok(read)
    }
}

/// The attributes of a file that a server keeps.
fn read_attributes(path: &Path) -> io::Result<Vec<(String, Vec<u8>)>> {
    let mut buffer = vec![0; MAX_ATTRIBUTE_BYTES];
    let length = match rustix::fs::llistxattr(path, &mut buffer[..]) {
        // A file system without support for attributes has none.
        Err(rustix::io::Errno::OPNOTSUPP) => 0,
        length => length?,
    };
    let names = buffer[..length].split(|byte| *byte == 0).filter_map(|name| std::str::from_utf8(name).ok());
    let names: Vec<String> =
        names.filter(|name| name.starts_with(USER_ATTRIBUTE_PREFIX)).map(str::to_owned).collect();
    let mut found = Vec::new();
    for name in names {
        let length = rustix::fs::lgetxattr(path, &name, &mut buffer[..])?;
        found.push((format!("{PAX_ATTRIBUTE_PREFIX}{name}"), buffer[..length].to_vec()));
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn directory_becomes_an_archive_with_links_and_attributes() {
        let source = tempfile::tempdir().expect("there is room");
        let at = |name: &str| source.path().join(name);
        fs::create_dir(at("usr")).expect("it is new");
        fs::write(at("usr/file"), "content").expect("it is new");
        fs::hard_link(at("usr/file"), at("usr/same")).expect("it is new");
        symlink("usr/file", at("link")).expect("it is new");
        rustix::fs::setxattr(at("usr/file"), "user.mine", b"1", rustix::fs::XattrFlags::empty())
            .expect("our own file");
        let mut bytes = Vec::new();
        write_archive(source.path(), &mut bytes).expect("it can be read");
        let mut archive = tar::Archive::new(bytes.as_slice());
        let mut found = Vec::new();
        for entry in archive.entries().expect("an archive") {
            let mut entry = entry.expect("it is whole");
            let attributes = entry.pax_extensions().expect("it is whole").into_iter().flatten();
            let marked =
                attributes.filter_map(Result::ok).any(|pair| pair.key() == Ok("SCHILY.xattr.user.mine"));
            let path = entry.path().expect("a path").display().to_string();
            let link = entry.link_name().expect("a path").map(|link| link.display().to_string());
            found.push((path, entry.header().entry_type(), link, marked));
        }
        let entry = |path: &str, kind, link: Option<&str>, marked| {
            (path.to_owned(), kind, link.map(str::to_owned), marked)
        };
        assert_eq!(
            found,
            [
                entry("link", EntryType::Symlink, Some("usr/file"), false),
                entry("usr", EntryType::Directory, None, false),
                entry("usr/file", EntryType::Regular, None, true),
                entry("usr/same", EntryType::Link, Some("usr/file"), false),
            ]
        );
    }
}
