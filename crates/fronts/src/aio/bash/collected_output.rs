//! Collects the output of a command that is waited for, in bounded memory: all of it, or its beginning and its end.

use domain::StreamKind;
use service::OutputEvent;

use super::stream_offsets::StreamOffsets;
use crate::aio::commands::bounded_text::{BoundedText, KeptText};
use crate::kit::utf8_decoder::Utf8Decoder;

/// The longest text that is collected of one stream, in characters. A character takes up to four bytes, and both streams
/// of every waiting call are in memory; `output` reads longer ones.
pub(super) const MAX_COLLECTED_CHARS: usize = 2 << 20;

/// Both streams of a command from its beginning on.
#[derive(Debug)]
pub(super) struct CollectedOutput {
    stdout: CollectedStream,
    stderr: CollectedStream,
    place: StreamOffsets,
}

impl CollectedOutput {
    /// Keeps at most so many characters of each stream.
    pub(super) fn new(max_chars: usize) -> Self {
        let max_chars = max_chars.min(MAX_COLLECTED_CHARS);
        Self {
            stdout: CollectedStream::new(max_chars),
            stderr: CollectedStream::new(max_chars),
            place: StreamOffsets::default(),
        }
    }

    pub(super) fn add_event(&mut self, event: &OutputEvent) {
        let before = self.place;
        self.place.advance(event);
        match event {
            OutputEvent::Output { stream: StreamKind::Stderr, bytes, .. } => self.stderr.add_bytes(bytes),
            OutputEvent::Output { bytes, .. } => self.stdout.add_bytes(bytes),
            OutputEvent::Gap { .. } => {
                self.stdout.add_gap(self.place.stdout - before.stdout);
                self.stderr.add_gap(self.place.stderr - before.stderr);
            }
            OutputEvent::Ended(_) => {}
        }
    }

    /// Nothing follows.
    pub(super) fn finish(&mut self) {
        self.stdout.finish_character();
        self.stderr.finish_character();
    }

    /// The offsets after the texts. The beginning of a character is not part of them.
    pub(super) fn offsets(&self) -> StreamOffsets {
        let pending = |stream: &CollectedStream| stream.decoder.pending_bytes() as u64;
        StreamOffsets {
            stdout: self.place.stdout - pending(&self.stdout),
            stderr: self.place.stderr - pending(&self.stderr),
        }
    }

    /// The texts of both streams; `None` if a stream is empty.
    pub(super) fn into_texts(self) -> (Option<String>, Option<String>) {
        (self.stdout.into_text(), self.stderr.into_text())
    }
}

#[derive(Debug)]
struct CollectedStream {
    decoder: Utf8Decoder,
    kept: BoundedText,
    /// The text of one piece; kept to avoid allocations.
    piece: String,
}

impl CollectedStream {
    fn new(max_chars: usize) -> Self {
        let max_head_chars = max_chars / 2;
        let kept = BoundedText::new(max_head_chars, max_chars - max_head_chars);
        Self { decoder: Utf8Decoder::default(), kept, piece: String::new() }
    }

    fn add_bytes(&mut self, bytes: &[u8]) {
        self.decoder.decode(bytes, &mut self.piece);
        self.kept.add_text(&self.piece);
        self.piece.clear();
    }

    fn finish_character(&mut self) {
        self.decoder.finish(&mut self.piece);
        self.kept.add_text(&self.piece);
        self.piece.clear();
    }

    /// So many bytes are missing here.
    fn add_gap(&mut self, length: u64) {
        if length > 0 {
            self.finish_character();
            self.kept.add_gap(length);
        }
    }

    fn into_text(self) -> Option<String> {
        let KeptText { head: mut text, omitted, tail, .. } = self.kept.into_parts();
        if omitted > 0 {
            text.push_str(&format!("\n... [{omitted} characters truncated] ...\n"));
        }
        text.push_str(&tail);
        (!text.is_empty()).then_some(text)
    }
}

#[cfg(test)]
mod tests {
    use domain::JournalOffset;

    use super::*;

    fn output(stream: StreamKind, bytes: &[u8]) -> OutputEvent {
        OutputEvent::Output { stream, at: JournalOffset(0), bytes: bytes.to_vec().into() }
    }

    fn collected(max_chars: usize, text: &str, piece: usize) -> Option<String> {
        let mut collected = CollectedOutput::new(max_chars);
        for bytes in text.as_bytes().chunks(piece) {
            collected.add_event(&output(StreamKind::Stdout, bytes));
        }
        collected.finish();
        collected.into_texts().0
    }

    #[test]
    fn middle_of_a_long_text_is_left_out() {
        for piece in [1, 7, 1000, 1 << 20] {
            assert_eq!(collected(10, "", piece), None);
            assert_eq!(collected(10, "äbcdefghij", piece).as_deref(), Some("äbcdefghij"));
            let long = collected(10, &format!("äbcde{}vwxyz", "-".repeat(5000)), piece);
            assert_eq!(long.as_deref(), Some("äbcde\n... [5000 characters truncated] ...\nvwxyz"));
            let odd = collected(3, "abcdef", piece);
            assert_eq!(odd.as_deref(), Some("a\n... [3 characters truncated] ...\nef"));
        }
    }

    #[test]
    fn gap_is_marked_in_the_stream_that_has_lost_bytes() {
        let mut both = CollectedOutput::new(100);
        both.add_event(&output(StreamKind::Stdout, b"abc"));
        both.add_event(&output(StreamKind::Stderr, b"err"));
        both.add_event(&OutputEvent::Gap {
            from: JournalOffset(6),
            to: JournalOffset(1006),
            stderr_before: Some(3),
        });
        both.add_event(&output(StreamKind::Stdout, b"xyz"));
        both.add_event(&output(StreamKind::Stderr, b"or"));
        assert_eq!(both.offsets(), StreamOffsets { stdout: 1006, stderr: 5 });
        let (stdout, stderr) = both.into_texts();
        assert_eq!(stdout.as_deref(), Some("abc\n... [1000 characters truncated] ...\nxyz"));
        assert_eq!(stderr.as_deref(), Some("error"));
    }

    #[test]
    fn offsets_end_before_half_a_character() {
        let mut both = CollectedOutput::new(100);
        both.add_event(&output(StreamKind::Stdout, b"a\xc3"));
        assert_eq!(both.offsets().stdout, 1);
        both.add_event(&output(StreamKind::Stdout, b"\xa9"));
        assert_eq!(both.offsets().stdout, 3);
        assert_eq!(both.into_texts().0.as_deref(), Some("aé"));
    }
}
