//! Searches: for paths by a glob (`find`), and for text in a tree (`grep`) or in one file (`search`).

use axum::Json;
use domain::Bytes as ByteCount;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use service::{GlobKinds, GlobOrder, GlobQuery, GrepMatch, GrepPattern, GrepQuery};

use super::failure::FileAction;
use super::{FileCall, number_between};
use crate::aio::body::{AioJson, require_text};
use crate::aio::envelope::{ResponseEnvelope, success_response};
use crate::aio::problem::AioProblem;
use crate::aio::target::AioTarget;

/// The maximum number of paths that `find` returns.
const MAX_FOUND_PATHS: u32 = 50_000;
const MAX_MATCHES: u32 = 10_000;
const DEFAULT_MATCHES: u32 = 500;
const MAX_CONTEXT_LINES: u32 = 20;
const DEFAULT_MAX_FILE_SIZE: &str = "1M";
/// The maximum number of globs in one list.
pub(super) const MAX_GLOBS: usize = 256;

#[derive(Debug, Deserialize)]
pub(in crate::aio) struct FindFilesBody {
    path: Option<String>,
    glob: Option<String>,
}

/// `POST /v1/file/find`
pub(in crate::aio) async fn find_files(
    target: AioTarget,
    AioJson(body): AioJson<FindFilesBody>,
) -> Result<Json<ResponseEnvelope<Value>>, AioProblem> {
    let call = FileCall::new(target, FileAction::Find, "path", body.path, None)?;
    let query = GlobQuery {
        pattern: require_text(body.glob, "glob")?,
        exclude: Vec::new(),
        hidden: false,
        kinds: GlobKinds::All,
        metadata: false,
        order: GlobOrder::Path,
        descending: false,
        limit: MAX_FOUND_PATHS,
    };
    let found = call.files().find_paths(&call.identity, &call.path, query).await;
    let found = found.map_err(|error| call.problem(error))?;
    let files: Vec<String> = found.paths.into_iter().map(|path| path.path).collect();
    let message = format!("Search completed, found {} files", files.len());
    let data = json!({"path": call.path, "files": files, "truncated": found.truncated});
    Ok(success_response(message, data))
}

#[derive(Debug, Deserialize)]
pub(in crate::aio) struct GrepFilesBody {
    path: Option<String>,
    pattern: Option<String>,
    include: Option<Vec<String>>,
    exclude: Option<Vec<String>>,
    case_insensitive: Option<bool>,
    fixed_strings: Option<bool>,
    context_before: Option<u32>,
    context_after: Option<u32>,
    max_results: Option<u32>,
    max_file_size: Option<String>,
    multiline: Option<bool>,
    offset: Option<u64>,
    #[serde(rename = "type")]
    file_type: Option<String>,
    recursive: Option<bool>,
}

#[derive(Serialize)]
struct GrepMatchBody {
    file: String,
    line_number: u64,
    line_content: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    context_before: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    context_after: Vec<String>,
}

impl From<GrepMatch> for GrepMatchBody {
    fn from(found: GrepMatch) -> Self {
        Self {
            file: found.path,
            line_number: found.line,
            line_content: found.text,
            context_before: found.before,
            context_after: found.after,
        }
    }
}

/// `POST /v1/file/grep`
pub(in crate::aio) async fn grep_files(
    target: AioTarget,
    AioJson(body): AioJson<GrepFilesBody>,
) -> Result<Json<ResponseEnvelope<Value>>, AioProblem> {
    let call = FileCall::new(target, FileAction::Grep, "path", body.path, None)?;
    let pattern = require_text(body.pattern, "pattern")?;
    let size = body.max_file_size.as_deref().unwrap_or(DEFAULT_MAX_FILE_SIZE);
    let size = parse_size(size).ok_or_else(|| {
        AioProblem::invalid_field("max_file_size", "must be a number of bytes, with K, M or G if it is large")
    })?;
    let query = GrepQuery {
        pattern: match body.fixed_strings {
            Some(true) => GrepPattern::Literal(pattern.clone()),
            _ => GrepPattern::Regex(pattern.clone()),
        },
        ignore_case: body.case_insensitive == Some(true),
        multiline: body.multiline == Some(true),
        before: number_between(body.context_before, "context_before", (0, MAX_CONTEXT_LINES), 0)?,
        after: number_between(body.context_after, "context_after", (0, MAX_CONTEXT_LINES), 0)?,
        include: checked_globs(body.include, "include")?,
        exclude: checked_globs(body.exclude, "exclude")?,
        file_type: body.file_type.filter(|name| !name.is_empty()),
        recursive: body.recursive != Some(false),
        max_file_size: Some(ByteCount(size)),
        offset: body.offset.unwrap_or(0),
        limit: number_between(body.max_results, "max_results", (1, MAX_MATCHES), DEFAULT_MATCHES)?,
    };
    let found = call.files().search_text(&call.identity, &call.path, query).await;
    let found = found.map_err(|error| call.problem(error))?;
    let matches: Vec<GrepMatchBody> = found.matches.into_iter().map(Into::into).collect();
    let count = matches.len();
    let data = json!({
        "path": call.path,
        "pattern": pattern,
        "matches": matches,
        "match_count": count,
        "files_searched": found.files_searched,
        "files_matched": found.files_matched,
        "truncated": found.truncated,
    });
    Ok(success_response(format!("Search completed, found {count} matches"), data))
}

