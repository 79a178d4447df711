//! Errors of the filesystem as this API reports them.
//!
//! A failed operation is described by an object in `data`. Depending on the sandbox the status is 200, as in AIO's image,
//! or one that says what went wrong: some clients never look at `success`.

use std::io;

use http::StatusCode;
use serde::Serialize;
use serde_json::json;
use service::{FileError, FileFault, ServiceError};

use crate::aio::notes::FileErrors;
use crate::aio::problem::AioProblem;
use crate::aio::target::AioTarget;

/// An operation, by the name that error reports have for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FileAction {
    Read,
    Write,
    Replace,
    Search,
    Find,
    List,
    Grep,
    Glob,
    Upload,
    Download,
    Edit,
    Watch,
}

/// The details of a failed operation.
#[derive(Debug, Serialize)]
struct FileFailureBody<'a> {
    path: &'a str,
    operation: &'static str,
    message: String,
    error_type: &'static str,
    retryable: bool,
    errno: Option<i32>,
    errno_name: Option<&'static str>,
    exception_type: &'static str,
}

/// The description of an error number for clients.
struct ErrnoMeaning {
    errno: i32,
    name: &'static str,
    error_type: &'static str,
    exception: &'static str,
}

const fn meaning(
    errno: i32,
    name: &'static str,
    error_type: &'static str,
    exception: &'static str,
) -> ErrnoMeaning {
    ErrnoMeaning { errno, name, error_type, exception }
}

const ERRNO_MEANINGS: &[ErrnoMeaning] = &[
    meaning(1, "EPERM", "permission_denied", "PermissionError"),
    meaning(2, "ENOENT", "not_found", "FileNotFoundError"),
    meaning(4, "EINTR", "io_error", "InterruptedError"),
    meaning(5, "EIO", "io_error", "OSError"),
    meaning(11, "EAGAIN", "io_error", "BlockingIOError"),
    meaning(13, "EACCES", "permission_denied", "PermissionError"),
    meaning(16, "EBUSY", "io_error", "OSError"),
    meaning(17, "EEXIST", "already_exists", "FileExistsError"),
    meaning(20, "ENOTDIR", "invalid_target", "NotADirectoryError"),
    meaning(21, "EISDIR", "invalid_target", "IsADirectoryError"),
    meaning(22, "EINVAL", "invalid_target", "OSError"),
    meaning(26, "ETXTBSY", "io_error", "OSError"),
    meaning(27, "EFBIG", "io_error", "OSError"),
    meaning(28, "ENOSPC", "no_space_left", "OSError"),
    meaning(30, "EROFS", "read_only_filesystem", "OSError"),
    meaning(36, "ENAMETOOLONG", "invalid_path", "OSError"),
    meaning(40, "ELOOP", "invalid_path", "OSError"),
    meaning(122, "EDQUOT", "no_space_left", "OSError"),
];

/// Error numbers after which the same request may succeed.
const RETRYABLE_ERRNOS: &[i32] = &[4, 11, 16, 26];
const EIO: i32 = 5;

impl FileAction {
    fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Replace => "replace",
            Self::Search => "search",
            Self::Find => "find",
            Self::List => "list",
            Self::Grep => "grep",
            Self::Glob => "glob",
            Self::Upload => "upload",
            Self::Download => "download",
            Self::Edit => "str_replace_editor",
            Self::Watch => "watch",
        }
    }

    /// The words after "Failed to".
    fn verb(self) -> &'static str {
        match self {
            Self::Read => "read file",
            Self::Write => "write file",
            Self::Replace => "replace in file",
            Self::Search => "search in file",
            Self::Find => "find files",
            Self::List => "list path",
            Self::Grep => "grep files",
            Self::Glob => "glob files",
            Self::Upload => "upload file",
            Self::Download => "download file",
            Self::Edit => "edit file",
            Self::Watch => "watch path",
        }
    }

    /// Whether these requests contain a pattern that the sandbox may refuse.
    fn has_pattern(self) -> bool {
        matches!(self, Self::Search | Self::Find | Self::Grep | Self::Glob | Self::List)
    }

    /// Whether errors have a status of their own in every sandbox.
    fn always_has_status(self) -> bool {
        matches!(self, Self::Download | Self::Watch)
    }
}

/// The response to an error of the service.
pub(super) fn file_problem(
    target: &AioTarget,
    action: FileAction,
    path: &str,
    error: ServiceError,
) -> AioProblem {
    let ServiceError::File(error) = error else { return error.into() };
    // The account is missing: the reason is not the file.
    if error.launch_step.is_some() {
        return ServiceError::File(error).into();
    }
    match (error.fault, error.errno) {
        (FileFault::Invalid, None) if action.has_pattern() => {
            AioProblem::bad_request(pattern_message(&error))
        }
        (FileFault::NotText, _) => decode_problem(target, action, path),
        (fault, errno) => errno_problem(target, action, path, errno.unwrap_or(usual_errno(fault))),
    }
}

