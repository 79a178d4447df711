//! Removes the values of secrets from responses.
//!
//! In headers a value becomes its placeholder, or `***`. In a body it becomes as many asterisks as it has bytes: the
//! length of the body, of its chunks and of messages framed inside it stays what the server said it is.
//!
//! A value may be cut at any place by the borders of chunks, so the end of a chunk that could be the beginning of a value
//! is held back until more arrives. If nothing arrives for a while, it is passed on: a conversation may wait for it.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use http::HeaderMap;
use http::header::HeaderValue;
use memchr::{memchr_iter, memmem};
use zeroize::Zeroizing;

/// Shorter values would be found by chance.
pub(super) const MIN_REDACTED_BYTES: usize = 4;

/// The texts to remove from the responses of a host.
#[derive(Default)]
pub(super) struct RedactionSet {
    entries: Vec<Redaction>,
}

struct Redaction {
    value: Zeroizing<Vec<u8>>,
    /// What takes its place in a header.
    replacement: String,
}

/// Removes them from one body.
pub(super) struct StreamRedactor {
    set: Arc<RedactionSet>,
    /// The end of what has arrived, from the first byte that may begin a value.
    held: Vec<u8>,
    /// How many of the held bytes have been passed on already.
    passed: usize,
    /// Parts of the held bytes that belong to values which began before them.
    masked: Vec<Range<usize>>,
}

impl RedactionSet {
    pub(super) fn add(&mut self, value: &[u8], replacement: &str) {
        let known = self.entries.iter().any(|entry| entry.value.as_slice() == value);
        if value.len() >= MIN_REDACTED_BYTES && !known {
            let value = Zeroizing::new(value.to_vec());
            self.entries.push(Redaction { value, replacement: replacement.to_owned() });
            // A value that contains another one is replaced as a whole.
            self.entries.sort_by_key(|entry| std::cmp::Reverse(entry.value.len()));
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Replaces values in headers or trailers.
    pub(super) fn redact_headers(&self, headers: &mut HeaderMap) {
        for value in headers.values_mut() {
            if let Some(redacted) = self.redact_value(value.as_bytes()) {
                *value = HeaderValue::from_bytes(&redacted).unwrap_or(HeaderValue::from_static("***"));
            }
        }
    }

    fn redact_value(&self, text: &[u8]) -> Option<Vec<u8>> {
        let mut changed: Option<Vec<u8>> = None;
        for entry in &self.entries {
            let current = changed.as_deref().unwrap_or(text);
            if memmem::find(current, &entry.value).is_some() {
                changed = Some(replace_all(current, &entry.value, entry.replacement.as_bytes()));
            }
        }
        changed
    }

    /// All parts of `data` that are values.
    fn find_values(&self, data: &[u8]) -> Vec<Range<usize>> {
        let of_entry = |entry: &Redaction| {
            let length = entry.value.len();
            memmem::find_iter(data, entry.value.as_slice()).map(|at| at..at + length).collect::<Vec<_>>()
        };
        self.entries.iter().flat_map(of_entry).collect()
    }

    /// Where the longest end of `data` begins that may be the beginning of a value.
    fn find_partial_value(&self, data: &[u8]) -> usize {
        let of_entry = |entry: &Redaction| {
            let from = data.len().saturating_sub(entry.value.len() - 1);
            let mut candidates = memchr_iter(entry.value[0], &data[from..]).map(|at| from + at);
            candidates.find(|at| entry.value.starts_with(&data[*at..]))
        };
        self.entries.iter().filter_map(of_entry).min().unwrap_or(data.len())
    }
}

fn replace_all(text: &[u8], value: &[u8], replacement: &[u8]) -> Vec<u8> {
    let mut result = Vec::with_capacity(text.len());
    let mut copied = 0;
    for at in memmem::find_iter(text, value) {
        result.extend_from_slice(&text[copied..at]);
        result.extend_from_slice(replacement);
        copied = at + value.len();
    }
    result.extend_from_slice(&text[copied..]);
    result
}

impl StreamRedactor {
    pub(super) fn new(set: Arc<RedactionSet>) -> Self {
        Self { set, held: Vec::new(), passed: 0, masked: Vec::new() }
    }

    /// Takes a chunk and returns what can be passed on.
    pub(super) fn push(&mut self, chunk: Bytes) -> Bytes {
        if self.held.is_empty() {
            let unchanged =
                self.set.find_partial_value(&chunk) == chunk.len() && self.set.find_values(&chunk).is_empty();
            if unchanged {
                return chunk;
            }
        }
        self.held.extend_from_slice(&chunk);
        self.masked.extend(self.set.find_values(&self.held));
        let end = self.set.find_partial_value(&self.held);
        let output = self.masked_part(end);
        self.held.drain(..end);
        self.passed = self.passed.saturating_sub(end);
        self.masked.retain_mut(|range| {
            *range = range.start.saturating_sub(end)..range.end.saturating_sub(end);
            range.start < range.end
        });
        output
    }

    /// The number of bytes that wait for more.
    pub(super) fn held_bytes(&self) -> usize {
        self.held.len() - self.passed
    }

    /// Passes on what is held, as more may not come soon. The rest of a value that began there is still found.
    pub(super) fn pass_held(&mut self) -> Bytes {
        let output = self.masked_part(self.held.len());
        self.passed = self.held.len();
        output
    }

    /// The held bytes up to `end` that have not been passed on, with values masked.
    fn masked_part(&self, end: usize) -> Bytes {
        if end <= self.passed {
            return Bytes::new();
        }
        let mut part = self.held[..end].to_vec();
        for range in &self.masked {
            let range = range.start.min(end)..range.end.min(end);
            part[range].fill(b'*');
        }
        Bytes::from(part).split_off(self.passed)
    }
}

impl fmt::Debug for RedactionSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedactionSet").field("entries", &self.entries.len()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(values: &[&str]) -> Arc<RedactionSet> {
        let mut set = RedactionSet::default();
        for value in values {
            set.add(value.as_bytes(), "***");
        }
        Arc::new(set)
    }

