//! Root file systems that come as a tar archive: plain, gzip or zstd.

use std::cell::Cell;
use std::fs::File;
use std::io::{self, BufReader, Read, Seek};
use std::path::Path;
use std::rc::Rc;

use tar::{Archive, EntryType};

use super::layer::{Layer, Marks, hostile};
use super::{During, ImageError};

/// What may be read between two entries: headers, long names, attributes. The parser holds
/// these in memory.
const MOST_HEADERS: u64 = 1 << 20;

const GZIP: &[u8] = &[0x1f, 0x8b];
const ZSTD: &[u8] = &[0x28, 0xb5, 0x2f, 0xfd];

/// Unpacks the archive `source` into `layer`.
pub(super) fn unpack(source: &Path, layer: &mut Layer<'_>) -> Result<(), ImageError> {
    let content = open(source)?;
    let ration = Rc::new(Cell::new(MOST_HEADERS));
    let mut archive = Archive::new(Rationed { content, ration: Rc::clone(&ration) });
    let mut entries = archive.entries().during("read", source)?;
    loop {
        ration.set(MOST_HEADERS);
        let Some(entry) = entries.next() else { return Ok(()) };
        let mut entry = entry.during("read", source)?;
        // The content of an entry is bounded by the layer, its size in the archive by its header.
        ration.set(u64::MAX);
        place(&mut entry, layer)?;
        io::copy(&mut entry, &mut io::sink()).during("read", source)?;
    }
}

fn open(source: &Path) -> Result<Box<dyn Read>, ImageError> {
    let mut file = File::open(source).during("open", source)?;
    let mut start = [0; 512];
    let length = file.read(&mut start).during("read", source)?;
    file.rewind().during("read", source)?;
    let file = BufReader::with_capacity(1 << 17, file);
    if start.starts_with(GZIP) {
        Ok(Box::new(flate2::bufread::MultiGzDecoder::new(file)))
    } else if start.starts_with(ZSTD) {
        Ok(Box::new(zstd::Decoder::with_buffer(file).during("read", source)?))
    } else if length == start.len() && start[257..].starts_with(b"ustar") {
        Ok(Box::new(file))
    } else {
        Err(ImageError::NotAnArchive(source.to_owned()))
    }
}

fn place<R: Read>(entry: &mut tar::Entry<'_, R>, layer: &mut Layer<'_>) -> Result<(), ImageError> {
    let path = entry.path().during("read the name of", Path::new("an entry"))?.into_owned();
    let link = entry.link_name().during("read the target of", &path)?.map(|link| link.into_owned());
    let marks = marks(entry.header()).during("read the header of", &path)?;
    match (entry.header().entry_type(), link) {
        (EntryType::Directory, _) => layer.directory(&path, marks),
        (EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse, _) => {
            layer.file(&path, marks, entry)
        }
        (EntryType::Symlink, Some(target)) => layer.symlink(&path, &target, marks),
        (EntryType::Link, Some(existing)) => layer.hard_link(&path, &existing),
        (EntryType::Fifo, _) => layer.fifo(&path, marks),
        (EntryType::Char | EntryType::Block, _) => layer.device(&path),
        // Attributes for all entries of the archive; the parser has no use for them.
        (EntryType::XGlobalHeader, _) => Ok(()),
        _ => Err(hostile(&path, "its type is unknown")),
    }
}

fn marks(header: &tar::Header) -> io::Result<Marks> {
    let narrow = |id: u64| u32::try_from(id).unwrap_or(u32::MAX);
    Ok(Marks {
        mode: header.mode()?,
        uid: narrow(header.uid()?),
        gid: narrow(header.gid()?),
        modified: i64::try_from(header.mtime()?).unwrap_or(0),
    })
}

/// A source that stops when its ration is used up, so that a long header cannot fill memory.
struct Rationed<R> {
    content: R,
    ration: Rc<Cell<u64>>,
}

impl<R: Read> Read for Rationed<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let length = self.content.read(buffer)?;
        let left = self.ration.get().checked_sub(length as u64);
        let left = left.ok_or_else(|| io::Error::other("a header of the archive is too long"))?;
        self.ration.set(left);
        Ok(length)
    }
}
