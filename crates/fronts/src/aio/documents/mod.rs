//! Descriptions of the API of one sandbox, for programs, people and agents. All come from the table of operations, so
//! they show what is offered and nothing else. Paths in them are below the address of the sandbox.

mod manual;
mod openapi_document;
mod pages;

use axum::response::{IntoResponse, Response};
use axum::routing::get;
use http::{HeaderValue, header};

use super::routes::AioRoute;
use super::target::AioTarget;

pub(super) fn routes() -> Vec<AioRoute> {
    vec![
        ("/", get(pages::show_home)),
        ("/index.html", get(pages::show_home)),
        ("/v1/docs", get(pages::show_operations)),
        ("/v1/openapi.json", get(get_openapi)),
        ("/llms.txt", get(get_manual)),
    ]
}

async fn get_openapi(_: AioTarget) -> Response {
    text_response("application/json", openapi_document::DOCUMENT.as_str())
}

async fn get_manual(_: AioTarget) -> Response {
    text_response("text/plain; charset=utf-8", manual::MANUAL.as_str())
}

fn text_response(kind: &'static str, text: &'static str) -> Response {
    let mut response = text.into_response();
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    response.headers_mut().insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    response
}
