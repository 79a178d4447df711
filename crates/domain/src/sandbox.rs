//! Who a sandbox is and whose: ids, owners, labels.

use std::collections::BTreeMap;
use std::fmt;

/// Free words that a client hangs on a sandbox and may filter lists by.
pub type Labels = BTreeMap<String, String>;

/// The name of one sandbox, minted by us: a letter and nineteen more letters or digits.
///
/// It appears in host names, cgroup names and paths, so nothing else is ever accepted.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SandboxId(String);

/// Whom a sandbox belongs to. A foreign owner's id is "not found" everywhere.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Owner(String);

/// The text is not a sandbox id.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("a sandbox id is a letter and nineteen lower-case letters or digits")]
pub struct NotAnId;

/// The text cannot be the name of an owner.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "an owner has 1 to 64 lower-case letters, digits, `-`, `_` and `.`, and begins with one of the first two"
)]
pub struct NotAnOwner;

impl SandboxId {
    const LENGTH: usize = 20;

    /// Mints an id from random bytes; 19 base-36 digits hold more than 95 bits of them.
    pub fn from_entropy(entropy: [u8; 20]) -> Self {
        const DIGITS: &[u8; 36] = b"abcdefghijklmnopqrstuvwxyz0123456789";
        let text = entropy.iter().enumerate().map(|(place, byte)| {
            let choices = if place == 0 { 26 } else { 36 };
            char::from(DIGITS[usize::from(*byte) % choices])
        });
        Self(text.collect())
    }

    pub fn parse(text: &str) -> Result<Self, NotAnId> {
        let bytes = text.as_bytes();
        let starts = bytes.first().is_some_and(u8::is_ascii_lowercase);
        let rest = bytes.iter().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit());
        if bytes.len() == Self::LENGTH && starts && rest { Ok(Self(text.to_owned())) } else { Err(NotAnId) }
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for SandboxId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Owner {
    /// The owner of everything on a server without tenants.
    pub fn single() -> Self {
        Self("default".to_owned())
    }

    /// Whose sandboxes in pools are until somebody takes them. No name that is chosen is this one.
    pub fn nobody() -> Self {
        Self("-".to_owned())
    }

    /// Reads a name that somebody chose: 1 to 64 lower-case letters, digits, `-`, `_` and `.`, the
    /// first a letter or digit.
    pub fn parse(text: &str) -> Result<Self, NotAnOwner> {
        let plain = |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
        let starts = text.as_bytes().first().is_some_and(plain);
        let rest = text.bytes().all(|byte| plain(&byte) || b"-_.".contains(&byte));
        if starts && rest && text.len() <= 64 { Ok(Self(text.to_owned())) } else { Err(NotAnOwner) }
    }

    /// A name that is known to be one.
    pub fn named(name: impl Into<String>) -> Self {
        Self(name.into())
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_minted_id_parses() {
        for byte in [0, 25, 26, 35, 36, 200, 255] {
            let id = SandboxId::from_entropy([byte; 20]);
            assert_eq!(SandboxId::parse(id.as_str()), Ok(id));
        }
    }

    #[test]
    fn an_owner_has_a_plain_name() {
        for name in ["a", "team-7", "0.x_y"] {
            assert_eq!(Owner::parse(name), Ok(Owner::named(name)));
        }
        for wrong in ["", Owner::nobody().as_str(), "-a", "A", "a b", "a/b", "ü", &"a".repeat(65)] {
            assert_eq!(Owner::parse(wrong), Err(NotAnOwner), "{wrong}");
        }
    }

    #[test]
    fn nothing_that_could_be_a_path_or_a_host_name_parses() {
        for text in [
            "",
            "a",
            "../../../../etc/passw",
            "0aaaaaaaaaaaaaaaaaaa",
            "aaaaaaaaaa-aaaaaaaaa",
            "Aaaaaaaaaaaaaaaaaaaa",
            "aaaaaaaaaaaaaaaaaaaa\n",
        ] {
            assert_eq!(SandboxId::parse(text), Err(NotAnId), "{text}");
        }
    }
}
