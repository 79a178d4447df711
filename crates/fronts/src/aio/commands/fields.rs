//! The bounds of what clients send about commands and sessions.

use std::time::Duration;

use crate::aio::body::check_text;
use crate::aio::problem::AioProblem;

/// The longest path (`PATH_MAX`).
const MAX_PATH_BYTES: usize = 4096;

/// Longer times mean the same as this one.
const MAX_SECONDS: f64 = 1e9;

/// Checks a text that has at most so many bytes, such as a command or an input.
pub(in crate::aio) fn check_bounded_text(
    text: String,
    field: &str,
    max_bytes: usize,
) -> Result<String, AioProblem> {
    let text = check_text(text, field)?;
    if text.len() > max_bytes {
        return Err(AioProblem::invalid_field(field, format!("the text has more than {max_bytes} bytes")));
    }
    Ok(text)
}

/// Checks a path; an empty one counts as absent.
pub(in crate::aio) fn check_path(path: Option<String>, field: &str) -> Result<Option<String>, AioProblem> {
    let path = path.filter(|path| !path.is_empty());
    path.map(|path| check_bounded_text(path, field, MAX_PATH_BYTES)).transpose()
}

/// Checks an absolute path; an empty one counts as absent.
pub(in crate::aio) fn check_absolute_path(
    path: Option<String>,
    field: &str,
) -> Result<Option<String>, AioProblem> {
    match check_path(path, field)? {
        Some(path) if !path.starts_with('/') => {
            Err(AioProblem::bad_request(format!("{field} must be an absolute path: {path}")))
        }
        path => Ok(path),
    }
}

/// A number of seconds; absent and zero mean no limit.
pub(in crate::aio) fn parse_seconds(
    seconds: Option<f64>,
    field: &str,
) -> Result<Option<Duration>, AioProblem> {
    match seconds {
        None => Ok(None),
        Some(seconds) if seconds >= 0.0 => {
            Ok(Some(Duration::from_secs_f64(seconds.min(MAX_SECONDS))).filter(|limit| !limit.is_zero()))
        }
        Some(_) => Err(AioProblem::invalid_field(field, "the number of seconds is negative")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zero_and_absent_times_are_no_limit() {
        let parsed = |seconds| parse_seconds(seconds, "timeout").map_err(|problem| problem.status.as_u16());
        assert_eq!(parsed(None), Ok(None));
        assert_eq!(parsed(Some(0.0)), Ok(None));
        assert_eq!(parsed(Some(1.5)), Ok(Some(Duration::from_millis(1500))));
        assert_eq!(parsed(Some(f64::MAX)), Ok(Some(Duration::from_secs(1_000_000_000))));
        assert_eq!(parsed(Some(-1.0)), Err(422));
        assert_eq!(parsed(Some(f64::NAN)), Err(422));
    }

    #[test]
    fn texts_and_paths_are_checked() {
        let text = |text: &str| check_bounded_text(text.to_owned(), "command", 3).is_ok();
        assert!(text("abc") && !text("abcd") && !text("\0"));
        let path = |path: &str| {
            let path = check_absolute_path(Some(path.to_owned()), "exec_dir");
            path.map_err(|problem| problem.status.as_u16())
        };
        assert_eq!(path(""), Ok(None));
        assert_eq!(path("/a"), Ok(Some("/a".to_owned())));
        assert_eq!(path("a"), Err(400));
        assert_eq!(path(&"/".repeat(MAX_PATH_BYTES + 1)), Err(422));
        assert_eq!(check_path(Some("a".to_owned()), "exec_dir").ok(), Some(Some("a".to_owned())));
    }
}
