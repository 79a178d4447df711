//! Uploads files from a multipart body: for each file a part `metadata`, then a part `file`. Content
//! is streamed; the response is sent once all files are in place.

use std::collections::VecDeque;

use axum::extract::Request;
use bytes::Bytes;
use futures_util::Stream;
use http::{StatusCode, header};
use serde::Deserialize;
use service::{FileAttributes, WriteFileRequest, WriteMode};

use super::FileActor;
use super::file_mode::FilePermissions;
use super::problem::ExecdProblem;
use crate::kit::body::drain_body;
use crate::kit::headers::header_text;
use crate::kit::multipart::{MultipartError, MultipartReader};

const MAX_METADATA_BYTES: usize = 64 << 10;
/// How many `metadata` parts may precede their files.
const MAX_PENDING_METADATA: usize = 1024;
/// The mode of a new file without a given one, as in the reference.
const DEFAULT_FILE_MODE: u32 = 0o755;

#[derive(Deserialize)]
struct UploadMetadata {
    path: String,
    #[serde(flatten)]
    permissions: FilePermissions,
}

/// `POST /files/upload`
pub(super) async fn upload_files(actor: FileActor, request: Request) -> Result<StatusCode, ExecdProblem> {
    let kind = header_text(request.headers(), header::CONTENT_TYPE.as_str()).unwrap_or_default().to_owned();
    let mut multipart = MultipartReader::new(&kind, request.into_body().into_data_stream())?;
    let taken = store_all_files(&actor, &mut multipart).await;
    if taken.is_err() {
        drain_body(multipart.into_body()).await;
    }
    taken.map(|()| StatusCode::OK)
}

async fn store_all_files<S, E>(actor: &FileActor, parts: &mut MultipartReader<S>) -> Result<(), ExecdProblem>
where
    S: Stream<Item = Result<Bytes, E>> + Unpin,
{
    let (mut ahead, mut files) = (VecDeque::new(), 0_usize);
    while let Some(part) = parts.next_part().await? {
        match part.name.as_str() {
            "metadata" if ahead.len() < MAX_PENDING_METADATA => ahead.push_back(read_metadata(parts).await?),
            "metadata" => {
                return Err(upload_problem("INVALID_FILE", "more `metadata` parts than `file` parts"));
            }
            "file" => {
                let (path, attributes) = ahead.pop_front().ok_or_else(|| {
                    upload_problem("INVALID_FILE_METADATA", "a part `file` must follow its part `metadata`")
                })?;
                store_file(actor, parts, &path, attributes).await?;
                files += 1;
            }
            _ => {}
        }
    }
    match (ahead.is_empty(), files) {
        (true, 0) => Err(upload_problem("INVALID_FILE_METADATA", "part `metadata` missing")),
        (false, 0) => Err(upload_problem("INVALID_FILE_CONTENT", "part `file` missing")),
        (false, _) => Err(upload_problem("INVALID_FILE", "more `metadata` parts than `file` parts")),
        (true, _) => Ok(()),
    }
}

async fn read_metadata<S, E>(parts: &mut MultipartReader<S>) -> Result<(String, FileAttributes), ExecdProblem>
where
    S: Stream<Item = Result<Bytes, E>> + Unpin,
{
    let mut text = Vec::new();
    while let Some(piece) = parts.next_chunk().await? {
        text.extend_from_slice(&piece);
        if text.len() > MAX_METADATA_BYTES {
            return Err(upload_problem("INVALID_FILE_METADATA", "part `metadata` is too long"));
        }
    }
    let wrong = |why: String| upload_problem("INVALID_FILE_METADATA", why);
    let metadata: UploadMetadata = serde_json::from_slice(&text).map_err(|error| wrong(error.to_string()))?;
    if metadata.path.is_empty() {
        return Err(wrong("`path` is empty".to_owned()));
    }
    let attributes = metadata.permissions.into_attributes().map_err(wrong)?;
    Ok((metadata.path, attributes))
}

/// Writes one file. An error drops the writer half-way, which leaves the old file in place.
async fn store_file<S, E>(
    actor: &FileActor,
    parts: &mut MultipartReader<S>,
    path: &str,
    attributes: FileAttributes,
) -> Result<(), ExecdProblem>
where
    S: Stream<Item = Result<Bytes, E>> + Unpin,
{
    let request =
        WriteFileRequest { mode: WriteMode::Replace, attributes, new_file_mode: Some(DEFAULT_FILE_MODE) };
    let mut writing = actor.sandbox.files().write_file(actor.as_service_actor(), path, request).await?;
    while let Some(piece) = parts.next_chunk().await? {
        writing.send_bytes(piece).await?;
    }
    Ok(writing.finish().await?)
}

fn upload_problem(code: &'static str, why: impl Into<String>) -> ExecdProblem {
    ExecdProblem::new(StatusCode::BAD_REQUEST, code, why)
}

impl From<MultipartError> for ExecdProblem {
    fn from(error: MultipartError) -> Self {
        upload_problem("INVALID_FILE", error.to_string())
    }
}
