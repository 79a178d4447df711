//! Changes of a text, without I/O. Texts are bytes: whatever an edit does not touch stays as it is.

use std::borrow::Cow;

use memchr::{memchr_iter, memmem};
use wire::file_edits::TextOccurrence;

/// How many lines with matches are reported.
const MAX_MATCH_LINES: usize = 64;

/// A mark at the beginning of some UTF-8 files, which stays first.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// What an edit makes of a text.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct EditedText {
    /// `None` if the text does not change.
    pub(super) content: Option<Vec<u8>>,
    pub(super) matches: u64,
    pub(super) match_lines: Vec<u64>,
}

/// The new content would be longer than allowed.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ContentTooLong;

/// The number of lines; the last one need not have an end.
pub(super) fn count_lines(content: &[u8]) -> u64 {
    let ends = memchr_iter(b'\n', content).count() as u64;
    ends + u64::from(content.last().is_some_and(|last| *last != b'\n'))
}

/// Replaces `old`, which is not empty, by `new`.
pub(super) fn replace_text(
    content: &[u8],
    old: &[u8],
    new: &[u8],
    occurrence: TextOccurrence,
    adapt_line_ends: bool,
    max_length: usize,
) -> Result<EditedText, ContentTooLong> {
    let literal = memmem::find(content, old).is_some();
    let (mut old, mut new) = (Cow::Borrowed(old), Cow::Borrowed(new));
    if adapt_line_ends && has_crlf(content) {
        if !literal {
            old = with_crlf(old);
        }
        // A file with both kinds of line ends: the text replaces lines that end with LF.
        if !(literal && has_bare_lf(&old)) {
            new = with_crlf(new);
        }
    }
    let (matches, match_lines) = find_matches(content, &old);
    let range = match occurrence {
        TextOccurrence::Only if matches != 1 => None,
        TextOccurrence::Only | TextOccurrence::First => memmem::find(content, &old),
        TextOccurrence::Last => memmem::rfind(content, &old),
        TextOccurrence::All => (matches > 0).then_some(0),
    };
    let replaced = if occurrence == TextOccurrence::All { matches } else { 1 };
    let Some(first) = range else { return Ok(EditedText { content: None, matches, match_lines }) };
    let added = u64::try_from(new.len()).ok().and_then(|length| length.checked_mul(replaced));
    let length = added.and_then(|added| added.checked_add(content.len() as u64)).ok_or(ContentTooLong)?;
    if length - replaced * old.len() as u64 > max_length as u64 {
        return Err(ContentTooLong);
    }
    let mut out = Vec::with_capacity(content.len());
    let mut last = 0;
    let positions = memmem::find_iter(&content[first..], old.as_ref()).map(|at| first + at);
    for start in positions.take(usize::try_from(replaced).unwrap_or(usize::MAX)) {
        out.extend_from_slice(&content[last..start]);
        out.extend_from_slice(&new);
        last = start + old.len();
    }
    out.extend_from_slice(&content[last..]);
    Ok(EditedText { content: Some(out).filter(|out| out != content), matches, match_lines })
}

/// Inserts `text` as whole lines after a line; a line that does not exist changes nothing.
pub(super) fn insert_lines(
    content: &[u8],
    after_line: u64,
    text: &[u8],
    adapt_line_ends: bool,
    max_length: usize,
) -> Result<EditedText, ContentTooLong> {
    let Some(position) = end_of_line(content, after_line) else { return Ok(EditedText::default()) };
    let line_end: &[u8] = if has_crlf(content) { b"\r\n" } else { b"\n" };
    let text = if adapt_line_ends && has_crlf(content) { with_crlf(text.into()) } else { text.into() };
    let (before, after) = content.split_at(position);
    if before.len() + text.len() + after.len() + line_end.len() > max_length {
        return Err(ContentTooLong);
    }
    let mut out = before.to_vec();
    let last_line_is_open = after_line > 0 && !before.ends_with(b"\n");
    if last_line_is_open {
        out.extend_from_slice(line_end);
    }
    out.extend_from_slice(&text);
    // A file without a last line end stays one.
    let is_between = !after.is_empty() || before.ends_with(b"\n");
    if is_between && !text.ends_with(b"\n") {
        out.extend_from_slice(line_end);
    }
    out.extend_from_slice(after);
    Ok(EditedText { content: Some(out).filter(|out| out != content), ..EditedText::default() })
}

