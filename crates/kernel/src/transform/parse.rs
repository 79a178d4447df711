//! Parses a cell and reports all errors that can be found before it runs.

use oxc_allocator::Allocator;
use oxc_ast::ast::Program;
use oxc_parser::Parser;
use oxc_semantic::{Scoping, SemanticBuilder};
use oxc_span::SourceType;

use super::syntax_error::SyntaxError;

/// The maximum nesting of brackets. The parser recurses for each level, and so does V8, whose limit
/// is lower.
const MAX_BRACKET_DEPTH: usize = 1000;

pub(super) struct ParsedCell<'a> {
    pub program: Program<'a>,
    pub scoping: Scoping,
}

pub(super) fn parse_cell<'a>(
    allocator: &'a Allocator,
    source: &'a str,
    kind: SourceType,
) -> Result<ParsedCell<'a>, SyntaxError> {
    if bracket_depth(source) > MAX_BRACKET_DEPTH {
        return Err(SyntaxError::from_message("the code is nested too deeply"));
    }
    let parsed = Parser::new(allocator, source, kind).parse();
    if parsed.panicked || !parsed.errors.is_empty() {
        return Err(SyntaxError::new(source, &parsed.errors));
    }
    let analysed = SemanticBuilder::new().with_check_syntax_error(true).build(&parsed.program);
    if !analysed.errors.is_empty() {
        return Err(SyntaxError::new(source, &analysed.errors));
    }
    let scoping = analysed.semantic.into_scoping();
    Ok(ParsedCell { program: parsed.program, scoping })
}

/// The maximum nesting of brackets. Those in strings count too: that is on the safe side and needs
/// no parsing.
fn bracket_depth(source: &str) -> usize {
    let mut depth = 0_usize;
    let mut deepest = 0;
    for byte in source.bytes() {
        match byte {
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        deepest = deepest.max(depth);
    }
    deepest
}