#[derive(Debug, Deserialize)]
pub(in crate::aio) struct SearchFileBody {
    file: Option<String>,
    regex: Option<String>,
    sudo: Option<bool>,
}

/// `POST /v1/file/search`: the lines of one file that match; their numbers begin at 0.
pub(in crate::aio) async fn search_in_file(
    target: AioTarget,
    AioJson(body): AioJson<SearchFileBody>,
) -> Result<Json<ResponseEnvelope<Value>>, AioProblem> {
    let call = FileCall::new(target, FileAction::Search, "file", body.file, body.sudo)?;
    let query = GrepQuery {
        pattern: GrepPattern::Regex(require_text(body.regex, "regex")?),
        ignore_case: false,
        multiline: false,
        before: 0,
        after: 0,
        include: Vec::new(),
        exclude: Vec::new(),
        file_type: None,
        recursive: false,
        max_file_size: None,
        offset: 0,
        limit: MAX_MATCHES,
    };
    must_be_text(&call).await?;
    let found = call.files().search_text(&call.identity, &call.path, query).await;
    let found = found.map_err(|error| call.problem(error))?;
    let numbers: Vec<u64> = found.matches.iter().map(|line| line.line.saturating_sub(1)).collect();
    let lines: Vec<String> = found.matches.into_iter().map(|line| line.text).collect();
    let message = format!("Search completed, found {} matches", lines.len());
    let data = json!({
        "file": call.path,
        "matches": lines,
        "line_numbers": numbers,
        "truncated": found.truncated,
    });
    Ok(success_response(message, data))
}

/// A directory and a file that is not text are errors here, while a search in a tree skips what it cannot read.
async fn must_be_text(call: &FileCall) -> Result<(), AioProblem> {
    let checked = call.files().read_lines(&call.identity, &call.path, 0, None).await;
    checked.map(drop).map_err(|error| call.problem(error))
}

/// Checks a list of globs; the sandbox checks each of them.
pub(super) fn checked_globs(globs: Option<Vec<String>>, field: &str) -> Result<Vec<String>, AioProblem> {
    let globs = globs.unwrap_or_default();
    if globs.len() > MAX_GLOBS {
        return Err(AioProblem::invalid_field(field, format!("more than {MAX_GLOBS} patterns")));
    }
    if globs.iter().any(|glob| glob.contains('\0')) {
        return Err(AioProblem::invalid_field(field, "a pattern contains a NUL byte"));
    }
    Ok(globs)
}

/// Parses a size as ripgrep does: `1024`, `500K`, `1M`, `2G`.
fn parse_size(text: &str) -> Option<u64> {
    let text = text.trim();
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let factor = match text[digits.len()..].to_ascii_uppercase().as_str() {
        "" | "B" => 1,
        "K" | "KB" => 1 << 10,
        "M" | "MB" => 1 << 20,
        "G" | "GB" => 1 << 30,
        _ => return None,
    };
    let is_number = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    digits.parse::<u64>().ok().filter(|_| is_number)?.checked_mul(factor)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_a_unit_or_none() {
        for (text, expected) in [
            ("1M", Some(1 << 20)),
            ("500k", Some(500 << 10)),
            ("2G", Some(2 << 30)),
            ("1024", Some(1024)),
            (" 1 ", Some(1)),
            ("1KB", Some(1024)),
            ("", None),
            ("M", None),
            ("+1", None),
            ("-1", None),
            ("1T", None),
            ("1é", None),
            ("99999999999999999999", None),
            ("18446744073709551615G", None),
        ] {
            assert_eq!(parse_size(text), expected, "{text}");
        }
    }
}
