//! Downloads of files: all content, a range of bytes, or a range of lines.

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use http::{HeaderMap, StatusCode, Uri, header};
use service::FileReader;

use super::FileActor;
use super::files::path_of;
use super::problem::ExecdProblem;
use crate::kit::download::{LineRange, file_response, parse_range, stream_lines};
use crate::kit::headers::header_text;
use crate::kit::query::QueryParams;

/// `GET /files/download?path=…[&offset=…&limit=…]`
pub(super) async fn download_file(
    actor: FileActor,
    uri: Uri,
    headers: HeaderMap,
) -> Result<Response, ExecdProblem> {
    let query = QueryParams::from_uri(&uri);
    let path = path_of(&query)?;
    let range = header_text(&headers, "range");
    if let Some(window) = parse_line_range(&query)? {
        if range.is_some() {
            return Err(ExecdProblem::invalid("`offset` and `limit` cannot be combined with `Range`"));
        }
        let reading = read_file(&actor, path, 0, None).await?;
        let kind = [(header::CONTENT_TYPE, "text/plain; charset=utf-8")];
        return Ok((kind, Body::from_stream(stream_lines(reading, window))).into_response());
    }
    let Some(range) = range else {
        let reading = read_file(&actor, path, 0, None).await?;
        let size = reading.size;
        return Ok(file_response(StatusCode::OK, path, size, None, reading));
    };
    let size = read_file(&actor, path, 0, Some(0)).await?.size;
    let Some((start, length)) = parse_range(range, size) else { return Ok(range_not_satisfiable(size)) };
    let reading = read_file(&actor, path, start, Some(length)).await?;
    let content_range = format!("bytes {start}-{}/{size}", start + length - 1);
    Ok(file_response(StatusCode::PARTIAL_CONTENT, path, length, Some(content_range), reading))
}

async fn read_file(
    actor: &FileActor,
    path: &str,
    offset: u64,
    length: Option<u64>,
) -> Result<FileReader, ExecdProblem> {
    Ok(actor.sandbox.files().read_file(actor.as_service_actor(), path, offset, length).await?)
}

fn range_not_satisfiable(size: u64) -> Response {
    let fault = ExecdProblem::new(StatusCode::RANGE_NOT_SATISFIABLE, "UNKNOWN", "range not satisfiable");
    let content_range = [(header::CONTENT_RANGE, format!("bytes */{size}"))];
    (content_range, fault).into_response()
}

fn parse_line_range(query: &QueryParams) -> Result<Option<LineRange>, ExecdProblem> {
    let offset: Option<u64> = query.parse_number("offset").map_err(ExecdProblem::invalid)?;
    let limit: Option<u64> = query.parse_number("limit").map_err(ExecdProblem::invalid)?;
    match (offset, limit) {
        (None, None) => Ok(None),
        (Some(0), _) | (_, Some(0)) => Err(ExecdProblem::invalid("`offset` and `limit` must be at least 1")),
        (first, count) => Ok(Some(LineRange { first: first.unwrap_or(1), count: count.unwrap_or(u64::MAX) })),
    }
}