/// The response to an error number.
pub(super) fn errno_problem(target: &AioTarget, action: FileAction, path: &str, errno: i32) -> AioProblem {
    let known = ERRNO_MEANINGS.iter().find(|meaning| meaning.errno == errno);
    let message = format!("Failed to {}: [Errno {errno}] {}: '{path}'", action.verb(), errno_text(errno));
    let body = FileFailureBody {
        path,
        operation: action.name(),
        message,
        error_type: known.map_or("io_error", |meaning| meaning.error_type),
        retryable: RETRYABLE_ERRNOS.contains(&errno),
        errno: Some(errno),
        errno_name: known.map(|meaning| meaning.name),
        exception_type: known.map_or("OSError", |meaning| meaning.exception),
    };
    failure_problem(status_style(target, action), body)
}

fn decode_problem(target: &AioTarget, action: FileAction, path: &str) -> AioProblem {
    let message = format!("Failed to {}: 'utf-8' codec can't decode the file: '{path}'", action.verb());
    let body = FileFailureBody {
        path,
        operation: action.name(),
        message,
        error_type: "decode_error",
        retryable: false,
        errno: None,
        errno_name: None,
        exception_type: "UnicodeDecodeError",
    };
    failure_problem(status_style(target, action), body)
}

/// A request with a relative path, which is refused in every sandbox.
pub(super) fn relative_path(action: FileAction, path: &str) -> AioProblem {
    let shown: String = path.chars().take(200).collect();
    let message = format!(
        "Failed to {}: Invalid `path` parameter: the path should be an absolute path, starting with `/`: '{shown}'",
        action.verb()
    );
    let body = FileFailureBody {
        path: &shown,
        operation: action.name(),
        message,
        error_type: "invalid_path",
        retryable: false,
        errno: None,
        errno_name: None,
        exception_type: "ValueError",
    };
    failure_problem(FileErrors::Http, body)
}

fn status_style(target: &AioTarget, action: FileAction) -> FileErrors {
    if action.always_has_status() { FileErrors::Http } else { target.notes.file_errors }
}

fn failure_problem(style: FileErrors, body: FileFailureBody<'_>) -> AioProblem {
    let status = match style {
        FileErrors::Structured => StatusCode::OK,
        FileErrors::Http => status_of(body.error_type),
    };
    let message = body.message.clone();
    AioProblem { data: Some(Box::new(json!(body))), ..AioProblem::new(status, message) }
}

fn status_of(error_type: &str) -> StatusCode {
    match error_type {
        "not_found" => StatusCode::NOT_FOUND,
        "permission_denied" | "read_only_filesystem" => StatusCode::FORBIDDEN,
        "already_exists" => StatusCode::CONFLICT,
        "invalid_target" | "invalid_path" | "decode_error" => StatusCode::BAD_REQUEST,
        "no_space_left" => StatusCode::INSUFFICIENT_STORAGE,
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

/// The error number of faults that did not come from the kernel.
fn usual_errno(fault: FileFault) -> i32 {
    match fault {
        FileFault::NotFound => 2,
        FileFault::AlreadyExists => 17,
        FileFault::NotADirectory => 20,
        FileFault::IsADirectory => 21,
        FileFault::Permission => 13,
        FileFault::NoSpace => 28,
        FileFault::Invalid => 22,
        FileFault::TooLarge => 27,
        FileFault::NotText | FileFault::Other => EIO,
    }
}

/// The kernel's text for an error number.
fn errno_text(errno: i32) -> String {
    let text = io::Error::from_raw_os_error(errno).to_string();
    text.split(" (os error").next().unwrap_or_default().to_owned()
}

/// The subject of the error is the pattern and what is wrong with it.
fn pattern_message(error: &FileError) -> String {
    format!("Invalid pattern: {}", error.path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_numbers_have_the_texts_of_the_kernel() {
        assert_eq!(errno_text(2), "No such file or directory");
        assert_eq!(errno_text(21), "Is a directory");
    }

    #[test]
    fn structured_errors_have_status_200_and_details() {
        let body = || FileFailureBody {
            path: "/a",
            operation: "read",
            message: "Failed".to_owned(),
            error_type: "not_found",
            retryable: false,
            errno: Some(2),
            errno_name: Some("ENOENT"),
            exception_type: "FileNotFoundError",
        };
        let structured = failure_problem(FileErrors::Structured, body());
        let http = failure_problem(FileErrors::Http, body());
        assert_eq!((structured.status.as_u16(), http.status.as_u16()), (200, 404));
        assert_eq!(structured.data, http.data);
        assert_eq!(structured.data.unwrap()["errno"], 2);
    }

    #[test]
    fn statuses_follow_the_kind_of_error() {
        for (errno, status) in [
            (2, 404),
            (13, 403),
            (30, 403),
            (17, 409),
            (20, 400),
            (21, 400),
            (22, 400),
            (36, 400),
            (40, 400),
            (28, 507),
            (5, 500),
        ] {
            let meaning = ERRNO_MEANINGS.iter().find(|meaning| meaning.errno == errno).unwrap();
            assert_eq!(status_of(meaning.error_type).as_u16(), status, "{errno}");
        }
    }
}
