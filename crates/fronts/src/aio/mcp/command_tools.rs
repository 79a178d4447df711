//! Tools that run commands and code.

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{ToolContext, read_arguments};
use crate::aio::body::{AioJson, parse_fields};
use crate::aio::code;
use crate::aio::shell::{ShellStatus, ToolSession, run_tool_command};
use crate::kit::mcp::{ToolArguments, ToolFailure, ToolFuture, ToolImage, ToolOutput};

/// How long a command is waited for, in seconds, as in AIO's image.
const DEFAULT_COMMAND_TIMEOUT: f64 = 30.0;

/// Formats of images that clients show.
const IMAGE_TYPES: &[&str] = &["image/png", "image/jpeg"];

/// How many images one call returns.
const MAX_IMAGES: usize = 16;

#[derive(Deserialize)]
struct BashArguments {
    cmd: String,
    cwd: Option<String>,
    new_session: Option<bool>,
    timeout: Option<f64>,
    truncate: Option<bool>,
    preserve_symlinks: Option<bool>,
}

/// `sandbox_execute_bash`
pub(super) fn execute_bash(context: ToolContext, arguments: ToolArguments) -> ToolFuture {
    Box::pin(async move {
        let arguments: BashArguments = read_arguments(arguments)?;
        let session =
            if arguments.new_session == Some(true) { ToolSession::New } else { ToolSession::Shared };
        let body = parse_fields(json!({
            "command": arguments.cmd,
            "exec_dir": arguments.cwd,
            // A missing directory is an error that the model can correct.
            "strict": true,
            "timeout": arguments.timeout.unwrap_or(DEFAULT_COMMAND_TIMEOUT),
            "truncate": arguments.truncate,
            "preserve_symlinks": arguments.preserve_symlinks,
        }))?;
        let result = run_tool_command(context.target, session, body).await?;
        if result.status == ShellStatus::Terminated {
            let message = format!("The command was not completed: {}", result.output);
            return Err(ToolFailure { message, data: Some(json!({"status": result.status})) });
        }
        let mut data = json!({
            "status": result.status,
            "output": result.output,
            "exit_code": result.exit_code,
            "cwd": result.directory,
            "session_id": result.session_id,
        });
        if result.exit_code.is_none() {
            data["hint"] =
                "The command goes on, and `output` is what it has printed so far. Use new_session to run \
                            other commands meanwhile."
                    .into();
        }
        Ok(ToolOutput::from_data(data))
    })
}

/// `sandbox_execute_code`
pub(super) fn execute_code(context: ToolContext, mut arguments: ToolArguments) -> ToolFuture {
    Box::pin(async move {
        arguments.entry("language").or_insert_with(|| "python".into());
        let body = read_arguments(arguments)?;
        let response = code::execute_code(context.target, AioJson(body)).await?.0;
        let data = serde_json::to_value(response.data).expect("responses consist of texts and JSON");
        Ok(code_output(&data, &response.message))
    })
}

/// What a model needs of the result of a run: its outputs repeat the texts.
fn code_output(data: &Value, message: &str) -> ToolOutput {
    let mut shown: Map<String, Value> = Map::new();
    for field in ["status", "stdout", "stderr", "exit_code", "traceback"] {
        shown.insert(field.to_owned(), data[field].clone());
    }
    let outputs = data["outputs"].as_array().map(Vec::as_slice).unwrap_or_default();
    let mut results = outputs.iter().filter(|output| output["output_type"] == "execute_result");
    let result = results.next_back().map(|output| output["data"]["text/plain"].clone());
    shown.insert("result".to_owned(), result.unwrap_or_default());
    if data["status"] != "ok" {
        shown.insert("message".to_owned(), message.into());
    }
    let images = outputs.iter().flat_map(|output| {
        IMAGE_TYPES.iter().filter_map(|media_type| {
            let data = output["data"][media_type].as_str()?.to_owned();
            Some(ToolImage { data, media_type })
        })
    });
    ToolOutput { images: images.take(MAX_IMAGES).collect(), ..ToolOutput::from_data(Value::Object(shown)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_and_the_last_value_are_taken_from_the_outputs() {
        let data = json!({
            "status": "ok", "stdout": "a\n", "stderr": "", "exit_code": 0, "traceback": null, "code": "x",
            "outputs": [
                {"output_type": "execute_result", "data": {"text/plain": "7"}},
                {"output_type": "display_data", "data": {"image/png": "cG5n", "text/plain": "<Figure>"}},
            ],
        });
        let output = code_output(&data, "done");
        assert_eq!(
            output.data,
            json!({"status": "ok", "stdout": "a\n", "stderr": "", "exit_code": 0, "traceback": null, "result": "7"})
        );
        let images: Vec<_> =
            output.images.iter().map(|image| (image.data.as_str(), image.media_type)).collect();
        assert_eq!(images, [("cG5n", "image/png")]);
    }
}
