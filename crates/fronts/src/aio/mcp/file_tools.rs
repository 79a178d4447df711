//! Tools that work with files.

use axum::Json;
use serde::Deserialize;
use serde_json::{Value, json};

use super::{ToolContext, read_arguments};
use crate::aio::body::{AioJson, parse_fields};
use crate::aio::envelope::ResponseEnvelope;
use crate::aio::files::{self, ShortText};
use crate::aio::target::AioTarget;
use crate::kit::mcp::{ToolArguments, ToolFailure, ToolFuture, ToolOutput};

/// How much of a file is read at once; a result is held in memory several times.
const MAX_READ_BYTES: usize = 1 << 20;

/// The arguments that `POST /v1/file/grep` knows by the same names.
const GREP_FIELDS: [&str; 9] = [
    "path",
    "pattern",
    "include",
    "exclude",
    "case_insensitive",
    "fixed_strings",
    "context_before",
    "context_after",
    "max_results",
];

/// The operation of `sandbox_file_operations`.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
enum FileOperation {
    Read,
    Write,
    Replace,
    Search,
    Find,
    List,
    Grep,
    Glob,
}

/// `sandbox_file_operations`
pub(super) fn operate_on_file(context: ToolContext, arguments: ToolArguments) -> ToolFuture {
    Box::pin(async move {
        let action = arguments.get("action").cloned().unwrap_or_default();
        let OperationName { action: operation } = parse_fields(json!({"action": action}))?;
        let (path, target) = (arguments.get("path").cloned().unwrap_or_default(), context.target);
        let mut data = match operation {
            FileOperation::Read => read_file(target, &arguments).await?,
            FileOperation::Write => write_file(target, arguments).await?,
            FileOperation::Replace => replace_in_file(target, &arguments).await?,
            FileOperation::Search => search_in_file(target, &arguments).await?,
            FileOperation::Find => find_files(target, &arguments).await?,
            FileOperation::List => list_path(target, &arguments).await?,
            FileOperation::Grep => grep_files(target, &arguments).await?,
            FileOperation::Glob => glob_files(target, &arguments).await?,
        };
        // Routes call the path by other names.
        if let Some(fields) = data.as_object_mut() {
            fields.remove("file");
            fields.insert("action".to_owned(), action);
            fields.insert("path".to_owned(), path);
            fields.insert("success".to_owned(), true.into());
        }
        Ok(ToolOutput::from_data(data))
    })
}

#[derive(Deserialize)]
struct OperationName {
    action: FileOperation,
}

async fn read_file(target: AioTarget, arguments: &ToolArguments) -> Result<Value, ToolFailure> {
    let body = parse_fields(fields_of(
        arguments,
        &[("file", "path"), ("start_line", "start_line"), ("end_line", "end_line"), ("sudo", "sudo")],
    ))?;
    match files::read_short_text(target, body, MAX_READ_BYTES).await? {
        ShortText::Whole(content) => Ok(json!({"content": content})),
        ShortText::TooLong => Err(ToolFailure::new(format!(
            "The text has more than {MAX_READ_BYTES} bytes. Read some of its lines with start_line and end_line, or use \
             grep or a command."
        ))),
    }
}

async fn write_file(target: AioTarget, mut arguments: ToolArguments) -> Result<Value, ToolFailure> {
    require_argument(&arguments, "content", "write needs the content")?;
    let Some(Value::String(content)) = arguments.remove("content") else {
        return Err(ToolFailure::new("Invalid argument `content`: it is not a text."));
    };
    let mut fields = fields_of(
        &arguments,
        &[("file", "path"), ("encoding", "encoding"), ("append", "append"), ("sudo", "sudo")],
    );
    fields["content"] = "".into();
    let written = files::write_text(target, parse_fields(fields)?, content).await?;
    Ok(serde_json::to_value(written).expect("the result is a text and a number"))
}

async fn replace_in_file(target: AioTarget, arguments: &ToolArguments) -> Result<Value, ToolFailure> {
    require_argument(arguments, "content", "replace needs the old text")?;
    require_argument(arguments, "target", "replace needs the new text")?;
    let names = [("file", "path"), ("old_str", "content"), ("new_str", "target"), ("sudo", "sudo")];
    let body = parse_fields(fields_of(arguments, &names))?;
    Ok(response_data(files::replace_text(target, body).await?))
}

