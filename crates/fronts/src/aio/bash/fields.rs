//! The bounds of what clients send.

use std::collections::BTreeMap;

use crate::aio::body::check_text;
use crate::aio::commands::fields::check_bounded_text;
use crate::aio::problem::AioProblem;

/// The longest command and the longest input.
const MAX_TEXT_BYTES: usize = 1 << 20;
/// How many variables one command may have, and how long all of them may be together. The kernel has similar bounds.
const MAX_VARIABLES: usize = 1024;
const MAX_VARIABLES_BYTES: usize = 128 << 10;

/// Checks a command or an input.
pub(super) fn check_long_text(text: String, field: &str) -> Result<String, AioProblem> {
    check_bounded_text(text, field, MAX_TEXT_BYTES)
}

/// Checks the variables of a command. Those without a value are left out.
pub(super) fn check_variables(
    env: Option<BTreeMap<String, Option<String>>>,
) -> Result<BTreeMap<String, String>, AioProblem> {
    let mut variables = BTreeMap::new();
    let mut length = 0;
    for (name, value) in env.unwrap_or_default() {
        if !is_variable_name(&name) {
            let shown: String = name.chars().take(64).collect();
            return Err(AioProblem::bad_request(format!("Invalid environment variable name: {shown:?}")));
        }
        let Some(value) = value else { continue };
        let value = check_text(value, "env")?;
        length += name.len() + value.len();
        variables.insert(name, value);
    }
    if variables.len() > MAX_VARIABLES || length > MAX_VARIABLES_BYTES {
        let reason = format!("more than {MAX_VARIABLES} variables or {MAX_VARIABLES_BYTES} bytes");
        return Err(AioProblem::invalid_field("env", reason));
    }
    Ok(variables)
}

fn is_variable_name(name: &str) -> bool {
    let is_word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    name.bytes().all(is_word) && name.bytes().next().is_some_and(|first| !first.is_ascii_digit())
}

/// A count or an offset; `None` has a default.
pub(super) fn check_count(count: Option<i64>, field: &str, default: u64) -> Result<u64, AioProblem> {
    let Some(count) = count else { return Ok(default) };
    u64::try_from(count).map_err(|_negative| AioProblem::invalid_field(field, "the number is negative"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_variables_are_checked() {
        for name in ["A", "_", "a_1", "PATH"] {
            assert!(is_variable_name(name), "{name}");
        }
        for name in ["", "1A", "A-B", "A=B", "ä", "A B", "A\0"] {
            assert!(!is_variable_name(name), "{name}");
            let env = BTreeMap::from([(name.to_owned(), None)]);
            assert_eq!(check_variables(Some(env)).unwrap_err().status, 400, "{name}");
        }
        let env = BTreeMap::from([("A".to_owned(), None), ("B".to_owned(), Some("b c".to_owned()))]);
        let expected = BTreeMap::from([("B".to_owned(), "b c".to_owned())]);
        assert_eq!(check_variables(Some(env)).unwrap(), expected);
        for value in ["\0".to_owned(), "x".repeat(MAX_VARIABLES_BYTES)] {
            let env = BTreeMap::from([("A".to_owned(), Some(value))]);
            assert_eq!(check_variables(Some(env)).unwrap_err().status, 422);
        }
    }

    #[test]
    fn counts_are_checked() {
        assert_eq!(check_count(None, "offset", 7).unwrap(), 7);
        assert_eq!(check_count(Some(-1), "offset", 7).unwrap_err().status, 422);
    }
}
