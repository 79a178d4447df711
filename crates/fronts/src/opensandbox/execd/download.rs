//! Downloads of files: all content, a range of bytes, or a range of lines.

use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::{Stream, stream};
use http::{HeaderMap, HeaderName, StatusCode, Uri, header};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use service::{Reading, ServiceError};

use super::Actor;
use super::fault::Fault;
use super::files::path_of;
use crate::auth;
use crate::opensandbox::Front;
use crate::opensandbox::query::Query;

/// Characters that RFC 5987 encodes in an extended parameter.
const NOT_A_NAME: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

/// `GET /files/download?path=…[&offset=…&limit=…]`
pub(super) async fn download(
    State(front): State<Front>,
    actor: Actor,
    uri: Uri,
    headers: HeaderMap,
) -> Result<Response, Fault> {
    let query = Query::of(&uri);
    let path = path_of(&query)?;
    let range = auth::text(&headers, "range");
    if let Some(window) = window(&query)? {
        if range.is_some() {
            return Err(Fault::invalid("`offset` and `limit` cannot be combined with `Range`"));
        }
        let reading = read(&front, &actor, path, 0, None).await?;
        let kind = [(header::CONTENT_TYPE, "text/plain; charset=utf-8")];
        return Ok((kind, Body::from_stream(lines(reading, window))).into_response());
    }
    let Some(range) = range else {
        let reading = read(&front, &actor, path, 0, None).await?;
        let size = reading.size;
        return Ok(content(StatusCode::OK, path, size, None, reading));
    };
    let size = read(&front, &actor, path, 0, Some(0)).await?.size;
    let Some((start, length)) = parse_range(range, size) else { return Ok(unsatisfiable(size)) };
    let reading = read(&front, &actor, path, start, Some(length)).await?;
    let content_range = format!("bytes {start}-{}/{size}", start + length - 1);
    Ok(content(StatusCode::PARTIAL_CONTENT, path, length, Some(content_range), reading))
}

async fn read(
    front: &Front,
    actor: &Actor,
    path: &str,
    offset: u64,
    length: Option<u64>,
) -> Result<Reading, Fault> {
    Ok(front.service.read(&actor.owner, &actor.id, actor.by(), path, offset, length).await?)
}

fn content(
    status: StatusCode,
    path: &str,
    length: u64,
    content_range: Option<String>,
    reading: Reading,
) -> Response {
    let mut headers = vec![
        (header::CONTENT_TYPE, "application/octet-stream".to_owned()),
        (header::CONTENT_LENGTH, length.to_string()),
        (header::CONTENT_DISPOSITION, disposition(path)),
        (header::ACCEPT_RANGES, "bytes".to_owned()),
    ];
    headers.extend(content_range.map(|range| (header::CONTENT_RANGE, range)));
    let mut response = (status, Body::from_stream(at_most(reading, length))).into_response();
    let valid = |(name, value): (HeaderName, String)| Some((name, value.try_into().ok()?));
    response.headers_mut().extend(headers.into_iter().filter_map(valid));
    response
}

fn unsatisfiable(size: u64) -> Response {
    let fault = Fault::new(StatusCode::RANGE_NOT_SATISFIABLE, "UNKNOWN", "range not satisfiable");
    let content_range = [(header::CONTENT_RANGE, format!("bytes */{size}"))];
    (content_range, fault).into_response()
}

/// Sends exactly the announced length, even if the file grows while it is read.
fn at_most(reading: Reading, length: u64) -> impl Stream<Item = Result<Bytes, ServiceError>> + Send {
    stream::unfold((reading, length), |(mut reading, left)| async move {
        let mut bytes = match reading.next().await {
            Ok(piece) => piece?,
            Err(error) => return Some((Err(error), (reading, 0))),
        };
        bytes.truncate(usize::try_from(left).unwrap_or(usize::MAX));
        let left = left - bytes.len() as u64;
        (!bytes.is_empty()).then_some((Ok(bytes), (reading, left)))
    })
}

/// Parses the first range of a `Range` header as start and length; `None` if it is unsatisfiable.
fn parse_range(text: &str, size: u64) -> Option<(u64, u64)> {
    let (first, last) = text.trim().strip_prefix("bytes=")?.split(',').next()?.trim().split_once('-')?;
    let number =
        |text: &str| text.bytes().all(|b| b.is_ascii_digit()).then(|| text.parse().unwrap_or(u64::MAX));
    let (start, end) = match (first, last) {
        ("", "") => return None,
        ("", suffix) => (size.saturating_sub(number(suffix)?), size),
        (first, "") => (number(first)?, size),
        (first, last) => (number(first)?, number(last)?.saturating_add(1).min(size)),
    };
    (start < end).then(|| (start, end - start))
}

/// Returns `attachment` with the base name in plain and, if necessary, extended form.
fn disposition(path: &str) -> String {
    let name = path.trim_end_matches('/').rsplit('/').next().unwrap_or_default();
    let plain = |c: char| (' '..='~').contains(&c) && c != '"' && c != '\\';
    if name.chars().all(plain) {
        return format!("attachment; filename=\"{name}\"");
    }
    let fallback: String = name.chars().map(|c| if plain(c) { c } else { '_' }).collect();
    let extended = utf8_percent_encode(name, NOT_A_NAME);
    format!("attachment; filename=\"{fallback}\"; filename*=UTF-8''{extended}")
}

