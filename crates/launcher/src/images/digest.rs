//! Digests, which identify content, and readers that compute them.

use std::fmt;
use std::io::{self, Read};

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

/// A SHA-256 digest, written as `sha256:` and 64 hexadecimal digits.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Digest(String);

/// The error for text that is not a supported digest.
#[derive(Debug, thiserror::Error)]
#[error("`{0}` is not `sha256:` and 64 hexadecimal digits")]
pub struct DigestError(String);

const DIGEST_PREFIX: &str = "sha256:";

impl Digest {
    pub fn parse(text: &str) -> Result<Self, DigestError> {
        let is_hex = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
        match text.strip_prefix(DIGEST_PREFIX) {
            Some(hex) if hex.len() == 64 && hex.bytes().all(is_hex) => Ok(Self(hex.to_owned())),
            _ => Err(DigestError(text.chars().take(100).collect())),
        }
    }

    pub fn of_content(content: &[u8]) -> Self {
        let mut hash = Sha256::new();
        hash.update(content);
        Self::from_hash(hash)
    }

    /// The digits alone, which are used as a file name.
    pub fn hex(&self) -> &str {
        &self.0
    }

    fn from_hash(hash: Sha256) -> Self {
        Self(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{DIGEST_PREFIX}{}", self.0)
    }
}

impl TryFrom<String> for Digest {
    type Error = DigestError;

    fn try_from(text: String) -> Result<Self, DigestError> {
        Self::parse(&text)
    }
}

impl From<Digest> for String {
    fn from(digest: Digest) -> Self {
        digest.to_string()
    }
}

/// A digest over several parts, unambiguous about where each part ends.
#[derive(Default)]
pub(super) struct PartsHasher(Sha256);

impl PartsHasher {
    pub(super) fn add_part(&mut self, part: &[u8]) {
        self.0.update(part.len().to_le_bytes());
        self.0.update(part);
    }

    pub(super) fn finish(self) -> Digest {
        Digest::from_hash(self.0)
    }
}

/// A reader that passes content through and computes its digest and length.
pub(super) struct HashingReader<R> {
    content: R,
    hash: Sha256,
    length: u64,
}

impl<R: Read> HashingReader<R> {
    pub(super) fn new(content: R) -> Self {
        Self { content, hash: Sha256::new(), length: 0 }
    }

    /// The number of bytes read so far.
    pub(super) fn length(&self) -> u64 {
        self.length
    }

    /// Returns the digest of the bytes read so far, and the inner reader.
    pub(super) fn into_parts(self) -> (Digest, R) {
        (Digest::from_hash(self.hash), self.content)
    }

    /// Reads the rest of the content, because the digest covers all of it.
    pub(super) fn finish(mut self) -> io::Result<(Digest, u64)> {
        io::copy(&mut self, &mut io::sink())?;
        Ok((Digest::from_hash(self.hash), self.length))
    }
}

impl<R: Read> Read for HashingReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let length = self.content.read(buffer)?;
        self.hash.update(&buffer[..length]);
        self.length += length as u64;
        Ok(length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_well_formed_digests_parse() {
        let digest = Digest::of_content(b"");
        let text = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        assert_eq!(digest.to_string(), text);
        assert_eq!(Digest::parse(text).ok(), Some(digest));
        let upper = text.to_uppercase();
        for wrong in ["", "sha256:", "sha512:00", &text[..70], &upper, "sha256:../../../etc/passwd"] {
            assert!(Digest::parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn digest_covers_unread_content() {
        let mut hashing = HashingReader::new(&b"abc"[..]);
        let mut one = [0];
        assert!(hashing.read_exact(&mut one).is_ok());
        let (digest, length) = hashing.finish().expect("memory can be read");
        assert_eq!((digest, length), (Digest::of_content(b"abc"), 3));
    }
}
