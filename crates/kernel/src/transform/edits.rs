//! Edits text in place and records where each position of the result came from.
//!
//! Cells are edited as text and not printed anew from a syntax tree: unchanged parts stay as the
//! author wrote them, on the lines that stack traces name.

use oxc_span::Span;

/// Replaces a range, which may be empty, by a text.
#[derive(Debug)]
pub(super) struct TextEdit {
    pub span: Span,
    pub text: String,
}

/// Maps the start of a piece of the result to its origin: line and column in the result, line and
/// column in the source. Lines count from 1, columns from 0 in UTF-16 units, as in V8.
pub(crate) type PositionMapping = [u32; 4];

/// Edits in the order of the text. At the same position the one added first comes first.
#[derive(Debug, Default)]
pub(super) struct EditList(Vec<TextEdit>);

impl EditList {
    pub(super) fn replace(&mut self, span: Span, text: impl Into<String>) {
        self.0.push(TextEdit { span, text: text.into() });
    }

    pub(super) fn insert(&mut self, at: u32, text: impl Into<String>) {
        self.replace(Span::empty(at), text);
    }

    /// Must be called once, when all edits are known.
    pub(super) fn sort(&mut self) {
        self.0.sort_by_key(|edit| edit.span.start);
    }

    fn edits_within(&self, span: Span) -> impl Iterator<Item = &TextEdit> {
        let first = self.0.partition_point(|edit| edit.span.start < span.start);
        let inside = self.0[first..].iter().take_while(move |edit| edit.span.start <= span.end);
        inside.filter(move |edit| edit.span.end <= span.end)
    }
}

/// The result as it is built.
#[derive(Debug)]
pub(super) struct ScriptBuilder<'s> {
    source: &'s str,
    /// The offset of each line of the source.
    lines: Vec<usize>,
    text: String,
    line: u32,
    column: u32,
    positions: Vec<PositionMapping>,
}

impl<'s> ScriptBuilder<'s> {
    pub(super) fn new(source: &'s str) -> Self {
        let lines = std::iter::once(0).chain(source.match_indices('\n').map(|(at, _)| at + 1)).collect();
        Self { source, lines, text: String::new(), line: 1, column: 0, positions: Vec::new() }
    }

    /// Adds text that has no position in the source.
    pub(super) fn push_text(&mut self, text: &str) {
        self.text.push_str(text);
        for character in text.chars() {
            self.advance_position(character);
        }
    }

    /// Copies a range of the source with its edits, without the ranges in `left_out`.
    pub(super) fn copy_range(&mut self, span: Span, edits: &EditList, left_out: &[Span]) {
        let mut at = span.start;
        for gap in left_out.iter().filter(|gap| gap.start >= span.start && gap.end <= span.end) {
            self.copy_edited(Span::new(at, gap.start), edits);
            // The tokens on both sides must not merge.
            self.push_text(" ");
            at = gap.end;
        }
        self.copy_edited(Span::new(at, span.end), edits);
    }

    /// Copies a range that was left out. Edits exactly at its ends belong to the text around it.
    pub(super) fn copy_alone(&mut self, span: Span, edits: &EditList) {
        if span.size() < 2 {
            return self.copy_plain(span.start, span.end);
        }
        self.copy_plain(span.start, span.start + 1);
        self.copy_edited(span.shrink(1), edits);
        self.copy_plain(span.end - 1, span.end);
    }

    fn copy_edited(&mut self, span: Span, edits: &EditList) {
        let mut at = span.start;
        for edit in edits.edits_within(span) {
            if edit.span.start < at {
                continue;
            }
            self.copy_plain(at, edit.span.start);
            self.push_text(&edit.text);
            at = edit.span.end;
        }
        self.copy_plain(at, span.end);
    }

    fn copy_plain(&mut self, start: u32, end: u32) {
        let piece = self.source.get(start as usize..end as usize).unwrap_or_default();
        if piece.is_empty() {
            return;
        }
        let (mut line, column) = self.line_and_column(start as usize);
        self.positions.push([self.line, self.column, line, column]);
        for character in piece.chars() {
            self.advance_position(character);
            if character == '\n' {
                line += 1;
                self.positions.push([self.line, 0, line, 0]);
            }
        }
        self.text.push_str(piece);
    }

    fn line_and_column(&self, offset: usize) -> (u32, u32) {
        let line = self.lines.partition_point(|start| *start <= offset);
        let before = &self.source[self.lines[line - 1]..offset];
        (saturating_u32(line), saturating_u32(before.encode_utf16().count()))
    }

    fn advance_position(&mut self, character: char) {
        if character == '\n' {
            self.line += 1;
            self.column = 0;
        } else {
            self.column += saturating_u32(character.len_utf16());
        }
    }

    pub(super) fn finish(self) -> (String, Vec<PositionMapping>) {
        (self.text, self.positions)
    }
}

/// Offsets fit, because the parser accepts no longer text.
fn saturating_u32(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_account_for_inserted_text() {
        let source = "ab\nsmile 😀 end";
        let mut edits = EditList::default();
        edits.insert(3, ">>");
        edits.replace(Span::new(9, 13), "x");
        edits.sort();
        let mut output = ScriptBuilder::new(source);
        output.push_text("head\n");
        output.copy_range(Span::new(0, 17), &edits, &[]);
        let (text, positions) = output.finish();
        assert_eq!(text, "head\nab\n>>smile x end");
        assert!(positions.contains(&[2, 0, 1, 0]), "{positions:?}");
        assert!(positions.contains(&[3, 2, 2, 0]), "{positions:?}");
        // The emoji is two UTF-16 units.
        assert!(positions.contains(&[3, 9, 2, 8]), "{positions:?}");
    }

    #[test]
    fn moved_range_keeps_its_edits() {
        let mut edits = EditList::default();
        edits.insert(2, "<");
        edits.insert(4, "!");
        edits.insert(6, ">");
        let mut output = ScriptBuilder::new("a (bc) d");
        output.copy_range(Span::new(0, 8), &edits, &[Span::new(2, 6)]);
        output.push_text("|");
        output.copy_alone(Span::new(2, 6), &edits);
        assert_eq!(output.finish().0, "a < > d|(b!c)");
    }
}
