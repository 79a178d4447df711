//! Splits a process's output into the texts of `stdout` and `stderr` events.
//!
//! This API has two dialects. In the preserving one (`P`) a text keeps its terminator, so that the
//! concatenated texts of a stream are exactly the output. In the stripping one (`S`) a text is a line
//! without its terminator, and an empty line is the text `"\n"`. In both, a line ends with `\n`, `\r`
//! or `\r\n`, characters are never split, and invalid UTF-8 is replaced.

/// The longest part of a line that goes into one event. A byte takes at most six bytes in JSON, which
/// keeps an event below the 4 MiB that the oldest clients can read.
const MAX_TEXT_BYTES: usize = 512 << 10;

/// The two dialects for splitting output into events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum LineDialect {
    /// `P`: each line with its terminator.
    #[default]
    Preserving,
    /// `S`: each line without its terminator.
    Stripping,
}

/// The text does not name a dialect.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a line dialect: write `P` or `S`")]
pub(crate) struct LineDialectError(String);

impl LineDialect {
    pub(crate) fn parse(text: &str) -> Result<Self, LineDialectError> {
        match text {
            "P" | "p" => Ok(Self::Preserving),
            "S" | "s" => Ok(Self::Stripping),
            _ => Err(LineDialectError(text.to_owned())),
        }
    }

    pub(crate) fn letter(self) -> &'static str {
        match self {
            Self::Preserving => "P",
            Self::Stripping => "S",
        }
    }
}

/// Splits one output stream into event texts.
pub(crate) struct LineSplitter {
    dialect: LineDialect,
    /// The start of a line whose end has not been seen.
    partial: Vec<u8>,
    /// Whether a part of the current line was already emitted.
    continued: bool,
}

impl LineSplitter {
    pub(crate) fn new(dialect: LineDialect) -> Self {
        Self { dialect, partial: Vec::new(), continued: false }
    }

    /// Adds output and passes each completed text to `emit`.
    pub(crate) fn push(&mut self, bytes: &[u8], emit: &mut impl FnMut(&str)) {
        let mut rest = bytes;
        // A `\r` at the end of the previous chunk may have been half of a `\r\n`.
        if self.partial.ends_with(b"\r") && !rest.is_empty() {
            if let Some(after) = rest.strip_prefix(b"\n") {
                self.partial.push(b'\n');
                rest = after;
            }
            self.end_line(emit);
        }
        while let Some(at) = memchr::memchr2(b'\n', b'\r', rest) {
            let end = match &rest[at..] {
                [b'\r'] => break,
                [b'\r', b'\n', ..] => at + 2,
                _ => at + 1,
            };
            self.extend_line(&rest[..end], emit);
            self.end_line(emit);
            rest = &rest[end..];
        }
        self.extend_line(rest, emit);
    }

    /// Emits the current partial line, because the process pauses. An incomplete character is kept back.
    pub(crate) fn flush(&mut self, emit: &mut impl FnMut(&str)) {
        let whole = self.partial.len() - incomplete_suffix(&self.partial);
        self.emit_partial(whole, emit);
    }

    /// Emits everything that is left, because the process has ended.
    pub(crate) fn finish(&mut self, emit: &mut impl FnMut(&str)) {
        if self.partial.ends_with(b"\r") {
            self.end_line(emit);
        }
        self.emit_partial(self.partial.len(), emit);
    }

    /// Ends an unfinished line, because output is missing after it: the halves of two lines must not
    /// be taken for one.
    pub(crate) fn break_line(&mut self, emit: &mut impl FnMut(&str)) {
        if !self.partial.is_empty() || self.continued {
            self.partial.push(b'\n');
            self.end_line(emit);
        }
    }

    pub(crate) fn has_partial(&self) -> bool {
        !self.partial.is_empty()
    }

