//! The identity of a sandbox: ids, owners, labels.

use std::collections::BTreeMap;
use std::fmt;

/// Key-value pairs that a client attaches to a sandbox and can filter lists by.
pub type Labels = BTreeMap<String, String>;

/// The id of a sandbox, created by us: a letter and nineteen more letters or digits.
///
/// It appears in host names, cgroup names and paths, so no other form is accepted.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SandboxId(String);

/// The owner of a sandbox. Another owner's id is reported as "not found" everywhere.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Owner(String);

/// The error for text that is not a sandbox id.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("a sandbox id is a letter and nineteen lower-case letters or digits")]
pub struct SandboxIdError;

/// The error for text that is not a valid owner name.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "an owner must be 1 to 64 lower-case letters, digits, `-`, `_` and `.`, and begin with a letter or digit"
)]
pub struct OwnerError;

impl SandboxId {
    const LENGTH: usize = 20;

    /// Creates an id from random bytes; 19 base-36 digits hold more than 95 bits of them.
    pub fn from_entropy(entropy: [u8; 20]) -> Self {
        const DIGITS: &[u8; 36] = b"abcdefghijklmnopqrstuvwxyz0123456789";
        let text = entropy.iter().enumerate().map(|(index, byte)| {
            let choices = if index == 0 { 26 } else { 36 };
            char::from(DIGITS[usize::from(*byte) % choices])
        });
        Self(text.collect())
    }

    pub fn parse(text: &str) -> Result<Self, SandboxIdError> {
        let bytes = text.as_bytes();
        let starts = bytes.first().is_some_and(u8::is_ascii_lowercase);
        let rest = bytes.iter().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit());
        if bytes.len() == Self::LENGTH && starts && rest {
            Ok(Self(text.to_owned()))
        } else {
            Err(SandboxIdError)
        }
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
    pub fn operator() -> Self {
        Self("default".to_owned())
    }

    /// The owner of pooled sandboxes until they are claimed. No valid owner name equals it.
    pub fn unclaimed() -> Self {
        Self("-".to_owned())
    }

    /// Parses a chosen name: 1 to 64 lower-case letters, digits, `-`, `_` and `.`, beginning with a
    /// letter or digit.
    pub fn parse(text: &str) -> Result<Self, OwnerError> {
        let plain = |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
        let starts = text.as_bytes().first().is_some_and(plain);
        let rest = text.bytes().all(|byte| plain(&byte) || b"-_.".contains(&byte));
        if starts && rest && text.len() <= 64 { Ok(Self(text.to_owned())) } else { Err(OwnerError) }
    }

    /// Wraps a name that is known to be valid.
    pub fn from_valid_name(name: impl Into<String>) -> Self {
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
    fn created_id_parses() {
        for byte in [0, 25, 26, 35, 36, 200, 255] {
            let id = SandboxId::from_entropy([byte; 20]);
            assert_eq!(SandboxId::parse(id.as_str()), Ok(id));
        }
    }

    #[test]
    fn owner_names_are_restricted() {
        for name in ["a", "team-7", "0.x_y"] {
            assert_eq!(Owner::parse(name), Ok(Owner::from_valid_name(name)));
        }
        for wrong in ["", Owner::unclaimed().as_str(), "-a", "A", "a b", "a/b", "ü", &"a".repeat(65)] {
            assert_eq!(Owner::parse(wrong), Err(OwnerError), "{wrong}");
        }
    }

    #[test]
    fn paths_and_host_names_do_not_parse() {
        for text in [
            "",
            "a",
            "../../../../etc/passw",
            "0aaaaaaaaaaaaaaaaaaa",
            "aaaaaaaaaa-aaaaaaaaa",
            "Aaaaaaaaaaaaaaaaaaaa",
            "aaaaaaaaaaaaaaaaaaaa\n",
        ] {
            assert_eq!(SandboxId::parse(text), Err(SandboxIdError), "{text}");
        }
    }
}
