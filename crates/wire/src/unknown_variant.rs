//! Finds out why a message could not be parsed: because it names a variant that this version does not know, as the
//! message of a newer peer may, or because it is malformed.

use std::fmt;

use serde::de::value::{MapAccessDeserializer, MapDeserializer, SeqDeserializer};
use serde::de::{self, DeserializeOwned, Deserializer, IntoDeserializer, Visitor};
use serde::forward_to_deserialize_any;
use serde_json::Value;

/// Whether `json` is no `T` because a variant of an enum in it is unknown.
pub(crate) fn has_unknown_variant<T: DeserializeOwned>(json: &[u8]) -> bool {
    let Ok(value) = serde_json::from_slice::<Value>(json) else { return false };
    matches!(T::deserialize(JsonValue(value)), Err(ParseFailure::UnknownVariant))
}

#[derive(Debug)]
enum ParseFailure {
    UnknownVariant,
    Other,
}

impl fmt::Display for ParseFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::UnknownVariant => "unknown variant",
            Self::Other => "malformed message",
        })
    }
}

impl std::error::Error for ParseFailure {}

impl de::Error for ParseFailure {
    fn custom<T: fmt::Display>(_message: T) -> Self {
        Self::Other
    }

    fn unknown_variant(_variant: &str, _expected: &'static [&'static str]) -> Self {
        Self::UnknownVariant
    }
}

/// A parsed value as a source of messages. `serde_json` has one too, but its errors are only text.
struct JsonValue(Value);

type JsonMap = MapDeserializer<'static, std::vec::IntoIter<(String, JsonValue)>, ParseFailure>;

fn map_access(map: serde_json::Map<String, Value>) -> JsonMap {
    let entries: Vec<_> = map.into_iter().map(|(name, value)| (name, JsonValue(value))).collect();
    MapDeserializer::new(entries.into_iter())
}

impl<'de> Deserializer<'de> for JsonValue {
    type Error = ParseFailure;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ParseFailure> {
        match self.0 {
            Value::Null => visitor.visit_unit(),
            Value::Bool(value) => visitor.visit_bool(value),
            Value::Number(number) => match (number.as_u64(), number.as_i64(), number.as_f64()) {
                (Some(value), _, _) => visitor.visit_u64(value),
                (_, Some(value), _) => visitor.visit_i64(value),
                (_, _, Some(value)) => visitor.visit_f64(value),
                (None, None, None) => Err(ParseFailure::Other),
            },
            Value::String(text) => visitor.visit_string(text),
            Value::Array(values) => {
                visitor.visit_seq(SeqDeserializer::new(values.into_iter().map(JsonValue)))
            }
            Value::Object(map) => visitor.visit_map(map_access(map)),
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ParseFailure> {
        if self.0.is_null() { visitor.visit_none() } else { visitor.visit_some(self) }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        visitor: V,
    ) -> Result<V::Value, ParseFailure> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _name: &'static str,
        _variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, ParseFailure> {
        match self.0 {
            Value::String(variant) => visitor.visit_enum(variant.into_deserializer()),
            Value::Object(map) => visitor.visit_enum(MapAccessDeserializer::new(map_access(map))),
            _ => Err(ParseFailure::Other),
        }
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit unit_struct seq
        tuple tuple_struct map struct identifier ignored_any
    }
}

impl IntoDeserializer<'_, ParseFailure> for JsonValue {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::VersionedRequest;

    #[test]
    fn unknown_variants_are_told_from_malformed_messages() {
        let file = |operation: &str| {
            format!(
                r#"{{"version":1,"request":{{"file":{{"identity":"default","operation":{operation}}}}}}}"#
            )
        };
        for (json, expected) in [
            (r#"{"version":1,"request":"later"}"#.to_owned(), true),
            (r#"{"version":1,"request":{"later":{"a":[1,null,true]}}}"#.to_owned(), true),
            (file(r#"{"later":{}}"#), true),
            (r#"{"version":1,"request":"ping"}"#.to_owned(), false),
            (r#"{"version":1,"request":{"forget":{}}}"#.to_owned(), false),
            (r#"{"version":1,"request":{"forget":{"process":7}}}"#.to_owned(), false),
            (r#"{"version":1,"request":7}"#.to_owned(), false),
            (file("7"), false),
            ("{".to_owned(), false),
        ] {
            assert_eq!(has_unknown_variant::<VersionedRequest>(json.as_bytes()), expected, "{json}");
        }
    }
}
