//! `POST /v1/file/read`: the text of a file, or some of its lines, streamed into JSON.
//!
//! Bytes are not changed: line ends stay as they are. Only the line feed behind the last line of a range is left out, so
//! that adjacent ranges joined by line feeds are the file.

use std::pin::pin;

use axum::response::Response;
use bytes::Bytes;
use futures_util::{Stream, StreamExt, stream};
use serde::Deserialize;
use serde_json::Value;
use service::{FileReader, ServiceError};

use super::FileCall;
use super::failure::FileAction;
use crate::aio::body::AioJson;
use crate::aio::problem::AioProblem;
use crate::aio::target::AioTarget;
use crate::kit::json_text_encoder::json_text_response;

#[derive(Debug, Deserialize)]
pub(in crate::aio) struct ReadFileBody {
    file: Option<String>,
    /// Counted from zero.
    start_line: Option<i64>,
    /// The first line behind the range.
    end_line: Option<i64>,
    sudo: Option<bool>,
}

pub(super) async fn read_file(
    target: AioTarget,
    AioJson(body): AioJson<ReadFileBody>,
) -> Result<Response, AioProblem> {
    let OpenedText { path, reader, is_range } = open_text(target, body).await?;
    let before = r#"{"success":true,"message":"File read successfully","data":{"content":""#.to_owned();
    let after = format!(r#"","file":{}}},"hint":null}}"#, Value::from(path));
    Ok(json_text_response(before, stream_text(reader, is_range), after))
}

/// The text of a file that is held in memory.
pub(in crate::aio) enum ShortText {
    Whole(String),
    /// The file, or the range of lines, is longer than allowed.
    TooLong,
}

/// Reads a file, or some of its lines, into memory.
pub(in crate::aio) async fn read_short_text(
    target: AioTarget,
    body: ReadFileBody,
    max_bytes: usize,
) -> Result<ShortText, AioProblem> {
    let OpenedText { path, reader, is_range } = open_text(target, body).await?;
    let mut pieces = pin!(stream_text(reader, is_range));
    let mut bytes = Vec::new();
    while let Some(piece) = pieces.next().await {
        let piece = piece?;
        if bytes.len() + piece.len() > max_bytes {
            return Ok(ShortText::TooLong);
        }
        bytes.extend_from_slice(&piece);
    }
    let not_text = |_| AioProblem::bad_request(format!("`{path}` is not a text file in UTF-8"));
    String::from_utf8(bytes).map(ShortText::Whole).map_err(not_text)
}

/// A file that is about to be read.
struct OpenedText {
    path: String,
    reader: FileReader,
    /// Only some of its lines are read.
    is_range: bool,
}

async fn open_text(target: AioTarget, body: ReadFileBody) -> Result<OpenedText, AioProblem> {
    let start = line_number(body.start_line, "start_line")?;
    let end = line_number(body.end_line, "end_line")?;
    let call = FileCall::new(target, FileAction::Read, "file", body.file, body.sudo)?;
    let first = start.unwrap_or(0);
    let last = end.map(|end| end.max(first));
    let reader = call.files().read_lines(&call.identity, &call.path, first, last).await;
    let reader = reader.map_err(|error| call.problem(error))?;
    Ok(OpenedText { path: call.path, reader, is_range: start.is_some() || end.is_some() })
}

fn line_number(value: Option<i64>, field: &str) -> Result<Option<u64>, AioProblem> {
    let negative = |_| AioProblem::invalid_field(field, "must be at least 0");
    value.map(u64::try_from).transpose().map_err(negative)
}

/// The content, in a range without the line feed at its end.
fn stream_text(
    reader: FileReader,
    is_range: bool,
) -> impl Stream<Item = Result<Bytes, ServiceError>> + Send + 'static {
    stream::unfold((reader, false), move |(mut reader, owes_line_feed)| async move {
        let piece = match reader.next().await {
            Ok(piece) => piece?,
            Err(error) => return Some((Err(error), (reader, false))),
        };
        let (piece, owes_line_feed) =
            if is_range { defer_line_feed(piece, owes_line_feed) } else { (piece, false) };
        Some((Ok(piece), (reader, owes_line_feed)))
    })
}

/// Holds back a line feed at the end of a piece until another piece follows.
fn defer_line_feed(piece: Bytes, owes_line_feed: bool) -> (Bytes, bool) {
    let ends_line = piece.ends_with(b"\n");
    let kept = piece.slice(..piece.len() - usize::from(ends_line));
    match owes_line_feed {
        true => ([b"\n", &kept[..]].concat().into(), ends_line),
        false => (kept, ends_line),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_last_line_feed_is_left_out() {
        for (text, expected) in [
            ("a\nb\n", "a\nb"),
            ("a\n\n", "a\n"),
            ("a\r\nb\r\n", "a\r\nb\r"),
            ("a", "a"),
            ("\n", ""),
            ("", ""),
        ] {
            for cut in 1..4 {
                let (mut joined, mut owes) = (Vec::new(), false);
                for piece in text.as_bytes().chunks(cut) {
                    let (piece, owes_now) = defer_line_feed(Bytes::copy_from_slice(piece), owes);
                    joined.extend_from_slice(&piece);
                    owes = owes_now;
                }
                assert_eq!(joined, expected.as_bytes(), "{text:?}");
            }
        }
    }
}
