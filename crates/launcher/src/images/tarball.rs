//! Root file systems and layers in a tar archive.

use std::cell::Cell;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;
use std::rc::Rc;

use tar::{Archive, EntryType};

use super::layer::{EntryMetadata, LayerWriter, hostile_entry};
use super::{ImageError, ImageErrorContext};

/// The maximum size read between two entries: headers, long names, attributes. The parser keeps these
/// in memory.
pub(super) const MAX_HEADER_SIZE: u64 = 1 << 20;

/// The maximum size of the attributes of one entry.
pub(super) const MAX_ATTRIBUTES_SIZE: usize = 64 << 10;

/// Unpacks the archive `content` into `layer`.
pub(super) fn unpack_tar(content: &mut dyn Read, layer: &mut LayerWriter<'_>) -> Result<(), ImageError> {
    let source = Path::new("the archive");
    let (content, ration) = RationedReader::new(content);
    let mut archive = Archive::new(content);
    let mut entries = archive.entries().during("read", source)?;
    loop {
        ration.set(MAX_HEADER_SIZE);
        let Some(entry) = entries.next() else { return Ok(()) };
        let mut entry = entry.during("read", source)?;
        // The content of an entry is limited by the layer, its size in the archive by its header.
        // Attributes for the whole archive are kept in memory as well.
        if !entry.header().entry_type().is_pax_global_extensions() {
            ration.set(u64::MAX);
        }
        unpack_entry(&mut entry, layer)?;
        io::copy(&mut entry, &mut io::sink()).during("read", source)?;
    }
}

fn unpack_entry<R: Read>(
    entry: &mut tar::Entry<'_, R>,
    layer: &mut LayerWriter<'_>,
) -> Result<(), ImageError> {
    let path = entry.path().during("read the name of", Path::new("an entry"))?.into_owned();
    let link = entry.link_name().during("read the target of", &path)?.map(|link| link.into_owned());
    let marks = read_metadata(entry, &path)?;
    match (entry.header().entry_type(), link) {
        (EntryType::Directory, _) => layer.add_directory(&path, marks),
        (EntryType::Regular | EntryType::Continuous, _) => layer.add_file(&path, &marks, entry),
        (EntryType::Symlink, Some(target)) => layer.add_symlink(&path, &target, &marks),
        (EntryType::Link, Some(existing)) => layer.add_hard_link(&path, &existing),
        (EntryType::Fifo, _) => layer.reject_special(&path, "it is a pipe"),
        (EntryType::Char | EntryType::Block, _) => layer.reject_special(&path, "it is a device"),
        // A few bytes of it can represent any amount of zeros.
        (EntryType::GNUSparse, _) => Err(hostile_entry(&path, "it is a sparse file")),
        // Attributes for all entries of the archive; the parser does not use them.
        (EntryType::XGlobalHeader, _) => Ok(()),
        _ => Err(hostile_entry(&path, "its type is unknown")),
    }
}

fn read_metadata<R: Read>(entry: &mut tar::Entry<'_, R>, path: &Path) -> Result<EntryMetadata, ImageError> {
    let attributes = read_attributes(entry, path)?;
    let narrow = |id: u64| u32::try_from(id).unwrap_or(u32::MAX);
    let read = |header: &tar::Header| {
        Ok(EntryMetadata {
            mode: header.mode()?,
            uid: narrow(header.uid()?),
            gid: narrow(header.gid()?),
            modified: i64::try_from(header.mtime()?).unwrap_or(0),
            attributes,
        })
    };
    read(entry.header()).during("read the header of", path)
}

/// Returns the attributes that any user may set. File capabilities, access lists and labels of the
/// host's security modules are omitted: nothing inside could use them, because no command gains
/// privileges by an exec.
fn read_attributes<R: Read>(
    entry: &mut tar::Entry<'_, R>,
    path: &Path,
) -> Result<Vec<(String, Vec<u8>)>, ImageError> {
    let mut found = Vec::new();
    let extensions = entry.pax_extensions().during("read the attributes of", path)?;
    for extension in extensions.into_iter().flatten() {
        let extension = extension.during("read the attributes of", path)?;
        // The other way to write a sparse file: a plain file that begins with the list of its holes.
        if extension.key_bytes().starts_with(b"GNU.sparse.") {
            return Err(hostile_entry(path, "it is a sparse file"));
        }
        let Some(name) = extension.key().ok().and_then(|key| key.strip_prefix("SCHILY.xattr.")) else {
            continue;
        };
        if is_kept_attribute(name, path)? {
            found.push((name.to_owned(), extension.value_bytes().to_vec()));
        }
    }
    check_attributes_size(&found, path)?;
    Ok(found)
}

/// Whether an attribute is one that any user may set. Attributes that control an overlay are rejected.
pub(super) fn is_kept_attribute(name: &str, path: &Path) -> Result<bool, ImageError> {
    if name.starts_with("user.overlay.") || name.starts_with("trusted.overlay.") {
        return Err(hostile_entry(path, "it has an attribute that steers an overlay"));
    }
    Ok(name.starts_with("user."))
}

/// Rejects an entry with too many attributes.
pub(super) fn check_attributes_size(found: &[(String, Vec<u8>)], path: &Path) -> Result<(), ImageError> {
    let length = |(name, value): &(String, Vec<u8>)| name.len() + value.len();
    if found.iter().map(length).sum::<usize>() > MAX_ATTRIBUTES_SIZE {
        return Err(hostile_entry(path, "its attributes are too large"));
    }
    Ok(())
}

/// A reader that fails when its ration is used up, so that a long header cannot fill the memory.
pub(super) struct RationedReader<R> {
    content: R,
    ration: Rc<Cell<u64>>,
}

impl<R> RationedReader<R> {
    /// Returns the reader and its ration, which is set to [`MAX_HEADER_SIZE`] before each header.
    pub(super) fn new(content: R) -> (Self, Rc<Cell<u64>>) {
        let ration = Rc::new(Cell::new(MAX_HEADER_SIZE));
        (Self { content, ration: Rc::clone(&ration) }, ration)
    }
}

impl<R: Read> Read for RationedReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let length = self.content.read(buffer)?;
        let left = self.ration.get().checked_sub(length as u64);
        let left = left.ok_or_else(|| io::Error::other("a header of the archive is too long"))?;
        self.ration.set(left);
        Ok(length)
    }
}

impl<R: Seek> Seek for RationedReader<R> {
    fn seek(&mut self, position: SeekFrom) -> io::Result<u64> {
        self.content.seek(position)
    }
}