    fn redact(values: &[&str], chunks: &[&str]) -> String {
        let mut redactor = StreamRedactor::new(set(values));
        let mut output = Vec::new();
        for chunk in chunks {
            output.extend_from_slice(&redactor.push(Bytes::copy_from_slice(chunk.as_bytes())));
        }
        output.extend_from_slice(&redactor.pass_held());
        String::from_utf8(output).expect("text")
    }

    #[test]
    fn values_are_masked_in_any_chunks() {
        for (values, text, expected) in [
            (&["secret"][..], "a secret b secretsecret", "a ****** b ************"),
            (&["secret"], "secre secret", "secre ******"),
            (&["secret"], "ssecret secre", "s****** secre"),
            (&["aaaab"], "aaaaaaab", "aaa*****"),
            (&["user:pass", "pass"], "user:pass pass user:pas", "********* **** user:pas"),
            (&["abcd", "bcdefg"], "abcdefg abcd", "******* ****"),
            (&["abcdef", "cdef"], "abcdcdef", "abcd****"),
            (&["abc"], "abc", "abc"),
            (&["secret"], "", ""),
        ] {
            assert_eq!(redact(values, &[text]), expected);
            let bytes: Vec<&str> = text.split("").collect();
            assert_eq!(redact(values, &bytes), expected, "single bytes of {text}");
            for cut in 0..text.len() {
                let (first, second) = text.split_at(cut);
                assert_eq!(redact(values, &[first, second]), expected, "{first}|{second}");
            }
        }
    }

    #[test]
    fn end_of_a_chunk_is_held_only_if_a_value_may_begin_there() {
        let mut redactor = StreamRedactor::new(set(&["secret"]));
        assert_eq!(redactor.push(Bytes::from_static(b"nothing")), "nothing");
        assert_eq!(redactor.held_bytes(), 0);
        assert_eq!(redactor.push(Bytes::from_static(b"yes")), "ye");
        assert_eq!(redactor.held_bytes(), 1);
        assert_eq!(redactor.pass_held(), "s");
        assert_eq!(redactor.held_bytes(), 0);
        // Only what was passed on is shown.
        assert_eq!(redactor.push(Bytes::from_static(b"ecret!")), "*****!");
        assert_eq!(redactor.held_bytes(), 0);
    }

    #[test]
    fn body_keeps_its_length() {
        let text = "secret".repeat(1000);
        assert_eq!(redact(&["secret"], &[&text]).len(), text.len());
    }

    #[test]
    fn header_values_are_replaced() {
        let mut set = RedactionSet::default();
        set.add(b"secret", "__TOKEN__");
        set.add(b"Bearer secret", "***");
        let mut headers = HeaderMap::new();
        headers.insert("x-echo", HeaderValue::from_static("Bearer secret"));
        headers.insert("x-other", HeaderValue::from_static("a=secret; b=secret"));
        headers.insert("x-plain", HeaderValue::from_static("nothing"));
        set.redact_headers(&mut headers);
        assert_eq!(headers["x-echo"], "***");
        assert_eq!(headers["x-other"], "a=__TOKEN__; b=__TOKEN__");
        assert_eq!(headers["x-plain"], "nothing");
    }
}
