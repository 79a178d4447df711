//! Bytes of a command as text. Bytes that are not UTF-8 become U+FFFD.

/// Decodes bytes that arrive in pieces. A character may be spread over two of them.
#[derive(Clone, Debug, Default)]
pub(super) struct LossyDecoder {
    /// The beginning of a character whose end has not arrived.
    pending: Vec<u8>,
}

impl LossyDecoder {
    pub(super) fn decode(&mut self, bytes: &[u8], text: &mut String) {
        if self.pending.is_empty() {
            self.decode_piece(bytes, text);
        } else {
            let mut joined = std::mem::take(&mut self.pending);
            joined.extend_from_slice(bytes);
            self.decode_piece(&joined, text);
        }
    }

    fn decode_piece(&mut self, bytes: &[u8], text: &mut String) {
        let complete = complete_length(bytes);
        text.push_str(&String::from_utf8_lossy(&bytes[..complete]));
        self.pending = bytes[complete..].to_vec();
    }

    /// Nothing follows, so the beginning of a character is not text.
    pub(super) fn finish(&mut self, text: &mut String) {
        if !std::mem::take(&mut self.pending).is_empty() {
            text.push(char::REPLACEMENT_CHARACTER);
        }
    }

    /// How many bytes wait for the rest of their character.
    pub(super) fn pending_bytes(&self) -> usize {
        self.pending.len()
    }
}

/// The length without the beginning of a character at the end.
pub(super) fn complete_length(bytes: &[u8]) -> usize {
    // A character has at most four bytes.
    let start = bytes.len().saturating_sub(3);
    for at in start..bytes.len() {
        if let Err(error) = std::str::from_utf8(&bytes[at..])
            && error.valid_up_to() == 0
            && error.error_len().is_none()
        {
            return at;
        }
    }
    bytes.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decoded(pieces: &[&[u8]]) -> String {
        let (mut decoder, mut text) = (LossyDecoder::default(), String::new());
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
        let single: Vec<&[u8]> = text.as_bytes().chunks(1).collect();
        assert_eq!(decoded(&single), text);
    }

    #[test]
    fn other_bytes_are_replaced() {
        assert_eq!(decoded(&[b"a\xffb", b"\xc3"]), "a\u{fffd}b\u{fffd}");
        assert_eq!(decoded(&[b"\xf0\x9f", b"x"]), "\u{fffd}x");
        for (bytes, complete) in
            [(&b"ab"[..], 2), (b"a\xf0\x9f\x98", 1), (b"\xc3", 0), (b"\xff", 1), (b"\x80\x80", 2), (b"", 0)]
        {
            assert_eq!(complete_length(bytes), complete, "{bytes:?}");
        }
    }
}
