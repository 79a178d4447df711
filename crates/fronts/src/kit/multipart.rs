//! Parses `multipart/form-data` as a stream, without holding more than a chunk of it.
//!
//! ```text
//! --B CRLF headers CRLF CRLF content CRLF --B CRLF … CRLF --B--
//! ```
//! The parser of the usual crate reads everything the socket has before it parses any of it, which is
//! not acceptable for files of gigabytes.

use bytes::{Buf, Bytes};
use futures_util::{Stream, StreamExt};
use memchr::memmem;

/// The maximum size of a part's headers.
const MAX_PART_HEAD_BYTES: usize = 16 << 10;
const MAX_BOUNDARY_LENGTH: usize = 200;

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum MultipartError {
    #[error("content type has no multipart boundary")]
    NoBoundary,
    #[error("failed to read the request body")]
    Broken,
    #[error("request body ended inside a part")]
    Unfinished,
    #[error("headers of a part exceed {MAX_PART_HEAD_BYTES} bytes")]
    LongHead,
    #[error("headers of a part are malformed")]
    BadHead,
}

/// The headers of a part, as far as fronts use them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PartHead {
    pub(crate) name: String,
    /// The file name as it was sent; it may contain a path.
    file_name: Option<String>,
}

/// How much of a part's file name a front takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(test), expect(dead_code, reason = "no front that takes whole names is compiled in"))]
pub(crate) enum FileNameForm {
    /// Only what follows the last slash, since clients may send paths of their own machine.
    LastSegment,
    /// The whole name: `dir/sub/a.txt` keeps its directories. It is not checked; `..` and a leading
    /// slash are left to the sandbox, which resolves paths within itself.
    FullPath,
}

impl PartHead {
    /// The name of the part's file; `None` if the part is not a file.
    pub(crate) fn file_name(&self, form: FileNameForm) -> Option<&str> {
        let whole = self.file_name.as_deref()?;
        let name = match form {
            FileNameForm::LastSegment => whole.rsplit('/').next().unwrap_or(whole),
            FileNameForm::FullPath => whole,
        };
        Some(name).filter(|name| !name.is_empty())
    }
}

/// A streaming multipart parser.
pub(crate) struct MultipartReader<S> {
    body: S,
    /// Received bytes that were not consumed yet.
    buffer: Bytes,
    /// The delimiter between parts: a line end, two dashes, the boundary.
    delimiter: memmem::Finder<'static>,
    inside: bool,
}

impl<S, E> MultipartReader<S>
where
    S: Stream<Item = Result<Bytes, E>> + Unpin,
{
    pub(crate) fn new(content_type: &str, body: S) -> Result<Self, MultipartError> {
        let boundary = parse_boundary(content_type).ok_or(MultipartError::NoBoundary)?;
        let delimiter = memmem::Finder::new(&[b"\r\n--", boundary.as_bytes()].concat()).into_owned();
        // The first delimiter may lack the line end before it; adding one makes it like the others.
        let buffer = Bytes::from_static(b"\r\n");
        Ok(Self { body, buffer, delimiter, inside: true })
    }

    /// Advances to the next part, skipping the rest of the current one, and returns its headers. `None`
    /// after the last.
    pub(crate) async fn next_part(&mut self) -> Result<Option<PartHead>, MultipartError> {
        while self.inside {
            self.next_chunk().await?;
        }
        while self.buffer.len() < 2 {
            self.read_more().await?;
        }
        if self.buffer.starts_with(b"--") {
            return Ok(None);
        }
        let end = loop {
            if let Some(end) = memmem::find(&self.buffer, b"\r\n\r\n") {
                break end;
            }
            if self.buffer.len() > MAX_PART_HEAD_BYTES {
                return Err(MultipartError::LongHead);
            }
            self.read_more().await?;
        };
        let head = self.buffer.split_to(end + 4);
        self.inside = true;
        let head = std::str::from_utf8(&head).ok().ok_or(MultipartError::BadHead)?;
        parse_part_head(head).map(Some).ok_or(MultipartError::BadHead)
    }

    /// Returns the next chunk of the current part's content; `None` at its end.
    pub(crate) async fn next_chunk(&mut self) -> Result<Option<Bytes>, MultipartError> {
        loop {
            if !self.inside {
                return Ok(None);
            }
            match self.delimiter.find(&self.buffer) {
                Some(0) => {
                    self.buffer.advance(self.delimiter.needle().len());
                    self.inside = false;
                }
                Some(end) => return Ok(Some(self.buffer.split_to(end))),
                None => match self.buffer.len() - self.begun_delimiter() {
                    0 => self.read_more().await?,
                    sure => return Ok(Some(self.buffer.split_to(sure))),
                },
            }
        }
    }

    /// Returns how many of the last bytes may be the start of a delimiter.
    fn begun_delimiter(&self) -> usize {
        let delimiter = self.delimiter.needle();
        let longest = (delimiter.len() - 1).min(self.buffer.len());
        let begun = |length: &usize| self.buffer.ends_with(&delimiter[..*length]);
        (1..=longest).rev().find(begun).unwrap_or(0)
    }

    /// Reads more of the body. Content is hardly ever copied here: only headers, or the start of a
    /// delimiter, have to wait for more.
    async fn read_more(&mut self) -> Result<(), MultipartError> {
        match self.body.next().await {
            Some(Ok(bytes)) if self.buffer.is_empty() => self.buffer = bytes,
            Some(Ok(bytes)) => self.buffer = [self.buffer.as_ref(), &bytes].concat().into(),
            Some(Err(_)) => return Err(MultipartError::Broken),
            None => return Err(MultipartError::Unfinished),
        }
        Ok(())
    }

    /// Returns the body, so that it can be drained.
    pub(crate) fn into_body(self) -> S {
        self.body
    }
}

