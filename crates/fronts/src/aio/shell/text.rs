//! The output of a command as plain text: UTF-8, lines that end with LF, and no escape sequences.
//!
//! Output arrives in pieces that may end inside a character or a sequence, so both are carried over.

use crate::kit::utf8_decoder::Utf8Decoder;

/// The state between two pieces of output.
#[derive(Debug, Default)]
pub(super) struct TextCleaner {
    decoder: Utf8Decoder,
    sequence: SequenceState,
    /// A CR that may be followed by LF.
    carriage_return: bool,
}

/// Where in an escape sequence the text is (ECMA-48).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum SequenceState {
    #[default]
    Text,
    /// After ESC.
    Escape,
    /// After ESC and intermediate characters; one more ends it.
    Intermediate,
    /// After `ESC [`, up to a final character.
    Control,
    /// In a string such as a title, up to BEL or `ESC \`.
    String,
    /// After ESC in a string.
    StringEscape,
}

const ESCAPE: char = '\x1b';
const BELL: char = '\x07';

impl TextCleaner {
    /// Appends the text of a piece of output.
    pub(super) fn clean(&mut self, bytes: &[u8], text: &mut String) {
        let mut decoded = String::with_capacity(bytes.len());
        self.decoder.decode(bytes, &mut decoded);
        self.clean_text(&decoded, text);
    }

    /// Appends what is left at the end of the output, or before a gap in it.
    pub(super) fn finish(&mut self, text: &mut String) {
        let mut last = String::new();
        self.decoder.finish(&mut last);
        self.clean_text(&last, text);
        if std::mem::take(&mut self.carriage_return) {
            text.push('\n');
        }
        self.sequence = SequenceState::Text;
    }

    fn clean_text(&mut self, mut piece: &str, text: &mut String) {
        while !piece.is_empty() {
            // Most output is plain, and is copied in one step.
            if self.sequence == SequenceState::Text && !self.carriage_return {
                let special = piece.find([ESCAPE, BELL, '\r', '\0']).unwrap_or(piece.len());
                let (plain, rest) = piece.split_at(special);
                text.push_str(plain);
                piece = rest;
            }
            let mut characters = piece.chars();
            if let Some(character) = characters.next() {
                self.clean_char(character, text);
            }
            piece = characters.as_str();
        }
    }

    fn clean_char(&mut self, character: char, text: &mut String) {
        use SequenceState::{Control, Escape, Intermediate, String, StringEscape, Text};
        self.sequence = match (self.sequence, character) {
            (String, BELL) => Text,
            (String, ESCAPE) => StringEscape,
            (String, _) => String,
            (StringEscape, '\\') => Text,
            // Any other sequence ends the string.
            (_, ESCAPE) => Escape,
            (Escape | StringEscape, '[') => Control,
            (Escape | StringEscape, ']' | 'P' | 'X' | '^' | '_') => String,
            (Escape | StringEscape | Intermediate, ' '..='/') => Intermediate,
            (Escape | StringEscape | Intermediate, '0'..='~') => Text,
            (Control, ' '..='?') => Control,
            (Control, '@'..='~') => Text,
            // A character that cannot be part of the sequence is text again.
            (Escape | StringEscape | Intermediate | Control | Text, _) => {
                self.add_char(character, text);
                Text
            }
        };
    }

    fn add_char(&mut self, character: char, text: &mut String) {
        match character {
            '\r' => self.carriage_return = true,
            '\n' => {
                self.carriage_return = false;
                text.push('\n');
            }
            // A program that moves back to the start of its line, as progress bars do, begins another line here.
            _ if std::mem::take(&mut self.carriage_return) => {
                text.push('\n');
                self.add_char(character, text);
            }
            BELL | '\0' => {}
            _ => text.push(character),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cleaned(pieces: &[&[u8]]) -> String {
        let (mut cleaner, mut text) = (TextCleaner::default(), String::new());
        for piece in pieces {
            cleaner.clean(piece, &mut text);
        }
        cleaner.finish(&mut text);
        text
    }

    const CASES: &[(&[u8], &str)] = &[
        (b"plain\n", "plain\n"),
        (b"\x1b[1;31mred\x1b[0m end", "red end"),
        (b"\x1b[?2004h$ \x1b[?2004l", "$ "),
        (b"\x1b]0;a title\x07text", "text"),
        (b"\x1b]8;;http://a\x1b\\link\x1b]8;;\x1b\\", "link"),
        (b"\x1bPdevice\x1b\\a\x1b(Bb\x1b=c\x1b7d", "abcd"),
        (b"a\r\nb\r\r\nc", "a\nb\nc"),
        (b"10%\r20%\r\n", "10%\n20%\n"),
        (b"last\r", "last\n"),
        (b"bell\x07 nul\0 tab\t", "bell nul tab\t"),
        (b"\x1b[31\x1b[32mgreen", "green"),
        (b"\x1b[3\nline", "\nline"),
        (b"\xff\xfe", "\u{fffd}\u{fffd}"),
        ("日本語 🦀 é".as_bytes(), "日本語 🦀 é"),
        (b"cut \xe6\x97", "cut \u{fffd}"),
        (b"\x1b", ""),
        (b"", ""),
    ];

    #[test]
    fn text_has_no_sequences_and_only_line_feeds() {
        for (bytes, expected) in CASES {
            assert_eq!(cleaned(&[bytes]), *expected, "{bytes:?}");
        }
    }

    #[test]
    fn pieces_may_end_anywhere() {
        for (bytes, expected) in CASES {
            let single: Vec<&[u8]> = bytes.chunks(1).collect();
            assert_eq!(cleaned(&single), *expected, "{bytes:?}");
            for middle in 0..bytes.len() {
                let (first, second) = bytes.split_at(middle);
                assert_eq!(cleaned(&[first, second]), *expected, "{bytes:?} at {middle}");
            }
        }
    }
}
