//! Translates static imports into statements that load the module and assign its names.

use oxc_ast::ast::{ImportAttributeKey, ImportDeclaration, ImportDeclarationSpecifier};
use serde_json::{Map, Value, json};

/// The statement that replaces an import, and the names that it assigns.
pub(super) fn rewrite_import(import: &ImportDeclaration<'_>) -> (String, Vec<String>) {
    let mut names = Vec::new();
    let mut taken = Vec::new();
    let mut targets = Vec::new();
    let mut whole = None;
    for specifier in import.specifiers.iter().flatten() {
        let (exported, local) = match specifier {
            ImportDeclarationSpecifier::ImportSpecifier(one) => (one.imported.name().to_string(), &one.local),
            ImportDeclarationSpecifier::ImportDefaultSpecifier(one) => ("default".to_owned(), &one.local),
            ImportDeclarationSpecifier::ImportNamespaceSpecifier(one) => {
                names.push(one.local.name.to_string());
                whole = Some(one.local.name.to_string());
                continue;
            }
        };
        names.push(local.name.to_string());
        targets.push(format!("{}: {}", json!(exported), local.name));
        taken.push(exported);
    }
    let load = format!(
        "await __coracle.module({}, {}, {})",
        json!(import.source.value.as_str()),
        json!(taken),
        import_attributes(import)
    );
    let load = whole.map_or(load.clone(), |whole| format!("({whole} = {load})"));
    let text = if targets.is_empty() {
        format!(";({load});")
    } else {
        format!(";({{{}}} = {load});", targets.join(", "))
    };
    (text, names)
}

fn import_attributes(import: &ImportDeclaration<'_>) -> Value {
    let entries = import.with_clause.iter().flat_map(|clause| clause.with_entries.iter());
    let entries = entries.map(|entry| {
        let key = match &entry.key {
            ImportAttributeKey::Identifier(name) => name.name.to_string(),
            ImportAttributeKey::StringLiteral(text) => text.value.to_string(),
        };
        (key, Value::from(entry.value.value.as_str()))
    });
    Value::Object(entries.collect::<Map<_, _>>())
}
