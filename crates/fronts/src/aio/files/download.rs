//! `GET /v1/file/download`: the bytes of a file. Its errors have a status in every sandbox.
//!
//! With `change_policy=abort` a file that changes meanwhile is not delivered: the last piece is sent only after the file
//! was looked at again, and otherwise the connection is broken.

use std::pin::pin;
use std::time::SystemTime;

use axum::response::Response;
use bytes::Bytes;
use futures_util::{Stream, StreamExt, stream};
use http::{StatusCode, Uri};
use serde_json::json;
use service::{FileError, FileFault, FileReader, ServiceError};

use super::FileCall;
use super::failure::FileAction;
use crate::aio::problem::AioProblem;
use crate::aio::target::AioTarget;
use crate::kit::download::{content_response, file_response, limit_length};
use crate::kit::query::QueryParams;

/// The properties by which a changed file is recognised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FileVersion {
    size: u64,
    modified: SystemTime,
}

pub(super) async fn download_file(target: AioTarget, uri: Uri) -> Result<Response, AioProblem> {
    let query = QueryParams::from_uri(&uri);
    let path = query.first("path").ok_or_else(|| AioProblem::missing_query("path"))?.to_owned();
    if path.contains('\0') {
        return Err(AioProblem::invalid_query("path", "the text contains a NUL byte"));
    }
    let call = FileCall::new(target, FileAction::Download, "path", Some(path), None)?;
    match query.first("change_policy").unwrap_or("ignore") {
        "ignore" => {
            let reader = open_file(&call).await?;
            let size = reader.size;
            Ok(file_response(StatusCode::OK, &call.path, size, None, reader))
        }
        "abort" => download_unchanged(call).await,
        _ => Err(AioProblem::invalid_query("change_policy", "must be `ignore` or `abort`")),
    }
}

async fn open_file(call: &FileCall) -> Result<FileReader, AioProblem> {
    let opened = call.files().read_file(&call.identity, &call.path, 0, None).await;
    opened.map_err(|error| match &error {
        ServiceError::File(FileError { fault: FileFault::NotFound | FileFault::NotADirectory, .. }) => {
            AioProblem::new(StatusCode::NOT_FOUND, format!("File does not exist: {}", call.path))
        }
        ServiceError::File(FileError { fault: FileFault::IsADirectory, .. })
        | ServiceError::File(FileError { fault: FileFault::Invalid, errno: None, .. }) => {
            AioProblem::bad_request(format!("Path is not a file: {}", call.path))
        }
        _ => call.problem(error),
    })
}

async fn download_unchanged(call: FileCall) -> Result<Response, AioProblem> {
    // A file that does not exist is reported by the attempt to open it.
    let before = read_version(&call).await.ok();
    let reader = open_file(&call).await?;
    let opened = read_version(&call).await.map_err(|error| call.problem(error))?;
    if before != Some(opened) || reader.size != opened.size {
        return Err(changed_problem(&call));
    }
    let (path, length) = (call.path.clone(), reader.size);
    let pieces = hold_last_piece(limit_length(reader, length), call, opened);
    Ok(content_response(StatusCode::OK, &path, length, None, pieces))
}

/// Passes the pieces on, each when the next has arrived, and the last one if the file is still the same.
fn hold_last_piece(
    pieces: impl Stream<Item = Result<Bytes, ServiceError>> + Send + 'static,
    call: FileCall,
    version: FileVersion,
) -> impl Stream<Item = Result<Bytes, ServiceError>> + Send + 'static {
    let state = (Box::pin(pieces), call, None::<Bytes>, false);
    stream::unfold(state, move |(mut pieces, call, mut held, over)| async move {
        if over {
            return None;
        }
        loop {
            match pin!(pieces.next()).await {
                Some(Ok(piece)) => match held.replace(piece) {
                    Some(ready) => return Some((Ok(ready), (pieces, call, held, false))),
                    None => continue,
                },
                Some(Err(error)) => return Some((Err(error), (pieces, call, None, true))),
                None => {}
            }
            let last = held.take()?;
            let result = match read_version(&call).await {
                Ok(now) if now == version => Ok(last),
                Ok(_) => Err(ServiceError::Invalid("the file was changed during the download".to_owned())),
                Err(error) => Err(error),
            };
            return Some((result, (pieces, call, None, true)));
        }
    })
}

/// The version of the file that the path leads to.
async fn read_version(call: &FileCall) -> Result<FileVersion, ServiceError> {
    // Reading metadata does not follow links, so the size that matters for a link is that of the opened file.
    let infos = call.files().stat_files(&call.identity, std::slice::from_ref(&call.path)).await?;
    let info = infos.into_iter().next().expect("the service returns one entry for each path");
    if info.link_target.is_none() {
        return Ok(FileVersion { size: info.size, modified: info.modified });
    }
    let reader = call.files().read_file(&call.identity, &call.path, 0, Some(0)).await?;
    Ok(FileVersion { size: reader.size, modified: info.modified })
}

fn changed_problem(call: &FileCall) -> AioProblem {
    let message = format!("File changed before the download started: {}", call.path);
    let data = json!({"path": call.path, "change_policy": "abort", "phase": "before_start"});
    AioProblem { data: Some(Box::new(data)), ..AioProblem::new(StatusCode::CONFLICT, message) }
}
