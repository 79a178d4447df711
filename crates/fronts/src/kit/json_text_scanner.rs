//! Reads a JSON object with one long text in pieces, as they arrive.
//!
//! ```text
//! {"file":"/a","content":"long ⋯ text","append":true}
//!   the long text, decoded ─► to the caller, piece by piece
//!   everything else        ─► kept: {"file":"/a","content":"","append":true}
//! ```
//! Only the structure that is needed to find the text is checked here. The kept part has the structure of the whole body,
//! so parsing it reports whatever else is wrong.

use memchr::memchr2;

use super::byte_search::any_byte;

/// The longest beginning of an escape or of a character that may have to wait for the next piece: two escapes of a
/// surrogate pair.
const MAX_PENDING_BYTES: usize = 12;

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum JsonTextError {
    #[error("the body without its long text exceeds {0} bytes")]
    TooLong(usize),
    #[error("the body has the field `{0}` twice")]
    Duplicate(&'static str),
    #[error("the body is not valid JSON")]
    Malformed,
    #[error("the text contains a character that must be escaped")]
    ControlCharacter,
    #[error("the text contains an invalid escape")]
    InvalidEscape,
    #[error("the text is not UTF-8")]
    NotUtf8,
}

/// Where the next byte belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ScanState {
    /// Between tokens.
    Outside,
    /// In a text that is kept, behind a backslash or not.
    KeptText { escaped: bool },
    /// In a name of the outermost object, which begins at this position of the kept part.
    FieldName { start: usize, escaped: bool },
    /// In the long text.
    LongText,
}

/// A scanner of one body.
pub(crate) struct JsonTextScanner {
    /// The name of the field with the long text.
    field: &'static str,
    max_kept: usize,
    kept: Vec<u8>,
    state: ScanState,
    depth: usize,
    /// The last byte between tokens that was not white space; `"` behind a text.
    last_token: u8,
    /// Whether the last name of the outermost object is the field's.
    is_field: bool,
    /// Where in the kept part the long text stood, once it has begun.
    text_position: Option<usize>,
    /// The beginning of an escape or of a character.
    pending: Vec<u8>,
}

impl JsonTextScanner {
    pub(crate) fn new(field: &'static str, max_kept: usize) -> Self {
        Self {
            field,
            max_kept,
            kept: Vec::new(),
            state: ScanState::Outside,
            depth: 0,
            last_token: 0,
            is_field: false,
            text_position: None,
            pending: Vec::new(),
        }
    }

    /// Scans the next piece, and adds what it has of the long text to `text`, as UTF-8.
    pub(crate) fn scan_piece(&mut self, piece: &[u8], text: &mut Vec<u8>) -> Result<(), JsonTextError> {
        let mut rest = piece;
        while !rest.is_empty() {
            rest = match self.state {
                ScanState::LongText => self.scan_long_text(rest, text)?,
                _ => self.scan_kept(rest)?,
            };
        }
        Ok(())
    }

    /// The body with an empty text in the place of the long one. It may be empty, or not valid JSON.
    pub(crate) fn finish(self) -> Result<Vec<u8>, JsonTextError> {
        match self.state {
            ScanState::LongText => Err(JsonTextError::Malformed),
            _ => Ok(self.kept),
        }
    }

    /// The object up to the long text, in which the text is empty; `None` until the text begins.
    pub(crate) fn fields_before_text(&self) -> Option<Vec<u8>> {
        let before = &self.kept[..self.text_position?];
        Some([before, br#""}"#].concat())
    }

    /// Keeps bytes up to the beginning of the long text, and returns what follows.
    fn scan_kept<'a>(&mut self, bytes: &'a [u8]) -> Result<&'a [u8], JsonTextError> {
        for (at, byte) in bytes.iter().enumerate() {
            if self.kept.len() >= self.max_kept {
                return Err(JsonTextError::TooLong(self.max_kept));
            }
            self.kept.push(*byte);
            match self.state {
                ScanState::Outside => self.scan_token(*byte)?,
                ScanState::KeptText { escaped } => {
                    self.state = match byte {
                        b'"' if !escaped => ScanState::Outside,
                        _ => ScanState::KeptText { escaped: *byte == b'\\' && !escaped },
                    }
                }
                ScanState::FieldName { start, escaped } => match byte {
                    b'"' if !escaped => self.end_field_name(start)?,
                    _ => {
                        self.state = ScanState::FieldName { start, escaped: *byte == b'\\' && !escaped };
                    }
                },
                ScanState::LongText => {}
            }
            if self.state == ScanState::LongText {
                return Ok(&bytes[at + 1..]);
            }
        }
        Ok(&[])
    }

