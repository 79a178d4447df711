//! Collects the text of a command in bounded memory: all of it, or its beginning and its end.

use service::OutputEvent;

use super::super::commands::bounded_text::{BoundedText, KeptText, skip_chars};
use super::text::TextCleaner;

/// How long a truncated output is, in characters.
pub(super) const MAX_TRUNCATED_CHARS: usize = 30_000;

/// The longest output that is collected, in characters. A character takes up to four bytes, and the output of every
/// waiting call is in memory.
pub(super) const MAX_COLLECTED_CHARS: usize = 4 << 20;

/// The text in the place of the part that is left out.
const OMISSION: &str = "\n[... output truncated ...]\n";

/// Text that is being collected.
#[derive(Debug)]
pub(super) struct CollectedText {
    cleaner: TextCleaner,
    max_chars: usize,
    kept: BoundedText,
    /// The text of one piece; kept to avoid allocations.
    piece: String,
}

impl CollectedText {
    pub(super) fn new(max_chars: usize) -> Self {
        let max_chars = max_chars.max(2 * OMISSION.len());
        // If output is missing early, the end is nearly all of the text.
        let kept = BoundedText::new(max_chars / 2, max_chars);
        Self { cleaner: TextCleaner::default(), max_chars, kept, piece: String::new() }
    }

    pub(super) fn add_event(&mut self, event: &OutputEvent) {
        match event {
            OutputEvent::Output { bytes, .. } => self.add_bytes(bytes),
            OutputEvent::Gap { .. } => self.add_gap(),
            OutputEvent::Ended(_) => {}
        }
    }

    pub(super) fn add_bytes(&mut self, bytes: &[u8]) {
        self.cleaner.clean(bytes, &mut self.piece);
        self.kept.add_text(&self.piece);
        self.piece.clear();
    }

    /// Output is missing here.
    pub(super) fn add_gap(&mut self) {
        self.finish_piece();
        self.kept.add_gap(1);
    }

    /// The text without line feeds at its end.
    pub(super) fn into_text(mut self) -> String {
        self.finish_piece();
        let KeptText { head: mut text, head_chars, omitted, tail, tail_chars } = self.kept.into_parts();
        if omitted > 0 || head_chars + tail_chars > self.max_chars {
            let room = self.max_chars - head_chars - OMISSION.len();
            text.push_str(OMISSION);
            text.push_str(skip_chars(&tail, tail_chars.saturating_sub(room)));
        } else {
            text.push_str(&tail);
        }
        text.truncate(text.trim_end_matches('\n').len());
        text
    }

    fn finish_piece(&mut self) {
        self.cleaner.finish(&mut self.piece);
        self.kept.add_text(&self.piece);
        self.piece.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn collected(max: usize, pieces: &[&str]) -> String {
        let mut text = CollectedText::new(max);
        for piece in pieces {
            text.add_bytes(piece.as_bytes());
        }
        text.into_text()
    }

    #[test]
    fn text_up_to_the_limit_is_complete() {
        for count in [0, 1, 499, 500, 501, 999, 1000] {
            let text = "é".repeat(count);
            assert_eq!(collected(1000, &[&text]), text, "{count}");
            let (first, second) = text.split_at(count / 3 * 2);
            assert_eq!(collected(1000, &[first, second]), text, "{count}");
        }
        assert_eq!(collected(1000, &["a\n", "\n\n"]), "a");
        assert_eq!(collected(1000, &["\n\nb"]), "\n\nb");
    }

    #[test]
    fn longer_text_keeps_its_beginning_and_end() {
        for count in [1001, 1251, 5000, 1_000_000] {
            let numbers: String = (0..)
                .flat_map(|number| format!("{number} ").chars().collect::<Vec<_>>())
                .take(count)
                .collect();
            for size in [7, 1000, count] {
                let pieces: Vec<&str> = numbers
                    .as_bytes()
                    .chunks(size)
                    .map(|piece| std::str::from_utf8(piece).unwrap())
                    .collect();
                let text = collected(1000, &pieces);
                assert_eq!(text.chars().count(), 1000, "{count} in pieces of {size}");
                let (head, tail) = text.split_once(OMISSION).unwrap();
                assert!(
                    numbers.starts_with(head)
                        && numbers.ends_with(tail)
                        && head.len() >= 400
                        && tail.len() >= 400
                );
            }
        }
    }

    #[test]
    fn missing_output_is_marked() {
        let mut text = CollectedText::new(1000);
        text.add_bytes(b"first\x1b[3");
        text.add_gap();
        text.add_bytes(b"last\n");
        assert_eq!(text.into_text(), format!("first{OMISSION}last"));
    }
}
