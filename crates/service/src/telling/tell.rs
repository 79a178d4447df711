//! What a kernel tells, read from one line of JSON.
//!
//! A line is of bounded length, but a few of its bytes can stand for many of ours: an empty text
//! takes three there and twenty-four here. So what it holds is counted while it is read.

use std::collections::BTreeMap;
use std::fmt::{self, Formatter};

use serde::de::{Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

use super::CodeEvent;

/// How many forms of one thing are passed on, and how long their names may be.
const MOST_FORMS: usize = 64;
const LONGEST_MIME: usize = 128;

/// How much of an error is passed on: of its name, of what it says, and of where it happened.
const LONGEST_NAME: usize = 4 << 10;
const LONGEST_VALUE: usize = 1 << 20;
const MOST_LINES: usize = 1000;
const LONGEST_TRACEBACK: usize = 1 << 20;

/// Stands behind the part of a traceback that is passed on.
const LEFT_OUT: &str = "coracle: the rest of this traceback is left out";

/// A thing in several forms, by their mime types. What is binary is in base64, and what is a
/// structure is its JSON.
pub type Forms = BTreeMap<String, String>;

/// An error of the code itself, in the words of its language.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct CodeError {
    #[serde(rename = "ename", deserialize_with = "name")]
    pub name: String,
    #[serde(rename = "evalue", default, deserialize_with = "value")]
    pub value: String,
    #[serde(default, deserialize_with = "traceback")]
    pub traceback: Vec<String>,
}

/// What is told, as it is written.
#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Tell {
    Count(u64),
    Display(#[serde(deserialize_with = "forms")] Forms),
    Result(#[serde(deserialize_with = "forms")] Forms),
    Error(CodeError),
}

/// What a line tells; `None` if it makes no sense, or tells too much.
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

/// The beginning of a text that is too long, in whole characters.
fn cut(mut text: String, most: usize) -> String {
    if text.len() > most {
        let end = (0..=most).rev().find(|end| text.is_char_boundary(*end));
        text.truncate(end.unwrap_or_default());
        text.shrink_to_fit();
    }
    text
}

/// One form at least, and not too many.
struct FewForms;

impl<'de> Visitor<'de> for FewForms {
    type Value = Forms;

    fn expecting(&self, formatter: &mut Formatter<'_>) -> fmt::Result {
        write!(formatter, "1 to {MOST_FORMS} texts by their mime types")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Forms, A::Error> {
        let mut forms = Forms::new();
        let mut told = 0;
        while let Some(mime) = map.next_key::<String>()? {
            told += 1;
            if told > MOST_FORMS || mime.is_empty() || mime.len() > LONGEST_MIME {
                return Err(A::Error::invalid_length(told, &self));
            }
            forms.insert(mime, map.next_value()?);
        }
        if forms.is_empty() { Err(A::Error::invalid_length(0, &self)) } else { Ok(forms) }
    }
}

/// The lines at the beginning, and a word in the place of the others.
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
    fn there_are_only_so_many_forms_though_they_have_the_same_name() {
        let told = |mime: fn(usize) -> String, count: usize| {
            let forms: Vec<String> = (0..count).map(|number| format!("\"{}\":\"x\"", mime(number))).collect();
            read(format!("{{\"display\":{{{}}}}}", forms.join(",")).as_bytes())
        };
        for mime in [|number| format!("m{number}"), |_| "m".to_owned()] {
            assert!(told(mime, MOST_FORMS).is_some());
            assert_eq!(told(mime, MOST_FORMS + 1), None);
        }
        assert_eq!(told(|_| "m".repeat(LONGEST_MIME + 1), 1), None);
    }

    /// The rest is not even looked at: it would be no JSON.
    #[test]
    fn what_follows_too_many_forms_is_not_read() {
        let forms: String = (0..=MOST_FORMS).map(|number| format!("\"m{number}\":\"\",")).collect();
        let line = format!("{{\"display\":{{{forms}\0");
        let error = serde_json::from_slice::<Tell>(line.as_bytes()).err().expect("it is refused");
        assert!(error.is_data(), "{error}");
    }

    #[test]
    fn millions_of_empty_lines_become_a_thousand() {
        let line =
            format!("{{\"error\":{{\"ename\":\"E\",\"traceback\":[{}\"\"]}}}}", "\"\",".repeat(2_700_000));
        let kept = error(&line).traceback;
        assert_eq!((kept.len(), kept.last().map(String::as_str)), (MOST_LINES + 1, Some(LEFT_OUT)));
        assert!(kept.capacity() <= 4 * MOST_LINES);
    }

    #[test]
    fn a_traceback_that_is_just_short_enough_is_whole() {
        let lines = vec![String::from("x"); MOST_LINES];
        assert_eq!(with_traceback(&lines).traceback, lines);
        let lines = vec!["x".repeat(LONGEST_TRACEBACK / 2); 2];
        assert_eq!(with_traceback(&lines).traceback, lines);
    }

    #[test]
    fn a_long_traceback_is_cut_between_characters() {
        let kept = with_traceback(&["x".to_owned(), "é".repeat(LONGEST_TRACEBACK), "y".to_owned()]).traceback;
        assert_eq!(kept.len(), 3);
        assert_eq!((kept[0].as_str(), kept[2].as_str()), ("x", LEFT_OUT));
        assert_eq!(kept[1].len(), LONGEST_TRACEBACK - 2, "one byte is left, and too little for one more");
    }

    #[test]
    fn what_an_error_says_is_cut() {
        let long = "é".repeat(LONGEST_VALUE);
        let error = error(&format!("{{\"error\":{{\"ename\":\"{long}\",\"evalue\":\"a{long}\"}}}}"));
        assert_eq!((error.name.len(), error.value.len()), (LONGEST_NAME, LONGEST_VALUE - 1));
    }
}