/// The position behind a line; line 0 ends before the first.
fn end_of_line(content: &[u8], line: u64) -> Option<usize> {
    let Some(index) = line.checked_sub(1) else {
        return Some(if content.starts_with(BYTE_ORDER_MARK) { BYTE_ORDER_MARK.len() } else { 0 });
    };
    let nth = usize::try_from(index).ok()?;
    match memchr_iter(b'\n', content).nth(nth) {
        Some(end) => Some(end + 1),
        None => (line == count_lines(content)).then_some(content.len()),
    }
}

fn find_matches(content: &[u8], old: &[u8]) -> (u64, Vec<u64>) {
    let (mut count, mut lines) = (0, Vec::new());
    let (mut line, mut counted) = (1, 0);
    for start in memmem::find_iter(content, old) {
        count += 1;
        if lines.len() < MAX_MATCH_LINES {
            line += memchr_iter(b'\n', &content[counted..start]).count() as u64;
            counted = start;
            lines.push(line);
        }
    }
    (count, lines)
}

/// Whether the first line ends with CRLF.
fn has_crlf(content: &[u8]) -> bool {
    memchr::memchr(b'\n', content).is_some_and(|end| content[..end].ends_with(b"\r"))
}

fn has_bare_lf(text: &[u8]) -> bool {
    memchr_iter(b'\n', text).any(|end| !text[..end].ends_with(b"\r"))
}

fn with_crlf(text: Cow<'_, [u8]>) -> Cow<'_, [u8]> {
    if !has_bare_lf(&text) {
        return text;
    }
    let mut out = Vec::with_capacity(text.len() + text.len() / 16);
    for byte in text.iter() {
        if *byte == b'\n' && out.last() != Some(&b'\r') {
            out.push(b'\r');
        }
        out.push(*byte);
    }
    out.into()
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "a panic shows which step of a test failed")]
mod tests {
    use super::*;

    const LIMIT: usize = 1000;

    fn check_replace(content: &str, occurrence: TextOccurrence, expected: Option<&str>, lines: &[u64]) {
        let edited = replace_text(content.as_bytes(), b"aa", b"b", occurrence, false, LIMIT).unwrap();
        assert_eq!(edited.content.as_deref(), expected.map(str::as_bytes), "{content}");
        assert_eq!((edited.matches, edited.match_lines.as_slice()), (lines.len() as u64, lines), "{content}");
    }

    #[test]
    fn chosen_occurrence_is_replaced() {
        use TextOccurrence::{All, First, Last, Only};
        check_replace("x aa y", Only, Some("x b y"), &[1]);
        check_replace("x\naa y", Only, Some("x\nb y"), &[2]);
        check_replace("aa aa", Only, None, &[1, 1]);
        check_replace("a", Only, None, &[]);
        check_replace("aa\r\naa\naa", First, Some("b\r\naa\naa"), &[1, 2, 3]);
        check_replace("aa\r\naa\naa", Last, Some("aa\r\naa\nb"), &[1, 2, 3]);
        check_replace("aa\r\naa\naa", All, Some("b\r\nb\nb"), &[1, 2, 3]);
        check_replace("aaa", All, Some("ba"), &[1]);
        check_replace("aaa", Last, Some("ab"), &[1]);
        for occurrence in [Only, First, Last, All] {
            check_replace("", occurrence, None, &[]);
        }
    }

