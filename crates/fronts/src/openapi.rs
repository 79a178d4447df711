//! The server's OpenAPI document.
//!
//! Each front keeps a table of its operations next to its routes, and a test checks that they agree:
//! it fails if a route is not described, or a described one does not exist. Body schemas are JSON, in
//! the front's `openapi.json`.

use std::sync::LazyLock;

use axum::Router;
use axum::response::{Html, IntoResponse};
use axum::routing::get;
use http::header;
use serde_json::{Map, Value, json};

use crate::registry::FRONTS;

/// One method of one path, in a compact notation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ApiOperation {
    /// `GET /v1/sandboxes/{id}`, below the prefix of its table.
    pub(crate) at: &'static str,
    pub(crate) summary: &'static str,
    /// Names of query parameters, separated by blanks; `*` follows one that may be repeated, `!` one
    /// that is required, and `:int` or `:bool` one that is not a string.
    pub(crate) query: &'static str,
    /// The schema of its body: empty, a name, a name with `?` if the body is optional, `multipart:` and a
    /// name, or `binary`.
    pub(crate) body: &'static str,
    /// Statuses separated by blanks, in addition to those that every operation has.
    pub(crate) answers: &'static str,
}

/// Builds an [`ApiOperation`]; keeps the tables short.
pub(crate) const fn operation(
    at: &'static str,
    summary: &'static str,
    query: &'static str,
    body: &'static str,
    answers: &'static str,
) -> ApiOperation {
    ApiOperation { at, summary, query, body, answers }
}

/// A group of operations below one path.
pub(crate) struct ApiSection {
    pub(crate) tag: &'static str,
    pub(crate) prefix: &'static str,
    pub(crate) operations: &'static [ApiOperation],
    /// Whether they need no key.
    pub(crate) open: bool,
}

impl ApiOperation {
    pub(crate) fn method(&self) -> &'static str {
        self.at.split_once(' ').map_or("", |(method, _)| method)
    }

    pub(crate) fn path(&self) -> &'static str {
        self.at.split_once(' ').map_or("", |(_, path)| path)
    }

    fn describe(&self, section: &ApiSection) -> Value {
        let path = format!("{}{}", section.prefix, self.path());
        let in_path = path.split('/').filter_map(|part| part.strip_prefix('{')?.strip_suffix('}'));
        let in_path = in_path
            .map(|name| json!({"name": name, "in": "path", "required": true, "schema": {"type": "string"}}));
        let in_query = self.query.split(' ').filter(|word| !word.is_empty()).map(query_parameter);
        let mut described = json!({
            "summary": self.summary,
            "tags": [section.tag],
            "parameters": in_path.chain(in_query).collect::<Vec<_>>(),
            "responses": self.describe_responses(section),
        });
        if section.open {
            described["security"] = json!([]);
        }
        if let Some(body) = self.request_body() {
            described["requestBody"] = body;
        }
        described
    }

    fn request_body(&self) -> Option<Value> {
        let name = self.body.trim_end_matches('?');
        match name {
            "" => None,
            name if name.starts_with("multipart:") => {
                let schema = json!({"$ref": format!("#/components/schemas/{}", &name["multipart:".len()..])});
                Some(json!({"required": true, "content": {"multipart/form-data": {"schema": schema}}}))
            }
            "binary" => {
                let schema = json!({"type": "string", "format": "binary"});
                Some(json!({"required": true, "content": {"application/octet-stream": {"schema": schema}}}))
            }
            name => {
                let schema = json!({"$ref": format!("#/components/schemas/{name}")});
                let required = !self.body.ends_with('?');
                Some(json!({"required": required, "content": {"application/json": {"schema": schema}}}))
            }
        }
    }

    /// Its own statuses, and those that middleware may answer with.
    fn describe_responses(&self, section: &ApiSection) -> Map<String, Value> {
        let of_all: &[&str] = if section.open { &["403", "429"] } else { &["401", "403", "429"] };
        let of_bodies: &[&str] = if self.body.is_empty() { &[] } else { &["400", "408", "413"] };
        let own = self.answers.split(' ').filter(|status| !status.is_empty());
        let all = own.chain(of_all.iter().copied()).chain(of_bodies.iter().copied());
        all.map(|status| (status.to_owned(), describe_response(status))).collect()
    }
}

