//! Collects the output of a command that is waited for, in bounded memory: all of it, or its beginning and its end.

use domain::StreamKind;
use service::OutputEvent;

use super::lossy_text::LossyDecoder;
use super::stream_offsets::StreamOffsets;

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
    decoder: LossyDecoder,
    max_chars: usize,
    head: String,
    head_chars: usize,
    tail: String,
    tail_chars: usize,
    /// How many characters, or bytes of a gap, between head and tail are missing.
    omitted: u64,
    /// The text of one piece; kept to avoid allocations.
    piece: String,
}

impl CollectedStream {
    fn new(max_chars: usize) -> Self {
        Self {
            decoder: LossyDecoder::default(),
            max_chars,
            head: String::new(),
            head_chars: 0,
            tail: String::new(),
            tail_chars: 0,
            omitted: 0,
            piece: String::new(),
        }
    }

    fn add_bytes(&mut self, bytes: &[u8]) {
        let mut piece = std::mem::take(&mut self.piece);
        self.decoder.decode(bytes, &mut piece);
        self.add_text(&piece);
        piece.clear();
        self.piece = piece;
    }

    fn finish_character(&mut self) {
        let mut piece = String::new();
        self.decoder.finish(&mut piece);
        self.add_text(&piece);
    }

    /// So many bytes are missing here. Later bytes belong to the end.
    fn add_gap(&mut self, length: u64) {
        if length == 0 {
            return;
        }
        self.finish_character();
        self.omitted = self.omitted.saturating_add(length).saturating_add(self.tail_chars as u64);
        self.tail.clear();
        self.tail_chars = 0;
    }

    fn max_tail_chars(&self) -> usize {
        self.max_chars - self.max_chars / 2
    }

    fn add_text(&mut self, text: &str) {
        let (max_head, mut rest) = (self.max_chars / 2, text);
        if self.omitted == 0 && self.tail.is_empty() && self.head_chars < max_head {
            rest = skip_chars(text, max_head - self.head_chars);
            let own = &text[..text.len() - rest.len()];
            self.head_chars += own.chars().count();
            self.head.push_str(own);
        }
        self.tail.push_str(rest);
        self.tail_chars += rest.chars().count();
        // Some more than needed is kept, so that the tail does not move with every piece.
        if self.tail_chars > self.max_tail_chars() + self.max_tail_chars() / 4 + 1024 {
            self.cut_tail();
        }
    }

    fn cut_tail(&mut self) {
        let surplus = self.tail_chars.saturating_sub(self.max_tail_chars());
        let start = self.tail.len() - skip_chars(&self.tail, surplus).len();
        self.tail.drain(..start);
        self.tail_chars -= surplus;
        self.omitted = self.omitted.saturating_add(surplus as u64);
    }

    fn into_text(mut self) -> Option<String> {
        self.cut_tail();
        let mut text = self.head;
        if self.omitted > 0 {
            text.push_str(&format!("\n... [{} characters truncated] ...\n", self.omitted));
        }
        text.push_str(&self.tail);
        (!text.is_empty()).then_some(text)
    }
}

/// The text after its first characters.
fn skip_chars(text: &str, count: usize) -> &str {
    text.char_indices().nth(count).map_or("", |(start, _)| &text[start..])
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
    fn memory_is_bounded() {
        let mut stream = CollectedStream::new(1000);
        for _ in 0..1000 {
            stream.add_bytes(&[b'x'; 1000]);
        }
        assert!(stream.head.capacity() + stream.tail.capacity() < 10_000);
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
