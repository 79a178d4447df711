//! The keys of signed routes, as the operator writes them.

use std::fmt;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;

/// Shorter secrets could be guessed by anyone who has seen a signature.
const MIN_SECRET_BYTES: usize = 16;

/// A key of signed routes. Its `Debug` output never shows the secret.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct RouteKey {
    /// A digit or a lower-case letter.
    pub(super) name: char,
    pub(super) secret: Vec<u8>,
}

/// Whether 32-bit signatures are created and accepted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum ShortSignatures {
    #[default]
    Refused,
    Accepted,
}

/// The reason why a list of keys is not accepted. It never contains a secret.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum RouteKeyError {
    #[error("not a list of keys: one has no name of one digit or lower-case letter")]
    NoName,
    #[error(
        "not a list of keys: the secret of the key `{0}` is not {MIN_SECRET_BYTES} bytes or more in base64"
    )]
    BadSecret(char),
    #[error("not a list of keys: it has two keys called `{0}`")]
    Twice(char),
}

impl RouteKeyError {
    pub(super) fn hint(&self) -> Option<&'static str> {
        match self {
            Self::NoName => Some("write `a=SECRET`, the secret in base64"),
            Self::BadSecret(_) => Some("`openssl rand -base64 32` makes a good one"),
            Self::Twice(_) => None,
        }
    }
}

impl RouteKey {
    /// Reads keys, each as `NAME=SECRET`.
    pub(super) fn parse_list<'a>(texts: impl Iterator<Item = &'a str>) -> Result<Vec<Self>, RouteKeyError> {
        let mut keys: Vec<Self> = Vec::new();
        for text in texts {
            let key = Self::parse(text)?;
            if keys.iter().any(|other| other.name == key.name) {
                return Err(RouteKeyError::Twice(key.name));
            }
            keys.push(key);
        }
        Ok(keys)
    }

    fn parse(text: &str) -> Result<Self, RouteKeyError> {
        let (name, secret) = text.split_once('=').unwrap_or((text, ""));
        let name = match name.trim().chars().collect::<Vec<_>>()[..] {
            [name] if name.is_ascii_lowercase() || name.is_ascii_digit() => name,
            _ => return Err(RouteKeyError::NoName),
        };
        let secret = STANDARD.decode(secret.trim()).ok().filter(|secret| secret.len() >= MIN_SECRET_BYTES);
        Ok(Self { name, secret: secret.ok_or(RouteKeyError::BadSecret(name))? })
    }

    /// The inverse of reading a key.
    pub(super) fn to_text(&self) -> String {
        format!("{}={}", self.name, STANDARD.encode(&self.secret))
    }
}

impl fmt::Debug for RouteKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}=***", self.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: &str = "a=MDEyMzQ1Njc4OWFiY2RlZg==";

    #[test]
    fn keys_keep_their_order_and_hide_their_secrets() {
        let keys = RouteKey::parse_list(["b=QUJDREVGR0hJSktMTU5PUA==", KEY].into_iter()).unwrap();
        assert_eq!((keys[1].name, keys[1].secret.as_slice()), ('a', &b"0123456789abcdef"[..]));
        assert_eq!(keys[1].to_text(), KEY);
        assert_eq!(format!("{keys:?}"), "[b=***, a=***]");
    }

    #[test]
    fn invalid_keys_are_refused_without_their_secrets() {
        for (texts, expected) in [
            (vec!["ab=MDEyMzQ1Njc4OWFiY2RlZg=="], RouteKeyError::NoName),
            (vec!["a=c2hvcnQ="], RouteKeyError::BadSecret('a')),
            (vec![KEY, KEY], RouteKeyError::Twice('a')),
        ] {
            assert_eq!(RouteKey::parse_list(texts.into_iter()), Err(expected));
        }
    }
}
