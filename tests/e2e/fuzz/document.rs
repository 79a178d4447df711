//! The server's own OpenAPI document.

use std::collections::BTreeSet;

use e2e::http::HttpClient;
use serde_json::Value;

/// One method of one path.
pub(super) struct DocumentedOperation {
    pub(super) method: String,
    pub(super) path: String,
    pub(super) query: Vec<DocumentedParameter>,
    /// The schema of its JSON body, without references.
    pub(super) body: Option<Value>,
    pub(super) multipart: bool,
    pub(super) statuses: BTreeSet<u16>,
    pub(super) tag: String,
}

pub(super) struct DocumentedParameter {
    pub(super) name: String,
    pub(super) kind: String,
}

pub(super) fn read_operations(client: &mut HttpClient) -> Vec<DocumentedOperation> {
    let document = client.get("/openapi.json").expect("the server answers").json();
    let mut operations = Vec::new();
    for (path, methods) in document["paths"].as_object().expect("paths are an object") {
        for (method, described) in methods.as_object().expect("methods are an object") {
            operations.push(parse_operation(&document, path, method, described));
        }
    }
    assert!(operations.len() > 100, "the document describes only {} operations", operations.len());
    operations
}

fn parse_operation(document: &Value, path: &str, method: &str, described: &Value) -> DocumentedOperation {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let parameters = described["parameters"].as_array().into_iter().flatten();
    let query = parameters
        .filter(|parameter| parameter["in"] == "query")
        .map(|one| DocumentedParameter { name: text(&one["name"]), kind: text(&one["schema"]["type"]) });
    let content = &described["requestBody"]["content"];
    let body = content["application/json"].get("schema").map(|schema| resolve_references(document, schema));
    let statuses = described["responses"].as_object().into_iter().flatten();
    DocumentedOperation {
        method: method.to_ascii_uppercase(),
        path: path.to_owned(),
        query: query.collect(),
        body,
        multipart: content.get("multipart/form-data").is_some(),
        statuses: statuses.filter_map(|(status, _)| status.parse().ok()).collect(),
        tag: text(&described["tags"][0]),
    }
}

/// The schema with all references replaced by their targets.
fn resolve_references(document: &Value, schema: &Value) -> Value {
    if let Some(name) = schema["$ref"].as_str().and_then(|name| name.rsplit('/').next()) {
        return resolve_references(document, &document["components"]["schemas"][name]);
    }
    match schema {
        Value::Object(fields) => {
            fields.iter().map(|(name, value)| (name.clone(), resolve_references(document, value))).collect()
        }
        other => other.clone(),
    }
}
