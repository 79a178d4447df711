//! Listings of directories: `list` for a tree as it is, `glob` for the paths that match a pattern.
//!
//! Both are searches for paths, which the sandbox sorts and limits, so a tree of any size can be listed.

use std::collections::HashMap;
use std::time::SystemTime;

use axum::Json;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use service::{FileKind, GlobKinds, GlobMatch, GlobMatches, GlobOrder, GlobQuery};

use super::failure::FileAction;
use super::search::checked_globs;
use super::{FileCall, base_name, number_between};
use crate::aio::body::{AioJson, require_text};
use crate::aio::envelope::{ResponseEnvelope, success_response};
use crate::aio::problem::AioProblem;
use crate::aio::target::AioTarget;
use crate::kit::time::format_rfc3339;

/// How many entries a listing returns.
const MAX_LISTED_ENTRIES: usize = 10_000;
/// How many entries are read if only some types of files are listed.
const MAX_READ_ENTRIES: u32 = 50_000;
const MAX_GLOB_RESULTS: u32 = 50_000;
const DEFAULT_GLOB_RESULTS: u32 = 5000;
/// How deep a listing with a maximum depth may be; the kernel's limit for paths allows no more.
const MAX_DEPTH: u32 = 2048;
/// How many files are asked for their permissions at once.
const STAT_BATCH: usize = 1000;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum ListOrder {
    #[default]
    Name,
    Size,
    Modified,
    Type,
}

#[derive(Debug, Deserialize)]
pub(in crate::aio) struct ListPathBody {
    path: Option<String>,
    recursive: Option<bool>,
    show_hidden: Option<bool>,
    /// Extensions, with or without a dot.
    file_types: Option<Vec<String>>,
    max_depth: Option<u32>,
    include_size: Option<bool>,
    include_permissions: Option<bool>,
    sort_by: Option<ListOrder>,
    sort_desc: Option<bool>,
}

#[derive(Debug, Serialize)]
struct ListedFileBody {
    name: String,
    path: String,
    is_directory: bool,
    size: Option<u64>,
    modified_time: Option<String>,
    permissions: Option<String>,
    extension: String,
}

/// `POST /v1/file/list`
pub(in crate::aio) async fn list_path(
    target: AioTarget,
    AioJson(body): AioJson<ListPathBody>,
) -> Result<Json<ResponseEnvelope<Value>>, AioProblem> {
    let call = FileCall::new(target, FileAction::List, "path", body.path.clone(), None)?;
    let max_depth = body.max_depth.map(|depth| number_between(Some(depth), "max_depth", (1, MAX_DEPTH), 1));
    let types = checked_globs(body.file_types.clone(), "file_types")?;
    let types: Vec<String> = types.iter().map(|name| extension_text(name)).collect();
    let depth = match (body.recursive, max_depth.transpose()?) {
        (Some(true), depth) => depth,
        _ => Some(1),
    };
    let limit = match types.is_empty() {
        true => u32::try_from(MAX_LISTED_ENTRIES).unwrap_or(u32::MAX),
        false => MAX_READ_ENTRIES,
    };
    let found = find_entries(&call, &body, depth, limit).await?;
    let mut entries = found.paths;
    if !types.is_empty() {
        entries.retain(|entry| is_directory(entry) || types.contains(&extension_of(&entry.path)));
    }
    if body.sort_by == Some(ListOrder::Type) {
        entries.sort_by_cached_key(|entry| {
            (!is_directory(entry), extension_of(&entry.path), base_name(&entry.path).to_owned())
        });
        if body.sort_desc == Some(true) {
            entries.reverse();
        }
    }
    let truncated = found.truncated || entries.len() > MAX_LISTED_ENTRIES;
    entries.truncate(MAX_LISTED_ENTRIES);
    let permissions = match body.include_permissions {
        Some(true) => read_permissions(&call, &entries).await?,
        _ => HashMap::new(),
    };
    let include_size = body.include_size != Some(false);
    let files: Vec<ListedFileBody> =
        entries.into_iter().map(|entry| listed_file(entry, include_size, &permissions)).collect();
    let directories = files.iter().filter(|file| file.is_directory).count();
    let data = json!({
        "path": call.path,
        "total_count": files.len(),
        "directory_count": directories,
        "file_count": files.len() - directories,
        "truncated": truncated,
        "files": files,
    });
    Ok(success_response("Directory listed successfully", data))
}

