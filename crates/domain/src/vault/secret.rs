//! Secrets, in the open and sealed. Neither is ever printed.

use std::fmt;

use zeroize::Zeroize;

use crate::vault::MAX_SECRET_BYTES;

/// A secret in the open. It is overwritten when it is dropped.
#[derive(Clone, PartialEq, Eq)]
pub struct SecretText(String);

/// A secret that only the process with the key can read, as text.
#[derive(Clone, PartialEq, Eq)]
pub struct SealedSecret(String);

impl SecretText {
    pub fn new(value: String) -> Self {
        Self(value)
    }

    pub fn expose(&self) -> &str {
        &self.0
    }

    pub fn has_valid_length(&self) -> bool {
        (1..=MAX_SECRET_BYTES).contains(&self.0.len())
    }

    /// Whether the value can be part of a header: visible ASCII characters, spaces and tabs, neither at its ends.
    pub fn fits_header(&self) -> bool {
        let visible = self.0.bytes().all(|byte| byte.is_ascii_graphic() || byte == b' ' || byte == b'\t');
        visible && self.0.trim() == self.0
    }
}

impl SealedSecret {
    pub fn new(text: String) -> Self {
        Self(text)
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Drop for SecretText {
    fn drop(&mut self) {
        self.0.zeroize();
    }
}

impl fmt::Debug for SecretText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SecretText(***)")
    }
}

impl fmt::Debug for SealedSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SealedSecret(***)")
    }
}
