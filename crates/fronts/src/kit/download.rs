//! Responses with the content of a file: all of it, a range of bytes, or a range of lines.

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::{Stream, stream};
use http::{HeaderName, StatusCode, header};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use service::{FileReader, ServiceError};

/// Characters that RFC 5987 encodes in an extended parameter.
const FILE_NAME_ESCAPES: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

/// Sends `length` bytes as a download named like the file.
pub(crate) fn file_response(
    status: StatusCode,
    path: &str,
    length: u64,
    content_range: Option<String>,
    reading: FileReader,
) -> Response {
    content_response(status, path, length, content_range, limit_length(reading, length))
}

/// Like [`file_response`], for pieces that have the announced length together.
pub(crate) fn content_response<S>(
    status: StatusCode,
    path: &str,
    length: u64,
    content_range: Option<String>,
    pieces: S,
) -> Response
where
    S: Stream<Item = Result<Bytes, ServiceError>> + Send + 'static,
{
    let mut headers = vec![
        (header::CONTENT_TYPE, "application/octet-stream".to_owned()),
        (header::CONTENT_LENGTH, length.to_string()),
        (header::CONTENT_DISPOSITION, content_disposition(path)),
        (header::ACCEPT_RANGES, "bytes".to_owned()),
    ];
    headers.extend(content_range.map(|range| (header::CONTENT_RANGE, range)));
    let mut response = (status, Body::from_stream(pieces)).into_response();
    let valid = |(name, value): (HeaderName, String)| Some((name, value.try_into().ok()?));
    response.headers_mut().extend(headers.into_iter().filter_map(valid));
    response
}

/// Sends exactly the announced length, even if the file grows while it is read.
pub(crate) fn limit_length(
    reading: FileReader,
    length: u64,
) -> impl Stream<Item = Result<Bytes, ServiceError>> + Send + 'static {
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
pub(crate) fn parse_range(text: &str, size: u64) -> Option<(u64, u64)> {
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
fn content_disposition(path: &str) -> String {
    let name = path.trim_end_matches('/').rsplit('/').next().unwrap_or_default();
    let plain = |c: char| (' '..='~').contains(&c) && c != '"' && c != '\\';
    if name.chars().all(plain) {
        return format!("attachment; filename=\"{name}\"");
    }
    let fallback: String = name.chars().map(|c| if plain(c) { c } else { '_' }).collect();
    let extended = utf8_percent_encode(name, FILE_NAME_ESCAPES);
    format!("attachment; filename=\"{fallback}\"; filename*=UTF-8''{extended}")
}

/// The requested lines: the first, counted from one, and how many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LineRange {
    pub(crate) first: u64,
    pub(crate) count: u64,
}

/// Sends only these lines.
pub(crate) fn stream_lines(
    reading: FileReader,
    window: LineRange,
) -> impl Stream<Item = Result<Bytes, ServiceError>> + Send {
    stream::unfold((reading, LineSelector::new(window)), |(mut reading, mut picker)| async move {
        loop {
            if picker.is_done() {
                return None;
            }
            match reading.next().await {
                Ok(piece) => {
                    let picked = picker.select_lines(&piece?);
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
struct LineSelector {
    to_skip: u64,
    wanted: u64,
    owes_end: bool,
    owes_return: bool,
}

impl LineSelector {
    fn new(window: LineRange) -> Self {
        Self { to_skip: window.first - 1, wanted: window.count, owes_end: false, owes_return: false }
    }

    fn is_done(&self) -> bool {
        self.wanted == 0
    }

    fn select_lines(&mut self, bytes: &[u8]) -> Vec<u8> {
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
        assert_eq!(content_disposition("/a/b c.txt"), "attachment; filename=\"b c.txt\"");
        assert_eq!(
            content_disposition("/a/é\".txt"),
            "attachment; filename=\"__.txt\"; filename*=UTF-8''%C3%A9%22.txt"
        );
        assert_eq!(content_disposition("x\ny"), "attachment; filename=\"x_y\"; filename*=UTF-8''x%0Ay");
    }

    fn pick(first: u64, count: u64, pieces: &[&[u8]]) -> String {
        let mut picker = LineSelector::new(LineRange { first, count });
        String::from_utf8(pieces.iter().flat_map(|piece| picker.select_lines(piece)).collect()).unwrap()
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