    /// Adds to the current line, emitting its beginning when it grows too long.
    fn extend_line(&mut self, bytes: &[u8], emit: &mut impl FnMut(&str)) {
        let mut rest = bytes;
        while self.partial.len() + rest.len() > MAX_TEXT_BYTES {
            let (head, tail) = rest.split_at(MAX_TEXT_BYTES - self.partial.len());
            self.partial.extend_from_slice(head);
            // A terminator stays with its line; alone it would look like an empty line.
            let whole = MAX_TEXT_BYTES - incomplete_suffix(&self.partial);
            let whole = whole - self.partial[..whole].iter().rev().take_while(|b| is_line_end(**b)).count();
            self.emit_partial(whole, emit);
            rest = tail;
        }
        self.partial.extend_from_slice(rest);
    }

    /// Emits the current line, which is complete with its terminator.
    fn end_line(&mut self, emit: &mut impl FnMut(&str)) {
        let line = std::mem::take(&mut self.partial);
        let continued = std::mem::take(&mut self.continued);
        match self.dialect {
            LineDialect::Preserving => emit(&String::from_utf8_lossy(&line)),
            LineDialect::Stripping => {
                let text = line.strip_suffix(b"\n").unwrap_or(&line);
                let text = text.strip_suffix(b"\r").unwrap_or(text);
                match (text.is_empty(), continued) {
                    (false, _) => emit(&String::from_utf8_lossy(text)),
                    (true, false) => emit("\n"),
                    (true, true) => {}
                }
            }
        }
    }

    fn emit_partial(&mut self, length: usize, emit: &mut impl FnMut(&str)) {
        if length > 0 {
            emit(&String::from_utf8_lossy(&self.partial[..length]));
            self.partial.drain(..length);
            self.continued = true;
        }
    }
}

fn is_line_end(byte: u8) -> bool {
    matches!(byte, b'\n' | b'\r')
}

