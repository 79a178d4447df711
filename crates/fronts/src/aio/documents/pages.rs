//! Pages for people. They run no scripts and load nothing.

use std::sync::LazyLock;

use axum::response::{Html, IntoResponse, Response};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use http::{HeaderValue, header};
use sha2::{Digest, Sha256};

use super::super::operations::offered_operations;
use super::super::target::AioTarget;

const STYLE: &str = "body{font:1rem/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;\
color:#222;background:#fff}th{text-align:left;padding-top:1rem}td{padding-right:1rem;vertical-align:top}\
@media(prefers-color-scheme:dark){body{color:#ddd;background:#181818}a{color:#8bf}}";

/// Allows the style above and nothing else.
static CONTENT_POLICY: LazyLock<HeaderValue> = LazyLock::new(|| {
    let hash = STANDARD.encode(Sha256::digest(STYLE));
    let policy = format!(
        "default-src 'none'; style-src 'sha256-{hash}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    );
    HeaderValue::try_from(policy).expect("base64 is a valid header value")
});

static OPERATION_ROWS: LazyLock<String> = LazyLock::new(|| {
    let mut rows = String::new();
    for (tag, operations) in offered_operations() {
        rows.push_str(&format!("<tr><th colspan=3>{}</th></tr>\n", section_title(tag)));
        for operation in operations {
            let (method, path, summary) = (operation.method(), operation.path(), operation.summary);
            rows.push_str(&format!("<tr><td>{method}<td><code>{path}</code><td>{summary}\n"));
        }
    }
    rows
});

/// The name of a section, without that of this front.
pub(super) fn section_title(tag: &'static str) -> &'static str {
    tag.strip_prefix("aio: ").unwrap_or(tag)
}

/// `GET /` and `GET /index.html`
pub(super) async fn show_home(target: AioTarget) -> Response {
    // The address may have been opened without a slash at its end, so links cannot be relative.
    let mount = escape_html(&target.mount);
    let body = format!(
        "<h1>Sandbox</h1>\n<p>This address is the API of one sandbox. A client gets it as its base URL.</p>\n<ul>\n\
         <li><a href=\"{mount}/terminal\">A terminal</a></li>\n\
         <li><a href=\"{mount}/v1/docs\">The operations</a>, also as <a href=\"{mount}/v1/openapi.json\">OpenAPI</a></li>\n\
         <li><a href=\"{mount}/llms.txt\">A manual for agents</a></li>\n\
         <li><a href=\"{mount}/v1/sandbox\">What is installed</a></li>\n</ul>\n"
    );
    page_response("Sandbox", &body)
}

/// `GET /v1/docs`
pub(super) async fn show_operations(_: AioTarget) -> Response {
    let body = format!(
        "<h1>Operations of this sandbox</h1>\n<p>Also as <a href=openapi.json>OpenAPI</a>, which has the fields of \
         requests.</p>\n<table>\n{}</table>\n",
        OPERATION_ROWS.as_str()
    );
    page_response("Operations", &body)
}

fn page_response(title: &str, body: &str) -> Response {
    let page = format!(
        "<!doctype html>\n<html lang=en>\n<meta charset=utf-8>\n<meta name=viewport content=\"width=device-width\">\n\
         <title>{title}</title>\n<style>{STYLE}</style>\n{body}</html>\n"
    );
    let mut response = Html(page).into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_SECURITY_POLICY, CONTENT_POLICY.clone());
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    // The address in the links opens the sandbox.
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

fn escape_html(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_need_no_escaping() {
        for (tag, operations) in offered_operations() {
            for text in operations.iter().map(|operation| operation.summary).chain([tag]) {
                assert_eq!(escape_html(text), text);
            }
        }
        assert_eq!(escape_html("\"<&"), "&quot;&lt;&amp;");
    }
}
