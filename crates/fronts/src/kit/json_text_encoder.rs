//! Writes a long text into JSON in pieces, as they are read.

use std::fmt::Display;
use std::pin::Pin;

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::{Stream, StreamExt, stream};
use http::header;

/// Why a long text could not be sent to its end. The connection is then broken.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TextStreamError<E> {
    #[error("the text could not be read")]
    Read(#[source] E),
    #[error("the text is not UTF-8")]
    NotUtf8,
}

/// Escapes a text for a JSON string. Characters may be divided between pieces.
#[derive(Default)]
pub(crate) struct JsonTextEncoder {
    /// The beginning of a character.
    begun: Vec<u8>,
}

/// The text is not UTF-8.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct InvalidText;

impl JsonTextEncoder {
    /// Escapes the next piece.
    pub(crate) fn encode_piece(&mut self, piece: Bytes) -> Result<Bytes, InvalidText> {
        let piece = match self.begun.is_empty() {
            true => piece,
            false => [std::mem::take(&mut self.begun).as_slice(), &piece].concat().into(),
        };
        let whole = match std::str::from_utf8(&piece) {
            Ok(_) => piece.len(),
            Err(error) if error.error_len().is_none() => error.valid_up_to(),
            Err(_) => return Err(InvalidText),
        };
        self.begun.extend_from_slice(&piece[whole..]);
        Ok(escape_text(piece.slice(..whole)))
    }

    /// Must be called at the end of the text.
    pub(crate) fn finish(self) -> Result<(), InvalidText> {
        if self.begun.is_empty() { Ok(()) } else { Err(InvalidText) }
    }
}

/// Escapes what JSON does not allow in a string. A piece without such bytes is not copied.
fn escape_text(text: Bytes) -> Bytes {
    let needs_escape = |byte: &u8| *byte < 0x20 || *byte == b'"' || *byte == b'\\';
    if !text.iter().any(needs_escape) {
        return text;
    }
    let mut escaped = Vec::with_capacity(text.len() + text.len() / 8 + 16);
    let mut rest = &text[..];
    while let Some(at) = rest.iter().position(needs_escape) {
        escaped.extend_from_slice(&rest[..at]);
        match rest[at] {
            b'"' => escaped.extend_from_slice(b"\\\""),
            b'\\' => escaped.extend_from_slice(b"\\\\"),
            b'\n' => escaped.extend_from_slice(b"\\n"),
            b'\r' => escaped.extend_from_slice(b"\\r"),
            b'\t' => escaped.extend_from_slice(b"\\t"),
            byte => escaped.extend_from_slice(format!("\\u{byte:04x}").as_bytes()),
        }
        rest = &rest[at + 1..];
    }
    escaped.extend_from_slice(rest);
    escaped.into()
}

/// A JSON response with a long text between `before` and `after`, which contain the quotes around it.
pub(crate) fn json_text_response<S, E>(before: String, text: S, after: String) -> Response
where
    S: Stream<Item = Result<Bytes, E>> + Send + 'static,
    E: std::error::Error + Send + Sync + Display + 'static,
{
    let state = (Box::pin(text) as Pin<Box<dyn Stream<Item = _> + Send>>, Some(JsonTextEncoder::default()));
    let encoded = stream::unfold(state, |(mut text, encoder)| async move {
        let mut encoder = encoder?;
        let piece = match text.next().await {
            Some(Ok(piece)) => encoder.encode_piece(piece),
            Some(Err(error)) => return Some((Err(TextStreamError::Read(error)), (text, None))),
            None => match encoder.finish() {
                Ok(()) => return None,
                Err(InvalidText) => return Some((Err(TextStreamError::NotUtf8), (text, None))),
            },
        };
        match piece {
            Ok(piece) => Some((Ok(piece), (text, Some(encoder)))),
            Err(InvalidText) => Some((Err(TextStreamError::NotUtf8), (text, None))),
        }
    });
    let edge = |text: String| stream::iter([Ok(Bytes::from(text))]);
    let body = Body::from_stream(edge(before).chain(encoded).chain(edge(after)));
    ([(header::CONTENT_TYPE, "application/json")], body).into_response()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn encode(pieces: &[&[u8]]) -> Result<String, InvalidText> {
        let (mut encoder, mut encoded) = (JsonTextEncoder::default(), Vec::new());
        for piece in pieces {
            encoded.extend_from_slice(&encoder.encode_piece(Bytes::copy_from_slice(piece))?);
        }
        encoder.finish()?;
        Ok(String::from_utf8(encoded).unwrap())
    }

    #[test]
    fn texts_are_escaped_at_every_division() {
        let text = "a\"\\\n\r\t\0\u{1f}é€😀\u{feff}".as_bytes();
        let expected = "a\\\"\\\\\\n\\r\\t\\u0000\\u001fé€😀\u{feff}";
        for at in 0..=text.len() {
            assert_eq!(encode(&[&text[..at], &text[at..]]).as_deref(), Ok(expected), "{at}");
        }
    }

    #[test]
    fn bytes_that_are_not_text_are_refused() {
        for text in [&b"a\xff"[..], b"\xc3", b"\xed\xa0\x80", b"\xf0\x9f\x98a"] {
            for at in 0..=text.len() {
                assert_eq!(encode(&[&text[..at], &text[at..]]), Err(InvalidText), "{text:?} {at}");
            }
        }
    }

    #[tokio::test]
    async fn response_breaks_off_after_an_error() {
        let pieces = stream::iter([Ok(Bytes::from("a\"")), Err(std::io::Error::other("broken"))]);
        let response = json_text_response("{\"text\":\"".to_owned(), pieces, "\"}".to_owned());
        assert!(axum::body::to_bytes(response.into_body(), 1 << 10).await.is_err());
        let pieces = stream::iter([Ok::<_, std::io::Error>(Bytes::from("a\"")), Ok(Bytes::from("b"))]);
        let response = json_text_response("{\"text\":\"".to_owned(), pieces, "\"}".to_owned());
        let body = axum::body::to_bytes(response.into_body(), 1 << 10).await.unwrap();
        assert_eq!(body, "{\"text\":\"a\\\"b\"}");
    }

    proptest! {
        #[test]
        fn encoded_texts_are_parsed_again(text in "\\PC*|[\\x00-\\x7f]*", cut in 1usize..9) {
            let pieces: Vec<_> = text.as_bytes().chunks(cut).collect();
            let encoded = format!("\"{}\"", encode(&pieces).unwrap());
            prop_assert_eq!(serde_json::from_str::<String>(&encoded).unwrap(), text);
        }
    }
}
