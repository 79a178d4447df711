//! Checks metadata, which follows the grammar of Kubernetes labels.

use std::collections::BTreeMap;

use http::StatusCode;

use super::problem::Problem;

const MAX_PREFIX_LENGTH: usize = 253;
const MAX_WORD_LENGTH: usize = 63;
/// Keys with this prefix are reserved for the server.
const RESERVED_PREFIX: &str = "opensandbox.io/";

pub(super) fn check_labels(labels: &BTreeMap<String, String>) -> Result<(), Problem> {
    labels.iter().try_for_each(|(key, value)| {
        check_key(key)?;
        check_value(key, value)
    })
}

pub(super) fn check_key(key: &str) -> Result<(), Problem> {
    if key.starts_with(RESERVED_PREFIX) {
        return Err(invalid_label(format!("the metadata key `{key}` is reserved")));
    }
    let (prefix, name) = match key.split_once('/') {
        Some((prefix, name)) => (Some(prefix), name),
        None => (None, key),
    };
    if prefix.is_none_or(is_subdomain) && is_word(name) {
        Ok(())
    } else {
        Err(invalid_label(format!("invalid metadata key `{}`", key.escape_debug())))
    }
}

pub(super) fn check_value(key: &str, value: &str) -> Result<(), Problem> {
    if value.is_empty() || is_word(value) {
        Ok(())
    } else {
        Err(invalid_label(format!(
            "the metadata value of `{key}` exceeds {MAX_WORD_LENGTH} characters or contains invalid ones"
        )))
    }
}

fn invalid_label(message: String) -> Problem {
    Problem::new(StatusCode::BAD_REQUEST, "SANDBOX::INVALID_METADATA_LABEL", message)
}

fn is_word(text: &str) -> bool {
    let inner = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    let bytes = text.as_bytes();
    let ends = |byte: Option<&u8>| byte.is_some_and(u8::is_ascii_alphanumeric);
    bytes.len() <= MAX_WORD_LENGTH
        && ends(bytes.first())
        && ends(bytes.last())
        && bytes.iter().all(|b| inner(*b))
}

fn is_subdomain(text: &str) -> bool {
    let inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    let label = |part: &str| {
        !part.is_empty() && !part.starts_with('-') && !part.ends_with('-') && part.bytes().all(inner)
    };
    text.len() <= MAX_PREFIX_LENGTH && text.split('.').all(label)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_follow_the_label_grammar() {
        for key in ["a", "team", "A-b_c.9", "example.com/team", &"x".repeat(63)] {
            assert!(check_key(key).is_ok(), "{key}");
        }
        for key in ["", "-a", "a-", "a b", "ä", "/a", "Example.com/a", "a/b/c", "a..b/c", &"x".repeat(64)] {
            assert!(check_key(key).is_err(), "{key}");
        }
        assert!(check_key("opensandbox.io/id").is_err());
    }

    #[test]
    fn a_value_may_be_empty() {
        assert!(check_value("a", "").is_ok());
        assert!(check_value("a", "v1.0_x").is_ok());
        assert!(check_value("a", "has space").is_err());
    }
}
