//! Decodes UTF-8 that arrives in pieces. Invalid bytes become U+FFFD.

use super::lines::incomplete_suffix;

/// The state between two pieces. A character may be spread over them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Utf8Decoder {
    /// The beginning of a character whose end has not arrived; at most three bytes.
    pending: Vec<u8>,
}

impl Utf8Decoder {
    /// Appends the text of a piece.
    pub(crate) fn decode(&mut self, bytes: &[u8], text: &mut String) {
        if self.pending.is_empty() {
            self.decode_piece(bytes, text);
        } else {
            let mut joined = std::mem::take(&mut self.pending);
            joined.extend_from_slice(bytes);
            self.decode_piece(&joined, text);
        }
    }

    fn decode_piece(&mut self, bytes: &[u8], text: &mut String) {
        let (complete, pending) = bytes.split_at(bytes.len() - incomplete_suffix(bytes));
        text.push_str(&String::from_utf8_lossy(complete));
        self.pending = pending.to_vec();
    }

    /// Nothing follows, so the beginning of a character is not text.
    pub(crate) fn finish(&mut self, text: &mut String) {
        if !std::mem::take(&mut self.pending).is_empty() {
            text.push(char::REPLACEMENT_CHARACTER);
        }
    }

    /// How many bytes wait for the rest of their character.
    pub(crate) fn pending_bytes(&self) -> usize {
        self.pending.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decoded(pieces: &[&[u8]]) -> String {
        let (mut decoder, mut text) = (Utf8Decoder::default(), String::new());
        for piece in pieces {
            decoder.decode(piece, &mut text);
        }
        decoder.finish(&mut text);
        text
    }

    #[test]
    fn characters_may_be_spread_over_pieces() {
        let text = "aé漢😀z";
        for at in 0..=text.len() {
            let (first, second) = text.as_bytes().split_at(at);
            assert_eq!(decoded(&[first, second]), text, "{at}");
        }
        let single: Vec<_> = text.as_bytes().chunks(1).collect();
        assert_eq!(decoded(&single), text);
    }

    #[test]
    fn other_bytes_are_replaced() {
        assert_eq!(decoded(&[b"a\xffb", b"\xc3"]), "a\u{fffd}b\u{fffd}");
        assert_eq!(decoded(&[b"\xf0\x9f", b"x"]), "\u{fffd}x");
    }
}