fn query_parameter(word: &str) -> Value {
    let (name, kind) = word.split_once(':').unwrap_or((word, "string"));
    let kind = match kind.trim_end_matches('!') {
        "int" => "integer",
        "bool" => "boolean",
        other => other,
    };
    let plain = name.trim_end_matches(['*', '!']);
    let schema = json!({ "type": kind });
    let schema = if name.ends_with('*') { json!({"type": "array", "items": schema}) } else { schema };
    json!({"name": plain, "in": "query", "required": word.ends_with('!'), "schema": schema})
}

fn describe_response(status: &str) -> Value {
    let description = match status {
        "101" => "protocol upgraded",
        "200" | "202" | "201" | "204" | "206" => "success",
        _ => {
            let schema = json!({"$ref": "#/components/schemas/Error"});
            return json!({"description": "error", "content": {"application/json": {"schema": schema}}});
        }
    };
    json!({ "description": description })
}

/// What a front adds to the document.
pub(crate) struct OpenApiPart {
    pub(crate) sections: Vec<ApiSection>,
    /// Its body schemas, as a JSON object.
    pub(crate) schemas: &'static str,
    /// Its ways to authenticate: a name for each, and the header. Fronts may share one.
    pub(crate) security: &'static [(&'static str, &'static str)],
    /// A remark about all its paths, if there is one.
    pub(crate) remark: &'static str,
}

fn all_parts() -> impl Iterator<Item = OpenApiPart> {
    FRONTS.iter().map(|front| (front.openapi)())
}

/// Returns all sections of the document.
fn all_sections() -> Vec<ApiSection> {
    let own = ApiSection { tag: "document", prefix: "", operations: DOCUMENT_OPERATIONS, open: true };
    std::iter::once(own).chain(all_parts().flat_map(|part| part.sections)).collect()
}

fn all_schemas() -> Map<String, Value> {
    let mut all = Map::new();
    for part in all_parts() {
        let schemas = serde_json::from_str::<Map<String, Value>>(part.schemas);
        all.extend(schemas.expect("a test parses the schemas"));
    }
    all.insert(
        "Error".to_owned(),
        json!({"type": "object", "required": ["code", "message"], "properties": {
            "code": {"type": "string"}, "message": {"type": "string"}}}),
    );
    all
}

/// Describes every operation of some sections, by path and method.
pub(crate) fn describe_paths(sections: &[ApiSection]) -> Map<String, Value> {
    let mut paths = Map::new();
    for section in sections {
        for operation in section.operations {
            let path = format!("{}{}", section.prefix, operation.path());
            let methods = paths.entry(path).or_insert_with(|| json!({}));
            methods[operation.method().to_ascii_lowercase()] = operation.describe(section);
        }
    }
    paths
}

fn build_document() -> Value {
    let paths = describe_paths(&all_sections());
    let (security, schemes) = describe_security();
    let remarks: Vec<_> = all_parts().map(|part| part.remark).filter(|remark| !remark.is_empty()).collect();
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Coracle",
            "version": env!("CARGO_PKG_VERSION"),
            "description": remarks.join(" "),
        },
        "security": security,
        "paths": paths,
        "components": {
            "schemas": all_schemas(),
            "securitySchemes": schemes,
        },
    })
}

/// Returns the alternatives by which a request may authenticate, and what each of them is.
fn describe_security() -> (Vec<Value>, Map<String, Value>) {
    let (mut alternatives, mut schemes) = (Vec::new(), Map::new());
    for (name, header) in all_parts().flat_map(|part| part.security) {
        if !schemes.contains_key(*name) {
            alternatives.push(json!({ *name: [] }));
            schemes.insert((*name).to_owned(), json!({"type": "apiKey", "in": "header", "name": header}));
        }
    }
    (alternatives, schemes)
}

/// The paths of the document itself.
pub(crate) const DOCUMENT_PATHS: [&str; 2] = ["/openapi.json", "/docs"];

const DOCUMENT_OPERATIONS: &[ApiOperation] = &[
    operation("GET /openapi.json", "This document", "", "", "200"),
    operation("GET /docs", "This document as HTML", "", "", "200"),
];

/// Routes that serve the document, without a key.
pub(crate) fn document_router() -> Router {
    static DOCUMENT: LazyLock<String> = LazyLock::new(|| build_document().to_string());
    static PAGE: LazyLock<String> = LazyLock::new(render_page);
    let json = || async { ([(header::CONTENT_TYPE, "application/json")], DOCUMENT.as_str()).into_response() };
    let [document, page] = DOCUMENT_PATHS;
    Router::new().route(document, get(json)).route(page, get(|| async { Html(PAGE.as_str()) }))
}

