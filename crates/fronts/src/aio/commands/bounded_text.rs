//! Keeps the beginning and the end of a text in bounded memory.

/// A text that is being collected.
#[derive(Debug)]
pub(in crate::aio) struct BoundedText {
    max_head_chars: usize,
    max_tail_chars: usize,
    head: String,
    head_chars: usize,
    tail: String,
    tail_chars: usize,
    omitted: u64,
}

/// The parts that were kept.
#[derive(Debug)]
pub(in crate::aio) struct KeptText {
    pub(in crate::aio) head: String,
    pub(in crate::aio) head_chars: usize,
    /// How many characters, or bytes of gaps, between head and tail are missing.
    pub(in crate::aio) omitted: u64,
    pub(in crate::aio) tail: String,
    pub(in crate::aio) tail_chars: usize,
}

impl BoundedText {
    pub(in crate::aio) fn new(max_head_chars: usize, max_tail_chars: usize) -> Self {
        Self {
            max_head_chars,
            max_tail_chars,
            head: String::new(),
            head_chars: 0,
            tail: String::new(),
            tail_chars: 0,
            omitted: 0,
        }
    }

    pub(in crate::aio) fn add_text(&mut self, text: &str) {
        let mut rest = text;
        if self.omitted == 0 && self.head_chars < self.max_head_chars {
            rest = skip_chars(text, self.max_head_chars - self.head_chars);
            let own = &text[..text.len() - rest.len()];
            self.head_chars += own.chars().count();
            self.head.push_str(own);
        }
        self.tail.push_str(rest);
        self.tail_chars += rest.chars().count();
        // Some more than needed is kept, so that the tail does not move with every piece.
        if self.tail_chars > self.max_tail_chars + self.max_tail_chars / 4 {
            self.cut_tail();
        }
    }

    /// So many bytes are missing here. Later text belongs to the end.
    pub(in crate::aio) fn add_gap(&mut self, length: u64) {
        self.omitted = self.omitted.saturating_add(length).saturating_add(self.tail_chars as u64);
        self.tail.clear();
        self.tail_chars = 0;
    }

    pub(in crate::aio) fn into_parts(mut self) -> KeptText {
        self.cut_tail();
        let Self { head, head_chars, omitted, tail, tail_chars, .. } = self;
        KeptText { head, head_chars, omitted, tail, tail_chars }
    }

    fn cut_tail(&mut self) {
        let surplus = self.tail_chars.saturating_sub(self.max_tail_chars);
        let start = self.tail.len() - skip_chars(&self.tail, surplus).len();
        self.tail.drain(..start);
        self.tail_chars -= surplus;
        self.omitted = self.omitted.saturating_add(surplus as u64);
    }
}

/// The text after its first characters.
pub(in crate::aio) fn skip_chars(text: &str, count: usize) -> &str {
    text.char_indices().nth(count).map_or("", |(start, _)| &text[start..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_bounded() {
        let mut text = BoundedText::new(500, 1000);
        for _ in 0..1000 {
            text.add_text(&"x".repeat(1000));
        }
        assert!(text.head.capacity() + text.tail.capacity() < 8000);
        let kept = text.into_parts();
        assert_eq!((kept.head_chars, kept.omitted, kept.tail_chars), (500, 998_500, 1000));
    }
}
