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
const MOST_FORMS: usize = 64;
const LONGEST_MIME: usize = 128;

/// The limits of a code error: of its name, its value and its traceback.
const LONGEST_NAME: usize = 4 << 10;
const LONGEST_VALUE: usize = 1 << 20;
const MOST_LINES: usize = 1000;
const LONGEST_TRACEBACK: usize = 1 << 20;

/// Marks the end of a truncated traceback.
const LEFT_OUT: &str = "coracle: the rest of this traceback is left out";

/// A value in several forms, by mime type. Binary forms are in base64, and structures are JSON text.
pub type Forms = BTreeMap<String, String>;

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
enum Tell {
    Count(u64),
    Display(#[serde(deserialize_with = "forms")] Forms),
    Result(#[serde(deserialize_with = "forms")] Forms),
    Error(CodeError),
}

/// Parses a line; `None` if it is malformed or exceeds a limit.
pub(super) fn read(line: &[u8]) -> Option<CodeEvent> {
    Some(match serde_json::from_slice(line).ok()? {
        Tell::Count(count) => CodeEvent::Count(count),
        Tell::Display(forms) => CodeEvent::Display(forms),
        Tell::Result(forms) => CodeEvent::Result(forms),
        Tell::Error(error) => CodeEvent::Error(error),
    })
}

fn forms<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Forms, D::Error> {
    deserializer.deserialize_map(FewForms)
}

fn traceback<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    deserializer.deserialize_seq(FirstLines)
}

fn name<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    String::deserialize(deserializer).map(|text| cut(text, LONGEST_NAME))
}

fn value<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    String::deserialize(deserializer).map(|text| cut(text, LONGEST_VALUE))
}

/// Truncates a text that is too long, at a character boundary.
fn cut(mut text: String, most: usize) -> String {
    if text.len() > most {
        let end = (0..=most).rev().find(|end| text.is_char_boundary(*end));
        text.truncate(end.unwrap_or_default());
        text.shrink_to_fit();
    }
    text
}

/// Accepts at least one form and at most [`MOST_FORMS`].
struct FewForms;

impl<'de> Visitor<'de> for FewForms {
    type Value = Forms;

    fn expecting(&self, formatter: &mut Formatter<'_>) -> fmt::Result {
        write!(formatter, "1 to {MOST_FORMS} texts by mime type")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Forms, A::Error> {
        let mut forms = Forms::new();
        let mut count = 0;
        while let Some(mime) = map.next_key::<String>()? {
            count += 1;
            if count > MOST_FORMS || mime.is_empty() || mime.len() > LONGEST_MIME {
                return Err(A::Error::invalid_length(count, &self));
            }
            forms.insert(mime, map.next_value()?);
        }
        if forms.is_empty() { Err(A::Error::invalid_length(0, &self)) } else { Ok(forms) }
    }
}

/// Keeps the first lines, and a marker in place of the others.
struct FirstLines;

impl<'de> Visitor<'de> for FirstLines {
    type Value = Vec<String>;

    fn expecting(&self, formatter: &mut Formatter<'_>) -> fmt::Result {
        formatter.write_str("the lines of a traceback")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut lines: A) -> Result<Vec<String>, A::Error> {
        let mut kept = Vec::new();
        let mut room = LONGEST_TRACEBACK;
        let mut more = false;
        while kept.len() < MOST_LINES && !more {
            let Some(line) = lines.next_element::<String>()? else { return Ok(kept) };
            more = line.len() > room;
            let line = cut(line, room);
            room -= line.len();
            kept.push(line);
        }
        while lines.next_element::<IgnoredAny>()?.is_some() {
            more = true;
        }
        kept.extend(more.then(|| LEFT_OUT.to_owned()));
        Ok(kept)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(json: &str) -> CodeError {
        let Some(CodeEvent::Error(error)) = read(json.as_bytes()) else { panic!("no error") };
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
            read(format!("{{\"display\":{{{}}}}}", forms.join(",")).as_bytes())
        };
        for mime in [|number| format!("m{number}"), |_| "m".to_owned()] {
            assert!(parse(mime, MOST_FORMS).is_some());
            assert_eq!(parse(mime, MOST_FORMS + 1), None);
        }
        assert_eq!(parse(|_| "m".repeat(LONGEST_MIME + 1), 1), None);
    }

    /// The rest of the line would be invalid JSON, which shows that it is not read.
    #[test]
    fn parsing_stops_after_too_many_forms() {
        let forms: String = (0..=MOST_FORMS).map(|number| format!("\"m{number}\":\"\",")).collect();
        let line = format!("{{\"display\":{{{forms}\0");
        let error = serde_json::from_slice::<Tell>(line.as_bytes()).err().expect("it is refused");
        assert!(error.is_data(), "{error}");
    }

    #[test]
    fn millions_of_empty_lines_are_cut_to_a_thousand() {
        let line =
            format!("{{\"error\":{{\"ename\":\"E\",\"traceback\":[{}\"\"]}}}}", "\"\",".repeat(2_700_000));
        let kept = error(&line).traceback;
        assert_eq!((kept.len(), kept.last().map(String::as_str)), (MOST_LINES + 1, Some(LEFT_OUT)));
        assert!(kept.capacity() <= 4 * MOST_LINES);
    }

    #[test]
    fn traceback_at_the_limit_is_kept_whole() {
        let lines = vec![String::from("x"); MOST_LINES];
        assert_eq!(with_traceback(&lines).traceback, lines);
        let lines = vec!["x".repeat(LONGEST_TRACEBACK / 2); 2];
        assert_eq!(with_traceback(&lines).traceback, lines);
    }

    #[test]
    fn long_traceback_is_cut_between_characters() {
        let kept = with_traceback(&["x".to_owned(), "é".repeat(LONGEST_TRACEBACK), "y".to_owned()]).traceback;
        assert_eq!(kept.len(), 3);
        assert_eq!((kept[0].as_str(), kept[2].as_str()), ("x", LEFT_OUT));
        assert_eq!(
            kept[1].len(),
            LONGEST_TRACEBACK - 2,
            "one byte is left, too little for another character"
        );
    }

    #[test]
    fn error_name_and_value_are_cut() {
        let long = "é".repeat(LONGEST_VALUE);
        let error = error(&format!("{{\"error\":{{\"ename\":\"{long}\",\"evalue\":\"a{long}\"}}}}"));
        assert_eq!((error.name.len(), error.value.len()), (LONGEST_NAME, LONGEST_VALUE - 1));
    }
}