/// The entries down to a depth, or all.
async fn find_entries(
    call: &FileCall,
    body: &ListPathBody,
    depth: Option<u32>,
    limit: u32,
) -> Result<GlobMatches, AioProblem> {
    let order = match body.sort_by.unwrap_or_default() {
        // The entries of a tree are not torn apart by their names.
        ListOrder::Name if body.recursive == Some(true) => GlobOrder::Path,
        ListOrder::Name => GlobOrder::Name,
        ListOrder::Size => GlobOrder::Size,
        ListOrder::Modified => GlobOrder::Modified,
        ListOrder::Type => GlobOrder::Path,
    };
    let query = |pattern: String| GlobQuery {
        pattern,
        exclude: Vec::new(),
        hidden: body.show_hidden != Some(false),
        kinds: GlobKinds::All,
        metadata: true,
        order,
        descending: body.sort_desc == Some(true),
        limit,
    };
    let find = async |pattern: String| {
        let found = call.files().find_paths(&call.identity, &call.path, query(pattern)).await;
        found.map_err(|error| call.problem(error))
    };
    let Some(depth) = depth else { return find("**/*".to_owned()).await };
    // A glob names one level. The levels end with the first empty one.
    let mut all = find("*".to_owned()).await?;
    for level in 2..=depth {
        let found = find(vec!["*"; usize::try_from(level).unwrap_or(1)].join("/")).await?;
        if found.paths.is_empty() {
            break;
        }
        all.truncated |= found.truncated;
        all.paths.extend(found.paths);
    }
    if depth > 1 {
        sort_levels(&mut all.paths, order, body.sort_desc == Some(true));
    }
    Ok(all)
}

/// Sorts entries of several levels as the sandbox sorts those of one.
fn sort_levels(entries: &mut [GlobMatch], order: GlobOrder, descending: bool) {
    let components = |entry: &GlobMatch| entry.path.split('/').map(str::to_owned).collect::<Vec<_>>();
    entries.sort_by_cached_key(components);
    match order {
        GlobOrder::Path => {}
        GlobOrder::Name => entries.sort_by(|a, b| base_name(&a.path).cmp(base_name(&b.path))),
        GlobOrder::Size => entries.sort_by_key(|entry| entry.size),
        GlobOrder::Modified => entries.sort_by_key(|entry| entry.modified),
    }
    if descending {
        entries.reverse();
    }
}

/// The permissions of entries, by path. Entries that have vanished meanwhile are left out.
async fn read_permissions(
    call: &FileCall,
    entries: &[GlobMatch],
) -> Result<HashMap<String, String>, AioProblem> {
    let mut permissions = HashMap::new();
    for batch in entries.chunks(STAT_BATCH) {
        let paths: Vec<String> = batch.iter().map(|entry| entry.path.clone()).collect();
        let infos = match call.files().stat_files(&call.identity, &paths).await {
            Ok(infos) => infos,
            // One missing path fails the whole batch.
            Err(service::ServiceError::File(_)) => Vec::new(),
            Err(error) => return Err(call.problem(error)),
        };
        let texts = infos.iter().map(|info| permissions_text(info.kind, info.mode));
        permissions.extend(paths.into_iter().zip(texts));
    }
    Ok(permissions)
}

fn listed_file(
    entry: GlobMatch,
    include_size: bool,
    permissions: &HashMap<String, String>,
) -> ListedFileBody {
    let is_directory = is_directory(&entry);
    ListedFileBody {
        name: base_name(&entry.path).to_owned(),
        is_directory,
        size: entry.size.filter(|_| include_size && !is_directory),
        modified_time: entry.modified.map(format_rfc3339),
        permissions: permissions.get(&entry.path).cloned(),
        extension: if is_directory { String::new() } else { dotted(&extension_of(&entry.path)) },
        path: entry.path,
    }
}

fn is_directory(entry: &GlobMatch) -> bool {
    entry.kind == FileKind::Directory
}

/// The extension of a file in lower case, without its dot.
fn extension_of(path: &str) -> String {
    let name = base_name(path).trim_start_matches('.');
    name.rsplit_once('.').map(|(_, extension)| extension.to_lowercase()).unwrap_or_default()
}

fn extension_text(written: &str) -> String {
    written.trim_start_matches('.').to_lowercase()
}

