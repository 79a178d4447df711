//! The archive: tar entries in a zstd frame, divided into parts with a checksum each.
//!
//! A part begins with an empty entry `part:<name>`. Its checksum covers everything from behind
//! that entry to the end of the entry with which the next part begins, as it stands in the archive.
//! The last part holds the manifest alone, which the frame's own checksum covers.

use std::cell::RefCell;
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::Path;
use std::rc::Rc;

use tar::{Builder, EntryType, Header};

use super::{BackupManifest, BackupPart, ProgressReport};

/// Incremented when older versions could not read the archive. Since version 2, attributes are encoded.
pub(super) const ARCHIVE_VERSION: u32 = 2;
pub(super) const PART_PREFIX: &str = "part:";
pub(super) const MANIFEST_NAME: &str = "manifest.json";
const COMPRESSION_LEVEL: i32 = 3;

/// The archive became larger than this.
#[derive(Debug, thiserror::Error)]
#[error("larger than {0} bytes")]
pub(super) struct ArchiveTooLarge(pub(super) u64);

/// Counts and limits the written bytes.
struct BoundedWriter {
    file: File,
    written: u64,
    most: Option<u64>,
}

impl Write for BoundedWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let after = self.written.saturating_add(bytes.len() as u64);
        if let Some(most) = self.most.filter(|most| after > *most) {
            return Err(io::Error::other(ArchiveTooLarge(most)));
        }
        let written = self.file.write(bytes)?;
        self.written += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// The checksums of the bytes that pass through.
#[derive(Default)]
pub(super) struct ArchiveChecksums {
    whole: blake3::Hasher,
    part: blake3::Hasher,
    bytes: u64,
    in_part: u64,
}

impl ArchiveChecksums {
    fn add_bytes(&mut self, bytes: &[u8]) {
        self.whole.update(bytes);
        self.part.update(bytes);
        self.bytes += bytes.len() as u64;
        self.in_part += bytes.len() as u64;
    }

    /// Ends a part.
    pub(super) fn end_part(&mut self, name: &str) -> BackupPart {
        let checksum = std::mem::take(&mut self.part).finalize().to_hex().to_string();
        BackupPart { name: name.to_owned(), bytes: std::mem::take(&mut self.in_part), checksum }
    }

    pub(super) fn total_checksum(&self) -> String {
        self.whole.finalize().to_hex().to_string()
    }
}

struct SummingWriter<'a> {
    inner: zstd::Encoder<'static, BoundedWriter>,
    sums: ArchiveChecksums,
    report: ProgressReport<'a>,
}

impl Write for SummingWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.inner.write(bytes)?;
        self.sums.add_bytes(&bytes[..written]);
        (self.report)(self.sums.bytes);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

pub(super) struct ArchiveWriter<'a> {
    builder: Builder<SummingWriter<'a>>,
    parts: Vec<BackupPart>,
    current: Option<String>,
}

impl<'a> ArchiveWriter<'a> {
    pub(super) fn new(file: File, most: Option<u64>, report: ProgressReport<'a>) -> io::Result<Self> {
        let mut inner = zstd::Encoder::new(BoundedWriter { file, written: 0, most }, COMPRESSION_LEVEL)?;
        inner.include_checksum(true)?;
        let mut builder = Builder::new(SummingWriter { inner, sums: ArchiveChecksums::default(), report });
        builder.follow_symlinks(false);
        builder.sparse(true);
        Ok(Self { builder, parts: Vec::new(), current: None })
    }

    /// Ends the current part and begins another.
    pub(super) fn begin_part(&mut self, name: &str) -> io::Result<()> {
        self.add_entry(
            entry_header(EntryType::Regular, 0o600),
            Path::new(&format!("{PART_PREFIX}{name}")),
            io::empty(),
        )?;
        let former = self.current.replace(name.to_owned());
        let part = self.builder.get_mut().sums.end_part(former.as_deref().unwrap_or_default());
        self.parts.extend(former.map(|_| part));
        Ok(())
    }

    pub(super) fn add_entry(
        &mut self,
        mut header: Header,
        name: &Path,
        content: impl Read,
    ) -> io::Result<()> {
        self.builder.append_data(&mut header, name, content)
    }

    pub(super) fn add_link(&mut self, mut header: Header, name: &Path, target: &Path) -> io::Result<()> {
        self.builder.append_link(&mut header, name, target)
    }

    /// Attributes of the next entry.
    pub(super) fn add_attributes(&mut self, attributes: &[(String, Vec<u8>)]) -> io::Result<()> {
        if attributes.is_empty() {
            return Ok(());
        }
        let pairs = attributes.iter().map(|(name, value)| (name.as_str(), value.as_slice()));
        self.builder.append_pax_extensions(pairs)
    }

    /// Adds a file that only its owner may read, and that belongs to root until it is given to a server.
    pub(super) fn add_private(&mut self, name: &str, size: u64, content: impl Read) -> io::Result<()> {
        let mut header = entry_header(EntryType::Regular, 0o600);
        header.set_size(size);
        self.add_entry(header, Path::new(name), content)
    }

    /// Adds a file of the host, without its holes.
    pub(super) fn add_file(&mut self, name: &str, path: &Path) -> io::Result<()> {
        self.add_open_file(Path::new(name), &mut File::open(path)?)
    }

    /// Adds an open file with its owner, mode and time, without its holes.
    pub(super) fn add_open_file(&mut self, name: &Path, file: &mut File) -> io::Result<()> {
        self.builder.append_file(name, file)
    }

    /// Writes the manifest, and waits until the whole archive is durable.
    pub(super) fn finish(mut self, mut manifest: BackupManifest) -> io::Result<(u64, BackupManifest)> {
        self.begin_part("manifest")?;
        manifest.parts = std::mem::take(&mut self.parts);
        manifest.checksum = self.builder.get_ref().sums.total_checksum();
        let text = serde_json::to_vec_pretty(&manifest)?;
        let mut header = entry_header(EntryType::Regular, 0o600);
        header.set_size(text.len() as u64);
        self.add_entry(header, Path::new(MANIFEST_NAME), text.as_slice())?;
        let bounded = self.builder.into_inner()?.inner.finish()?;
        bounded.file.sync_all()?;
        Ok((bounded.written, manifest))
    }
}

/// The header of an entry of root.
pub(super) fn entry_header(kind: EntryType, mode: u32) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    header.set_size(0);
    header
}

/// Reads an archive and adds up its checksums.
pub(super) struct SummingReader<'a, R> {
    inner: R,
    report: ProgressReport<'a>,
    sums: Rc<RefCell<ArchiveChecksums>>,
}

impl<'a, R: Read> SummingReader<'a, R> {
    pub(super) fn new(inner: R, report: ProgressReport<'a>) -> (Self, Rc<RefCell<ArchiveChecksums>>) {
        let sums = Rc::<RefCell<ArchiveChecksums>>::default();
        (Self { inner, report, sums: Rc::clone(&sums) }, sums)
    }
}

impl<R: Read> Read for SummingReader<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let length = self.inner.read(buffer)?;
        let mut sums = self.sums.borrow_mut();
        sums.add_bytes(&buffer[..length]);
        (self.report)(sums.bytes);
        Ok(length)
    }
}
