//! Turns a cell of JavaScript or TypeScript into a script whose declarations the next cell can use.
//!
//! ```text
//! TypeScript ─► types removed ─┐
//! JavaScript ──────────────────┴─► text edited in place ─► a script for V8
//! ```
//! The script comes with two tables that map its positions to those of the cell, because a
//! traceback has to name the lines of the cell.

mod cell_rewrite;
mod edits;
mod imports;
mod parse;
mod syntax_error;
mod typescript;

#[cfg(test)]
mod tests;

use oxc_allocator::Allocator;
use oxc_span::{SourceType, Span};
use serde::Serialize;

use cell_rewrite::CellRewrite;
use edits::{PositionMapping, ScriptBuilder};

pub(crate) use syntax_error::SyntaxError;

/// The language of a cell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ScriptLanguage {
    JavaScript,
    TypeScript,
}

/// A script that is ready to run.
#[derive(Debug, Serialize)]
pub(crate) struct PreparedScript {
    pub code: String,
    /// The names it assigns at the top level.
    pub names: Vec<String>,
    /// Whether its value is a promise to await.
    pub waits: bool,
    /// Maps positions in `code` to positions in the JavaScript it was made from.
    pub positions: Vec<PositionMapping>,
    /// Maps those to positions in the TypeScript that the author wrote; empty for JavaScript.
    pub types: Vec<PositionMapping>,
}

pub(crate) fn prepare_script(code: &str, language: ScriptLanguage) -> Result<PreparedScript, SyntaxError> {
    if u32::try_from(code.len()).is_err() {
        return Err(SyntaxError::from_message("the code is too long"));
    }
    // A cell `{a: 1}` means the object, not a block with a label in it.
    let trimmed = code.trim();
    if trimmed.starts_with('{')
        && trimmed.ends_with('}')
        && let Ok(script) = transform_code(&format!("({code}\n)"), language)
    {
        return Ok(script);
    }
    transform_code(code, language)
}

fn transform_code(code: &str, language: ScriptLanguage) -> Result<PreparedScript, SyntaxError> {
    match language {
        ScriptLanguage::JavaScript => rewrite_source(code, SourceType::mjs()).or_else(|refused| {
            // Only sloppy mode allows `with` and `delete name`.
            rewrite_source(code, SourceType::cjs()).map_err(|_also| refused)
        }),
        ScriptLanguage::TypeScript => {
            let (plain, types) = typescript::strip_types(code)?;
            Ok(PreparedScript { types, ..rewrite_source(&plain, SourceType::mjs())? })
        }
    }
}

fn rewrite_source(source: &str, kind: SourceType) -> Result<PreparedScript, SyntaxError> {
    let allocator = Allocator::default();
    let parsed = parse::parse_cell(&allocator, source, kind)?;
    let survey = CellRewrite::of_program(source, &parsed.program);
    let mut output = ScriptBuilder::new(source);
    let names: Vec<String> = survey.names.into_iter().collect();
    if !names.is_empty() {
        output.push_text(&format!("var {};\n", names.join(", ")));
    }
    for function in &survey.moved {
        output.copy_alone(*function, &survey.edits);
        output.push_text("\n");
    }
    output.push_text(if survey.waits { "(async () => {" } else { "(() => {" });
    let start = parsed.program.hashbang.as_ref().map_or(0, |line| line.span.end);
    let end = u32::try_from(source.len()).unwrap_or(u32::MAX);
    output.copy_range(Span::new(start, end), &survey.edits, &survey.moved);
    output.push_text("\n})()");
    let (code, positions) = output.finish();
    Ok(PreparedScript { code, names, waits: survey.waits, positions, types: Vec::new() })
}
