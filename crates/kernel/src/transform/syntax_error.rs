//! Syntax errors, formatted as a traceback.

use oxc_diagnostics::OxcDiagnostic;

/// Longer lines are truncated in the traceback.
const MAX_EXCERPT_COLUMNS: usize = 200;

/// A syntax error with its position.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SyntaxError {
    pub message: String,
    pub traceback: Vec<String>,
}

impl SyntaxError {
    /// The first error of the parser: the others are mostly consequences of it.
    pub(super) fn new(source: &str, errors: &[OxcDiagnostic]) -> Self {
        let Some(first) = errors.first() else { return Self::from_message("the code could not be parsed") };
        let message = first.message.to_string();
        let label = first.labels.iter().flatten().next();
        let mut traceback = label.map(|label| source_excerpt(source, label.offset())).unwrap_or_default();
        traceback.push(format!("SyntaxError: {message}"));
        traceback.extend(first.help.iter().map(|help| format!("help: {help}")));
        Self { message, traceback }
    }

    pub(super) fn from_message(message: &str) -> Self {
        Self { message: message.to_owned(), traceback: vec![format!("SyntaxError: {message}")] }
    }
}

/// The line at `offset`, with a caret below the position.
fn source_excerpt(source: &str, offset: usize) -> Vec<String> {
    let offset = (0..=offset.min(source.len())).rev().find(|at| source.is_char_boundary(*at)).unwrap_or(0);
    let start = source[..offset].rfind('\n').map_or(0, |at| at + 1);
    let end = source[offset..].find('\n').map_or(source.len(), |at| offset + at);
    let number = source[..start].matches('\n').count() + 1;
    let column = source[start..offset].chars().count();
    let line: String = source[start..end].chars().take(MAX_EXCERPT_COLUMNS).collect();
    let mut lines = vec![format!("cell:{number}:{}", column + 1), line];
    if column < MAX_EXCERPT_COLUMNS {
        lines.push(format!("{}^", " ".repeat(column)));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn caret_is_below_the_position_in_any_text() {
        assert_eq!(source_excerpt("a\nß = ;", 7), ["cell:2:5", "ß = ;", "    ^"]);
        // In the middle of a character, and after the end.
        assert_eq!(source_excerpt("ß", 1), ["cell:1:1", "ß", "^"]);
        assert_eq!(source_excerpt("x", 99), ["cell:1:2", "x", " ^"]);
    }
}
