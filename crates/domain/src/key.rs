//! Names that clients choose for sandboxes.

use crate::Owner;

/// A name of a client's own that leads to a sandbox: the same key, the same sandbox.
///
/// It may outlive the sandbox and lead to a successor. Names of different uses never meet,
/// because each use has a space of its own.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    owner: Owner,
    space: String,
    name: String,
}

/// The text cannot be the name in a key.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("a key has 1 to {} bytes and no control characters", Key::LONGEST)]
pub struct NotAKey;

impl Key {
    pub const LONGEST: usize = 256;

    pub fn new(owner: &Owner, space: &str, name: &str) -> Result<Self, NotAKey> {
        let fits = !name.is_empty() && name.len() <= Self::LONGEST && !name.contains(char::is_control);
        let key = Self { owner: owner.clone(), space: space.to_owned(), name: name.to_owned() };
        fits.then_some(key).ok_or(NotAKey)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_text_of_bounded_length() {
        let key = |name: &str| Key::new(&Owner::single(), "test", name);
        assert_eq!(key("user:7/thread 9 ü").expect("a fine name").name(), "user:7/thread 9 ü");
        assert!(key(&"x".repeat(Key::LONGEST)).is_ok());
        for wrong in ["", "a\nb", "a\0", &"x".repeat(Key::LONGEST + 1)] {
            assert_eq!(key(wrong), Err(NotAKey), "{wrong:?}");
        }
    }

    #[test]
    fn spaces_and_owners_keep_equal_names_apart() {
        let key = |owner: &str, space| Key::new(&Owner::named(owner), space, "n").expect("a fine name");
        assert_ne!(key("a", "s"), key("b", "s"));
        assert_ne!(key("a", "s"), key("a", "t"));
    }
}