    /// Handles a byte between texts.
    fn scan_token(&mut self, byte: u8) -> Result<(), JsonTextError> {
        let before = self.last_token;
        if !byte.is_ascii_whitespace() {
            self.last_token = byte;
        }
        match byte {
            b'{' | b'[' => self.depth += 1,
            b'}' | b']' => self.depth = self.depth.checked_sub(1).ok_or(JsonTextError::Malformed)?,
            b'"' if self.depth == 1 && matches!(before, b'{' | b',') => {
                self.state = ScanState::FieldName { start: self.kept.len() - 1, escaped: false };
            }
            b'"' if self.depth == 1 && before == b':' && self.is_field => {
                if self.text_position.replace(self.kept.len()).is_some() {
                    return Err(JsonTextError::Duplicate(self.field));
                }
                self.state = ScanState::LongText;
            }
            b'"' => self.state = ScanState::KeptText { escaped: false },
            _ => {}
        }
        Ok(())
    }

    fn end_field_name(&mut self, start: usize) -> Result<(), JsonTextError> {
        let name: String = serde_json::from_slice(&self.kept[start..]).or(Err(JsonTextError::Malformed))?;
        self.is_field = name == self.field;
        self.state = ScanState::Outside;
        Ok(())
    }

    /// Decodes bytes up to the end of the long text, and returns what follows.
    fn scan_long_text<'a>(
        &mut self,
        mut bytes: &'a [u8],
        text: &mut Vec<u8>,
    ) -> Result<&'a [u8], JsonTextError> {
        loop {
            bytes = self.complete_pending(bytes, text)?;
            let end = memchr2(b'"', b'\\', bytes).unwrap_or(bytes.len());
            let (run, rest) = bytes.split_at(end);
            self.decode_run(run, rest.is_empty(), text)?;
            match rest.split_first() {
                None => return Ok(&[]),
                Some((b'"', after)) => {
                    self.kept.push(b'"');
                    self.state = ScanState::Outside;
                    return Ok(after);
                }
                Some(_) => {
                    self.pending.push(b'\\');
                    bytes = &rest[1..];
                }
            }
        }
    }

    /// Adds plain characters. The last one may be incomplete if the piece ends with it.
    fn decode_run(&mut self, run: &[u8], is_last: bool, text: &mut Vec<u8>) -> Result<(), JsonTextError> {
        if any_byte(run, |byte| byte < 0x20) {
            return Err(JsonTextError::ControlCharacter);
        }
        match std::str::from_utf8(run) {
            Ok(_) => text.extend_from_slice(run),
            Err(error) if is_last && error.error_len().is_none() => {
                let (whole, begun) = run.split_at(error.valid_up_to());
                text.extend_from_slice(whole);
                self.pending.extend_from_slice(begun);
            }
            Err(_) => return Err(JsonTextError::NotUtf8),
        }
        Ok(())
    }

    /// Adds bytes to a begun escape or character until it is complete, and returns what follows.
    fn complete_pending<'a>(
        &mut self,
        bytes: &'a [u8],
        text: &mut Vec<u8>,
    ) -> Result<&'a [u8], JsonTextError> {
        let mut rest = bytes;
        while !self.pending.is_empty() {
            if self.decode_pending(text)? {
                self.pending.clear();
                break;
            }
            let Some((byte, after)) = rest.split_first() else { break };
            if self.pending.len() >= MAX_PENDING_BYTES {
                return Err(JsonTextError::InvalidEscape);
            }
            self.pending.push(*byte);
            rest = after;
        }
        Ok(rest)
    }

    /// Decodes a pending escape or character; false if it is incomplete.
    fn decode_pending(&self, text: &mut Vec<u8>) -> Result<bool, JsonTextError> {
        if self.pending[0] != b'\\' {
            return match std::str::from_utf8(&self.pending) {
                Ok(_) => {
                    text.extend_from_slice(&self.pending);
                    Ok(true)
                }
                Err(error) if error.error_len().is_none() => Ok(false),
                Err(_) => Err(JsonTextError::NotUtf8),
            };
        }
        let Some(character) = decode_escape(&self.pending)? else { return Ok(false) };
        text.extend_from_slice(character.encode_utf8(&mut [0; 4]).as_bytes());
        Ok(true)
    }
}

