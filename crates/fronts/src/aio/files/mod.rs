//! The file API of a sandbox, below `/v1/file`.
//!
//! ```text
//! read, write            whole files and ranges of lines; long texts are streamed both ways (spool.rs)
//! upload, download       bytes
//! list, find, glob       names
//! grep, search           text in files
//! replace, editor        edits
//! watch                  changes as they happen
//! ```
//! Everything is done as the guest's default user or, with `sudo`, as root. Errors of the filesystem are reported in the
//! form that the sandbox was created for (failure.rs).

mod content;
mod download;
mod editor;
mod editor_view;
mod failure;
mod list;
mod read;
mod replace;
mod search;
pub(super) mod spool;
mod upload;
mod watch;
mod watch_events;
mod watch_routes;
mod write;

use axum::routing::{delete, get, post};
use domain::UserIdentity;
use service::{SandboxFiles, ServiceError};

use super::body::check_text;
use super::problem::AioProblem;
use super::routes::AioRoute;
use super::target::AioTarget;

use self::failure::FileAction;

pub(super) use self::editor::run_command as run_editor;
pub(super) use self::list::{glob_files, list_path};
pub(super) use self::read::{ShortText, read_short_text};
pub(super) use self::replace::replace_text;
pub(super) use self::search::{find_files, grep_files, search_in_file};
pub(super) use self::watch::WatchRegistry;
pub(super) use self::write::write_text;

/// The longest path that the kernel accepts.
const MAX_PATH_BYTES: usize = 4095;
const ENAMETOOLONG: i32 = 36;

pub(super) fn routes() -> Vec<AioRoute> {
    vec![
        ("/v1/file/read", post(read::read_file)),
        ("/v1/file/write", post(write::write_file)),
        ("/v1/file/replace", post(replace::replace_in_file)),
        ("/v1/file/search", post(search::search_in_file)),
        ("/v1/file/find", post(search::find_files)),
        ("/v1/file/grep", post(search::grep_files)),
        ("/v1/file/glob", post(list::glob_files)),
        ("/v1/file/list", post(list::list_path)),
        ("/v1/file/upload", post(upload::upload_file)),
        ("/v1/file/download", get(download::download_file)),
        ("/v1/file/str_replace_editor", post(editor::edit_file)),
        ("/v1/file/watch", get(watch_routes::list_watches).post(watch_routes::create_watch)),
        ("/v1/file/watch/wait", post(watch_routes::wait_for_event)),
        ("/v1/file/watch/{id}", delete(watch_routes::remove_watch)),
        ("/v1/file/watch/{id}/poll", post(watch_routes::poll_watch)),
        ("/v1/file/watch/{id}/events", get(watch_routes::stream_events)),
    ]
}

/// One operation on one path.
pub(super) struct FileCall {
    target: AioTarget,
    identity: UserIdentity,
    action: FileAction,
    path: String,
}

impl FileCall {
    /// `field` is the name of the field that has the path.
    fn new(
        target: AioTarget,
        action: FileAction,
        field: &str,
        path: Option<String>,
        sudo: Option<bool>,
    ) -> Result<Self, AioProblem> {
        let path = check_text(path.ok_or_else(|| AioProblem::missing_field(field))?, field)?;
        let identity = if sudo == Some(true) { root_identity() } else { UserIdentity::Default };
        let call = Self { target, identity, action, path };
        if !call.path.starts_with('/') {
            return Err(failure::relative_path(call.action, &call.path));
        }
        if call.path.len() > MAX_PATH_BYTES {
            return Err(call.errno_problem(ENAMETOOLONG));
        }
        Ok(call)
    }

    fn files(&self) -> SandboxFiles<'_> {
        self.target.sandbox.files()
    }

    /// The response to an error of this operation.
    fn problem(&self, error: ServiceError) -> AioProblem {
        failure::file_problem(&self.target, self.action, &self.path, error)
    }

    fn errno_problem(&self, errno: i32) -> AioProblem {
        failure::errno_problem(&self.target, self.action, &self.path, errno)
    }
}

fn root_identity() -> UserIdentity {
    UserIdentity::Ids { uid: 0, gid: 0 }
}

/// The last component of a path.
fn base_name(path: &str) -> &str {
    path.trim_end_matches('/').rsplit('/').next().unwrap_or_default()
}

/// Returns a number within bounds, or the default.
fn number_between<T: PartialOrd + Copy + std::fmt::Display>(
    value: Option<T>,
    field: &str,
    (least, most): (T, T),
    default: T,
) -> Result<T, AioProblem> {
    let value = value.unwrap_or(default);
    if value < least || value > most {
        return Err(AioProblem::invalid_field(field, format!("must be between {least} and {most}")));
    }
    Ok(value)
}
