//! `POST /v1/file/upload`: one file from a multipart body, to the path that a field names.
//!
//! The field may stand before the file, which is then written while it arrives, or behind it; then the file is spooled.

use axum::extract::Request;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::Stream;
use http::header;
use serde_json::json;
use service::{FileAttributes, WriteFileRequest, WriteMode};

use super::FileCall;
use super::failure::{FileAction, file_problem};
use super::spool::{ContentSpool, DRAFT_DIRECTORY, SpooledContent};
use crate::aio::envelope::success_response;
use crate::aio::problem::AioProblem;
use crate::aio::target::AioTarget;
use crate::kit::body::drain_body;
use crate::kit::headers::header_text;
use crate::kit::multipart::{FileNameForm, MultipartError, MultipartReader};

const MAX_FIELD_BYTES: usize = 16 << 10;
/// Where files without a path are stored.
const DEFAULT_DIRECTORY: &str = "/tmp";
const DEFAULT_FILE_NAME: &str = "upload";

/// A file that was received.
enum ReceivedFile {
    /// It is in place.
    Written { path: String, size: u64 },
    /// Its path was not known yet.
    Spooled { content: SpooledContent, name: String },
}

pub(super) async fn upload_file(target: AioTarget, request: Request) -> Result<Response, AioProblem> {
    let kind = header_text(request.headers(), header::CONTENT_TYPE.as_str()).unwrap_or_default().to_owned();
    let mut parts = MultipartReader::new(&kind, request.into_body().into_data_stream())?;
    let stored = store_upload(&target, &mut parts).await;
    let (path, size) = match stored {
        Ok(stored) => stored,
        Err(problem) => {
            drain_body(parts.into_body()).await;
            return Err(problem);
        }
    };
    let data = json!({"file_path": path, "file_size": size, "success": true});
    Ok(success_response("File uploaded successfully", data).into_response())
}

async fn store_upload<S, E>(
    target: &AioTarget,
    parts: &mut MultipartReader<S>,
) -> Result<(String, u64), AioProblem>
where
    S: Stream<Item = Result<Bytes, E>> + Unpin,
{
    let (mut path, mut file) = (None, None);
    while let Some(part) = parts.next_part().await? {
        match part.name.as_str() {
            "path" => path = Some(read_field(parts).await?).filter(|path| !path.is_empty()),
            "file" if file.is_some() => {
                return Err(AioProblem::invalid_field("file", "more than one file"));
            }
            "file" => {
                let name = part.file_name(FileNameForm::LastSegment).unwrap_or(DEFAULT_FILE_NAME).to_owned();
                file = Some(match &path {
                    Some(path) => write_part(upload_call(target, path, &name)?, parts).await?,
                    None => spool_part(target, name, parts).await?,
                });
            }
            _ => {}
        }
    }
    match file {
        None => Err(AioProblem::missing_field("file")),
        Some(ReceivedFile::Written { path, size }) => Ok((path, size)),
        Some(ReceivedFile::Spooled { content, name }) => {
            let path = path.unwrap_or_else(|| format!("{DEFAULT_DIRECTORY}/{name}"));
            let copied = copy_spooled(upload_call(target, &path, &name)?, &content).await;
            content.discard().await;
            copied
        }
    }
}

/// A path that ends with a slash is a directory.
fn upload_call(target: &AioTarget, path: &str, name: &str) -> Result<FileCall, AioProblem> {
    let path = if path.ends_with('/') { format!("{path}{name}") } else { path.to_owned() };
    FileCall::new(target.clone(), FileAction::Upload, "path", Some(path), None)
}

fn write_request() -> WriteFileRequest {
    let attributes = FileAttributes::default();
    WriteFileRequest { mode: WriteMode::Replace, attributes, new_file_mode: None }
}

/// Writes a file while it arrives. An error leaves the old file in place.
async fn write_part<S, E>(call: FileCall, parts: &mut MultipartReader<S>) -> Result<ReceivedFile, AioProblem>
where
    S: Stream<Item = Result<Bytes, E>> + Unpin,
{
    let failed = |error| call.problem(error);
    let writer = call.files().write_file(&call.identity, &call.path, write_request()).await;
    let (mut writer, mut size) = (writer.map_err(failed)?, 0);
    while let Some(piece) = parts.next_chunk().await? {
        size += piece.len() as u64;
        writer.send_bytes(piece).await.map_err(failed)?;
    }
    writer.finish().await.map_err(failed)?;
    Ok(ReceivedFile::Written { path: call.path, size })
}

async fn spool_part<S, E>(
    target: &AioTarget,
    name: String,
    parts: &mut MultipartReader<S>,
) -> Result<ReceivedFile, AioProblem>
where
    S: Stream<Item = Result<Bytes, E>> + Unpin,
{
    let failed = |error| file_problem(target, FileAction::Upload, DRAFT_DIRECTORY, error);
    let mut spool = ContentSpool::new(target.sandbox.clone());
    while let Some(piece) = parts.next_chunk().await? {
        spool.add_bytes(piece).await.map_err(failed)?;
    }
    Ok(ReceivedFile::Spooled { content: spool.finish().await.map_err(failed)?, name })
}

async fn copy_spooled(call: FileCall, content: &SpooledContent) -> Result<(String, u64), AioProblem> {
    let failed = |error| call.problem(error);
    let mut pieces = content.read_pieces().await.map_err(failed)?;
    let writer = call.files().write_file(&call.identity, &call.path, write_request()).await;
    let (mut writer, mut size) = (writer.map_err(failed)?, 0);
    while let Some(piece) = pieces.next_piece().await.map_err(failed)? {
        size += piece.len() as u64;
        writer.send_bytes(piece).await.map_err(failed)?;
    }
    writer.finish().await.map_err(failed)?;
    Ok((call.path, size))
}

async fn read_field<S, E>(parts: &mut MultipartReader<S>) -> Result<String, AioProblem>
where
    S: Stream<Item = Result<Bytes, E>> + Unpin,
{
    let mut text = Vec::new();
    while let Some(piece) = parts.next_chunk().await? {
        text.extend_from_slice(&piece);
        if text.len() > MAX_FIELD_BYTES {
            return Err(AioProblem::invalid_field("path", "the text is too long"));
        }
    }
    String::from_utf8(text).or(Err(AioProblem::invalid_field("path", "the text is not UTF-8")))
}

impl From<MultipartError> for AioProblem {
    fn from(error: MultipartError) -> Self {
        Self::invalid(["body"], error.to_string(), "value_error")
    }
}