/// Decodes an escape, or a pair of escapes of surrogates; `None` if it is incomplete.
fn decode_escape(escape: &[u8]) -> Result<Option<char>, JsonTextError> {
    let Some(kind) = escape.get(1) else { return Ok(None) };
    let character = match kind {
        b'"' => '"',
        b'\\' => '\\',
        b'/' => '/',
        b'b' => '\u{8}',
        b'f' => '\u{c}',
        b'n' => '\n',
        b'r' => '\r',
        b't' => '\t',
        b'u' => return decode_code_units(escape),
        _ => return Err(JsonTextError::InvalidEscape),
    };
    Ok(Some(character))
}

fn decode_code_units(escape: &[u8]) -> Result<Option<char>, JsonTextError> {
    let Some(high) = code_unit(escape)? else { return Ok(None) };
    if !(0xD800..0xE000).contains(&high) {
        return Ok(char::from_u32(high));
    }
    let low = escape.get(6..).unwrap_or_default();
    let begins_escape = matches!(low, [] | [b'\\'] | [b'\\', b'u', ..]);
    if high >= 0xDC00 || !begins_escape {
        return Err(JsonTextError::InvalidEscape);
    }
    match code_unit(low)? {
        None => Ok(None),
        Some(low @ 0xDC00..0xE000) => Ok(char::from_u32(0x1_0000 + ((high - 0xD800) << 10) + (low - 0xDC00))),
        Some(_) => Err(JsonTextError::InvalidEscape),
    }
}