fn parse_boundary(content_type: &str) -> Option<String> {
    let (kind, parameters) = content_type.split_once(';')?;
    let boundary = kind
        .trim()
        .eq_ignore_ascii_case("multipart/form-data")
        .then(|| find_parameter(parameters, "boundary"))??;
    (1..=MAX_BOUNDARY_LENGTH).contains(&boundary.len()).then_some(boundary)
}

/// Reads a part's `Content-Disposition`, which must have a `name`.
fn parse_part_head(head: &str) -> Option<PartHead> {
    let mut lines = head.split("\r\n").filter_map(|line| line.split_once(':'));
    let (_, value) = lines.find(|(key, _)| key.trim().eq_ignore_ascii_case("content-disposition"))?;
    let (_, parameters) = value.split_once(';')?;
    let file_name = find_parameter(parameters, "filename");
    Some(PartHead { name: find_parameter(parameters, "name")?, file_name })
}

/// Finds the parameter `wanted` in text such as `a=b; c="d;\"e"`.
fn find_parameter(text: &str, wanted: &str) -> Option<String> {
    let mut rest = text;
    loop {
        rest = rest.trim_start_matches([';', ' ', '\t']);
        let (key, after) = rest.split_once('=')?;
        let (value, after) = match after.strip_prefix('"') {
            Some(quoted) => unquote(quoted)?,
            None => {
                let end = after.find(';').unwrap_or(after.len());
                (after[..end].trim().to_owned(), &after[end..])
            }
        };
        if key.trim().eq_ignore_ascii_case(wanted) {
            return Some(value);
        }
        rest = after;
    }
}

