//! The API key that an operator configured.

use std::fmt;

use subtle::ConstantTimeEq;

/// Longer keys would not fit into the head of a request together with a path.
const MAX_KEY_BYTES: usize = 1024;

/// A key that never appears in `Debug` output.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct ApiKey(String);

impl ApiKey {
    /// Parses a configured key; the error never contains it.
    pub(super) fn parse(text: &str) -> Result<Self, &'static str> {
        let is_usable = text.bytes().all(|byte| byte.is_ascii_graphic());
        match text {
            "" => Err("empty"),
            _ if text.len() > MAX_KEY_BYTES => Err("longer than 1024 bytes"),
            _ if !is_usable => Err("not made of visible ASCII characters, which a header can carry"),
            _ => Ok(Self(text.to_owned())),
        }
    }

    pub(super) fn expose(&self) -> &str {
        &self.0
    }

    /// Compares hashes, so that the time depends on neither the length nor the bytes of the key.
    pub(super) fn is_equal_to(&self, presented: &[u8]) -> bool {
        let [own, other] = [self.0.as_bytes(), presented].map(blake3::hash);
        own.as_bytes().ct_eq(other.as_bytes()).into()
    }
}

impl fmt::Debug for ApiKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_compared_and_never_shown() {
        let key = ApiKey::parse("k3y").unwrap();
        assert!(key.is_equal_to(b"k3y"));
        for other in [&b"k3Y"[..], b"k3", b"k3y ", b""] {
            assert!(!key.is_equal_to(other), "{other:?}");
        }
        assert_eq!(format!("{key:?}"), "***");
        for text in ["", "a b", "schlüssel", "a\n", &"x".repeat(1025)] {
            assert!(ApiKey::parse(text).is_err(), "{text}");
        }
    }
}
