//! `POST /v1/file/str_replace_editor`: the editing tool that language models are trained to use.
//!
//! What a model does wrong, such as a text that is not in the file, is 400 with a message in the tool's wording, which
//! clients look for. Errors of the filesystem are reported as everywhere else.

use axum::Json;
use axum::extract::Request;
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use service::{
    EditContents, EditedFile, FileError, FileFault, FileKind, LineEnds, MAX_RETURNED_CONTENT, ServiceError,
    TextEdit, TextOccurrence, UndoOutcome, UndoPolicy,
};

use super::FileCall;
use super::editor_view::{numbered_lines, snippet_around, view_path};
use super::failure::FileAction;
use super::replace::MAX_EDIT_BODY;
use crate::aio::body::parse_json;
use crate::aio::envelope::{ResponseEnvelope, data_response};
use crate::aio::problem::AioProblem;
use crate::aio::target::AioTarget;
use crate::kit::body::read_body;

/// How many characters of a text appear in a message.
const MAX_SHOWN_CHARS: usize = 2000;
const REVIEW_REQUEST: &str =
    "Review the changes and make sure they are as expected. Edit the file again if necessary.";

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum EditorCommand {
    View,
    Create,
    StrReplace,
    Insert,
    UndoEdit,
}

/// Which occurrences are replaced; without one, the text must occur once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
enum ReplaceMode {
    All,
    First,
    Last,
}

#[derive(Debug, Deserialize)]
pub(in crate::aio) struct EditorBody {
    command: Option<EditorCommand>,
    path: Option<String>,
    file_text: Option<String>,
    old_str: Option<String>,
    new_str: Option<String>,
    insert_line: Option<i64>,
    view_range: Option<Vec<i64>>,
    replace_mode: Option<ReplaceMode>,
}

/// The result of a command.
#[derive(Debug, Serialize)]
pub(in crate::aio) struct EditorResult {
    output: String,
    error: Option<String>,
    path: String,
    prev_exist: bool,
    old_content: Option<String>,
    new_content: Option<String>,
    metadata: Option<()>,
}

impl EditorResult {
    pub(super) fn new(path: &str, output: String, prev_exist: bool, contents: EditContents) -> Self {
        let text = |content: Option<Bytes>| content.and_then(|bytes| String::from_utf8(bytes.into()).ok());
        Self {
            output,
            error: None,
            path: path.to_owned(),
            prev_exist,
            old_content: text(contents.old),
            new_content: text(contents.new),
            metadata: None,
        }
    }
}

pub(super) async fn edit_file(
    target: AioTarget,
    request: Request,
) -> Result<Json<ResponseEnvelope<EditorResult>>, AioProblem> {
    let bytes = read_body(request.into_body(), MAX_EDIT_BODY).await?;
    run_command(target, parse_json(&bytes)?).await.map(data_response)
}

pub(in crate::aio) async fn run_command(
    target: AioTarget,
    body: EditorBody,
) -> Result<EditorResult, AioProblem> {
    let command = body.command.ok_or_else(|| AioProblem::missing_field("command"))?;
    if let Some(path) = body.path.as_deref().filter(|path| !path.starts_with('/')) {
        let path = shown(path);
        return Err(AioProblem::bad_request(format!(
            "Invalid `path` parameter: {path}. The path should be an absolute path, starting with `/`."
        )));
    }
    let call = FileCall::new(target, FileAction::Edit, "path", body.path.clone(), None)?;
    match command {
        EditorCommand::View => view_path(&call, body.view_range.unwrap_or_default()).await,
        EditorCommand::Create => create_file(&call, body.file_text).await,
        EditorCommand::StrReplace => replace_text(&call, body).await,
        EditorCommand::Insert => insert_text(&call, body).await,
        EditorCommand::UndoEdit => undo_edit(&call).await,
    }
}

async fn create_file(call: &FileCall, text: Option<String>) -> Result<EditorResult, AioProblem> {
    let text = text.ok_or_else(|| missing_parameter("file_text", "create"))?;
    let attributes = service::FileAttributes::default();
    let edit = TextEdit::Create { attributes, new_file_mode: None };
    let edited = call.files().edit_file(&call.identity, &call.path, edit, text.into(), MAX_RETURNED_CONTENT);
    let edited = edited.await.map_err(|error| match fault_of(&error) {
        Some(FileFault::AlreadyExists | FileFault::IsADirectory) => AioProblem::bad_request(format!(
            "Invalid `path` parameter: {0}. File already exists at: {0}. Cannot overwrite files using command \
             `create`.",
            call.path
        )),
        _ => call.problem(error),
    })?;
    let output = format!("File created successfully at: {}", call.path);
    Ok(EditorResult::new(&call.path, output, false, edited.contents))
}

async fn replace_text(call: &FileCall, body: EditorBody) -> Result<EditorResult, AioProblem> {
    let old = body.old_str.ok_or_else(|| missing_parameter("old_str", "str_replace"))?;
    let new = body.new_str.unwrap_or_default();
    if old.is_empty() {
        return Err(AioProblem::bad_request(
            "Invalid `old_str` parameter: it is empty. No replacement was performed.",
        ));
    }
    if old == new {
        return Err(AioProblem::bad_request(
            "No replacement was performed. `new_str` and `old_str` must be different.",
        ));
    }
    let occurrence = match body.replace_mode {
        None => TextOccurrence::Only,
        Some(ReplaceMode::All) => TextOccurrence::All,
        Some(ReplaceMode::First) => TextOccurrence::First,
        Some(ReplaceMode::Last) => TextOccurrence::Last,
    };
    let edit = TextEdit::Replace { old: old.clone(), occurrence, line_ends: LineEnds::AsInFile };
    let edited = run_edit(call, edit, new).await?;
    let (path, old) = (&call.path, shown(&old));
    if edited.matches == 0 {
        return Err(AioProblem::bad_request(format!(
            "No replacement was performed, old_str `{old}` did not appear verbatim in {path}."
        )));
    }
    if edited.matches > 1 && occurrence == TextOccurrence::Only {
        let lines: Vec<String> = edited.match_lines.iter().map(u64::to_string).collect();
        return Err(AioProblem::bad_request(format!(
            "No replacement was performed. Multiple occurrences of old_str `{old}` in lines [{}], so it is not \
             unique. Please ensure it is unique.",
            lines.join(", ")
        )));
    }
    let line = match occurrence {
        TextOccurrence::Last => edited.match_lines.last(),
        _ => edited.match_lines.first(),
    };
    let line = line.copied().unwrap_or(1);
    Ok(edited_result(call, edited.contents, line))
}

