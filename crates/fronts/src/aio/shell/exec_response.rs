//! The response of a command: `ShellCommandResult` in the envelope.
//!
//! A long output appears twice in it, so it is written in pieces while it is sent.

use std::borrow::Cow;
use std::convert::Infallible;

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::stream;
use http::header;
use serde_json::{Value, json};

use super::super::commands::run::FailedCommand;
use super::super::keep_alive::JsonPieces;
use super::session::ShellStatus;

/// The message of a command that was waited for.
pub(super) const EXECUTED_MESSAGE: &str = "Command executed";

/// The exit code of a command that was refused after the response had begun, as of one that a shell cannot execute.
const REFUSED_EXIT_CODE: i32 = 126;

/// The prompt that console records show, as in AIO's image.
pub(super) const CONSOLE_PROMPT: &str = "$ ";

/// How much output is written in one piece, in bytes.
const MAX_PIECE_BYTES: usize = 64 << 10;

/// The data of a response to `exec`.
#[derive(Debug)]
pub(super) struct CommandResult {
    pub(super) session_id: String,
    command: String,
    pub(super) status: ShellStatus,
    pub(super) exit_code: Option<i32>,
    pub(super) output: Option<String>,
    /// What a command that goes on has printed so far; not part of the response to `exec`.
    pub(super) partial_output: Option<String>,
    /// Whether the command was carried out, successfully or not.
    success: bool,
    message: Cow<'static, str>,
    hint: Option<String>,
}

impl CommandResult {
    fn new(session_id: String, command: String, status: ShellStatus) -> Self {
        Self {
            session_id,
            command,
            status,
            exit_code: None,
            output: None,
            partial_output: None,
            success: true,
            message: EXECUTED_MESSAGE.into(),
            hint: None,
        }
    }

    pub(super) fn running(session_id: String, command: String, message: &'static str) -> Self {
        let message = message.into();
        Self { message, ..Self::new(session_id, command, ShellStatus::Running) }
    }

    pub(super) fn with_partial_output(self, output: String) -> Self {
        Self { partial_output: Some(output), ..self }
    }

    /// The command goes on, but has printed nothing for some time.
    pub(super) fn quiet(session_id: String, command: String, output: String) -> Self {
        let quiet = Self::new(session_id, command, ShellStatus::NoChangeTimeout);
        Self { output: Some(output), ..quiet }
    }

    pub(super) fn ended(
        session_id: String,
        command: String,
        (status, exit_code): (ShellStatus, i32),
        output: String,
    ) -> Self {
        let (exit_code, output) = (Some(exit_code), Some(output));
        Self { exit_code, output, ..Self::new(session_id, command, status) }
    }

    /// The result of a command that failed after the response had begun. Clients that do not read `success` find the error
    /// in the output. A command that was only refused is not `terminated`, since clients then give the whole sandbox up.
    pub(super) fn late_failure(failed: FailedCommand) -> Self {
        let status = match failed.was_only_refused() {
            true => (ShellStatus::Completed, REFUSED_EXIT_CODE),
            false => (ShellStatus::Terminated, -1),
        };
        let FailedCommand { problem, ids, command, .. } = failed;
        let (message, hint) = (problem.message, problem.hint);
        let ended = Self::ended(ids.session, command, status, message.clone());
        Self { success: false, message: message.into(), hint, ..ended }
    }
}