/// Returns how many bytes at the end form an incomplete character.
pub(crate) fn incomplete_suffix(bytes: &[u8]) -> usize {
    (1..=bytes.len().min(3))
        .find(|length| {
            let tail = &bytes[bytes.len() - length..];
            matches!(std::str::from_utf8(tail), Err(e) if e.valid_up_to() == 0 && e.error_len().is_none())
        })
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn line_broken_by_a_gap_is_ended_once() {
        for (dialect, expected) in
            [(LineDialect::Preserving, ["a\n", "1\n", "2\n"]), (LineDialect::Stripping, ["a", "1", "2"])]
        {
            let mut texts = Vec::new();
            let mut emit = |text: &str| texts.push(text.to_owned());
            let mut splitter = LineSplitter::new(dialect);
            splitter.push(b"a\n1", &mut emit);
            splitter.break_line(&mut emit);
            splitter.break_line(&mut emit);
            splitter.push(b"2\n", &mut emit);
            splitter.finish(&mut emit);
            assert_eq!(texts, expected);
        }
    }

    #[test]
    fn line_of_which_a_part_was_shown_is_ended_too() {
        let mut texts = Vec::new();
        let mut emit = |text: &str| texts.push(text.to_owned());
        let mut splitter = LineSplitter::new(LineDialect::Preserving);
        splitter.push(b"68", &mut emit);
        splitter.flush(&mut emit);
        splitter.break_line(&mut emit);
        splitter.push(b"21\n", &mut emit);
        assert_eq!(texts, ["68", "\n", "21\n"]);
    }

    fn split(dialect: LineDialect, pieces: &[&[u8]]) -> Vec<String> {
        let mut texts = Vec::new();
        let mut emit = |text: &str| texts.push(text.to_owned());
        let mut splitter = LineSplitter::new(dialect);
        for piece in pieces {
            splitter.push(piece, &mut emit);
        }
        splitter.finish(&mut emit);
        texts
    }

    #[test]
    fn stripping_shows_empty_lines_as_newlines() {
        assert_eq!(split(LineDialect::Stripping, &[b"a\n\nb\n\n\nc\n"]), ["a", "\n", "b", "\n", "\n", "c"]);
        assert_eq!(split(LineDialect::Stripping, &[b"a\r\nb\rc\r\n\r\nd"]), ["a", "b", "c", "\n", "d"]);
        assert_eq!(split(LineDialect::Stripping, &[b"a\r", b"\nb\r", b"c"]), ["a", "b", "c"]);
    }

    #[test]
    fn preserving_keeps_terminators_with_their_line() {
        assert_eq!(split(LineDialect::Preserving, &[b"a\n\nb\r\nc\rd"]), ["a\n", "\n", "b\r\n", "c\r", "d"]);
        assert_eq!(split(LineDialect::Preserving, &[b"a\r", b"\nb\r"]), ["a\r\n", "b\r"]);
    }

    #[test]
    fn flushed_line_is_not_followed_by_an_empty_one() {
        let mut texts = Vec::new();
        let mut emit = |text: &str| texts.push(text.to_owned());
        let mut splitter = LineSplitter::new(LineDialect::Stripping);
        splitter.push(b"wait", &mut emit);
        splitter.flush(&mut emit);
        splitter.push(b"\n\nnext\n", &mut emit);
        assert_eq!(texts, ["wait", "\n", "next"]);
    }

    #[test]
    fn character_is_not_split_by_a_pause() {
        let mut texts = Vec::new();
        let mut emit = |text: &str| texts.push(text.to_owned());
        let mut splitter = LineSplitter::new(LineDialect::Preserving);
        splitter.push("é€😀".as_bytes().split_at(7).0, &mut emit);
        splitter.flush(&mut emit);
        splitter.push("é€😀".as_bytes().split_at(7).1, &mut emit);
        splitter.finish(&mut emit);
        assert_eq!(texts, ["é€", "😀"]);
    }

    #[test]
    fn long_line_continues_in_the_next_event() {
        let line = ["€".repeat(MAX_TEXT_BYTES / 3 + 10).as_str(), "\n"].concat();
        let texts = split(LineDialect::Preserving, &[line.as_bytes()]);
        assert_eq!(texts.concat(), line);
        assert_eq!(texts.len(), 2);
        let exact = [vec![b'x'; MAX_TEXT_BYTES], b"\r\n\ny".to_vec()].concat();
        let texts = split(LineDialect::Stripping, &[&exact]);
        assert_eq!(texts[1..], ["\n", "y"]);
        assert_eq!(texts[0].len(), MAX_TEXT_BYTES);
    }

    /// Output with many line ends and incomplete or invalid characters.
    fn output() -> impl Strategy<Value = Vec<u8>> {
        let atom = prop_oneof![
            Just(b"\n".to_vec()),
            Just(b"\r".to_vec()),
            Just("€".as_bytes().to_vec()),
            Just("😀".as_bytes().to_vec()),
            Just(vec![0xe2, 0x82]),
            Just(vec![0xff]),
            Just(b"ab".to_vec()),
        ];
        prop::collection::vec(atom, 0..40).prop_map(|atoms| atoms.concat())
    }

    proptest! {
        #[test]
        fn preserved_texts_concatenate_to_the_output(
            output in output(),
            cuts in prop::collection::vec((0usize..160, any::<bool>()), 0..6),
        ) {
            let mut cuts = cuts;
            cuts.sort_unstable();
            let mut text = String::new();
            let mut emit = |piece: &str| { assert!(!piece.is_empty()); text.push_str(piece) };
            let mut splitter = LineSplitter::new(LineDialect::Preserving);
            let mut from = 0;
            for (cut, pause) in cuts {
                let cut = cut.clamp(from, output.len().max(from));
                splitter.push(&output[from.min(output.len())..cut.min(output.len())], &mut emit);
                if pause { splitter.flush(&mut emit); }
                from = cut.min(output.len());
            }
            splitter.push(&output[from..], &mut emit);
            splitter.finish(&mut emit);
            prop_assert_eq!(text, String::from_utf8_lossy(&output));
        }

        #[test]
        fn texts_do_not_depend_on_chunk_boundaries(output in output(), cut in 0usize..160) {
            let (head, tail) = output.split_at(cut.min(output.len()));
            for dialect in [LineDialect::Preserving, LineDialect::Stripping] {
                prop_assert_eq!(split(dialect, &[head, tail]), split(dialect, &[&output]));
            }
        }
    }
}