/// The number of an escape such as `\u00e9`; `None` if it is incomplete.
fn code_unit(escape: &[u8]) -> Result<Option<u32>, JsonTextError> {
    let digits = escape.get(2..escape.len().min(6)).unwrap_or_default();
    if !digits.iter().all(u8::is_ascii_hexdigit) {
        return Err(JsonTextError::InvalidEscape);
    }
    if digits.len() < 4 {
        return Ok(None);
    }
    let digits = std::str::from_utf8(digits).or(Err(JsonTextError::InvalidEscape))?;
    u32::from_str_radix(digits, 16).map(Some).or(Err(JsonTextError::InvalidEscape))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    const MAX_KEPT: usize = 4096;

    /// The long text, and the kept part.
    type ScannedBody = (Option<String>, Vec<u8>);

    fn scan(pieces: &[&[u8]]) -> Result<ScannedBody, JsonTextError> {
        let (mut scanner, mut text) = (JsonTextScanner::new("content", MAX_KEPT), Vec::new());
        for piece in pieces {
            scanner.scan_piece(piece, &mut text)?;
            std::str::from_utf8(&text).expect("each piece of text ends with a character");
        }
        let found = scanner.fields_before_text().is_some();
        let kept = scanner.finish()?;
        Ok((found.then(|| String::from_utf8(text).unwrap()), kept))
    }

    /// Scans a body in one piece, in two pieces divided at each byte, and in pieces of one byte.
    fn scan_divided(body: &[u8]) -> Result<ScannedBody, JsonTextError> {
        let whole = scan(&[body]);
        for at in 0..=body.len() {
            assert_eq!(scan(&[&body[..at], &body[at..]]), whole, "divided at {at}");
        }
        assert_eq!(scan(&body.chunks(1).collect::<Vec<_>>()), whole);
        whole
    }

    /// Compares with what the usual parser reads.
    fn check(body: &str) {
        let mut expected: Value = serde_json::from_str(body).unwrap();
        let expected_text = expected["content"].as_str().map(str::to_owned);
        if expected_text.is_some() {
            expected["content"] = json!("");
        }
        let (text, kept) = scan_divided(body.as_bytes()).unwrap();
        assert_eq!(text, expected_text, "{body}");
        assert_eq!(serde_json::from_slice::<Value>(&kept).unwrap(), expected, "{body}");
    }

    #[test]
    fn text_is_found_before_between_and_after_other_fields() {
        for body in [
            r#"{"content":"abc"}"#,
            r#" { "file" : "/a" , "content" : "abc" , "append" : true } "#,
            r#"{"other":{"content":"no","x":[{"content":"no"},"content",":"]},"content":"yes"}"#,
            r#"{"content":"yes","other":{"content":"no","x":["\"}",{"a":"\\"}]}}"#,
            r#"{"content":null,"file":"content"}"#,
            r#"{"content":["a"],"x":"\"content\":\"no\""}"#,
            r#"{"\u0063ontent":"escaped name"}"#,
            r#"{"file":"/a"}"#,
            r#"{"content":""}"#,
        ] {
            check(body);
        }
        assert_eq!(scan(&[b""]), Ok((None, Vec::new())));
    }

    #[test]
    fn fields_before_the_text_are_known_when_it_begins() {
        let mut scanner = JsonTextScanner::new("content", MAX_KEPT);
        let mut text = Vec::new();
        scanner.scan_piece(br#"{"a":{"content":"no"},"#, &mut text).unwrap();
        assert_eq!(scanner.fields_before_text(), None);
        scanner.scan_piece(br#""content":"abc","b":2}"#, &mut text).unwrap();
        let fields: Value = serde_json::from_slice(&scanner.fields_before_text().unwrap()).unwrap();
        assert_eq!(fields, json!({"a": {"content": "no"}, "content": ""}));
    }

    #[test]
    fn escapes_and_characters_are_decoded_at_every_division() {
        for text in [
            r#"\" \\ \/ \b \f \n \r \t"#,
            r"\u0000\u00e9\u20ac\ud83d\ude00\uD83D\uDE00",
            "é€😀\u{feff}",
            r"\\\\u0041\\",
            "\u{7f}\u{80}",
        ] {
            check(&format!(r#"{{"a":1,"content":"x{text}y","b":2}}"#));
        }
    }

    #[test]
    fn invalid_texts_are_refused() {
        for (text, expected) in [
            (&b"\\x"[..], JsonTextError::InvalidEscape),
            (b"\\u12g4", JsonTextError::InvalidEscape),
            (b"\\ud83d", JsonTextError::InvalidEscape),
            (b"\\ud83dx", JsonTextError::InvalidEscape),
            (b"\\ud83d\\n", JsonTextError::InvalidEscape),
            (b"\\ud83d\\u0041", JsonTextError::InvalidEscape),
            (b"\\ude00", JsonTextError::InvalidEscape),
            (b"a\nb", JsonTextError::ControlCharacter),
            (b"a\xff", JsonTextError::NotUtf8),
            (b"\xed\xa0\x80", JsonTextError::NotUtf8),
            (b"\xc3", JsonTextError::NotUtf8),
            (b"\xf0\x9f\x98\\n", JsonTextError::NotUtf8),
        ] {
            let body = [br#"{"content":""#, text, br#""}"#].concat();
            assert_eq!(scan_divided(&body), Err(expected), "{}", String::from_utf8_lossy(text));
        }
    }

    #[test]
    fn broken_structure_is_refused_or_kept_for_the_parser() {
        for body in [r#"{"content":"a"#, "}", r#"{"content":"a\"#] {
            assert_eq!(scan_divided(body.as_bytes()), Err(JsonTextError::Malformed), "{body}");
        }
        let twice = br#"{"content":"a","content":"b"}"#;
        assert_eq!(scan_divided(twice), Err(JsonTextError::Duplicate("content")));
        for body in [r#"{"content" "a"}"#, r#"{"content":"a" "b"}"#, r#"{"content":"a"} x"#, "[1", "x"] {
            let (_, kept) = scan_divided(body.as_bytes()).unwrap();
            assert!(serde_json::from_slice::<Value>(&kept).is_err(), "{body}");
        }
    }

    #[test]
    fn only_the_other_fields_are_limited() {
        let (mut scanner, mut text) = (JsonTextScanner::new("content", 64), Vec::new());
        scanner.scan_piece(br#"{"content":""#, &mut text).unwrap();
        let mut length = 0;
        for _ in 0..1000 {
            scanner.scan_piece(&[b'x'; 64 << 10], &mut text).unwrap();
            length += text.len();
            text.clear();
        }
        assert_eq!((length, scanner.kept.len()), (1000 * (64 << 10), 12));
        scanner.scan_piece(b"\",\"other\":\"", &mut text).unwrap();
        assert_eq!(scanner.scan_piece(&[b'x'; 64], &mut text), Err(JsonTextError::TooLong(64)));
    }

    proptest! {
        #[test]
        fn any_text_is_read_as_the_usual_parser_reads_it(text in "\\PC*|[\\x00-\\x7f]*", cut in 1usize..9) {
            let body = json!({"a": {"content": text}, "content": text, "z": text}).to_string();
            let pieces: Vec<_> = body.as_bytes().chunks(cut).collect();
            prop_assert_eq!(scan(&pieces).unwrap().0, Some(text));
        }
    }
}
