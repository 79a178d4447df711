//! Separates code from comments and strings in Rust sources, well enough to search either.

/// A source with the same lines, in two views.
#[derive(Debug, Default)]
pub(super) struct RustText {
    /// Everything but comments and the insides of strings.
    pub code: String,
    /// Only the insides of strings.
    pub strings: String,
    /// The inside of each string or character, in order; `code` has `""` in its place.
    pub literals: Vec<String>,
}

impl RustText {
    pub(super) fn scan(source: &str) -> Self {
        let mut reader = TextScanner { rest: source, text: Self::default() };
        while let Some(next) = reader.rest.chars().next() {
            reader.step(next);
        }
        reader.text
    }
}

struct TextScanner<'a> {
    rest: &'a str,
    text: RustText,
}

impl TextScanner<'_> {
    fn step(&mut self, next: char) {
        let raw = raw_string_hashes(self.rest, self.text.code.chars().next_back());
        if self.rest.starts_with("//") {
            let end = self.rest.find('\n').unwrap_or(self.rest.len());
            self.skip_comment(end);
        } else if self.rest.starts_with("/*") {
            let end = block_comment_end(self.rest);
            self.skip_comment(end);
        } else if let Some((opening, hashes)) = raw {
            let close = format!("\"{}", "#".repeat(hashes));
            let end = self.rest[opening..].find(&close).map_or(self.rest.len(), |at| opening + at);
            self.take_string(opening, end, close.len());
        } else if next == '"' {
            let end = quoted_end(self.rest, '"');
            self.take_string(1, end, 1);
        } else if next == '\'' && is_character(self.rest) {
            let end = quoted_end(self.rest, '\'');
            self.take_string(1, end, 1);
        } else {
            self.text.code.push(next);
            self.rest = &self.rest[next.len_utf8()..];
        }
        if next == '\n' {
            self.text.strings.push('\n');
        }
    }

    /// Removes the text of a comment, but keeps its lines.
    fn skip_comment(&mut self, length: usize) {
        let lines = "\n".repeat(self.rest[..length].matches('\n').count());
        self.text.code.push_str(&lines);
        self.text.strings.push_str(&lines);
        self.rest = &self.rest[length..];
    }

    /// Moves the contents of a string, from `opening` to `end`, into its own view.
    fn take_string(&mut self, opening: usize, end: usize, closing: usize) {
        let inside = &self.rest[opening..end];
        self.text.strings.push_str(inside);
        self.text.strings.push(' ');
        self.text.literals.push(inside.to_owned());
        self.text.code.push_str("\"\"");
        self.text.code.push_str(&"\n".repeat(inside.matches('\n').count()));
        self.rest = self.rest.get(end + closing..).unwrap_or_default();
    }
}

/// The length of `r##"` and its number of hashes, if the text begins so. `before` is the preceding
/// character: an `r` that ends a word begins no string.
fn raw_string_hashes(text: &str, before: Option<char>) -> Option<(usize, usize)> {
    if before.is_some_and(|before| before == '_' || (before.is_alphanumeric() && before != 'b')) {
        return None;
    }
    let after = text.strip_prefix("br").or_else(|| text.strip_prefix('r'))?;
    let hashes = after.bytes().take_while(|byte| *byte == b'#').count();
    after[hashes..].starts_with('"').then(|| (text.len() - after.len() + hashes + 1, hashes))
}

/// Block comments nest.
fn block_comment_end(text: &str) -> usize {
    let mut depth = 0;
    let bytes = text.as_bytes();
    let mut at = 0;
    while at < bytes.len() {
        match bytes.get(at..at + 2) {
            Some(b"/*") => (depth, at) = (depth + 1, at + 2),
            Some(b"*/") => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
        if depth == 0 {
            return at;
        }
    }
    bytes.len()
}

/// The end of the string at the beginning of the text, before its closing quote.
fn quoted_end(text: &str, quote: char) -> usize {
    let mut escaped = false;
    for (at, character) in text.char_indices().skip(1) {
        match character {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            _ if character == quote => return at,
            _ => {}
        }
    }
    text.len()
}

/// A quote begins a character and not a lifetime if it is closed after one character.
fn is_character(text: &str) -> bool {
    let mut characters = text.chars().skip(1);
    match characters.next() {
        Some('\\') => true,
        Some(_) => characters.next() == Some('\''),
        None => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(source: &str, code: &str, strings: &str) {
        let text = RustText::scan(source);
        assert_eq!(text.code, code, "{source}");
        assert_eq!(text.strings.split_whitespace().collect::<Vec<_>>().join(" "), strings, "{source}");
        assert_eq!(text.code.matches('\n').count(), source.matches('\n').count(), "{source}");
    }

    #[test]
    fn comments_are_neither_code_nor_strings() {
        check("a // unsafe \"x\"\nb", "a \nb", "");
        check("a /* unsafe /* \" */\n*/ b", "a \n b", "");
    }

    #[test]
    fn strings_are_recognised_in_every_quoting() {
        check(r#"f("unsafe \" // x")"#, r#"f("")"#, r#"unsafe \" // x"#);
        check("f(r#\"a \" b\"#, br\"c\")", "f(\"\", \"\")", "a \" b c");
        check("f('\"', '\\'', 'x')", "f(\"\", \"\", \"\")", "\" \\' x");
        assert_eq!(RustText::scan("f(\"a b\", 'c', \"\")").literals, ["a b", "c", ""]);
    }

    #[test]
    fn lifetimes_begin_no_character_and_words_begin_no_raw_string() {
        check("fn f<'a>(x: &'a str) {}", "fn f<'a>(x: &'a str) {}", "");
        check("for r in bar {}", "for r in bar {}", "");
    }
}
