//! The front matter of a `SKILL.md`: YAML between two lines `---` at the beginning.
//!
//! The text is hostile. It is read event by event with limited depth, and aliases are refused, since a few of them can
//! stand for more values than fit into memory. Even without them, a value of two bytes can need some hundreds in memory,
//! so events are counted too: those of one front matter, and those of all that a request reads.

use saphyr_parser::{Event, Parser, ScalarStyle};
use serde_json::{Map, Value};

/// The longest front matter that is read.
const MAX_BYTES: usize = 64 << 10;
const MAX_DEPTH: usize = 16;
const MAX_EVENTS: usize = 4096;
/// The bounds of all front matters that one request reads.
const MAX_REQUEST_BYTES: usize = 4 << 20;
const MAX_REQUEST_EVENTS: usize = 32 << 10;

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum FrontMatterError {
    #[error("the front matter of SKILL.md exceeds {MAX_BYTES} bytes")]
    TooLong,
    #[error("the front matter of SKILL.md is nested deeper than {MAX_DEPTH} levels")]
    TooDeep,
    #[error("the front matter of SKILL.md has more than {MAX_EVENTS} YAML events")]
    TooManyEvents,
    #[error(
        "the front matters exceed {MAX_REQUEST_BYTES} bytes or {MAX_REQUEST_EVENTS} YAML events in total; \
         request fewer skills at once"
    )]
    RequestTooLarge,
    #[error("the front matter of SKILL.md uses an alias")]
    Alias,
    #[error("the front matter of SKILL.md is not a YAML mapping with text as keys")]
    NotYaml,
}

/// What the front matters of one request have used of what they may use together.
#[derive(Default)]
pub(super) struct FrontMatterBudget {
    bytes: usize,
    events: usize,
}

impl FrontMatterBudget {
    /// Fails once the request has read too much.
    pub(super) fn check(&self) -> Result<(), FrontMatterError> {
        match self.bytes > MAX_REQUEST_BYTES || self.events > MAX_REQUEST_EVENTS {
            true => Err(FrontMatterError::RequestTooLarge),
            false => Ok(()),
        }
    }
}

/// Splits a text into its front matter, if it has one, and the rest.
pub(super) fn split_text(text: &str) -> (Option<&str>, &str) {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let mut lines = text.split_inclusive('\n');
    let Some(first) = lines.next().filter(|line| line.trim_end() == "---") else { return (None, text) };
    let mut end = first.len();
    for line in lines {
        if line.trim_end() == "---" {
            return (Some(&text[first.len()..end]), &text[end + line.len()..]);
        }
        end += line.len();
    }
    (None, text)
}

/// Parses a front matter; an empty one is an empty object.
pub(super) fn parse_metadata(
    yaml: &str,
    budget: &mut FrontMatterBudget,
) -> Result<Map<String, Value>, FrontMatterError> {
    if yaml.len() > MAX_BYTES {
        return Err(FrontMatterError::TooLong);
    }
    budget.bytes += yaml.len();
    budget.check()?;
    let (mut builder, mut events) = (ValueBuilder::default(), 0);
    let mut parser = Parser::new_from_str(yaml);
    while let Some(event) = parser.next_event() {
        let (event, _) = event.or(Err(FrontMatterError::NotYaml))?;
        events += 1;
        if events > MAX_EVENTS {
            return Err(FrontMatterError::TooManyEvents);
        }
        builder.add_event(event)?;
    }
    // Values of a front matter that is refused are not kept, so they do not count.
    budget.events += events;
    budget.check()?;
    match builder.root {
        None | Some(Value::Null) => Ok(Map::new()),
        Some(Value::Object(metadata)) => Ok(metadata),
        Some(_) => Err(FrontMatterError::NotYaml),
    }
}

/// Builds a value from events.
#[derive(Default)]
struct ValueBuilder {
    root: Option<Value>,
    open: Vec<OpenValue>,
}

enum OpenValue {
    List(Vec<Value>),
    /// The entries so far, and the key whose value is awaited.
    Map(Map<String, Value>, Option<String>),
}

impl ValueBuilder {
    fn add_event(&mut self, event: Event<'_>) -> Result<(), FrontMatterError> {
        match event {
            Event::Alias(_) => Err(FrontMatterError::Alias),
            Event::Scalar(text, style, ..) => self.add_value(scalar_value(&text, style)),
            Event::SequenceStart(..) => self.begin(OpenValue::List(Vec::new())),
            Event::MappingStart(..) => self.begin(OpenValue::Map(Map::new(), None)),
            Event::SequenceEnd | Event::MappingEnd => match self.open.pop() {
                Some(OpenValue::List(list)) => self.add_value(Value::Array(list)),
                Some(OpenValue::Map(map, _)) => self.add_value(Value::Object(map)),
                None => Err(FrontMatterError::NotYaml),
            },
            // There can be only one document between two lines `---`.
            _ => Ok(()),
        }
    }