async fn insert_text(call: &FileCall, body: EditorBody) -> Result<EditorResult, AioProblem> {
    let line = body.insert_line.ok_or_else(|| missing_parameter("insert_line", "insert"))?;
    let text = body.new_str.ok_or_else(|| missing_parameter("new_str", "insert"))?;
    let out_of_range = |lines: &str| {
        AioProblem::bad_request(format!(
            "Invalid `insert_line` parameter: {line}. It should be within the range of allowed values: [0, {lines}]"
        ))
    };
    let after_line = u64::try_from(line).or(Err(out_of_range("number of lines")))?;
    let edit = TextEdit::Insert { after_line, line_ends: LineEnds::AsInFile };
    let edited = run_edit(call, edit, text).await?;
    if !edited.changed && after_line > edited.lines {
        return Err(out_of_range(&edited.lines.to_string()));
    }
    Ok(edited_result(call, edited.contents, after_line + 1))
}

async fn undo_edit(call: &FileCall) -> Result<EditorResult, AioProblem> {
    let undone =
        call.files().undo_edit(&call.identity, &call.path, UndoPolicy::Overwrite, MAX_RETURNED_CONTENT);
    let undone = undone.await.map_err(|error| edit_problem(call, error))?;
    let path = &call.path;
    let existed = undone.contents.old.is_some() || undone.outcome == UndoOutcome::Removed;
    let output = match undone.outcome {
        UndoOutcome::NoHistory | UndoOutcome::ChangedSince => {
            return Err(AioProblem::bad_request(format!("No edit history found for {path}.")));
        }
        UndoOutcome::Removed => {
            format!(
                "Last edit to {path} undone successfully. The edit had created the file, which was removed."
            )
        }
        UndoOutcome::Restored => {
            let content = undone.contents.new.as_deref().map(String::from_utf8_lossy).unwrap_or_default();
            let lines = numbered_lines(path, &content, 1);
            format!("Last edit to {path} undone successfully. {lines}")
        }
    };
    Ok(EditorResult::new(path, output, existed, undone.contents))
}

async fn run_edit(call: &FileCall, edit: TextEdit, text: String) -> Result<EditedFile, AioProblem> {
    let edited = call.files().edit_file(&call.identity, &call.path, edit, text.into(), MAX_RETURNED_CONTENT);
    edited.await.map_err(|error| edit_problem(call, error))
}

/// The result of a change at a line, with the lines around it.
fn edited_result(call: &FileCall, contents: EditContents, line: u64) -> EditorResult {
    let path = &call.path;
    let snippet = contents.new.as_deref().map(|new| snippet_around(&String::from_utf8_lossy(new), line));
    let shown = match snippet {
        Some(snippet) => format!(" Here's the result of running `cat -n` on a snippet of {path}:\n{snippet}"),
        None => String::new(),
    };
    let output = format!("The file {path} has been edited.{shown}\n{REVIEW_REQUEST}");
    EditorResult::new(path, output, true, contents)
}

/// Errors that the tool itself reports; others are errors of the filesystem.
pub(super) fn edit_problem(call: &FileCall, error: ServiceError) -> AioProblem {
    let path = &call.path;
    match fault_of(&error) {
        Some(FileFault::NotFound) => AioProblem::bad_request(format!(
            "Invalid `path` parameter: {path}. The path {path} does not exist. Please provide a valid path."
        )),
        Some(FileFault::IsADirectory) => AioProblem::bad_request(format!(
            "Invalid `path` parameter: {path}. The path {path} is a directory and only the `view` command can be \
             used on directories."
        )),
        _ => call.problem(error),
    }
}

fn fault_of(error: &ServiceError) -> Option<FileFault> {
    match error {
        ServiceError::File(FileError { fault, launch_step: None, .. }) => Some(*fault),
        _ => None,
    }
}

fn missing_parameter(name: &str, command: &str) -> AioProblem {
    AioProblem::bad_request(format!("Parameter `{name}` is required for command: {command}."))
}

/// The beginning of a text, for a message.
fn shown(text: &str) -> String {
    match text.char_indices().nth(MAX_SHOWN_CHARS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// Whether the path leads to a directory; links are followed.
pub(super) async fn is_directory(call: &FileCall) -> Result<bool, AioProblem> {
    let infos = call.files().stat_files(&call.identity, std::slice::from_ref(&call.path)).await;
    let infos = infos.map_err(|error| edit_problem(call, error))?;
    match infos.first().map(|info| info.kind) {
        Some(FileKind::Directory) => Ok(true),
        Some(FileKind::Symlink) => {
            let opened = call.files().read_file(&call.identity, &call.path, 0, Some(0)).await;
            Ok(opened.is_err_and(|error| fault_of(&error) == Some(FileFault::IsADirectory)))
        }
        _ => Ok(false),
    }
}
