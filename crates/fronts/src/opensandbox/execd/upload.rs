//! Uploads files from a multipart body: for each file a part `metadata`, then a part `file`. Content
//! is streamed; the response is sent once all files are in place.

use std::collections::VecDeque;
use std::time::Duration;

use axum::extract::{Request, State};
use bytes::Bytes;
use futures_util::{Stream, StreamExt};
use http::{StatusCode, header};
use serde::Deserialize;
use service::{Attributes, WriteMode};

use super::Actor;
use super::fault::Fault;
use super::mode::Permissions;
use super::multipart::{Multipart, NotMultipart};
use crate::auth;
use crate::opensandbox::Front;

const LARGEST_METADATA: usize = 64 << 10;
/// How many `metadata` parts may precede their files.
const MOST_AHEAD: usize = 1024;
/// The mode of a new file without a given one, as in the reference.
const NEW_FILE: u32 = 0o755;
/// How long the rest of a refused body is read. A client that is still sending would otherwise see a
/// broken connection instead of the reason.
const DRAIN_TIME: Duration = Duration::from_secs(10);

#[derive(Deserialize)]
struct Metadata {
    path: String,
    #[serde(flatten)]
    permissions: Permissions,
}

/// `POST /files/upload`
pub(super) async fn upload(
    State(front): State<Front>,
    actor: Actor,
    request: Request,
) -> Result<StatusCode, Fault> {
    let kind = auth::text(request.headers(), header::CONTENT_TYPE.as_str()).unwrap_or_default().to_owned();
    let mut multipart = Multipart::new(&kind, request.into_body().into_data_stream())?;
    let taken = take_all(&front, &actor, &mut multipart).await;
    if taken.is_err() {
        let rest = multipart.into_body().for_each(|_| async {});
        if tokio::time::timeout(DRAIN_TIME, rest).await.is_err() {
            tracing::debug!("stopped draining a refused upload: it took too long");
        }
    }
    taken.map(|()| StatusCode::OK)
}

async fn take_all<S, E>(front: &Front, actor: &Actor, parts: &mut Multipart<S>) -> Result<(), Fault>
where
    S: Stream<Item = Result<Bytes, E>> + Unpin,
{
    let (mut ahead, mut files) = (VecDeque::new(), 0_usize);
    while let Some(name) = parts.part().await? {
        match name.as_str() {
            "metadata" if ahead.len() < MOST_AHEAD => ahead.push_back(metadata(parts).await?),
            "metadata" => return Err(file("INVALID_FILE", "more `metadata` parts than `file` parts")),
            "file" => {
                let (path, attributes) = ahead.pop_front().ok_or_else(|| {
                    file("INVALID_FILE_METADATA", "a part `file` must follow its part `metadata`")
                })?;
                store(front, actor, parts, &path, attributes).await?;
                files += 1;
            }
            _ => {}
        }
    }
    match (ahead.is_empty(), files) {
        (true, 0) => Err(file("INVALID_FILE_METADATA", "part `metadata` missing")),
        (false, 0) => Err(file("INVALID_FILE_CONTENT", "part `file` missing")),
        (false, _) => Err(file("INVALID_FILE", "more `metadata` parts than `file` parts")),
        (true, _) => Ok(()),
    }
}

async fn metadata<S, E>(parts: &mut Multipart<S>) -> Result<(String, Attributes), Fault>
where
    S: Stream<Item = Result<Bytes, E>> + Unpin,
{
    let mut text = Vec::new();
    while let Some(piece) = parts.piece().await? {
        text.extend_from_slice(&piece);
        if text.len() > LARGEST_METADATA {
            return Err(file("INVALID_FILE_METADATA", "part `metadata` is too long"));
        }
    }
    let wrong = |why: String| file("INVALID_FILE_METADATA", why);
    let metadata: Metadata = serde_json::from_slice(&text).map_err(|error| wrong(error.to_string()))?;
    if metadata.path.is_empty() {
        return Err(wrong("`path` is empty".to_owned()));
    }
    let attributes = metadata.permissions.attributes().map_err(wrong)?;
    Ok((metadata.path, Attributes { new_mode: Some(NEW_FILE), ..attributes }))
}

/// Writes one file. An error drops the writer half-way, which leaves the old file in place.
async fn store<S, E>(
    front: &Front,
    actor: &Actor,
    parts: &mut Multipart<S>,
    path: &str,
    attributes: Attributes,
) -> Result<(), Fault>
where
    S: Stream<Item = Result<Bytes, E>> + Unpin,
{
    let mode = WriteMode::Replace;
    let mut writing =
        front.service.write(&actor.owner, &actor.id, actor.by(), path, attributes, mode).await?;
    while let Some(piece) = parts.piece().await? {
        writing.send(piece).await?;
    }
    Ok(writing.finish().await?)
}

fn file(code: &'static str, why: impl Into<String>) -> Fault {
    Fault::new(StatusCode::BAD_REQUEST, code, why)
}

impl From<NotMultipart> for Fault {
    fn from(error: NotMultipart) -> Self {
        file("INVALID_FILE", error.to_string())
    }
}