    #[test]
    fn reported_lines_are_few() {
        let content = "aa\n".repeat(500);
        let edited =
            replace_text(content.as_bytes(), b"aa", b"", TextOccurrence::All, false, LIMIT * 10).unwrap();
        assert_eq!((edited.matches, edited.match_lines.len()), (500, MAX_MATCH_LINES));
    }

    #[test]
    fn too_long_result_is_refused_before_it_is_made() {
        let content = vec![b'a'; 1 << 20];
        let new = vec![b'b'; 1 << 20];
        let edited = replace_text(&content, b"a", &new, TextOccurrence::All, false, 1 << 21);
        assert_eq!(edited, Err(ContentTooLong));
        assert_eq!(insert_lines(b"a\n", 1, &new, false, 1 << 20), Err(ContentTooLong));
        let shrinking = replace_text(b"aaaa", b"aa", b"b", TextOccurrence::All, false, 2).unwrap();
        assert_eq!(shrinking.content.as_deref(), Some(&b"bb"[..]));
    }

    fn check_adapted(content: &str, old: &str, new: &str, expected: Option<&str>) {
        let (content, old, new) = (content.as_bytes(), old.as_bytes(), new.as_bytes());
        let edited = replace_text(content, old, new, TextOccurrence::Only, true, LIMIT).unwrap();
        assert_eq!(edited.content.as_deref(), expected.map(str::as_bytes));
    }

    #[test]
    fn line_ends_are_those_of_the_file() {
        check_adapted("a\r\nb\r\nc\r\n", "a\nb", "x\ny\nz", Some("x\r\ny\r\nz\r\nc\r\n"));
        check_adapted("a\r\nb\r\n", "a", "x\ny", Some("x\r\ny\r\nb\r\n"));
        check_adapted("a\r\nb\r\n", "a\r\nb", "x\r\ny", Some("x\r\ny\r\n"));
        check_adapted("a\nb\n", "a\nb", "x\ny", Some("x\ny\n"));
        check_adapted("1\r\na\nb\n", "a\nb", "x\ny", Some("1\r\nx\ny\n"));
        check_adapted("a\nb\n", "a\r\nb", "x", None);
    }

    fn check_insert(content: &str, after_line: u64, text: &str, expected: Option<&str>) {
        let edited = insert_lines(content.as_bytes(), after_line, text.as_bytes(), true, LIMIT).unwrap();
        let shown = edited.content.map(|content| String::from_utf8(content).unwrap());
        assert_eq!(shown.as_deref(), expected, "{content:?} {after_line} {text:?}");
    }

    #[test]
    fn lines_are_inserted_after_a_line() {
        check_insert("a\nb\n", 0, "x", Some("x\na\nb\n"));
        check_insert("a\nb\n", 1, "x", Some("a\nx\nb\n"));
        check_insert("a\nb\n", 1, "x\n", Some("a\nx\nb\n"));
        check_insert("a\nb\n", 2, "x\ny", Some("a\nb\nx\ny\n"));
        check_insert("a\nb\n", 3, "x", None);
        check_insert("a\nb\n", u64::MAX, "x", None);
        check_insert("a\nb", 2, "x", Some("a\nb\nx"));
        check_insert("a\nb", 1, "", Some("a\n\nb"));
        check_insert("", 0, "x", Some("x"));
        check_insert("", 1, "x", None);
        check_insert("a\r\nb", 1, "x\ny", Some("a\r\nx\r\ny\r\nb"));
        check_insert("a\r\nb", 2, "x", Some("a\r\nb\r\nx"));
        check_insert("\u{feff}a\n", 0, "x", Some("\u{feff}x\na\n"));
    }

    #[test]
    fn last_line_needs_no_end() {
        for (content, lines) in [("", 0), ("a", 1), ("a\n", 1), ("a\nb", 2), ("\n\n", 2)] {
            assert_eq!(count_lines(content.as_bytes()), lines, "{content:?}");
        }
    }
}