/// Parses up to the closing quote, and returns the value and what follows.
fn unquote(text: &str) -> Option<(String, &str)> {
    let mut value = String::new();
    let mut chars = text.char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            '"' => return Some((value, &text[at + 1..])),
            '\\' => value.push(chars.next()?.1),
            _ => value.push(c),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use futures_util::{FutureExt, stream};
    use proptest::prelude::*;

    use super::*;

    type Parts = Vec<(String, Vec<u8>)>;

    fn encode(parts: &[(String, Vec<u8>)]) -> Vec<u8> {
        let mut body = Vec::new();
        for (name, content) in parts {
            let head =
                format!("--B\r\nContent-Disposition: form-data; name=\"{name}\"; filename=\"x\"\r\n\r\n");
            body.extend_from_slice(head.as_bytes());
            body.extend_from_slice(content);
            body.extend_from_slice(b"\r\n");
        }
        body.extend_from_slice(b"--B--\r\n");
        body
    }

    fn decode(body: &[u8], cut: usize) -> Result<Parts, MultipartError> {
        let pieces = body.chunks(cut).map(|piece| Ok::<_, ()>(Bytes::copy_from_slice(piece)));
        let mut multipart = MultipartReader::new("multipart/form-data; boundary=B", stream::iter(pieces))?;
        let all = async {
            let mut parts = Parts::new();
            while let Some(PartHead { name, .. }) = multipart.next_part().await? {
                let mut content = Vec::new();
                while let Some(piece) = multipart.next_chunk().await? {
                    content.extend_from_slice(&piece);
                }
                parts.push((name, content));
            }
            Ok(parts)
        };
        all.now_or_never().expect("an iterator is always ready")
    }

    #[test]
    fn parameters_may_be_quoted() {
        for (text, expected) in [
            ("boundary=abc", Some("abc")),
            (" charset=x; BOUNDARY=\"a;b\\\"c\"", Some("a;b\"c")),
            ("filename=\"name=evil\"; boundary=z", Some("z")),
            ("boundary=\"open", None),
            ("nothing", None),
        ] {
            assert_eq!(find_parameter(text, "boundary").as_deref(), expected, "{text}");
        }
        let head = parse_part_head("\r\nContent-Disposition: form-data; filename=\"a\"; name=\"b\"\r\n\r\n");
        assert_eq!(head.unwrap().name, "b");
    }

    #[test]
    fn file_names_keep_their_path_if_asked() {
        for (parameter, last, full) in [
            ("; filename=\"dir/sub/a.txt\"", Some("a.txt"), Some("dir/sub/a.txt")),
            ("; filename=\"/abs/../a b;c\\\"d.txt\"", Some("a b;c\"d.txt"), Some("/abs/../a b;c\"d.txt")),
            ("; filename=a.txt", Some("a.txt"), Some("a.txt")),
            ("; filename=\"dir/\"", None, Some("dir/")),
            ("; filename=\"\"", None, None),
            ("", None, None),
        ] {
            let text = format!("\r\ncontent-disposition: form-data; name=\"file\"{parameter}\r\n\r\n");
            let head = parse_part_head(&text).unwrap();
            assert_eq!(head.name, "file");
            assert_eq!(head.file_name(FileNameForm::LastSegment), last, "{parameter}");
            assert_eq!(head.file_name(FileNameForm::FullPath), full, "{parameter}");
        }
    }

    #[test]
    fn unread_part_is_skipped() {
        let parts = [("a".to_owned(), vec![b'x'; 100]), ("b".to_owned(), b"y".to_vec())];
        let pieces = stream::iter([Ok::<_, ()>(Bytes::from(encode(&parts)))]);
        let mut multipart = MultipartReader::new("multipart/form-data; boundary=B", pieces).unwrap();
        let names =
            async { (multipart.next_part().await, multipart.next_part().await, multipart.next_part().await) };
        let (first, second, third) = names.now_or_never().unwrap();
        let name = |head: Result<Option<PartHead>, MultipartError>| head.unwrap().unwrap().name;
        assert_eq!((name(first).as_str(), name(second).as_str(), third), ("a", "b", Ok(None)));
    }

    #[test]
    fn malformed_bodies_are_errors() {
        let whole = encode(&[("a".to_owned(), b"x".to_vec())]);
        assert_eq!(decode(&whole[..whole.len() - 6], 7), Err(MultipartError::Unfinished));
        assert_eq!(decode(b"nothing at all", 3), Err(MultipartError::Unfinished));
        assert_eq!(decode(b"--B\r\nX: y\r\n\r\n\r\n--B--", 99), Err(MultipartError::BadHead));
        assert_eq!(
            decode(&[b"--B\r\n", vec![b'h'; MAX_PART_HEAD_BYTES + 2].as_slice()].concat(), 4096),
            Err(MultipartError::LongHead)
        );
        let empty = stream::iter(Vec::<Result<Bytes, ()>>::new());
        assert!(MultipartReader::new("application/json", empty).is_err());
    }

    /// Content built from parts of delimiters.
    fn content() -> impl Strategy<Value = Vec<u8>> {
        let atoms = ["\r\n", "--", "-", "\r", "\n", "B", "\r\n--", "\r\n-B", "x"];
        prop::collection::vec(prop::sample::select(atoms.to_vec()), 0..30)
            .prop_map(|atoms| atoms.concat().into_bytes())
            .prop_filter("the delimiter ends a part", |c| {
                memmem::find(&[b"\r\n", c.as_slice(), b"\r\n--"].concat(), b"\r\n--B").is_none()
            })
    }

    proptest! {
        #[test]
        fn parts_do_not_depend_on_chunk_boundaries(
            parts in prop::collection::vec(("[a-z]{1,8}", content()), 0..4),
            cut in 1usize..50,
        ) {
            prop_assert_eq!(decode(&encode(&parts), cut), Ok(parts));
        }

        #[test]
        fn parsing_arbitrary_bytes_does_not_panic(body in prop::collection::vec(any::<u8>(), 0..200), cut in 1usize..9) {
            drop(decode(&body, cut));
        }
    }
}
