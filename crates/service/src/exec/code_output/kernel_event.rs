//! Parses a kernel's event from one line of JSON.
//!
//! A line has a bounded length, but its content may take far more memory than its bytes: an empty string takes three
//! bytes there and twenty-four here. So the elements are counted while they are parsed.

use std::collections::BTreeMap;
use std::fmt::{self, Formatter};

use serde::de::{Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

use super::CodeEvent;

/// How many forms of one value are accepted, and how long their mime types may be.
const MAX_FORMS: usize = 64;
const MAX_MIME_BYTES: usize = 128;

/// The limits of a code error: of its name, its value and its traceback.
const MAX_ERROR_NAME_BYTES: usize = 4 << 10;
const MAX_ERROR_VALUE_BYTES: usize = 1 << 20;
const MAX_TRACEBACK_LINES: usize = 1000;
const MAX_TRACEBACK_BYTES: usize = 1 << 20;

/// Marks the end of a truncated traceback.
const TRUNCATION_MARKER: &str = "coracle: the rest of this traceback is left out";

/// A value in several forms, by mime type. Binary forms are in base64, and structures are JSON text.
pub type MimeForms = BTreeMap<String, String>;

/// An error that the code raised, with the texts of its language.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct CodeError {
    #[serde(rename = "ename", deserialize_with = "name")]
    pub name: String,
    #[serde(rename = "evalue", default, deserialize_with = "value")]
    pub value: String,
    #[serde(default, deserialize_with = "traceback")]
    pub traceback: Vec<String>,
}

/// An event as the kernel writes it.
#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum KernelEvent {
    Count(u64),
    Display(#[serde(deserialize_with = "forms")] MimeForms),
    Result(#[serde(deserialize_with = "forms")] MimeForms),
    Error(CodeError),
}

/// Parses a line; `None` if it is malformed or exceeds a limit.
pub(super) fn parse_kernel_event(line: &[u8]) -> Option<CodeEvent> {
    Some(match serde_json::from_slice(line).ok()? {
        KernelEvent::Count(count) => CodeEvent::Count(count),
        KernelEvent::Display(forms) => CodeEvent::Display(forms),
        KernelEvent::Result(forms) => CodeEvent::Result(forms),
        KernelEvent::Error(error) => CodeEvent::Error(error),
    })
}

fn forms<'de, D: Deserializer<'de>>(deserializer: D) -> Result<MimeForms, D::Error> {
    deserializer.deserialize_map(FormsVisitor)
}

fn traceback<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    deserializer.deserialize_seq(TracebackVisitor)
}

fn name<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    String::deserialize(deserializer).map(|text| truncate_text(text, MAX_ERROR_NAME_BYTES))
}

fn value<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    String::deserialize(deserializer).map(|text| truncate_text(text, MAX_ERROR_VALUE_BYTES))
}

/// Truncates a text that is too long, at a character boundary.
fn truncate_text(mut text: String, most: usize) -> String {
    if text.len() > most {
        let end = (0..=most).rev().find(|end| text.is_char_boundary(*end));
        text.truncate(end.unwrap_or_default());
        text.shrink_to_fit();
    }
    text
}

/// Accepts at least one form and at most [`MAX_FORMS`].
struct FormsVisitor;

impl<'de> Visitor<'de> for FormsVisitor {
    type Value = MimeForms;

    fn expecting(&self, formatter: &mut Formatter<'_>) -> fmt::Result {
        write!(formatter, "1 to {MAX_FORMS} texts by mime type")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<MimeForms, A::Error> {
        let mut forms = MimeForms::new();
        let mut count = 0;
        while let Some(mime) = map.next_key::<String>()? {
            count += 1;
            if count > MAX_FORMS || mime.is_empty() || mime.len() > MAX_MIME_BYTES {
                return Err(A::Error::invalid_length(count, &self));
            }
            forms.insert(mime, map.next_value()?);
        }
        if forms.is_empty() { Err(A::Error::invalid_length(0, &self)) } else { Ok(forms) }
    }
}

/// Keeps the first lines, and a marker in place of the others.
struct TracebackVisitor;

impl<'de> Visitor<'de> for TracebackVisitor {
    type Value = Vec<String>;

