//! Limits of code runs.

use std::time::Duration;

use crate::aio::body::{check_text, require_text};
use crate::aio::problem::AioProblem;

pub(super) const DEFAULT_TIMEOUT_SECONDS: i64 = 30;
pub(super) const MAX_TIMEOUT_SECONDS: i64 = 300;

/// Returns the time that code may take.
pub(super) fn parse_timeout(seconds: Option<i64>) -> Result<Duration, AioProblem> {
    let seconds = seconds.unwrap_or(DEFAULT_TIMEOUT_SECONDS);
    let valid = u64::try_from(seconds).ok().filter(|_| (1..=MAX_TIMEOUT_SECONDS).contains(&seconds));
    let refused = || {
        let message = format!("a timeout has 1 to {MAX_TIMEOUT_SECONDS} seconds");
        AioProblem::invalid_field("timeout", message)
    };
    valid.map(Duration::from_secs).ok_or_else(refused)
}

/// Returns the code, which may be empty.
pub(super) fn parse_code(code: Option<String>) -> Result<String, AioProblem> {
    require_text(code, "code")
}

/// Returns the directory; an empty one counts as none.
pub(super) fn parse_directory(cwd: Option<String>) -> Result<Option<String>, AioProblem> {
    cwd.filter(|path| !path.is_empty()).map(|path| check_text(path, "cwd")).transpose()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_outside_the_range_are_refused() {
        assert_eq!(parse_timeout(None).unwrap().as_secs(), 30);
        assert_eq!(parse_timeout(Some(300)).unwrap().as_secs(), 300);
        for seconds in [0, -1, 301, i64::MAX, i64::MIN] {
            assert_eq!(parse_timeout(Some(seconds)).unwrap_err().validation[0].loc, ["body", "timeout"]);
        }
    }
}
