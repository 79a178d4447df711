//! `/v1/openapi.json`: the API of one sandbox.

use std::sync::LazyLock;

use serde_json::{Map, Value, json};

use super::super::operations::{SCHEMAS, offered_operations};
use crate::openapi::{ApiSection, describe_paths};

/// The same for every sandbox, because paths are relative to where the document is.
pub(super) static DOCUMENT: LazyLock<String> = LazyLock::new(|| build_document().to_string());

fn build_document() -> Value {
    let section = |(tag, operations)| ApiSection { tag, prefix: "", operations, open: true };
    let sections: Vec<_> = offered_operations().into_iter().map(section).collect();
    let mut schemas: Map<String, Value> = serde_json::from_str(SCHEMAS).expect("a test parses the schemas");
    schemas.insert("Error".to_owned(), error_schema());
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Sandbox",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "The API of AIO Sandbox for one sandbox of Coracle. Responses are \
                `{success, message, data, hint}`; a body that fails validation is answered with 422 and `detail`.",
        },
        "servers": [{"url": ".."}],
        "paths": describe_paths(&sections),
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "key": {"type": "apiKey", "in": "header", "name": "X-AIO-API-Key"},
                "bearer": {"type": "http", "scheme": "bearer", "description": "the key, or an RS256 token"},
                "ticket": {"type": "apiKey", "in": "query", "name": "ticket"},
            },
        },
    })
}

fn error_schema() -> Value {
    json!({"type": "object", "required": ["success", "message"], "properties": {
        "success": {"const": false},
        "message": {"type": "string"},
        "data": {},
        "hint": {"type": ["string", "null"]},
    }})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn document_has_plain_paths_and_all_their_schemas() {
        let document = build_document();
        let paths = document["paths"].as_object().unwrap();
        assert!(paths.contains_key("/v1/shell/exec") && paths.contains_key("/"));
        assert!(paths.keys().all(|path| !path.starts_with("/aio")));
        // What is answered with 501 is not offered.
        assert!(!paths.contains_key("/v1/browser/{path}"));
        let text = document.to_string();
        for name in text.split("#/components/schemas/").skip(1).filter_map(|rest| rest.split('"').next()) {
            assert!(document["components"]["schemas"][name].is_object(), "schema `{name}` is missing");
        }
    }
}