impl JsonPieces for CommandResult {
    fn into_pieces(self) -> impl Iterator<Item = Bytes> + Send + 'static {
        let Self { session_id, command, status, exit_code, output, success, message, hint, .. } = self;
        let is_null = output.is_none();
        let quoted = |text: &str| Value::from(text).to_string();
        let start = format!(
            r#"{{"success":{success},"message":{},"hint":{},"data":{{"session_id":{},"command":{},"status":{},"exit_code":{},"#,
            quoted(&message),
            json!(hint),
            quoted(&session_id),
            quoted(&command),
            json!(status),
            json!(exit_code),
        );
        let (before, between, after) = if is_null {
            (r#""output":null,"#.to_owned(), r#""console":null}}"#.to_owned(), String::new())
        } else {
            let record = format!(
                r#"","console":[{{"ps1":{},"command":{},"output":""#,
                quoted(CONSOLE_PROMPT),
                quoted(&command)
            );
            (r#""output":""#.to_owned(), record, r#""}]}}"#.to_owned())
        };
        let text = output.unwrap_or_default();
        let bounds = piece_bounds(&text);
        let mut parts = vec![JsonPart::Raw(start + &before)];
        parts.extend(bounds.iter().cloned().map(JsonPart::Output));
        parts.push(JsonPart::Raw(between));
        parts.extend(bounds.into_iter().map(JsonPart::Output));
        parts.push(JsonPart::Raw(after));
        parts.into_iter().map(move |part| match part {
            JsonPart::Raw(text) => Bytes::from(text),
            JsonPart::Output(range) => escape_text(&text[range]),
        })
    }
}

impl IntoResponse for CommandResult {
    fn into_response(self) -> Response {
        let is_long = self.output.as_ref().is_some_and(|output| output.len() > MAX_PIECE_BYTES);
        let pieces = self.into_pieces();
        let body = if is_long {
            Body::from_stream(stream::iter(pieces.map(Ok::<_, Infallible>)))
        } else {
            Body::from(pieces.fold(Vec::new(), |mut body, piece| {
                body.extend_from_slice(&piece);
                body
            }))
        };
        ([(header::CONTENT_TYPE, "application/json")], body).into_response()
    }
}

/// A part of the body.
enum JsonPart {
    Raw(String),
    /// A part of the output, without quotes.
    Output(std::ops::Range<usize>),
}

/// Splits a text between characters.
fn piece_bounds(text: &str) -> Vec<std::ops::Range<usize>> {
    let mut bounds = Vec::new();
    let mut start = 0;
    while start < text.len() {
        let mut end = text.len().min(start.saturating_add(MAX_PIECE_BYTES));
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        bounds.push(start..end);
        start = end;
    }
    bounds
}

/// The text as the inside of a JSON string.
fn escape_text(text: &str) -> Bytes {
    let quoted = Bytes::from(Value::from(text).to_string());
    quoted.slice(1..quoted.len() - 1)
}

#[cfg(test)]
mod tests {
    use super::super::super::commands::run::{CommandIds, FailedStage};
    use super::super::super::problem::AioProblem;
    use super::*;
    use http::StatusCode;

    fn body_of(result: CommandResult) -> Value {
        let bytes: Vec<u8> = result.into_pieces().flat_map(|piece| piece.to_vec()).collect();
        serde_json::from_slice(&bytes).unwrap_or_else(|error| panic!("{error}: {bytes:?}"))
    }

    #[test]
    fn pieces_are_one_json_object() {
        for output in ["", "a \"quoted\" \\ text\n\u{1}", &"é\n".repeat(100_000)] {
            let ended = CommandResult::ended(
                "s\"1".to_owned(),
                "echo \"\n".to_owned(),
                (ShellStatus::Completed, 3),
                output.to_owned(),
            );
            let expected = json!({
                "success": true, "message": "Command executed", "hint": null,
                "data": {
                    "session_id": "s\"1", "command": "echo \"\n", "status": "completed", "exit_code": 3,
                    "output": output,
                    "console": [{"ps1": "$ ", "command": "echo \"\n", "output": output}],
                },
            });
            assert_eq!(body_of(ended), expected);
        }
        let running = body_of(CommandResult::running("s".to_owned(), "c".to_owned(), "m"));
        let expected = json!({
            "session_id": "s", "command": "c", "status": "running", "exit_code": null, "output": null, "console": null,
        });
        assert_eq!(running["data"], expected);
    }

    fn late_failure(problem: AioProblem, stage: FailedStage) -> Value {
        let ids = CommandIds { session: "s".to_owned(), ..CommandIds::default() };
        body_of(CommandResult::late_failure(FailedCommand { problem, stage, ids, command: "c".to_owned() }))
    }

    #[test]
    fn late_failure_has_all_fields_of_a_result() {
        let problem =
            AioProblem { hint: Some("retry".to_owned()), ..AioProblem::bad_request("it \"failed\"") };
        let expected = json!({
            "success": false, "message": "it \"failed\"", "hint": "retry",
            "data": {
                "session_id": "s", "command": "c", "status": "terminated", "exit_code": -1,
                "output": "it \"failed\"", "console": [{"ps1": "$ ", "command": "c", "output": "it \"failed\""}],
            },
        });
        assert_eq!(late_failure(problem, FailedStage::Started), expected);
    }

    #[test]
    fn command_that_was_only_refused_is_not_terminated() {
        let status = |problem, stage| late_failure(problem, stage)["data"]["status"].clone();
        let busy = || AioProblem::new(StatusCode::TOO_MANY_REQUESTS, "too many commands");
        for problem in [AioProblem::no_session(), busy(), AioProblem::bad_request("no room")] {
            let data = late_failure(problem, FailedStage::NotStarted)["data"].clone();
            assert_eq!((&data["status"], &data["exit_code"]), (&json!("completed"), &json!(126)));
        }
        assert_eq!(status(busy(), FailedStage::Started), "terminated", "the command has had effects");
        let unreachable = AioProblem::new(StatusCode::INTERNAL_SERVER_ERROR, "no answer");
        for problem in [AioProblem::not_found(), unreachable] {
            assert_eq!(status(problem, FailedStage::NotStarted), "terminated", "the sandbox is lost");
        }
    }
}
