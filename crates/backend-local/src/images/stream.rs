//! Archives as streams: which compression they have, and how far they may swell.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

use super::digest::Hashing;
use super::{During, ImageError};

const GZIP: &[u8] = &[0x1f, 0x8b];
const ZSTD: &[u8] = &[0x28, 0xb5, 0x2f, 0xfd];

/// Content may swell this much, once it is larger than what everybody has room for. Gzip cannot
/// reach three times of it even with nothing but zeros.
const MOST_SWELLING: u64 = 400;
const HARMLESS: u64 = 64 << 20;

/// A file, or a part of one.
pub(super) type Part = io::Take<File>;

/// The content of an archive, uncompressed, beside what is known of the compressed bytes.
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
    /// Looks at the first bytes to see what it is.
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

    /// The compressed bytes, to see their digest once everything was read.
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
            return Err(io::Error::other("it swells more than 400 times when it is unpacked"));
        }
        Ok(length)
    }
}
