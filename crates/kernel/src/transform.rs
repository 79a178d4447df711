//! Turns a cell of JavaScript or TypeScript into a script whose declarations the next cell can use.
//!
//! ```text
//! TypeScript ─► types removed ─┐
//! JavaScript ──────────────────┴─► text edited in place ─► a script for V8
//! ```
//! The script comes with two tables that map its positions to those of the cell, because a
//! traceback has to name the lines of the cell.

mod edits;
mod imports;
mod parse;
mod refused;
mod survey;
mod types;

#[cfg(test)]
mod tests;

use oxc_allocator::Allocator;
use oxc_span::{SourceType, Span};
use serde::Serialize;

use edits::{Output, Position};
use survey::Survey;

pub(crate) use refused::Refused;

/// The language of a cell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Language {
    JavaScript,
    TypeScript,
}

/// A script that is ready to run.
#[derive(Debug, Serialize)]
pub(crate) struct Script {
    pub code: String,
    /// The names it assigns at the top level.
    pub names: Vec<String>,
    /// Whether its value is a promise to await.
    pub waits: bool,
    /// Maps positions in `code` to positions in the JavaScript it was made from.
    pub positions: Vec<Position>,
    /// Maps those to positions in the TypeScript that the author wrote; empty for JavaScript.
    pub types: Vec<Position>,
}

pub(crate) fn prepare(code: &str, language: Language) -> Result<Script, Refused> {
    if u32::try_from(code.len()).is_err() {
        return Err(Refused::plain("the code is too long"));
    }
    // A cell `{a: 1}` means the object, not a block with a label in it.
    let trimmed = code.trim();
    if trimmed.starts_with('{')
        && trimmed.ends_with('}')
        && let Ok(script) = write(&format!("({code}\n)"), language)
    {
        return Ok(script);
    }
    write(code, language)
}

fn write(code: &str, language: Language) -> Result<Script, Refused> {
    match language {
        Language::JavaScript => rewrite(code, SourceType::mjs()).or_else(|refused| {
            // Only sloppy mode allows `with` and `delete name`.
            rewrite(code, SourceType::cjs()).map_err(|_also| refused)
        }),
        Language::TypeScript => {
            let (plain, types) = types::strip(code)?;
            Ok(Script { types, ..rewrite(&plain, SourceType::mjs())? })
        }
    }
}

fn rewrite(source: &str, kind: SourceType) -> Result<Script, Refused> {
    let allocator = Allocator::default();
    let parsed = parse::parse(&allocator, source, kind)?;
    let survey = Survey::of(source, &parsed.program);
    let mut output = Output::new(source);
    let names: Vec<String> = survey.names.into_iter().collect();
    if !names.is_empty() {
        output.add(&format!("var {};\n", names.join(", ")));
    }
    for function in &survey.moved {
        output.copy_alone(*function, &survey.edits);
        output.add("\n");
    }
    output.add(if survey.waits { "(async () => {" } else { "(() => {" });
    let start = parsed.program.hashbang.as_ref().map_or(0, |line| line.span.end);
    let end = u32::try_from(source.len()).unwrap_or(u32::MAX);
    output.copy(Span::new(start, end), &survey.edits, &survey.moved);
    output.add("\n})()");
    let (code, positions) = output.finish();
    Ok(Script { code, names, waits: survey.waits, positions, types: Vec::new() })
}