fn dotted(extension: &str) -> String {
    if extension.is_empty() { String::new() } else { format!(".{extension}") }
}

/// The form of `ls -l`.
pub(super) fn permissions_text(kind: FileKind, mode: u32) -> String {
    let kind = match kind {
        FileKind::File => '-',
        FileKind::Directory => 'd',
        FileKind::Symlink => 'l',
        FileKind::Other => '?',
    };
    let mut text = String::from(kind);
    for (shift, special, letter) in [(6, 0o4000, 's'), (3, 0o2000, 's'), (0, 0o1000, 't')] {
        let bits = mode >> shift;
        text.push(if bits & 4 == 0 { '-' } else { 'r' });
        text.push(if bits & 2 == 0 { '-' } else { 'w' });
        text.push(match (mode & special != 0, bits & 1 != 0) {
            (false, false) => '-',
            (false, true) => 'x',
            (true, true) => letter,
            (true, false) => letter.to_ascii_uppercase(),
        });
    }
    text
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum GlobSort {
    #[default]
    Path,
    Name,
    Size,
    Modified,
}

#[derive(Debug, Deserialize)]
pub(in crate::aio) struct GlobFilesBody {
    path: Option<String>,
    pattern: Option<String>,
    exclude: Option<Vec<String>>,
    include_hidden: Option<bool>,
    files_only: Option<bool>,
    include_metadata: Option<bool>,
    max_results: Option<u32>,
    sort_by: Option<GlobSort>,
    sort_desc: Option<bool>,
}

#[derive(Serialize)]
struct GlobFileBody {
    name: String,
    path: String,
    is_directory: bool,
    size: Option<u64>,
    modified_time: Option<String>,
}

/// `POST /v1/file/glob`
pub(in crate::aio) async fn glob_files(
    target: AioTarget,
    AioJson(body): AioJson<GlobFilesBody>,
) -> Result<Json<ResponseEnvelope<Value>>, AioProblem> {
    let call = FileCall::new(target, FileAction::Glob, "path", body.path, None)?;
    let pattern = require_text(body.pattern, "pattern")?;
    let query = GlobQuery {
        pattern: pattern.clone(),
        exclude: checked_globs(body.exclude, "exclude")?,
        hidden: body.include_hidden == Some(true),
        kinds: if body.files_only == Some(false) { GlobKinds::All } else { GlobKinds::Files },
        metadata: body.include_metadata != Some(false),
        order: match body.sort_by.unwrap_or_default() {
            GlobSort::Path => GlobOrder::Path,
            GlobSort::Name => GlobOrder::Name,
            GlobSort::Size => GlobOrder::Size,
            GlobSort::Modified => GlobOrder::Modified,
        },
        descending: body.sort_desc == Some(true),
        limit: number_between(body.max_results, "max_results", (1, MAX_GLOB_RESULTS), DEFAULT_GLOB_RESULTS)?,
    };
    let found = call.files().find_paths(&call.identity, &call.path, query).await;
    let found = found.map_err(|error| call.problem(error))?;
    let files: Vec<GlobFileBody> = found.paths.into_iter().map(glob_file).collect();
    let data = json!({
        "path": call.path,
        "pattern": pattern,
        "total_count": found.total,
        "truncated": found.truncated,
        "files": files,
    });
    Ok(success_response("Glob search completed", data))
}

fn glob_file(entry: GlobMatch) -> GlobFileBody {
    let time: Option<SystemTime> = entry.modified;
    GlobFileBody {
        name: base_name(&entry.path).to_owned(),
        is_directory: is_directory(&entry),
        size: entry.size,
        modified_time: time.map(format_rfc3339),
        path: entry.path,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extensions_follow_the_last_dot() {
        for (path, expected) in [
            ("/a/b.TXT", "txt"),
            ("/a.d/b", ""),
            ("/a/.hidden", ""),
            ("/a/.x.py", "py"),
            ("/a/b.tar.gz", "gz"),
        ] {
            assert_eq!(extension_of(path), expected, "{path}");
        }
    }

    #[test]
    fn permissions_are_written_as_ls_does() {
        assert_eq!(permissions_text(FileKind::File, 0o644), "-rw-r--r--");
        assert_eq!(permissions_text(FileKind::Directory, 0o1777), "drwxrwxrwt");
        assert_eq!(permissions_text(FileKind::Symlink, 0o4640), "lrwSr-----");
    }
}
