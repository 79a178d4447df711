//! Replaces placeholders by secrets, in a text at once or in a body as it streams.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use memchr::{memchr_iter, memmem};
use zeroize::Zeroizing;

/// Placeholders and what takes their place on one surface. No placeholder contains another.
#[derive(Default)]
pub(super) struct Replacements {
    entries: Vec<Replacement>,
}

struct Replacement {
    placeholder: Vec<u8>,
    value: Zeroizing<Vec<u8>>,
}

/// Replaces placeholders in a body whose chunks may cut them.
pub(super) struct StreamReplacer {
    replacements: Arc<Replacements>,
    /// The end of what has arrived, if a placeholder may begin there.
    held: Vec<u8>,
}

impl Replacements {
    pub(super) fn add(&mut self, placeholder: &str, value: Zeroizing<Vec<u8>>) {
        self.entries.push(Replacement { placeholder: placeholder.as_bytes().to_vec(), value });
    }

    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The text with all placeholders replaced; `None` if it has none.
    pub(super) fn replace(&self, text: &[u8]) -> Option<Zeroizing<Vec<u8>>> {
        let found = self.find(text);
        if found.is_empty() { None } else { Some(replace_found(text, &found)) }
    }

    /// The placeholders in a text, in their order.
    fn find(&self, text: &[u8]) -> Vec<(usize, &Replacement)> {
        let mut found: Vec<(usize, &Replacement)> = Vec::new();
        for entry in &self.entries {
            found.extend(memmem::find_iter(text, &entry.placeholder).map(|at| (at, entry)));
        }
        found.sort_unstable_by_key(|(at, _)| *at);
        // Two placeholders may share some bytes, such as the last underscores of one and the first of the next.
        let mut end = 0;
        found.retain(|(at, entry)| {
            let free = *at >= end;
            if free {
                end = at + entry.placeholder.len();
            }
            free
        });
        found
    }

    /// Where the longest end of `data` begins that may be the beginning of a placeholder.
    fn find_partial_placeholder(&self, data: &[u8]) -> usize {
        let of_entry = |entry: &Replacement| {
            let from = data.len().saturating_sub(entry.placeholder.len() - 1);
            let mut candidates = memchr_iter(entry.placeholder[0], &data[from..]).map(|at| from + at);
            candidates.find(|at| entry.placeholder.starts_with(&data[*at..]))
        };
        self.entries.iter().filter_map(of_entry).min().unwrap_or(data.len())
    }
}

fn replace_found(text: &[u8], found: &[(usize, &Replacement)]) -> Zeroizing<Vec<u8>> {
    let added: usize = found.iter().map(|(_, entry)| entry.value.len()).sum();
    // Large enough for everything, so that it never grows and leaves a copy behind.
    let mut result = Zeroizing::new(Vec::with_capacity(text.len() + added));
    let mut copied = 0;
    for (at, entry) in found {
        result.extend_from_slice(&text[copied..*at]);
        result.extend_from_slice(&entry.value);
        copied = at + entry.placeholder.len();
    }
    result.extend_from_slice(&text[copied..]);
    result
}

impl StreamReplacer {
    pub(super) fn new(replacements: Arc<Replacements>) -> Self {
        Self { replacements, held: Vec::new() }
    }

    /// Takes a chunk and returns what can be passed on.
    pub(super) fn push(&mut self, chunk: Bytes) -> Bytes {
        let mut data = chunk;
        if !self.held.is_empty() {
            self.held.extend_from_slice(&data);
            data = Bytes::from(std::mem::take(&mut self.held));
        }
        let found = self.replacements.find(&data);
        // The bytes of a whole placeholder are not the beginning of another one.
        let after_last = found.last().map_or(0, |(at, entry)| at + entry.placeholder.len());
        let end = after_last + self.replacements.find_partial_placeholder(&data[after_last..]);
        self.held = data[end..].to_vec();
        if found.is_empty() {
            return data.slice(..end);
        }
        let mut replaced = replace_found(&data[..end], &found);
        Bytes::from(std::mem::take(&mut *replaced))
    }

    /// Returns what was held when nothing follows.
    pub(super) fn finish(&mut self) -> Bytes {
        Bytes::from(std::mem::take(&mut self.held))
    }
}

impl fmt::Debug for Replacements {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Replacements").field("entries", &self.entries.len()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn replacements(pairs: &[(&str, &str)]) -> Replacements {
        let mut replacements = Replacements::default();
        for (placeholder, value) in pairs {
            replacements.add(placeholder, Zeroizing::new(value.as_bytes().to_vec()));
        }
        replacements
    }

    fn stream(pairs: &[(&str, &str)], chunks: &[&str]) -> String {
        let mut replacer = StreamReplacer::new(Arc::new(replacements(pairs)));
        let mut output = Vec::new();
        for chunk in chunks {
            output.extend_from_slice(&replacer.push(Bytes::copy_from_slice(chunk.as_bytes())));
        }
        output.extend_from_slice(&replacer.finish());
        String::from_utf8(output).expect("text")
    }

    #[test]
    fn placeholders_are_replaced_in_any_chunks() {
        let one = &[("__KEY__", "s3cr3t")][..];
        let two = &[("__KEY__", "s3cr3t"), ("{{id}}", "42")][..];
        for (pairs, text, expected) in [
            (one, "a __KEY__ b __KEY____KEY__", "a s3cr3t b s3cr3ts3cr3t"),
            (one, "___KEY__ __KEY_", "_s3cr3t __KEY_"),
            (one, "__KEY__KEY__", "s3cr3tKEY__"),
            (two, "{\"k\":\"__KEY__\",\"i\":{{id}}}", "{\"k\":\"s3cr3t\",\"i\":42}"),
            (two, "nothing", "nothing"),
            (one, "", ""),
            // A value that contains a placeholder is not looked at again.
            (&[("__KEY__", "x__KEY__")][..], "__KEY__", "x__KEY__"),
        ] {
            assert_eq!(stream(pairs, &[text]), expected);
            let bytes: Vec<&str> = text.split("").collect();
            assert_eq!(stream(pairs, &bytes), expected, "single bytes of {text}");
            for cut in 0..text.len() {
                let (first, second) = text.split_at(cut);
                assert_eq!(stream(pairs, &[first, second]), expected, "{first}|{second}");
            }
        }
    }

    #[test]
    fn text_without_placeholder_is_not_copied() {
        assert!(replacements(&[("__KEY__", "x")]).replace(b"nothing").is_none());
    }
}