    fn expecting(&self, formatter: &mut Formatter<'_>) -> fmt::Result {
        formatter.write_str("the lines of a traceback")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut lines: A) -> Result<Vec<String>, A::Error> {
        let mut kept = Vec::new();
        let mut room = MAX_TRACEBACK_BYTES;
        let mut more = false;
        while kept.len() < MAX_TRACEBACK_LINES && !more {
            let Some(line) = lines.next_element::<String>()? else { return Ok(kept) };
            more = line.len() > room;
            let line = truncate_text(line, room);
            room -= line.len();
            kept.push(line);
        }
        while lines.next_element::<IgnoredAny>()?.is_some() {
            more = true;
        }
        kept.extend(more.then(|| TRUNCATION_MARKER.to_owned()));
        Ok(kept)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(json: &str) -> CodeError {
        let Some(CodeEvent::Error(error)) = parse_kernel_event(json.as_bytes()) else { panic!("no error") };
        error
    }

    fn with_traceback(lines: &[String]) -> CodeError {
        let lines: Vec<String> = lines.iter().map(|line| format!("\"{line}\"")).collect();
        error(&format!("{{\"error\":{{\"ename\":\"E\",\"traceback\":[{}]}}}}", lines.join(",")))
    }

    #[test]
    fn number_of_forms_is_limited_even_with_equal_names() {
        let parse = |mime: fn(usize) -> String, count: usize| {
            let forms: Vec<String> = (0..count).map(|number| format!("\"{}\":\"x\"", mime(number))).collect();
            parse_kernel_event(format!("{{\"display\":{{{}}}}}", forms.join(",")).as_bytes())
        };
        for mime in [|number| format!("m{number}"), |_| "m".to_owned()] {
            assert!(parse(mime, MAX_FORMS).is_some());
            assert_eq!(parse(mime, MAX_FORMS + 1), None);
        }
        assert_eq!(parse(|_| "m".repeat(MAX_MIME_BYTES + 1), 1), None);
    }

    /// The rest of the line would be invalid JSON, which shows that it is not read.
    #[test]
    fn parsing_stops_after_too_many_forms() {
        let forms: String = (0..=MAX_FORMS).map(|number| format!("\"m{number}\":\"\",")).collect();
        let line = format!("{{\"display\":{{{forms}\0");
        let error = serde_json::from_slice::<KernelEvent>(line.as_bytes()).err().expect("it is refused");
        assert!(error.is_data(), "{error}");
    }

    #[test]
    fn millions_of_empty_lines_are_cut_to_a_thousand() {
        let line =
            format!("{{\"error\":{{\"ename\":\"E\",\"traceback\":[{}\"\"]}}}}", "\"\",".repeat(2_700_000));
        let kept = error(&line).traceback;
        assert_eq!(
            (kept.len(), kept.last().map(String::as_str)),
            (MAX_TRACEBACK_LINES + 1, Some(TRUNCATION_MARKER))
        );
        assert!(kept.capacity() <= 4 * MAX_TRACEBACK_LINES);
    }

    #[test]
    fn traceback_at_the_limit_is_kept_whole() {
        let lines = vec![String::from("x"); MAX_TRACEBACK_LINES];
        assert_eq!(with_traceback(&lines).traceback, lines);
        let lines = vec!["x".repeat(MAX_TRACEBACK_BYTES / 2); 2];
        assert_eq!(with_traceback(&lines).traceback, lines);
    }

    #[test]
    fn long_traceback_is_cut_between_characters() {
        let kept =
            with_traceback(&["x".to_owned(), "é".repeat(MAX_TRACEBACK_BYTES), "y".to_owned()]).traceback;
        assert_eq!(kept.len(), 3);
        assert_eq!((kept[0].as_str(), kept[2].as_str()), ("x", TRUNCATION_MARKER));
        assert_eq!(
            kept[1].len(),
            MAX_TRACEBACK_BYTES - 2,
            "one byte is left, too little for another character"
        );
    }

    #[test]
    fn error_name_and_value_are_cut() {
        let long = "é".repeat(MAX_ERROR_VALUE_BYTES);
        let error = error(&format!("{{\"error\":{{\"ename\":\"{long}\",\"evalue\":\"a{long}\"}}}}"));
        assert_eq!((error.name.len(), error.value.len()), (MAX_ERROR_NAME_BYTES, MAX_ERROR_VALUE_BYTES - 1));
    }
}
