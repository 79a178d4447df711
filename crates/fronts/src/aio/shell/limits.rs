//! The bounds of what clients send about commands and sessions.

use std::time::Duration;

use super::super::body::check_text;
use super::super::problem::AioProblem;

/// The longest command. Linux has the same bound for one argument of a program.
const MAX_COMMAND_BYTES: usize = 128 << 10;

/// The longest path of a directory (`PATH_MAX`).
const MAX_PATH_BYTES: usize = 4096;

/// Longer times mean the same as this one.
const MAX_SECONDS: f64 = 1e9;

/// Checks a command or an input.
pub(super) fn check_command(text: String, field: &str) -> Result<String, AioProblem> {
    check_length(check_text(text, field)?, field, MAX_COMMAND_BYTES)
}

/// Checks a directory; an empty one counts as absent.
pub(super) fn check_directory(path: Option<String>, field: &str) -> Result<Option<String>, AioProblem> {
    let path = path.filter(|path| !path.is_empty());
    path.map(|path| check_length(check_text(path, field)?, field, MAX_PATH_BYTES)).transpose()
}

fn check_length(text: String, field: &str, most: usize) -> Result<String, AioProblem> {
    if text.len() > most {
        return Err(AioProblem::invalid_field(field, format!("the text has more than {most} bytes")));
    }
    Ok(text)
}

/// A number of seconds; absent and zero mean no limit.
pub(super) fn parse_seconds(seconds: Option<f64>, field: &str) -> Result<Option<Duration>, AioProblem> {
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
        let parsed = |seconds| parse_seconds(seconds, "timeout").ok();
        assert_eq!(parsed(None), Some(None));
        assert_eq!(parsed(Some(0.0)), Some(None));
        assert_eq!(parsed(Some(1.5)), Some(Some(Duration::from_millis(1500))));
        assert_eq!(parsed(Some(f64::MAX)), Some(Some(Duration::from_secs(1_000_000_000))));
        assert_eq!(parsed(Some(-1.0)), None);
        assert_eq!(parsed(Some(f64::NAN)), None);
    }

    #[test]
    fn lengths_are_bounded() {
        assert!(check_command("x".repeat(MAX_COMMAND_BYTES), "command").is_ok());
        assert!(check_command("x".repeat(MAX_COMMAND_BYTES + 1), "command").is_err());
        assert!(check_command("\0".to_owned(), "command").is_err());
        assert_eq!(check_directory(Some(String::new()), "exec_dir").ok(), Some(None));
        assert!(check_directory(Some("/".repeat(MAX_PATH_BYTES + 1)), "exec_dir").is_err());
    }
}
