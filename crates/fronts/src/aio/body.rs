//! JSON bodies of requests, with FastAPI's errors.
//!
//! Clients send `null` for what their user set to nothing, an empty body if nothing was set, and fields of other
//! versions. So body types consist of `Option`s, unknown fields are ignored, and required fields are checked with
//! [`require_field`].

use axum::extract::{FromRequest, Request};
use http::StatusCode;
use serde::de::DeserializeOwned;
use serde_json::Value;
use serde_path_to_error::Segment;

use super::AioState;
use super::problem::{AioProblem, ValidationError};
use crate::kit::body::read_body;

/// A JSON body; an empty one counts as `{}`.
pub(super) struct AioJson<T>(pub(super) T);

impl<T: DeserializeOwned> FromRequest<AioState> for AioJson<T> {
    type Rejection = AioProblem;

    async fn from_request(request: Request, state: &AioState) -> Result<Self, AioProblem> {
        let bytes = read_body(request.into_body(), state.settings.json_body_limit).await?;
        parse_json(&bytes).map(Self)
    }
}

pub(super) fn parse_json<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, AioProblem> {
    let text: &[u8] = if bytes.trim_ascii().is_empty() { b"{}" } else { bytes };
    // A list of values would be taken for the fields in their order.
    if !text.trim_ascii_start().starts_with(b"{") {
        let (loc, msg) = (vec!["body".to_owned()], "the body is not a JSON object".to_owned());
        return Err(validation_problem(ValidationError { loc, msg, kind: "type_error" }));
    }
    let mut parser = serde_json::Deserializer::from_slice(text);
    let parsed = serde_path_to_error::deserialize(&mut parser);
    let parsed = parsed.map_err(|error| {
        let is_data = error.inner().is_data();
        let path = error.path().iter().map(segment_name);
        let loc = std::iter::once("body".to_owned()).chain(path).collect();
        let kind = if is_data { "type_error" } else { "json_invalid" };
        validation_problem(ValidationError { loc, msg: error.inner().to_string(), kind })
    })?;
    parser.end().map_err(|error| {
        let loc = vec!["body".to_owned()];
        validation_problem(ValidationError { loc, msg: error.to_string(), kind: "json_invalid" })
    })?;
    Ok(parsed)
}

/// Reads the fields of a JSON value that was parsed before.
pub(super) fn parse_fields<T: DeserializeOwned>(fields: Value) -> Result<T, AioProblem> {
    serde_path_to_error::deserialize(fields).map_err(|error| {
        let path = error.path().iter().map(segment_name);
        let loc = std::iter::once("body".to_owned()).chain(path).collect();
        validation_problem(ValidationError { loc, msg: error.inner().to_string(), kind: "type_error" })
    })
}

/// Returns a field that must be present.
pub(super) fn require_field<T>(value: Option<T>, field: &str) -> Result<T, AioProblem> {
    value.ok_or_else(|| AioProblem::missing_field(field))
}

/// Returns a text that must be present and cannot contain NUL.
pub(super) fn require_text(value: Option<String>, field: &str) -> Result<String, AioProblem> {
    check_text(require_field(value, field)?, field)
}

/// Refuses a text with a NUL byte, which no command, path or variable can contain.
pub(super) fn check_text(text: String, field: &str) -> Result<String, AioProblem> {
    if text.contains('\0') {
        return Err(AioProblem::invalid_field(field, "the text contains a NUL byte"));
    }
    Ok(text)
}

fn segment_name(segment: &Segment) -> String {
    match segment {
        Segment::Seq { index } => index.to_string(),
        Segment::Map { key } => key.clone(),
        Segment::Enum { variant } => variant.clone(),
        Segment::Unknown => "?".to_owned(),
    }
}

fn validation_problem(error: ValidationError) -> AioProblem {
    let problem = AioProblem::new(StatusCode::UNPROCESSABLE_ENTITY, "invalid request");
    AioProblem { validation: vec![error], ..problem }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[derive(Debug, Deserialize)]
    struct ExampleBody {
        command: Option<String>,
        seconds: Option<Vec<u32>>,
    }

    fn refused(text: &str) -> ValidationError {
        parse_json::<ExampleBody>(text.as_bytes()).unwrap_err().validation.remove(0)
    }

    #[test]
    fn empty_bodies_nulls_and_unknown_fields_are_accepted() {
        for text in ["", " \n", "{}", r#"{"command":null}"#, r#"{"other":{"a":[1]}}"#] {
            let body: ExampleBody = parse_json(text.as_bytes()).unwrap();
            assert_eq!((body.command, body.seconds), (None, None), "{text}");
        }
    }

    #[test]
    fn errors_name_the_field() {
        assert_eq!(refused(r#"{"command":7}"#).loc, ["body", "command"]);
        assert_eq!(refused(r#"{"seconds":[1,"a"]}"#).loc, ["body", "seconds", "1"]);
        assert_eq!(refused("{").kind, "json_invalid");
        assert_eq!(refused("{} x").kind, "json_invalid");
        for text in ["[]", r#"["true",[1]]"#, "null", "7", "x"] {
            assert_eq!(refused(text).loc, ["body"], "{text}");
        }
        let missing = require_text(None, "command").unwrap_err().validation.remove(0);
        assert_eq!((missing.loc, missing.kind), (vec!["body".to_owned(), "command".to_owned()], "missing"));
        assert!(check_text("a\0".to_owned(), "command").is_err());
    }
}
