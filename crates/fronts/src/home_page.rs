//! The page that a person sees who opens the address of the server in a browser.
//!
//! It needs no key, so it says only the version and whether the backend answers. It loads nothing and runs nothing.

use std::sync::LazyLock;

use axum::extract::Request;
use axum::response::{Html, IntoResponse, Response};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use http::{HeaderValue, Method, header};
use sha2::{Digest, Sha256};

use crate::kit::headers::header_text;

const STYLE: &str = "body{font:1rem/1.5 system-ui,sans-serif;max-width:40rem;margin:3rem auto;padding:0 1rem;\
color:#222;background:#fff}code{background:#eee;padding:0 .2em}\
@media(prefers-color-scheme:dark){body{color:#ddd;background:#181818}code{background:#333}a{color:#8bf}}";

/// What the page says about the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ServerState {
    BackendAnswers,
    /// The backend does not answer, so no sandbox can be made.
    NoBackend,
}

fn write_page(state: ServerState) -> String {
    let state = match state {
        ServerState::BackendAnswers => {
            "It works: it accepts requests, and the process that makes sandboxes answers."
        }
        ServerState::NoBackend => {
            "<strong>It does not work fully:</strong> it accepts requests, but the process that makes sandboxes does not answer. \
             The server's log says why; commands that run continue."
        }
    };
    format!(
        "<!doctype html>\n<html lang=en>\n<meta charset=utf-8>\n<meta name=viewport content=\"width=device-width\">\n\
         <title>Coracle</title>\n<style>{STYLE}</style>\n<h1>Coracle</h1>\n\
         <p>This is a Coracle server, version {version}. It runs code in sandboxes for AI agents and other programs.</p>\n\
         <p>{state} Programs ask <a href=\"/health\"><code>/health</code></a>.</p>\n\
         <ul>\n<li><a href=\"/docs\">The API</a>, as a list of its operations</li>\n\
         <li><a href=\"/openapi.json\">The same as OpenAPI</a>, for programs</li>\n\
         <li>The manual is in the directory <code>docs</code> of the release; <code>coracle help</code> lists the commands</li>\n\
         </ul>\n</html>\n",
        version = env!("CARGO_PKG_VERSION"),
    )
}

/// Allows the style above and nothing else.
static CONTENT_POLICY: LazyLock<HeaderValue> = LazyLock::new(|| {
    let hash = STANDARD.encode(Sha256::digest(STYLE));
    let policy = format!(
        "default-src 'none'; style-src 'sha256-{hash}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    );
    HeaderValue::try_from(policy).expect("base64 is a valid header value")
});

/// Whether this request comes from a person with a browser. Programs ask for JSON, or for anything.
pub(crate) fn is_wanted_by(request: &Request) -> bool {
    let accepts = header_text(request.headers(), header::ACCEPT.as_str()).unwrap_or_default();
    let wants_html = accepts.split(',').any(|kind| {
        let kind = kind.split(';').next().unwrap_or_default();
        kind.trim().eq_ignore_ascii_case("text/html")
    });
    request.uri().path() == "/" && matches!(*request.method(), Method::GET | Method::HEAD) && wants_html
}

pub(crate) fn build_response(state: ServerState) -> Response {
    let mut response = Html(write_page(state)).into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_SECURITY_POLICY, CONTENT_POLICY.clone());
    for (name, value) in [
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CACHE_CONTROL, "no-store"),
        (header::VARY, "accept"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    response
}