/// Renders all operations as an HTML page without scripts.
fn render_page() -> String {
    let mut rows = String::new();
    for section in all_sections() {
        rows.push_str(&format!("<tr><th colspan=3>{}</th></tr>\n", section.tag));
        for operation in section.operations {
            let (method, path) = (operation.method(), operation.path());
            let cells = [method, &format!("<code>{}{path}</code>", section.prefix), operation.summary];
            rows.push_str(&format!("<tr><td>{}</td></tr>\n", cells.join("</td><td>")));
        }
    }
    format!(
        "<!doctype html><meta charset=utf-8><title>Coracle</title><h1>Coracle</h1>\
         <p>Also available as <a href=/openapi.json>OpenAPI JSON</a>.</p><table>{rows}</table>"
    )
}

#[cfg(test)]
pub(crate) mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use axum::routing::MethodRouter;

    use super::*;

    /// Returns the methods of a route; `None` if it accepts any.
    pub(crate) fn route_methods<S>(route: &MethodRouter<S>) -> Option<BTreeSet<String>> {
        let shown = format!("{route:?}");
        let (_, allowed) = shown.split_once("allow_header: Bytes(b\"")?;
        let (allowed, _) = allowed.split_once('"')?;
        // Routes that accept GET also accept HEAD.
        Some(allowed.split(',').filter(|method| *method != "HEAD").map(str::to_owned).collect())
    }

    fn path_matches(pattern: &str, path: &str) -> bool {
        let (mut pattern, mut path) = (pattern.split('/'), path.split('/'));
        loop {
            match (pattern.next(), path.next()) {
                (None, None) => return true,
                (Some(part), Some(_)) if part.starts_with("{*") => return true,
                (Some(one), Some(other)) if one == other || one.starts_with('{') => {}
                _ => return false,
            }
        }
    }

    /// Asserts that the described operations match the routes.
    pub(crate) fn assert_operations_match<S>(
        operations: &[ApiOperation],
        routes: &[(String, MethodRouter<S>)],
    ) {
        let mut described: BTreeMap<&str, BTreeSet<String>> = BTreeMap::new();
        for operation in operations {
            let methods = described.entry(operation.path()).or_default();
            assert!(methods.insert(operation.method().to_owned()), "`{}` is described twice", operation.at);
        }
        for (path, found) in &described {
            let mut fitting = routes.iter().filter(|(pattern, _)| path_matches(pattern, path));
            let exact = fitting.clone().find(|(pattern, _)| !pattern.contains("{*"));
            let (pattern, route) =
                exact.or(fitting.next()).unwrap_or_else(|| panic!("no route for `{path}`"));
            if let Some(taken) = route_methods(route) {
                assert_eq!(*found, taken, "the description of `{path}` differs from `{pattern}`");
            }
        }
        for (pattern, _) in routes {
            assert!(described.keys().any(|path| path_matches(pattern, path)), "`{pattern}` is not described");
        }
    }

    #[test]
    fn every_referenced_schema_exists() {
        let document = build_document();
        let text = document.to_string();
        let named = text.split("#/components/schemas/").skip(1).filter_map(|rest| rest.split('"').next());
        for name in named {
            assert!(document["components"]["schemas"][name].is_object(), "schema `{name}` is missing");
        }
    }

    #[test]
    fn table_notation_expands_into_the_document() {
        let compact = operation("GET /x/{id}", "", "a* b:int c! d:bool!", "Name?", "200");
        let section = ApiSection { tag: "t", prefix: "/p", operations: &[], open: false };
        let described = compact.describe(&section);
        let parameters = described["parameters"].as_array().unwrap();
        let shown: Vec<_> = parameters
            .iter()
            .map(|it| {
                (it["name"].as_str().unwrap(), it["schema"]["type"].as_str().unwrap(), it["required"] == true)
            })
            .collect();
        let expected = [
            ("id", "string", true),
            ("a", "array", false),
            ("b", "integer", false),
            ("c", "string", true),
            ("d", "boolean", true),
        ];
        assert_eq!(shown, expected);
        assert_eq!(described["requestBody"]["required"], false);
        assert!(described["responses"]["413"].is_object() && described["responses"]["401"].is_object());
    }
}