    fn begin(&mut self, value: OpenValue) -> Result<(), FrontMatterError> {
        if self.open.len() >= MAX_DEPTH {
            return Err(FrontMatterError::TooDeep);
        }
        self.open.push(value);
        Ok(())
    }

    fn add_value(&mut self, value: Value) -> Result<(), FrontMatterError> {
        match self.open.last_mut() {
            None => self.root = Some(value),
            Some(OpenValue::List(list)) => list.push(value),
            Some(OpenValue::Map(map, key)) => match key.take() {
                Some(key) => drop(map.insert(key, value)),
                None => *key = Some(key_text(value)?),
            },
        }
        Ok(())
    }
}

fn key_text(value: Value) -> Result<String, FrontMatterError> {
    match value {
        Value::String(text) => Ok(text),
        Value::Bool(_) | Value::Number(_) | Value::Null => Ok(value.to_string()),
        Value::Array(_) | Value::Object(_) => Err(FrontMatterError::NotYaml),
    }
}

/// Only plain words are anything but text.
fn scalar_value(text: &str, style: ScalarStyle) -> Value {
    if style != ScalarStyle::Plain {
        return Value::String(text.to_owned());
    }
    match text {
        "" | "~" | "null" | "Null" | "NULL" => Value::Null,
        "true" | "True" | "TRUE" => Value::Bool(true),
        "false" | "False" | "FALSE" => Value::Bool(false),
        text => {
            let begins_a_number = text.starts_with(|first: char| first.is_ascii_digit() || first == '-');
            let number =
                begins_a_number.then(|| serde_json::from_str::<serde_json::Number>(text).ok()).flatten();
            number.map_or_else(|| Value::String(text.to_owned()), Value::Number)
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn parsed(yaml: &str) -> Result<Map<String, Value>, FrontMatterError> {
        parse_metadata(yaml, &mut FrontMatterBudget::default())
    }

    #[test]
    fn front_matter_is_split_off() {
        for (text, expected) in [
            ("---\nname: a\n---\nbody\n", (Some("name: a\n"), "body\n")),
            ("\u{feff}---\r\nname: a\r\n---\r\nbody", (Some("name: a\r\n"), "body")),
            ("---\n---\n", (Some(""), "")),
            ("---\nname: a\n", (None, "---\nname: a\n")),
            ("# title\n---\n", (None, "# title\n---\n")),
            ("", (None, "")),
        ] {
            assert_eq!(split_text(text), expected, "{text:?}");
        }
    }

    #[test]
    fn values_have_their_types() {
        let yaml = "name: a\ndescription: >\n  two\n  lines\nversion: 1.5\ncount: 3\non: true\nnone:\nquoted: '3'\n\
                    tools: [a, b]\nmetadata:\n  author: me\n  list:\n    - x\n";
        let expected = json!({"name": "a", "description": "two lines\n", "version": 1.5, "count": 3, "on": true,
            "none": null, "quoted": "3", "tools": ["a", "b"], "metadata": {"author": "me", "list": ["x"]}});
        assert_eq!(Value::Object(parsed(yaml).unwrap()), expected);
        assert_eq!(parsed(""), Ok(Map::new()));
    }

    #[test]
    fn hostile_texts_are_refused() {
        let bomb = "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n";
        for (yaml, expected) in [
            (bomb, FrontMatterError::Alias),
            (&format!("a: {}{}", "[".repeat(90), "]".repeat(90)), FrontMatterError::TooDeep),
            (&"x".repeat(MAX_BYTES + 1), FrontMatterError::TooLong),
            (&format!("a: [{}]", "{a: 1},".repeat(MAX_EVENTS / 4)), FrontMatterError::TooManyEvents),
            ("- a\n- b\n", FrontMatterError::NotYaml),
            ("text", FrontMatterError::NotYaml),
            ("a: b: c", FrontMatterError::NotYaml),
            ("[a]: b", FrontMatterError::NotYaml),
        ] {
            assert_eq!(parsed(yaml), Err(expected), "{}", &yaml[..yaml.len().min(40)]);
        }
    }

    #[test]
    fn front_matters_of_a_request_are_bounded_together() {
        let long = format!("a: {}", "x".repeat(MAX_BYTES - 3));
        let dense = format!("a: [{}]", "1,".repeat(MAX_EVENTS - 100));
        for (yaml, most) in [(long, MAX_REQUEST_BYTES / MAX_BYTES), (dense, MAX_REQUEST_EVENTS / MAX_EVENTS)]
        {
            let mut budget = FrontMatterBudget::default();
            for _ in 0..most {
                parse_metadata(&yaml, &mut budget).unwrap();
            }
            assert_eq!(budget.check(), Ok(()));
            assert_eq!(parse_metadata(&yaml, &mut budget), Err(FrontMatterError::RequestTooLarge));
            assert_eq!(budget.check(), Err(FrontMatterError::RequestTooLarge));
            assert_eq!(parse_metadata("", &mut budget), Err(FrontMatterError::RequestTooLarge));
        }
    }
}
