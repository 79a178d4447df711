//! File routes: attributes, search, and changes other than to content.

use std::collections::BTreeMap;

use axum::Json;
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, get, post};
use http::{StatusCode, Uri};
use serde::{Deserialize, Serialize};
use service::{FileAttributes, FileEdit, FileFault, FileInfo, FileKind, ServiceError};

use super::file_mode::{FilePermissions, to_decimal};
use super::problem::{ExecdProblem, JsonOrEmpty, required_parameter};
use super::{FileActor, download, upload};
use crate::kit::query::QueryParams;
use crate::kit::time::format_rfc3339;
use crate::opensandbox::OpenSandboxState;

/// Every file route; they exist as they are, and below prefixes that name a user or a session.
pub(super) fn file_routes() -> Vec<(&'static str, MethodRouter<OpenSandboxState>)> {
    vec![
        ("/files", axum::routing::delete(delete_files)),
        ("/files/info", get(get_file_info)),
        ("/files/search", get(search_files)),
        ("/files/mv", post(move_files)),
        ("/files/links", post(make_links)),
        ("/files/permissions", post(set_permissions)),
        ("/files/replace", post(replace_in_files)),
        ("/files/upload", post(upload::upload_files)),
        ("/files/download", get(download::download_file)),
        ("/directories", post(make_directories).delete(delete_directories)),
        ("/directories/list", get(list_directory)),
    ]
}

#[derive(Serialize)]
struct FileInfoBody {
    path: String,
    #[serde(rename = "type")]
    kind: &'static str,
    size: u64,
    modified_at: String,
    created_at: String,
    owner: String,
    group: String,
    mode: u32,
    /// Where a link leads; an addition of this server.
    #[serde(skip_serializing_if = "Option::is_none")]
    link_target: Option<String>,
}

impl FileInfoBody {
    fn from_info(info: FileInfo) -> Self {
        Self {
            path: info.path,
            kind: match info.kind {
                FileKind::File => "file",
                FileKind::Directory => "directory",
                FileKind::Symlink => "symlink",
                FileKind::Other => "other",
            },
            size: info.size,
            modified_at: format_rfc3339(info.modified),
            created_at: format_rfc3339(info.created),
            owner: info.owner,
            group: info.group,
            mode: to_decimal(info.mode),
            link_target: info.link_target,
        }
    }
}

/// Returns the one path in a query.
pub(super) fn path_of(query: &QueryParams) -> Result<&str, ExecdProblem> {
    required_parameter(query, "path")
}

/// Returns all paths in a query, possibly none.
fn paths_of(uri: &Uri) -> Result<Vec<String>, ExecdProblem> {
    let paths = QueryParams::from_uri(uri).all("path");
    if paths.iter().any(String::is_empty) {
        return Err(ExecdProblem::missing_query("path"));
    }
    Ok(paths)
}

/// `GET /files/info?path=…&path=…`: keyed by the paths as written in the query.
async fn get_file_info(actor: FileActor, uri: Uri) -> Result<Response, ExecdProblem> {
    let paths = paths_of(&uri)?;
    let infos = match paths.is_empty() {
        true => Vec::new(),
        false => actor.sandbox.files().stat_files(actor.as_service_actor(), &paths).await?,
    };
    let body: BTreeMap<String, FileInfoBody> =
        paths.into_iter().zip(infos.into_iter().map(FileInfoBody::from_info)).collect();
    Ok(Json(body).into_response())
}

/// `GET /files/search?path=…&pattern=…`
async fn search_files(actor: FileActor, uri: Uri) -> Result<Response, ExecdProblem> {
    let query = QueryParams::from_uri(&uri);
    let pattern = query.first("pattern").filter(|pattern| !pattern.is_empty()).unwrap_or("**");
    let path = path_of(&query)?;
    let found = actor.sandbox.files().search_files(actor.as_service_actor(), path, pattern).await?;
    Ok(Json(found.into_iter().map(FileInfoBody::from_info).collect::<Vec<_>>()).into_response())
}

/// `GET /directories/list?path=…&depth=…`
async fn list_directory(actor: FileActor, uri: Uri) -> Result<Response, ExecdProblem> {
    let query = QueryParams::from_uri(&uri);
    let depth = query.parse_number("depth").map_err(ExecdProblem::invalid)?.unwrap_or(1);
    let path = path_of(&query)?;
    must_be_directory(&actor, path).await?;
    let entries = match depth {
        0 => Vec::new(),
        _ => actor.sandbox.files().list_directory(actor.as_service_actor(), path, depth).await?,
    };
    Ok(Json(entries.into_iter().map(FileInfoBody::from_info).collect::<Vec<_>>()).into_response())
}

/// Refuses paths that are not directories. Links are not followed, even with a trailing slash, so that
/// the listed directory is the one that was named.
async fn must_be_directory(actor: &FileActor, path: &str) -> Result<(), ExecdProblem> {
    let bare = match path.trim_end_matches('/') {
        "" => "/",
        bare => bare,
    };
    let infos = actor.sandbox.files().stat_files(actor.as_service_actor(), &[bare.to_owned()]).await?;
    let what = match infos.first().map(|info| info.kind) {
        Some(FileKind::Directory) => return Ok(()),
        Some(FileKind::Symlink) => "a link, which is not followed",
        Some(FileKind::File | FileKind::Other) | None => "not a directory",
    };
    Err(ExecdProblem::invalid(format!("`{path}` is {what}")))
}

