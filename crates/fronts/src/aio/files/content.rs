//! The text of a write, and the bytes that it stands for.

use base64::Engine;
use base64::alphabet;
use base64::engine::{GeneralPurpose, GeneralPurposeConfig};
use serde::Deserialize;

use crate::kit::byte_search::any_byte;

/// The alphabet with `+` and `/`, padded. The unused bits of the last character may have any value, as in Python.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &alphabet::STANDARD,
    GeneralPurposeConfig::new().with_decode_allow_trailing_bits(true),
);
/// Four characters stand for three bytes.
const BASE64_GROUP: usize = 4;

/// How a text stands for bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub(super) enum ContentEncoding {
    #[default]
    #[serde(rename = "utf-8", alias = "utf8", alias = "UTF-8")]
    Utf8,
    #[serde(rename = "base64")]
    Base64,
    /// Each character up to U+00FF stands for one byte.
    #[serde(rename = "raw")]
    Raw,
}

/// The text is not valid in its encoding.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct InvalidContent;

/// Decodes a text that arrives in pieces, which may divide characters.
pub(super) struct ContentDecoder {
    encoding: ContentEncoding,
    /// The beginning of a group or of a character.
    pending: Vec<u8>,
    /// Whether the padding at the end of base64 was read.
    padded: bool,
}

impl ContentDecoder {
    pub(super) fn new(encoding: ContentEncoding) -> Self {
        Self { encoding, pending: Vec::new(), padded: false }
    }

    /// Decodes the next piece.
    pub(super) fn decode_piece(&mut self, text: &[u8]) -> Result<Vec<u8>, InvalidContent> {
        match self.encoding {
            ContentEncoding::Utf8 => Ok(text.to_vec()),
            ContentEncoding::Base64 => self.decode_base64(text),
            ContentEncoding::Raw => self.decode_raw(text),
        }
    }

    /// Must be called at the end of the text.
    pub(super) fn finish(self) -> Result<(), InvalidContent> {
        if self.pending.is_empty() { Ok(()) } else { Err(InvalidContent) }
    }

    /// Line breaks and other white space are skipped, as in Python.
    fn decode_base64(&mut self, text: &[u8]) -> Result<Vec<u8>, InvalidContent> {
        let mut characters = std::mem::take(&mut self.pending);
        match any_byte(text, |byte| byte.is_ascii_whitespace()) {
            true => characters.extend(text.iter().filter(|byte| !byte.is_ascii_whitespace())),
            false => characters.extend_from_slice(text),
        }
        if self.padded && !characters.is_empty() {
            return Err(InvalidContent);
        }
        self.pending = characters.split_off(characters.len() - characters.len() % BASE64_GROUP);
        self.padded |= characters.last() == Some(&b'=');
        if self.padded && !self.pending.is_empty() {
            return Err(InvalidContent);
        }
        BASE64.decode(&characters).or(Err(InvalidContent))
    }

    fn decode_raw(&mut self, text: &[u8]) -> Result<Vec<u8>, InvalidContent> {
        if self.pending.is_empty() && text.is_ascii() {
            return Ok(text.to_vec());
        }
        let mut decoded = Vec::with_capacity(text.len());
        for byte in text {
            match (self.pending.pop(), byte) {
                (None, 0..0x80) => decoded.push(*byte),
                // The first byte of U+0080 to U+00FF.
                (None, 0xC2 | 0xC3) => self.pending.push(*byte),
                (Some(first), 0x80..0xC0) => decoded.push((first << 6) | (byte & 0x3F)),
                _ => return Err(InvalidContent),
            }
        }
        Ok(decoded)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn decode(encoding: ContentEncoding, pieces: &[&[u8]]) -> Result<Vec<u8>, InvalidContent> {
        let (mut decoder, mut decoded) = (ContentDecoder::new(encoding), Vec::new());
        for piece in pieces {
            decoded.extend(decoder.decode_piece(piece)?);
        }
        decoder.finish().map(|()| decoded)
    }

    fn check(encoding: ContentEncoding, text: &str, expected: Result<&[u8], InvalidContent>) {
        let expected = expected.map(<[u8]>::to_vec);
        for at in 0..=text.len() {
            let (first, second) = text.as_bytes().split_at(at);
            assert_eq!(decode(encoding, &[first, second]), expected, "{text} divided at {at}");
        }
    }

    #[test]
    fn base64_is_decoded_and_checked() {
        for (text, expected) in [
            ("", Ok(&b""[..])),
            ("aGk=", Ok(b"hi")),
            ("aGk=\n", Ok(b"hi")),
            ("aGlo\r\naGk=", Ok(b"hihhi")),
            ("AP8=", Ok(b"\x00\xff")),
            ("aGl=", Ok(b"hi")),
            ("aGk", Err(InvalidContent)),
            ("aGk=aGk=", Err(InvalidContent)),
            ("a===", Err(InvalidContent)),
            ("aG-k", Err(InvalidContent)),
            ("é===", Err(InvalidContent)),
            ("=", Err(InvalidContent)),
        ] {
            check(ContentEncoding::Base64, text, expected);
        }
    }

    #[test]
    fn raw_characters_are_bytes() {
        check(ContentEncoding::Raw, "a\u{80}\u{e9}\u{ff}\0", Ok(b"a\x80\xe9\xff\0"));
        check(ContentEncoding::Raw, "a\u{100}", Err(InvalidContent));
        check(ContentEncoding::Raw, "€", Err(InvalidContent));
    }

    proptest! {
        #[test]
        fn encoded_bytes_are_decoded(bytes: Vec<u8>, cut in 1usize..9) {
            let text = BASE64.encode(&bytes);
            let pieces: Vec<_> = text.as_bytes().chunks(cut).collect();
            prop_assert_eq!(decode(ContentEncoding::Base64, &pieces), Ok(bytes));
        }
    }
}
