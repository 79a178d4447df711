//! Archives as streams: their compression, and how much they may expand.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

use super::digest::HashingReader;
use super::{ImageError, ImageErrorContext};

const GZIP_MAGIC: &[u8] = &[0x1f, 0x8b];
const ZSTD_MAGIC: &[u8] = &[0x28, 0xb5, 0x2f, 0xfd];

/// The maximum expansion of content that is larger than `MIN_CHECKED_SIZE`. Even with nothing but zeros,
/// gzip cannot reach three times as much.
const MAX_EXPANSION: u64 = 400;
const MIN_CHECKED_SIZE: u64 = 64 << 20;

/// A file, or a part of one.
pub(super) type FileSection = io::Take<File>;

/// The uncompressed content of an archive, with the digest of the compressed bytes.
pub(super) struct InflatedReader {
    content: CompressedContent,
    out: u64,
}

type PackedReader = BufReader<HashingReader<FileSection>>;

enum CompressedContent {
    Plain(PackedReader),
    Gzip(flate2::bufread::MultiGzDecoder<PackedReader>),
    Zstd(Box<zstd::Decoder<'static, PackedReader>>),
}

impl InflatedReader {
    /// Detects the compression from the first bytes.
    pub(super) fn open(part: FileSection, path: &Path) -> Result<Self, ImageError> {
        let mut packed = BufReader::with_capacity(1 << 17, HashingReader::new(part));
        let start = packed.fill_buf().during("read", path)?;
        let content = if start.starts_with(GZIP_MAGIC) {
            CompressedContent::Gzip(flate2::bufread::MultiGzDecoder::new(packed))
        } else if start.starts_with(ZSTD_MAGIC) {
            CompressedContent::Zstd(Box::new(zstd::Decoder::with_buffer(packed).during("read", path)?))
        } else {
            CompressedContent::Plain(packed)
        };
        Ok(Self { content, out: 0 })
    }

    /// Returns the compressed stream, whose digest is known once everything was read.
    pub(super) fn into_packed(self) -> HashingReader<FileSection> {
        let packed = match self.content {
            CompressedContent::Plain(packed) => packed,
            CompressedContent::Gzip(decoder) => decoder.into_inner(),
            CompressedContent::Zstd(decoder) => decoder.finish(),
        };
        packed.into_inner()
    }
}

impl Read for InflatedReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let length = match &mut self.content {
            CompressedContent::Plain(packed) => packed.read(buffer),
            CompressedContent::Gzip(decoder) => decoder.read(buffer),
            CompressedContent::Zstd(decoder) => decoder.read(buffer),
        }?;
        self.out += length as u64;
        let packed = match &mut self.content {
            CompressedContent::Plain(_) => return Ok(length),
            CompressedContent::Gzip(decoder) => decoder.get_ref().get_ref().length(),
            CompressedContent::Zstd(decoder) => decoder.get_ref().get_ref().length(),
        };
        if self.out > MIN_CHECKED_SIZE && self.out / MAX_EXPANSION > packed {
            return Err(io::Error::other("the archive swells more than 400 times when unpacked"));
        }
        Ok(length)
    }
}
