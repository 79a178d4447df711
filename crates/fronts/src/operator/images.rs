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
use service::{CommitSource, Credentials, ErrorKind, Freed, ImageInfo, PullState, ServiceError};
use tokio::sync::watch;
use tokio_util::io::StreamReader;

use super::Front;
use super::access::Operator;
use crate::answer;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Wish {
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
struct Shown {
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
pub(super) async fn list(State(front): State<Front>, _: Operator, RawQuery(query): RawQuery) -> Response {
    let Some(name) = name_in(query.as_deref()) else {
        return match front.service.images().await {
            Ok(images) => {
                let items: Vec<Shown> = images.into_iter().map(shown).collect();
                Json(json!({ "items": items })).into_response()
            }
            Err(error) => failed(&error),
        };
    };
    match front.service.image(&name).await {
        Ok(Some(image)) => Json(shown(image)).into_response(),
        Ok(None) => unknown(),
        Err(error) => failed(&error),
    }
}

/// `POST /coracle/v1/images`: pulls an image. The response is a stream of events: `progress` with
/// bytes, then one `done` or `failed`.
pub(super) async fn pull(
    State(front): State<Front>,
    _: Operator,
    body: Result<Bytes, BytesRejection>,
) -> Response {
    let request = body.ok().and_then(|body| serde_json::from_slice::<Wish>(&body).ok());
    let Some(Wish { name, username, password }) = request else {
        let message = "the body must be an object with `name`, and optionally `username` and `password`";
        return answer::error(StatusCode::BAD_REQUEST, "INVALID_IMAGE_REQUEST", message);
    };
    let credentials = match (username, password) {
        (None, None) => None,
        (Some(username), Some(password)) => Some(Credentials { username, password }),
        _ => {
            let message = "`username` and `password` must be given together";
            return answer::error(StatusCode::BAD_REQUEST, "INVALID_IMAGE_REQUEST", message);
        }
    };
    match front.service.pull_image(&name, credentials) {
        Ok(state) => follow(state),
        Err(error) => failed(&error),
    }
}

/// `POST /coracle/v1/images/import?name=`: the body is an archive, read as it arrives. The response
/// is the image.
pub(super) async fn import(
    State(front): State<Front>,
    _: Operator,
    RawQuery(query): RawQuery,
    body: Body,
) -> Response {
    let Some(name) = name_in(query.as_deref()) else {
        return answer::error(StatusCode::BAD_REQUEST, "INVALID_IMAGE_REQUEST", "`?name=` is missing");
    };
    let archive = StreamReader::new(body.into_data_stream().map_err(std::io::Error::other));
    match front.service.import_image(&name, Box::pin(archive)).await {
        Ok(image) => Json(shown(image)).into_response(),
        Err(error) => failed(&error),
    }
}

/// `POST /coracle/v1/images/commit`: creates an image from one of the operator's own sandboxes or
/// snapshots, for every owner to use. The response is a stream of events like that of a pull.
pub(super) async fn commit(
    State(front): State<Front>,
    _: Operator,
    body: Result<Bytes, BytesRejection>,
) -> Response {
    let invalid = |message: &str| answer::error(StatusCode::BAD_REQUEST, "INVALID_IMAGE_REQUEST", message);
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
    match front.service.commit_image(&domain::Owner::single(), source, &name).await {
        Ok(state) => follow(state),
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NoSnapshot) => {
            answer::error(StatusCode::NOT_FOUND, "NOT_FOUND", &error.to_string())
        }
        Err(error) if matches!(error.kind(), ErrorKind::Snapshot(_)) => {
            answer::error(StatusCode::CONFLICT, "NOT_READY", &error.to_string())
        }
        Err(error) => failed(&error),
    }
}

/// `DELETE /coracle/v1/images?name=`: sandboxes that use it keep its files.
pub(super) async fn remove(State(front): State<Front>, _: Operator, RawQuery(query): RawQuery) -> Response {
    let Some(name) = name_in(query.as_deref()) else {
        return answer::error(StatusCode::BAD_REQUEST, "INVALID_IMAGE_REQUEST", "`?name=` is missing");
    };
    match front.service.remove_image(&name).await {
        Ok(freed) => Json(told(&freed)).into_response(),
        Err(error) if error.kind() == ErrorKind::Invalid => unknown(),
        // No image has this name, or the image may not be removed.
        Err(error) if error.kind() == ErrorKind::Unsupported => answer::error(
            StatusCode::BAD_REQUEST,
            "INVALID_IMAGE_REQUEST",
            &error.told_to(&domain::Owner::single()),
        ),
        Err(error) => failed(&error),
    }
}

/// `POST /coracle/v1/images/gc`
pub(super) async fn collect(State(front): State<Front>, _: Operator) -> Response {
    match front.service.collect_images().await {
        Ok(freed) => Json(told(&freed)).into_response(),
        Err(error) => failed(&error),
    }
}

fn name_in(query: Option<&str>) -> Option<String> {
    let mut pairs = form_urlencoded::parse(query?.as_bytes());
    pairs.find(|(key, _)| key == "name").map(|(_, name)| name.into_owned())
}

/// Streams events until the pull is over. A slow reader may miss progress but never the end.
fn follow(state: watch::Receiver<PullState>) -> Response {
    let frames = stream::unfold(Some((state, true)), |reading| async move {
        let (mut state, first) = reading?;
        if !first && state.changed().await.is_err() {
            return None;
        }
        let now = state.borrow_and_update().clone();
        let over = matches!(now, PullState::Done(_) | PullState::Failed { .. });
        Some((Ok::<_, Infallible>(frame(now)), (!over).then_some((state, false))))
    });
    let kind = [(header::CONTENT_TYPE, "text/event-stream"), (header::CACHE_CONTROL, "no-store")];
    (kind, Body::from_stream(frames)).into_response()
}

fn frame(state: PullState) -> Bytes {
    let (kind, data) = match state {
        PullState::Fetching { bytes, of } => ("progress", json!({"step": "fetch", "bytes": bytes, "of": of})),
        PullState::Unpacking => ("progress", json!({"step": "unpack"})),
        PullState::Done(image) => ("done", json!(shown(image))),
        PullState::Failed { message, hint } => ("failed", json!({"message": message, "hint": hint})),
    };
    Bytes::from(format!("event: {kind}\ndata: {data}\n\n"))
}

fn shown(image: ImageInfo) -> Shown {
    let time = |time| Timestamp::try_from(time).ok().map(|time| time.to_string());
    Shown {
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

fn told(freed: &Freed) -> Value {
    json!({ "images": freed.images, "layers": freed.layers, "bytes": freed.bytes })
}

fn unknown() -> Response {
    answer::error(StatusCode::NOT_FOUND, "IMAGE_NOT_FOUND", "image not found")
}

fn failed(error: &ServiceError) -> Response {
    let status = match error.kind() {
        ErrorKind::Unsupported => StatusCode::NOT_IMPLEMENTED,
        ErrorKind::Invalid => StatusCode::BAD_REQUEST,
        ErrorKind::Exhausted { .. } => StatusCode::TOO_MANY_REQUESTS,
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    };
    let mut response = answer::error(status, "IMAGE_FAILED", &error.told_to(&domain::Owner::single()));
    answer::add_hint(&mut response, error.hint());
    response
}
