//! TypeScript to JavaScript: types are removed, and constructs with a meaning at run time (enums,
//! namespaces, parameter properties, decorators) are translated. Types are not checked.

use std::path::{Path, PathBuf};

use oxc_allocator::Allocator;
use oxc_codegen::{Codegen, CodegenOptions};
use oxc_span::SourceType;
use oxc_transformer::{
    DecoratorOptions, HelperLoaderMode, HelperLoaderOptions, TransformOptions, Transformer, TypeScriptOptions,
};

use super::edits::PositionMapping;
use super::parse::{self, ParsedCell};
use super::syntax_error::SyntaxError;

/// Returns the JavaScript, and the origins of its tokens.
pub(super) fn strip_types(source: &str) -> Result<(String, Vec<PositionMapping>), SyntaxError> {
    let allocator = Allocator::default();
    let ParsedCell { mut program, scoping } = parse::parse_cell(&allocator, source, SourceType::ts())?;
    let options = TransformOptions {
        typescript: TypeScriptOptions {
            // A later cell may use the imports of this one.
            only_remove_type_imports: true,
            ..TypeScriptOptions::default()
        },
        decorator: DecoratorOptions { legacy: true, emit_decorator_metadata: false },
        helper_loader: HelperLoaderOptions {
            mode: HelperLoaderMode::External,
            ..HelperLoaderOptions::default()
        },
        ..TransformOptions::default()
    };
    let done = Transformer::new(&allocator, Path::new("cell.ts"), &options)
        .build_with_scoping(scoping, &mut program);
    if !done.errors.is_empty() {
        return Err(SyntaxError::new(source, &done.errors));
    }
    let options =
        CodegenOptions { source_map_path: Some(PathBuf::from("cell.ts")), ..CodegenOptions::default() };
    let printed = Codegen::new().with_options(options).build(&program);
    let tokens = printed.map.iter().flat_map(|map| map.get_tokens());
    let positions = tokens.map(|token| {
        [token.get_dst_line() + 1, token.get_dst_col(), token.get_src_line() + 1, token.get_src_col()]
    });
    Ok((printed.code, positions.collect()))
}