/// `DELETE /files?path=…`: missing files are not an error, directories are.
async fn delete_files(actor: FileActor, uri: Uri) -> Result<StatusCode, ExecdProblem> {
    for path in paths_of(&uri)? {
        let removed = actor.sandbox.files().remove_file(actor.as_service_actor(), &path, false).await;
        removed.or_else(|error| match &error {
            ServiceError::File(file) if file.fault == FileFault::NotFound => Ok(()),
            ServiceError::File(file) if file.fault == FileFault::IsADirectory => {
                Err(ExecdProblem::runtime_error(format!("`{path}` is a directory")))
            }
            _ => Err(error.into()),
        })?;
    }
    Ok(StatusCode::OK)
}

/// `DELETE /directories?path=…`: removes them recursively.
async fn delete_directories(actor: FileActor, uri: Uri) -> Result<StatusCode, ExecdProblem> {
    for path in paths_of(&uri)? {
        actor.sandbox.files().remove_file(actor.as_service_actor(), &path, true).await?;
    }
    Ok(StatusCode::OK)
}

type EntriesByPath<T> = BTreeMap<String, Option<T>>;

fn parse_attributes(permissions: Option<FilePermissions>) -> Result<FileAttributes, ExecdProblem> {
    permissions.unwrap_or_default().into_attributes().map_err(ExecdProblem::invalid)
}

/// `POST /directories`: creates parents too; mode and owner apply only to new directories.
async fn make_directories(
    actor: FileActor,
    JsonOrEmpty(entries): JsonOrEmpty<EntriesByPath<FilePermissions>>,
) -> Result<StatusCode, ExecdProblem> {
    for (path, permissions) in entries {
        let attributes = parse_attributes(permissions)?;
        actor.sandbox.files().make_directory(actor.as_service_actor(), &path, attributes).await?;
    }
    Ok(StatusCode::OK)
}

/// `POST /files/permissions`
async fn set_permissions(
    actor: FileActor,
    JsonOrEmpty(entries): JsonOrEmpty<EntriesByPath<FilePermissions>>,
) -> Result<StatusCode, ExecdProblem> {
    for (path, permissions) in entries {
        let attributes = parse_attributes(permissions)?;
        // If there is nothing to change, only check that the file exists.
        if attributes == FileAttributes::default() {
            actor.sandbox.files().stat_files(actor.as_service_actor(), &[path]).await?;
        } else {
            actor.sandbox.files().set_attributes(actor.as_service_actor(), &path, attributes).await?;
        }
    }
    Ok(StatusCode::OK)
}

#[derive(Deserialize)]
struct MoveBody {
    src: String,
    dest: String,
}

/// `POST /files/mv`: never replaces an existing file.
async fn move_files(
    actor: FileActor,
    JsonOrEmpty(moves): JsonOrEmpty<Vec<MoveBody>>,
) -> Result<StatusCode, ExecdProblem> {
    for MoveBody { src, dest } in moves {
        actor.sandbox.files().move_file(actor.as_service_actor(), &src, &dest, false).await?;
    }
    Ok(StatusCode::OK)
}

#[derive(Deserialize)]
struct LinkBody {
    target: String,
}

/// `POST /files/links`: symbolic links; a route that only this server has, for `coracle cp`.
async fn make_links(
    actor: FileActor,
    JsonOrEmpty(links): JsonOrEmpty<BTreeMap<String, LinkBody>>,
) -> Result<StatusCode, ExecdProblem> {
    for (path, LinkBody { target }) in links {
        actor.sandbox.files().make_link(actor.as_service_actor(), &path, &target).await?;
    }
    Ok(StatusCode::OK)
}

#[derive(Deserialize)]
struct ReplaceBody {
    old: String,
    /// If absent, matches are removed.
    new: Option<String>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ReplaceCountBody {
    replaced_count: u64,
}

/// `POST /files/replace[?verbose=true]`
async fn replace_in_files(
    actor: FileActor,
    uri: Uri,
    JsonOrEmpty(entries): JsonOrEmpty<BTreeMap<String, ReplaceBody>>,
) -> Result<Response, ExecdProblem> {
    if entries.values().any(|entry| entry.old.is_empty()) {
        return Err(ExecdProblem::invalid("`old` is empty"));
    }
    let paths: Vec<String> = entries.keys().cloned().collect();
    let edit = |(path, entry): (String, ReplaceBody)| FileEdit {
        path,
        old: entry.old,
        new: entry.new.unwrap_or_default(),
    };
    let edits = entries.into_iter().map(edit).collect();
    let counts = actor.sandbox.files().replace_text(actor.as_service_actor(), edits).await?;
    if !QueryParams::from_uri(&uri).is_on("verbose") {
        return Ok(StatusCode::OK.into_response());
    }
    let counted = paths.into_iter().zip(counts);
    let body: BTreeMap<_, _> =
        counted.map(|(path, replaced_count)| (path, ReplaceCountBody { replaced_count })).collect();
    Ok(Json(body).into_response())
}