/// The requested lines: the first, counted from one, and how many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Window {
    first: u64,
    count: u64,
}

fn window(query: &Query) -> Result<Option<Window>, Fault> {
    let offset: Option<u64> = query.number("offset").map_err(Fault::invalid)?;
    let limit: Option<u64> = query.number("limit").map_err(Fault::invalid)?;
    match (offset, limit) {
        (None, None) => Ok(None),
        (Some(0), _) | (_, Some(0)) => Err(Fault::invalid("`offset` and `limit` must be at least 1")),
        (first, count) => Ok(Some(Window { first: first.unwrap_or(1), count: count.unwrap_or(u64::MAX) })),
    }
}

fn lines(reading: Reading, window: Window) -> impl Stream<Item = Result<Bytes, ServiceError>> + Send {
    stream::unfold((reading, Picker::new(window)), |(mut reading, mut picker)| async move {
        loop {
            if picker.is_done() {
                return None;
            }
            match reading.next().await {
                Ok(piece) => {
                    let picked = picker.pick(&piece?);
                    if !picked.is_empty() {
                        return Some((Ok(Bytes::from(picked)), (reading, picker)));
                    }
                }
                Err(error) => {
                    picker.wanted = 0;
                    return Some((Err(error), (reading, picker)));
                }
            }
        }
    })
}

/// Selects lines from a stream. A line end is emitted only once another line follows, and a carriage
/// return only once it turns out not to be part of a line end.
struct Picker {
    to_skip: u64,
    wanted: u64,
    owes_end: bool,
    owes_return: bool,
}

impl Picker {
    fn new(window: Window) -> Self {
        Self { to_skip: window.first - 1, wanted: window.count, owes_end: false, owes_return: false }
    }

    fn is_done(&self) -> bool {
        self.wanted == 0
    }

    fn pick(&mut self, bytes: &[u8]) -> Vec<u8> {
        let mut picked = Vec::new();
        for piece in bytes.split_inclusive(|byte| *byte == b'\n') {
            let line = piece.strip_suffix(b"\n");
            if self.to_skip > 0 {
                self.to_skip -= u64::from(line.is_some());
            } else if self.wanted > 0 {
                if std::mem::take(&mut self.owes_end) {
                    picked.push(b'\n');
                }
                let text = line.unwrap_or(piece);
                if std::mem::take(&mut self.owes_return) && !text.is_empty() {
                    picked.push(b'\r');
                }
                let kept = text.strip_suffix(b"\r").unwrap_or(text);
                picked.extend_from_slice(kept);
                self.owes_return = line.is_none() && kept != text;
                self.owes_end = line.is_some();
                self.wanted -= u64::from(line.is_some());
            }
        }
        picked
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_clamped_to_the_file() {
        for (text, expected) in [
            ("bytes=0-3", Some((0, 4))),
            ("bytes=2-", Some((2, 8))),
            ("bytes=-3", Some((7, 3))),
            ("bytes=-99", Some((0, 10))),
            ("bytes=5-99999999999999999999999", Some((5, 5))),
            ("bytes=0-18446744073709551615", Some((0, 10))),
            ("bytes=0-1,4-5", Some((0, 2))),
            ("bytes=10-", None),
            ("bytes=-0", None),
            ("bytes=3-2", None),
            ("bytes=-", None),
            ("bytes=a-b", None),
            ("lines=1-2", None),
        ] {
            assert_eq!(parse_range(text, 10), expected, "{text}");
        }
        assert_eq!(parse_range("bytes=0-", 0), None);
    }

    #[test]
    fn special_characters_in_names_are_encoded() {
        assert_eq!(disposition("/a/b c.txt"), "attachment; filename=\"b c.txt\"");
        assert_eq!(
            disposition("/a/é\".txt"),
            "attachment; filename=\"__.txt\"; filename*=UTF-8''%C3%A9%22.txt"
        );
        assert_eq!(disposition("x\ny"), "attachment; filename=\"x_y\"; filename*=UTF-8''x%0Ay");
    }

    fn pick(first: u64, count: u64, pieces: &[&[u8]]) -> String {
        let mut picker = Picker::new(Window { first, count });
        String::from_utf8(pieces.iter().flat_map(|piece| picker.pick(piece)).collect()).unwrap()
    }

    #[test]
    fn selected_lines_have_no_trailing_newline() {
        assert_eq!(pick(1, 2, &[b"a\nb\nc\n"]), "a\nb");
        assert_eq!(pick(2, 9, &[b"a\nb\n", b"c\n"]), "b\nc");
        assert_eq!(pick(2, u64::MAX, &[b"a", b"a\nb", b"b\n\n"]), "bb\n");
        assert_eq!(pick(3, 1, &[b"a\nb\nc"]), "c");
        assert_eq!(pick(9, 1, &[b"a\nb\nc"]), "");
    }

    #[test]
    fn carriage_return_before_newline_is_removed() {
        assert_eq!(pick(1, 2, &[b"a\r\nb\r\nc\r\n"]), "a\nb");
        assert_eq!(pick(1, 9, &[b"a\r", b"\nb\r", b"c\r\n", b"\r\nd\r"]), "a\nb\rc\n\nd");
        assert_eq!(pick(2, 9, &[b"a\r", b"\n\rb\r", b"\n"]), "\rb");
    }
}
