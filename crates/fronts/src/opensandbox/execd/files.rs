//! File routes: attributes, search, and changes other than to content.

use std::collections::BTreeMap;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, get, post};
use http::{StatusCode, Uri};
use serde::{Deserialize, Serialize};
use service::{Attributes, Edit, FileFault, FileInfo, FileKind, ServiceError};

use super::fault::{Fault, Wish, named};
use super::mode::{Permissions, to_decimal};
use super::{Actor, download, upload};
use crate::opensandbox::Front;
use crate::opensandbox::query::Query;
use crate::opensandbox::types::rfc3339;

/// Every file route; they exist as they are, and below prefixes that name a user or a session.
pub(super) fn table() -> Vec<(&'static str, MethodRouter<Front>)> {
    vec![
        ("/files", axum::routing::delete(delete_files)),
        ("/files/info", get(info)),
        ("/files/search", get(search)),
        ("/files/mv", post(rename)),
        ("/files/links", post(make_links)),
        ("/files/permissions", post(set_permissions)),
        ("/files/replace", post(replace)),
        ("/files/upload", post(upload::upload)),
        ("/files/download", get(download::download)),
        ("/directories", post(make_directories).delete(delete_directories)),
        ("/directories/list", get(list)),
    ]
}

#[derive(Serialize)]
struct InfoBody {
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

impl InfoBody {
    fn of(info: FileInfo) -> Self {
        Self {
            path: info.path,
            kind: match info.kind {
                FileKind::File => "file",
                FileKind::Directory => "directory",
                FileKind::Symlink => "symlink",
                FileKind::Other => "other",
            },
            size: info.size,
            modified_at: rfc3339(info.modified),
            created_at: rfc3339(info.created),
            owner: info.owner,
            group: info.group,
            mode: to_decimal(info.mode),
            link_target: info.link_target,
        }
    }
}

/// Returns the one path in a query.
pub(super) fn path_of(query: &Query) -> Result<&str, Fault> {
    named(query, "path")
}

/// Returns all paths in a query, possibly none.
fn paths_of(uri: &Uri) -> Result<Vec<String>, Fault> {
    let paths = Query::of(uri).all("path");
    if paths.iter().any(String::is_empty) {
        return Err(Fault::missing_query("path"));
    }
    Ok(paths)
}

/// `GET /files/info?path=…&path=…`: keyed by the paths as written in the query.
async fn info(State(front): State<Front>, actor: Actor, uri: Uri) -> Result<Response, Fault> {
    let paths = paths_of(&uri)?;
    let infos = match paths.is_empty() {
        true => Vec::new(),
        false => front.service.stat(&actor.owner, &actor.id, actor.by(), &paths).await?,
    };
    let body: BTreeMap<String, InfoBody> =
        paths.into_iter().zip(infos.into_iter().map(InfoBody::of)).collect();
    Ok(Json(body).into_response())
}

/// `GET /files/search?path=…&pattern=…`
async fn search(State(front): State<Front>, actor: Actor, uri: Uri) -> Result<Response, Fault> {
    let query = Query::of(&uri);
    let pattern = query.first("pattern").filter(|pattern| !pattern.is_empty()).unwrap_or("**");
    let path = path_of(&query)?;
    let found = front.service.search(&actor.owner, &actor.id, actor.by(), path, pattern).await?;
    Ok(Json(found.into_iter().map(InfoBody::of).collect::<Vec<_>>()).into_response())
}

/// `GET /directories/list?path=…&depth=…`
async fn list(State(front): State<Front>, actor: Actor, uri: Uri) -> Result<Response, Fault> {
    let query = Query::of(&uri);
    let depth = query.number("depth").map_err(Fault::invalid)?.unwrap_or(1);
    let path = path_of(&query)?;
    must_be_directory(&front, &actor, path).await?;
    let entries = match depth {
        0 => Vec::new(),
        _ => front.service.list_directory(&actor.owner, &actor.id, actor.by(), path, depth).await?,
    };
    Ok(Json(entries.into_iter().map(InfoBody::of).collect::<Vec<_>>()).into_response())
}

/// Refuses paths that are not directories. Links are not followed, even with a trailing slash, so that
/// the listed directory is the one that was named.
async fn must_be_directory(front: &Front, actor: &Actor, path: &str) -> Result<(), Fault> {
    let bare = match path.trim_end_matches('/') {
        "" => "/",
        bare => bare,
    };
    let infos = front.service.stat(&actor.owner, &actor.id, actor.by(), &[bare.to_owned()]).await?;
    let what = match infos.first().map(|info| info.kind) {
        Some(FileKind::Directory) => return Ok(()),
        Some(FileKind::Symlink) => "a link, which is not followed",
        Some(FileKind::File | FileKind::Other) | None => "not a directory",
    };
    Err(Fault::invalid(format!("`{path}` is {what}")))
}

/// `DELETE /files?path=…`: missing files are not an error, directories are.
async fn delete_files(State(front): State<Front>, actor: Actor, uri: Uri) -> Result<StatusCode, Fault> {
    for path in paths_of(&uri)? {
        let removed = front.service.remove(&actor.owner, &actor.id, actor.by(), &path, false).await;
        removed.or_else(|error| match &error {
            ServiceError::File(file) if file.fault == FileFault::NotFound => Ok(()),
            ServiceError::File(file) if file.fault == FileFault::IsADirectory => {
                Err(Fault::runtime(format!("`{path}` is a directory")))
            }
            _ => Err(error.into()),
        })?;
    }
    Ok(StatusCode::OK)
}

/// `DELETE /directories?path=…`: removes them recursively.
async fn delete_directories(State(front): State<Front>, actor: Actor, uri: Uri) -> Result<StatusCode, Fault> {
    for path in paths_of(&uri)? {
        front.service.remove(&actor.owner, &actor.id, actor.by(), &path, true).await?;
    }
    Ok(StatusCode::OK)
}

type ByPath<T> = BTreeMap<String, Option<T>>;

fn attributes(permissions: Option<Permissions>) -> Result<Attributes, Fault> {
    permissions.unwrap_or_default().attributes().map_err(Fault::invalid)
}

/// `POST /directories`: creates parents too; mode and owner apply only to new directories.
async fn make_directories(
    State(front): State<Front>,
    actor: Actor,
    Wish(entries): Wish<ByPath<Permissions>>,
) -> Result<StatusCode, Fault> {
    for (path, permissions) in entries {
        let attributes = attributes(permissions)?;
        front.service.make_directory(&actor.owner, &actor.id, actor.by(), &path, attributes).await?;
    }
    Ok(StatusCode::OK)
}

/// `POST /files/permissions`
async fn set_permissions(
    State(front): State<Front>,
    actor: Actor,
    Wish(entries): Wish<ByPath<Permissions>>,
) -> Result<StatusCode, Fault> {
    for (path, permissions) in entries {
        let attributes = attributes(permissions)?;
        // If there is nothing to change, only check that the file exists.
        if attributes == Attributes::default() {
            front.service.stat(&actor.owner, &actor.id, actor.by(), &[path]).await?;
        } else {
            front.service.set_attributes(&actor.owner, &actor.id, actor.by(), &path, attributes).await?;
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
async fn rename(
    State(front): State<Front>,
    actor: Actor,
    Wish(moves): Wish<Vec<MoveBody>>,
) -> Result<StatusCode, Fault> {
    for MoveBody { src, dest } in moves {
        front.service.move_file(&actor.owner, &actor.id, actor.by(), &src, &dest, false).await?;
    }
    Ok(StatusCode::OK)
}

#[derive(Deserialize)]
struct LinkBody {
    target: String,
}

/// `POST /files/links`: symbolic links; a route that only this server has, for `coracle cp`.
async fn make_links(
    State(front): State<Front>,
    actor: Actor,
    Wish(links): Wish<BTreeMap<String, LinkBody>>,
) -> Result<StatusCode, Fault> {
    for (path, LinkBody { target }) in links {
        front.service.make_link(&actor.owner, &actor.id, actor.by(), &path, &target).await?;
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
struct Replaced {
    replaced_count: u64,
}

/// `POST /files/replace[?verbose=true]`
async fn replace(
    State(front): State<Front>,
    actor: Actor,
    uri: Uri,
    Wish(entries): Wish<BTreeMap<String, ReplaceBody>>,
) -> Result<Response, Fault> {
    if entries.values().any(|entry| entry.old.is_empty()) {
        return Err(Fault::invalid("`old` is empty"));
    }
    let paths: Vec<String> = entries.keys().cloned().collect();
    let edit = |(path, entry): (String, ReplaceBody)| Edit {
        path,
        old: entry.old,
        new: entry.new.unwrap_or_default(),
    };
    let edits = entries.into_iter().map(edit).collect();
    let counts = front.service.replace(&actor.owner, &actor.id, actor.by(), edits).await?;
    if !Query::of(&uri).is_on("verbose") {
        return Ok(StatusCode::OK.into_response());
    }
    let counted = paths.into_iter().zip(counts);
    let body: BTreeMap<_, _> =
        counted.map(|(path, replaced_count)| (path, Replaced { replaced_count })).collect();
    Ok(Json(body).into_response())
}
