//! Images: listing, pulling with progress, importing, committing, removing. They belong to the server
//! and not to an owner, so only the operator manages them.

use std::convert::Infallible;

use axum::Json;
use axum::body::{Body, Bytes};
use axum::extract::rejection::BytesRejection;
use axum::extract::{RawQuery, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use domain::{SandboxId, SnapshotId};
use futures_util::{TryStreamExt, stream};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use service::{CommitSource, ErrorKind, FreedSpace, ImageInfo, PullState, RegistryCredentials, ServiceError};
use tokio::sync::watch;
use tokio_util::io::StreamReader;

use super::OperatorState;
use super::access::OperatorOnly;
use crate::kit::error_format;
use crate::kit::sse::format_event;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PullRequest {
    name: String,
    #[serde(default)]
    username: Option<String>,
    #[serde(default)]
    password: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CommitRequest {
    name: String,
    #[serde(default)]
    sandbox: Option<String>,
    #[serde(default)]
    snapshot: Option<String>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ImageDetails {
    name: String,
    digest: Option<String>,
    bytes: u64,
    layers: Vec<String>,
    entrypoint: Vec<String>,
    cmd: Vec<String>,
    env: std::collections::BTreeMap<String, String>,
    user: Option<String>,
    workdir: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    last_used: Option<String>,
    /// Whether its layers are stacked on the files of this host.
    above_host: bool,
}

/// `GET /coracle/v1/images`, or with `?name=` the image that a sandbox would get. Names contain
/// slashes and colons, so they are not part of the path.
pub(super) async fn list_images(
    State(state): State<OperatorState>,
    _: OperatorOnly,
    RawQuery(query): RawQuery,
) -> Response {
    let Some(name) = name_in(query.as_deref()) else {
        return match state.service.list_images().await {
            Ok(images) => {
                let items: Vec<ImageDetails> = images.into_iter().map(image_details).collect();
                Json(json!({ "items": items })).into_response()
            }
            Err(error) => image_error_response(&error),
        };
    };
    match state.service.find_image(&name).await {
        Ok(Some(image)) => Json(image_details(image)).into_response(),
        Ok(None) => image_not_found(),
        Err(error) => image_error_response(&error),
    }
}

/// `POST /coracle/v1/images`: pulls an image. The response is a stream of events: `progress` with
/// bytes, then one `done` or `failed`.
pub(super) async fn pull_image(
    State(front): State<OperatorState>,
    _: OperatorOnly,
    body: Result<Bytes, BytesRejection>,
) -> Response {
    let request = body.ok().and_then(|body| serde_json::from_slice::<PullRequest>(&body).ok());
    let Some(PullRequest { name, username, password }) = request else {
        let message = "the body must be an object with `name`, and optionally `username` and `password`";
        return error_format::build_error(StatusCode::BAD_REQUEST, "INVALID_IMAGE_REQUEST", message);
    };
    let credentials = match (username, password) {
        (None, None) => None,
        (Some(username), Some(password)) => Some(RegistryCredentials { username, password }),
        _ => {
            let message = "`username` and `password` must be given together";
            return error_format::build_error(StatusCode::BAD_REQUEST, "INVALID_IMAGE_REQUEST", message);
        }
    };
    match front.service.pull_image(&name, credentials) {
        Ok(state) => stream_pull(state),
        Err(error) => image_error_response(&error),
    }
}

/// `POST /coracle/v1/images/import?name=`: the body is an archive, read as it arrives. The response
/// is the image.
pub(super) async fn import_image(
    State(state): State<OperatorState>,
    _: OperatorOnly,
    RawQuery(query): RawQuery,
    body: Body,
) -> Response {
    let Some(name) = name_in(query.as_deref()) else {
        return error_format::build_error(
            StatusCode::BAD_REQUEST,
            "INVALID_IMAGE_REQUEST",
            "`?name=` is missing",
        );
    };
    let archive = StreamReader::new(body.into_data_stream().map_err(std::io::Error::other));
    match state.service.import_image(&name, Box::pin(archive)).await {
        Ok(image) => Json(image_details(image)).into_response(),
        Err(error) => image_error_response(&error),
    }
}

/// `POST /coracle/v1/images/commit`: creates an image from one of the operator's own sandboxes or
/// snapshots, for every owner to use. The response is a stream of events like that of a pull.
pub(super) async fn commit_image(
    State(front): State<OperatorState>,
    _: OperatorOnly,
    body: Result<Bytes, BytesRejection>,
) -> Response {
    let invalid =
        |message: &str| error_format::build_error(StatusCode::BAD_REQUEST, "INVALID_IMAGE_REQUEST", message);
    let request = body.ok().and_then(|body| serde_json::from_slice::<CommitRequest>(&body).ok());
    let Some(CommitRequest { name, sandbox, snapshot }) = request else {
        return invalid("the body must be an object with `name`, and `sandbox` or `snapshot`");
    };
    let source = match (sandbox, snapshot) {
        (Some(id), None) => SandboxId::parse(&id).map(CommitSource::Sandbox).ok(),
        (None, Some(id)) => SnapshotId::parse(&id).map(CommitSource::Snapshot).ok(),
        _ => return invalid("one of `sandbox` and `snapshot` must be given"),
    };
    let Some(source) = source else { return invalid("`sandbox` or `snapshot` is not an id") };
    match front.service.commit_image(&domain::Owner::operator(), source, &name).await {
        Ok(state) => stream_pull(state),
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NoSnapshot) => {
            error_format::build_error(StatusCode::NOT_FOUND, "NOT_FOUND", &error.to_string())
        }
        Err(error) if error.kind() == ErrorKind::Snapshot => {
            error_format::build_error(StatusCode::CONFLICT, "NOT_READY", &error.to_string())
        }
        Err(error) => image_error_response(&error),
    }
}

/// `DELETE /coracle/v1/images?name=`: sandboxes that use it keep its files.
pub(super) async fn remove_image(
    State(state): State<OperatorState>,
    _: OperatorOnly,
    RawQuery(query): RawQuery,
) -> Response {
    let Some(name) = name_in(query.as_deref()) else {
        return error_format::build_error(
            StatusCode::BAD_REQUEST,
            "INVALID_IMAGE_REQUEST",
            "`?name=` is missing",
        );
    };
    match state.service.remove_image(&name).await {
        Ok(freed) => Json(freed_body(&freed)).into_response(),
        Err(error) if error.kind() == ErrorKind::Invalid => image_not_found(),
        // No image has this name, or the image may not be removed.
        Err(error) if error.kind() == ErrorKind::Unsupported => error_format::build_error(
            StatusCode::BAD_REQUEST,
            "INVALID_IMAGE_REQUEST",
            &error.message_for(&domain::Owner::operator()),
        ),
        Err(error) => image_error_response(&error),
    }
}

/// `POST /coracle/v1/images/gc`
pub(super) async fn collect_images(State(state): State<OperatorState>, _: OperatorOnly) -> Response {
    match state.service.collect_images().await {
        Ok(freed) => Json(freed_body(&freed)).into_response(),
        Err(error) => image_error_response(&error),
    }
}

fn name_in(query: Option<&str>) -> Option<String> {
    let mut pairs = form_urlencoded::parse(query?.as_bytes());
    pairs.find(|(key, _)| key == "name").map(|(_, name)| name.into_owned())
}

/// Streams events until the pull is over. A slow reader may miss progress but never the end.
fn stream_pull(state: watch::Receiver<PullState>) -> Response {
    let frames = stream::unfold(Some((state, true)), |reading| async move {
        let (mut state, first) = reading?;
        if !first && state.changed().await.is_err() {
            return None;
        }
        let now = state.borrow_and_update().clone();
        let over = matches!(now, PullState::Done(_) | PullState::Failed { .. });
        Some((Ok::<_, Infallible>(encode_frame(now)), (!over).then_some((state, false))))
    });
    let kind = [(header::CONTENT_TYPE, "text/event-stream"), (header::CACHE_CONTROL, "no-store")];
    (kind, Body::from_stream(frames)).into_response()
}

fn encode_frame(state: PullState) -> Bytes {
    let (kind, data) = match state {
        PullState::Fetching { bytes, of } => ("progress", json!({"step": "fetch", "bytes": bytes, "of": of})),
        PullState::Unpacking => ("progress", json!({"step": "unpack"})),
        PullState::Done(image) => ("done", json!(image_details(image))),
        PullState::Failed { message, hint } => ("failed", json!({"message": message, "hint": hint})),
    };
    Bytes::from(format_event(None, kind, data))
}

fn image_details(image: ImageInfo) -> ImageDetails {
    let time = |time| Timestamp::try_from(time).ok().map(|time| time.to_string());
    ImageDetails {
        name: image.name,
        digest: image.digest,
        bytes: image.bytes,
        layers: image.layers,
        entrypoint: image.entrypoint,
        cmd: image.cmd,
        env: image.env.into_iter().collect(),
        user: image.user,
        workdir: image.workdir,
        last_used: image.last_used.and_then(time),
        above_host: image.above_host,
    }
}

fn freed_body(freed: &FreedSpace) -> Value {
    json!({ "images": freed.images, "layers": freed.layers, "bytes": freed.bytes })
}

fn image_not_found() -> Response {
    error_format::build_error(StatusCode::NOT_FOUND, "IMAGE_NOT_FOUND", "image not found")
}

fn image_error_response(error: &ServiceError) -> Response {
    let status = match error.kind() {
        ErrorKind::Unsupported => StatusCode::NOT_IMPLEMENTED,
        ErrorKind::Invalid => StatusCode::BAD_REQUEST,
        ErrorKind::Exhausted { .. } => StatusCode::TOO_MANY_REQUESTS,
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    };
    let mut response =
        error_format::build_error(status, "IMAGE_FAILED", &error.message_for(&domain::Owner::operator()));
    error_format::add_hint(&mut response, error.hint());
    response
}
