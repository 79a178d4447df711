//! Names that clients choose for sandboxes.

use crate::Owner;

/// A name chosen by a client that identifies a sandbox: the same key leads to the same sandbox.
///
/// It may outlive the sandbox and then lead to a successor. Each use of keys has its own `space`,
/// so names of different uses never collide.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SandboxKey {
    owner: Owner,
    space: String,
    name: String,
}

/// The error for text that is not a valid key name.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("a key has 1 to {} bytes and no control characters", SandboxKey::MAX_NAME_BYTES)]
pub struct SandboxKeyError;

impl SandboxKey {
    pub const MAX_NAME_BYTES: usize = 256;

    pub fn new(owner: &Owner, space: &str, name: &str) -> Result<Self, SandboxKeyError> {
        let fits = !name.is_empty() && name.len() <= Self::MAX_NAME_BYTES && !name.contains(char::is_control);
        let key = Self { owner: owner.clone(), space: space.to_owned(), name: name.to_owned() };
        fits.then_some(key).ok_or(SandboxKeyError)
    }

    pub fn owner(&self) -> &Owner {
        &self.owner
    }

    pub fn space(&self) -> &str {
        &self.space
    }

    pub fn name(&self) -> &str {
        &self.name
    }
}

/// A short text that stands for a key in addresses: twenty lower-case letters and digits, the first a letter. It does not
/// show the owner or the name, and is the same for every sandbox that the key leads to.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct KeyHandle(String);

impl KeyHandle {
    const LENGTH: usize = 20;

    /// Creates a handle from bytes of a digest.
    pub fn from_digest(digest: [u8; Self::LENGTH]) -> Self {
        Self(crate::sandbox::SandboxId::from_entropy(digest).as_str().to_owned())
    }

    /// Text that no handle has leads to no key.
    pub fn from_text(text: &str) -> Option<Self> {
        crate::sandbox::SandboxId::parse(text).ok().map(|id| Self(id.as_str().to_owned()))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn key_name_has_limited_length() {
        let key = |name: &str| SandboxKey::new(&Owner::operator(), "test", name);
        assert_eq!(key("user:7/thread 9 ü").expect("a valid name").name(), "user:7/thread 9 ü");
        assert!(key(&"x".repeat(SandboxKey::MAX_NAME_BYTES)).is_ok());
        for wrong in ["", "a\nb", "a\0", &"x".repeat(SandboxKey::MAX_NAME_BYTES + 1)] {
            assert_eq!(key(wrong), Err(SandboxKeyError), "{wrong:?}");
        }
    }

    #[test]
    fn equal_names_in_other_spaces_or_owners_are_different_keys() {
        let key = |owner: &str, space| {
            SandboxKey::new(&Owner::from_valid_name(owner), space, "n").expect("a valid name")
        };
        assert_ne!(key("a", "s"), key("b", "s"));
        assert_ne!(key("a", "s"), key("a", "t"));
    }
}