async fn search_in_file(target: AioTarget, arguments: &ToolArguments) -> Result<Value, ToolFailure> {
    require_argument(arguments, "content", "search needs a regular expression")?;
    let names = [("file", "path"), ("regex", "content"), ("sudo", "sudo")];
    let body = parse_fields(fields_of(arguments, &names))?;
    let mut data = response_data(files::search_in_file(target, AioJson(body)).await?);
    data["match_count"] = data["matches"].as_array().map(Vec::len).into();
    Ok(data)
}

async fn find_files(target: AioTarget, arguments: &ToolArguments) -> Result<Value, ToolFailure> {
    require_argument(arguments, "pattern", "find needs a glob")?;
    let body = parse_fields(fields_of(arguments, &[("path", "path"), ("glob", "pattern")]))?;
    let mut data = response_data(files::find_files(target, AioJson(body)).await?);
    data["file_count"] = data["files"].as_array().map(Vec::len).into();
    Ok(data)
}

async fn list_path(target: AioTarget, arguments: &ToolArguments) -> Result<Value, ToolFailure> {
    let mut fields = fields_of(arguments, &["path", "recursive", "file_types"].map(|name| (name, name)));
    // The route shows hidden files unless it is told otherwise.
    fields["show_hidden"] = arguments.get("show_hidden").cloned().unwrap_or(false.into());
    let body = parse_fields(fields)?;
    Ok(response_data(files::list_path(target, AioJson(body)).await?))
}

async fn grep_files(target: AioTarget, arguments: &ToolArguments) -> Result<Value, ToolFailure> {
    require_argument(arguments, "pattern", "grep needs a regular expression")?;
    let mut fields = fields_of(arguments, &GREP_FIELDS.map(|name| (name, name)));
    // The route searches a whole tree unless it is told otherwise.
    fields["recursive"] = arguments.get("recursive").cloned().unwrap_or(false.into());
    let body = parse_fields(fields)?;
    Ok(response_data(files::grep_files(target, AioJson(body)).await?))
}

async fn glob_files(target: AioTarget, arguments: &ToolArguments) -> Result<Value, ToolFailure> {
    require_argument(arguments, "pattern", "glob needs a glob")?;
    let names = [
        ("path", "path"),
        ("pattern", "pattern"),
        ("exclude", "exclude"),
        ("include_hidden", "show_hidden"),
        ("files_only", "files_only"),
        ("include_metadata", "include_metadata"),
        ("max_results", "max_results"),
    ];
    let body = parse_fields(fields_of(arguments, &names))?;
    Ok(response_data(files::glob_files(target, AioJson(body)).await?))
}

fn response_data(Json(response): Json<ResponseEnvelope<Value>>) -> Value {
    response.data.unwrap_or_default()
}

/// `sandbox_str_replace_editor`
pub(super) fn edit_file(context: ToolContext, arguments: ToolArguments) -> ToolFuture {
    Box::pin(async move {
        let command = arguments.get("command").cloned().unwrap_or_default();
        let result = files::run_editor(context.target, read_arguments(arguments)?).await?;
        let mut data = serde_json::to_value(result).expect("the result consists of texts");
        if let Some(fields) = data.as_object_mut() {
            fields.remove("metadata");
            fields.insert("command".to_owned(), command);
            fields.insert("success".to_owned(), true.into());
        }
        Ok(ToolOutput::from_data(data))
    })
}

/// The fields of a route's body, from arguments with other names.
fn fields_of(arguments: &ToolArguments, names: &[(&str, &str)]) -> Value {
    let present = names.iter().filter_map(|(field, argument)| {
        arguments.get(*argument).map(|value| ((*field).to_owned(), value.clone()))
    });
    Value::Object(present.collect())
}

fn require_argument(arguments: &ToolArguments, name: &str, reason: &str) -> Result<(), ToolFailure> {
    match arguments.contains_key(name) {
        true => Ok(()),
        false => Err(ToolFailure::new(format!("Missing argument `{name}`: {reason}."))),
    }
}
