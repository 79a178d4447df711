//! Archives as streams: their compression, and how much they may expand.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

use super::digest::Hashing;
use super::{During, ImageError};

const GZIP: &[u8] = &[0x1f, 0x8b];
const ZSTD: &[u8] = &[0x28, 0xb5, 0x2f, 0xfd];

/// The maximum expansion of content that is larger than `HARMLESS`. Even with nothing but zeros,
/// gzip cannot reach three times as much.
const MOST_SWELLING: u64 = 400;
const HARMLESS: u64 = 64 << 20;

/// A file, or a part of one.
pub(super) type Part = io::Take<File>;

/// The uncompressed content of an archive, with the digest of the compressed bytes.
pub(super) struct Inflated {
    content: Content,
    out: u64,
}

type Packed = BufReader<Hashing<Part>>;

enum Content {
    Plain(Packed),
    Gzip(flate2::bufread::MultiGzDecoder<Packed>),
    Zstd(Box<zstd::Decoder<'static, Packed>>),
}

impl Inflated {
    /// Detects the compression from the first bytes.
    pub(super) fn open(part: Part, path: &Path) -> Result<Self, ImageError> {
        let mut packed = BufReader::with_capacity(1 << 17, Hashing::new(part));
        let start = packed.fill_buf().during("read", path)?;
        let content = if start.starts_with(GZIP) {
            Content::Gzip(flate2::bufread::MultiGzDecoder::new(packed))
        } else if start.starts_with(ZSTD) {
            Content::Zstd(Box::new(zstd::Decoder::with_buffer(packed).during("read", path)?))
        } else {
            Content::Plain(packed)
        };
        Ok(Self { content, out: 0 })
    }

    /// Returns the compressed stream, whose digest is known once everything was read.
    pub(super) fn into_packed(self) -> Hashing<Part> {
        let packed = match self.content {
            Content::Plain(packed) => packed,
            Content::Gzip(decoder) => decoder.into_inner(),
            Content::Zstd(decoder) => decoder.finish(),
        };
        packed.into_inner()
    }
}

impl Read for Inflated {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let length = match &mut self.content {
            Content::Plain(packed) => packed.read(buffer),
            Content::Gzip(decoder) => decoder.read(buffer),
            Content::Zstd(decoder) => decoder.read(buffer),
        }?;
        self.out += length as u64;
        let packed = match &mut self.content {
            Content::Plain(_) => return Ok(length),
            Content::Gzip(decoder) => decoder.get_ref().get_ref().length(),
            Content::Zstd(decoder) => decoder.get_ref().get_ref().length(),
        };
        if self.out > HARMLESS && self.out / MOST_SWELLING > packed {
            return Err(io::Error::other("the archive swells more than 400 times when unpacked"));
        }
        Ok(length)
    }
}
