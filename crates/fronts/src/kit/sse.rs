//! Server-sent events.

use std::convert::Infallible;
use std::fmt::Display;

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::Stream;
use http::header;

/// Builds a response that streams `frames`.
pub(crate) fn event_stream_response<S>(frames: S) -> Response
where
    S: Stream<Item = Result<Bytes, Infallible>> + Send + 'static,
{
    let headers = [
        (header::CONTENT_TYPE, "text/event-stream"),
        (header::CACHE_CONTROL, "no-cache"),
        (header::CONNECTION, "keep-alive"),
        (header::HeaderName::from_static("x-accel-buffering"), "no"),
    ];
    (headers, Body::from_stream(frames)).into_response()
}

/// Formats one event of the standard form. `data` must be one line.
pub(crate) fn format_event(id: Option<u64>, kind: &str, data: impl Display) -> String {
    let id = id.map(|id| format!("id: {id}\n")).unwrap_or_default();
    format!("{id}event: {kind}\ndata: {data}\n\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_end_with_a_blank_line() {
        assert_eq!(format_event(Some(7), "phase", "{}"), "id: 7\nevent: phase\ndata: {}\n\n");
        assert_eq!(format_event(None, "missed", "1"), "event: missed\ndata: 1\n\n");
    }
}
