//! The images of the server, for its operator.

use anyhow::{Context, Result, anyhow, bail};
use bytes::Bytes;
use domain::{SandboxId, SnapshotId};
use futures_util::StreamExt;
use futures_util::stream::BoxStream;
use http::{Method, StatusCode};
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Frame;
use serde::Deserialize;
use serde_json::{Value, json};

use super::http as web;
use super::lifecycle::ServerClient;
use super::operator::EventFeed;
use crate::output::WithHint;

/// An archive that is sent as it is read; an error ends the request.
pub(crate) type ArchiveStream = BoxStream<'static, std::io::Result<Bytes>>;

/// The progress of the server with an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ImageProgress {
    Fetching { bytes: u64, of: u64 },
    Unpacking,
}

/// The source of a new image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ImageSource {
    Sandbox(SandboxId),
    Snapshot(SnapshotId),
}

/// The images, layers and bytes that were freed.
#[derive(Debug, Deserialize)]
pub(crate) struct FreedImages {
    #[serde(default)]
    pub images: Vec<String>,
    #[serde(default)]
    pub layers: usize,
    #[serde(default)]
    pub bytes: u64,
}

#[derive(Deserialize)]
struct ImagePage {
    items: Vec<Value>,
}

impl ServerClient {
    /// Whether a server answers at all. Only a failed connection counts as no server.
    pub(crate) async fn is_reachable(&self) -> Result<bool> {
        match self.operator_api().get("/capabilities").await {
            Err(error) if web::is_unreachable(&error) => Ok(false),
            // A refused caller is refused again by the next request, which reports the error better.
            _ => Ok(true),
        }
    }

    pub(crate) async fn list_images(&self) -> Result<Vec<Value>> {
        let page: ImagePage = web::read_json(self.operator_api().get("/images").await?).await?;
        Ok(page.items)
    }

    /// `None` if there is no such image.
    pub(crate) async fn find_image(&self, name: &str) -> Result<Option<Value>> {
        match self.operator_api().get(&format!("/images{}", web::encode_query(&[("name", name)]))).await {
            Ok(answer) => web::read_json(answer).await.map(Some),
            Err(error) if super::failed_with_status(&error, StatusCode::NOT_FOUND) => Ok(None),
            Err(error) => Err(error),
        }
    }

    pub(crate) async fn pull_image(
        &self,
        name: &str,
        credentials: Option<(String, String)>,
        progress: impl FnMut(ImageProgress),
    ) -> Result<Value> {
        let mut body = json!({ "name": name });
        if let Some((username, password)) = credentials {
            body["username"] = json!(username);
            body["password"] = json!(password);
        }
        follow_image_events(
            EventFeed::from_response(self.operator_api().post_json("/images", &body).await?),
            progress,
        )
        .await
    }

    pub(crate) async fn commit_image(
        &self,
        source: &ImageSource,
        name: &str,
        progress: impl FnMut(ImageProgress),
    ) -> Result<Value> {
        let body = match source {
            ImageSource::Sandbox(id) => json!({ "name": name, "sandbox": id.as_str() }),
            ImageSource::Snapshot(id) => json!({ "name": name, "snapshot": id.as_str() }),
        };
        follow_image_events(
            EventFeed::from_response(self.operator_api().post_json("/images/commit", &body).await?),
            progress,
        )
        .await
    }

    /// Sends an archive as it is read.
    pub(crate) async fn import_image(&self, name: &str, archive: ArchiveStream) -> Result<Value> {
        let body = StreamBody::new(archive.map(|part| part.map(Frame::data))).boxed_unsync();
        let path = format!("/images/import{}", web::encode_query(&[("name", name)]));
        let sent =
            self.operator_api().send(Method::POST, &path, Some("application/octet-stream"), body).await;
        web::read_json(sent?).await
    }

    /// Returns whether the image existed.
    pub(crate) async fn remove_image(&self, name: &str) -> Result<bool> {
        match self.operator_api().delete(&format!("/images{}", web::encode_query(&[("name", name)]))).await {
            Ok(()) => Ok(true),
            Err(error) if super::failed_with_status(&error, StatusCode::NOT_FOUND) => Ok(false),
            Err(error) => Err(error),
        }
    }

    pub(crate) async fn collect_images(&self) -> Result<FreedImages> {
        web::read_json(self.operator_api().post_json("/images/gc", &json!({})).await?).await
    }
}

/// Reads events until the image is there or has failed.
async fn follow_image_events(
    mut events: EventFeed,
    mut progress: impl FnMut(ImageProgress),
) -> Result<Value> {
    while let Some(event) = events.next_event().await? {
        let data: Value = serde_json::from_str(&event.data).context("the server sent an odd event")?;
        match event.kind.as_str() {
            "progress" if data["step"] == "fetch" => {
                let number = |name: &str| data[name].as_u64().unwrap_or(0);
                progress(ImageProgress::Fetching { bytes: number("bytes"), of: number("of") });
            }
            "progress" => progress(ImageProgress::Unpacking),
            "done" => return Ok(data),
            "failed" => {
                let text = |name: &str| data[name].as_str().map(str::to_owned);
                let failed =
                    anyhow!(text("message").unwrap_or_else(|| "the server said no reason".to_owned()));
                return match text("hint") {
                    Some(hint) => Err(failed).with_hint(hint),
                    None => Err(failed),
                };
            }
            _ => {}
        }
    }
    bail!("the server ended the connection before the image was there")
}
