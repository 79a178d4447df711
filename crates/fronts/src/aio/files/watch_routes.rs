//! Routes of watches. Their results are in the envelope and, for clients that expect the bare resource, beside it.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::{Path, State};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::{Stream, stream};
use http::{HeaderMap, StatusCode};
use serde::Deserialize;
use serde_json::{Value, json};
use service::WatchEvent;

use super::failure::FileAction;
use super::search::checked_globs;
use super::watch::{FileWatcher, MAX_WATCHES, TooManyWatches, WatchOptions};
use super::watch_events::{EventFilter, EventPage, EventType, FileEventBody};
use super::{FileCall, number_between};
use crate::aio::AioState;
use crate::aio::body::AioJson;
use crate::aio::envelope::DEFAULT_MESSAGE;
use crate::aio::problem::AioProblem;
use crate::aio::target::AioTarget;
use crate::kit::headers::header_text;
use crate::kit::sse::{event_stream_response, format_event};

const DEFAULT_EXCLUDES: &[&str] =
    &[".git", "node_modules", "__pycache__", ".venv", "*.pyc", "*.pyo", ".DS_Store", "*.swp", "*.swo"];
const DEBOUNCE_BOUNDS: (u64, u64) = (50, 5000);
const DEFAULT_DEBOUNCE: u64 = 300;
const MAX_POLL_EVENTS: usize = 1000;
const DEFAULT_POLL_EVENTS: usize = 100;
const MAX_POLL_SECONDS: u64 = 60;
const MAX_WAIT_SECONDS: u64 = 300;
const DEFAULT_WAIT_SECONDS: u64 = 30;
/// After how long a stream without events sends a comment.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(15);

#[derive(Debug, Deserialize)]
pub(super) struct CreateWatchBody {
    path: Option<String>,
    recursive: Option<bool>,
    exclude: Option<Vec<String>>,
    /// In milliseconds.
    debounce: Option<u64>,
    include_patterns: Option<Vec<String>>,
}

/// `GET /v1/file/watch`
pub(super) async fn list_watches(target: AioTarget, State(state): State<AioState>) -> Response {
    let watches = state.watches.list_watches(target.sandbox.id());
    let watches: Vec<Value> = watches.iter().map(|watcher| describe_watch(watcher)).collect();
    resource_response(json!({ "watchers": watches }))
}

/// `POST /v1/file/watch`
pub(super) async fn create_watch(
    target: AioTarget,
    State(state): State<AioState>,
    AioJson(body): AioJson<CreateWatchBody>,
) -> Result<Response, AioProblem> {
    let call = FileCall::new(target, FileAction::Watch, "path", body.path, None)?;
    let default_excludes = || DEFAULT_EXCLUDES.iter().map(|glob| (*glob).to_owned()).collect();
    let exclude = checked_globs(Some(body.exclude.unwrap_or_else(default_excludes)), "exclude")?;
    let include = checked_globs(body.include_patterns, "include_patterns")?;
    let filter = EventFilter::new(&include, &exclude);
    let filter = filter.map_err(|reason| AioProblem::bad_request(format!("Invalid pattern: {reason}")))?;
    let debounce = number_between(body.debounce, "debounce", DEBOUNCE_BOUNDS, DEFAULT_DEBOUNCE)?;
    let recursive = body.recursive != Some(false);
    let options = WatchOptions {
        path: call.path.clone(),
        recursive,
        debounce: Duration::from_millis(debounce),
        filter,
    };
    let events = call.files().watch_files(&call.identity, &call.path, recursive).await;
    let events = events.map_err(|error| call.problem(error))?;
    let sandbox = call.target.sandbox.id();
    let watcher = state.watches.add_watch(sandbox, events, options).map_err(|TooManyWatches| {
        let message = format!("watch limit reached ({MAX_WATCHES})");
        AioProblem::new(StatusCode::TOO_MANY_REQUESTS, message)
    })?;
    Ok(resource_response(describe_watch(&watcher)))
}

/// `DELETE /v1/file/watch/{id}`
pub(super) async fn remove_watch(
    target: AioTarget,
    State(state): State<AioState>,
    Path(id): Path<String>,
) -> Result<Response, AioProblem> {
    match state.watches.remove_watch(target.sandbox.id(), &id) {
        true => Ok(resource_response(json!({ "watcher_id": id }))),
        false => Err(no_watch()),
    }
}

#[derive(Debug, Deserialize)]
pub(super) struct PollWatchBody {
    /// The newest client calls it `since`.
    #[serde(alias = "since")]
    cursor: Option<u64>,
    limit: Option<usize>,
    /// In seconds; 0 does not wait.
    timeout: Option<u64>,
}

/// `POST /v1/file/watch/{id}/poll`
pub(super) async fn poll_watch(
    target: AioTarget,
    State(state): State<AioState>,
    Path(id): Path<String>,
    AioJson(body): AioJson<PollWatchBody>,
) -> Result<Response, AioProblem> {
    let limit = number_between(body.limit, "limit", (1, MAX_POLL_EVENTS), DEFAULT_POLL_EVENTS)?;
    let seconds = number_between(body.timeout, "timeout", (0, MAX_POLL_SECONDS), 0)?;
    let cursor = body.cursor.unwrap_or(0);
    let watcher = find_watch(&target, &state, &id)?;
    if seconds > 0 {
        target.begin_stream()?;
        let waited = watcher.wait_for_event(cursor);
        // A watch that has ended, or a wait without an event, is answered with what there is.
        if tokio::time::timeout(Duration::from_secs(seconds), waited).await.is_err() {
            tracing::trace!("a poll of a file watch ended without an event");
        }
        watcher.count_use();
    }
    Ok(resource_response(json!(watcher.read_page(cursor, limit))))
}

/// `GET /v1/file/watch/{id}/events`: server-sent events, from the last one that the client names.
pub(super) async fn stream_events(
    target: AioTarget,
    State(state): State<AioState>,
    Path(id): Path<String>,
    headers: HeaderMap,
) -> Result<Response, AioProblem> {
    let watcher = find_watch(&target, &state, &id)?;
    target.begin_stream()?;
    let last = header_text(&headers, "last-event-id").and_then(|text| text.rsplit_once(':')?.1.parse().ok());
    let started = json!({"watcher_id": watcher.id, "path": watcher.path, "recursive": watcher.recursive});
    let first = format_event(None, "watch_started", started);
    Ok(event_stream_response(event_frames(watcher, last.unwrap_or(0), first)))
}

/// The frames of a stream; they end with the watch.
fn event_frames(
    watcher: Arc<FileWatcher>,
    cursor: u64,
    first: String,
) -> impl Stream<Item = Result<Bytes, Infallible>> + Send + 'static {
    stream::unfold((watcher, cursor, Some(first)), |(watcher, cursor, first)| async move {
        if let Some(first) = first {
            return Some((Ok(first.into()), (watcher, cursor, None)));
        }
        watcher.count_use();
        match tokio::time::timeout(KEEP_ALIVE_INTERVAL, watcher.wait_for_event(cursor)).await {
            Err(_elapsed) => Some((Ok(Bytes::from_static(b": keep-alive\n\n")), (watcher, cursor, None))),
            Ok(false) => None,
            Ok(true) => {
                let page = watcher.read_page(cursor, MAX_POLL_EVENTS);
                let frames = page_frames(&watcher.id, &page);
                Some((Ok(frames.into()), (watcher, page.cursor, None)))
            }
        }
    })
}

fn page_frames(id: &str, page: &EventPage) -> String {
    let mut frames = String::new();
    if page.overflow {
        frames.push_str(&format_event(None, "overflow", json!({ "cursor": page.cursor })));
    }
    for event in &page.events {
        frames.push_str(&format!("id: {id}:{}\n", event.seq));
        frames.push_str(&format_event(None, "file_change", json!(event)));
    }
    frames
}

#[derive(Debug, Deserialize)]
pub(super) struct WaitEventBody {
    path: Option<String>,
    /// In seconds.
    timeout: Option<u64>,
    event_types: Option<Vec<EventType>>,
}

/// `POST /v1/file/watch/wait`: waits for something to happen to one file, which need not exist.
pub(super) async fn wait_for_event(
    target: AioTarget,
    AioJson(body): AioJson<WaitEventBody>,
) -> Result<Response, AioProblem> {
    let call = FileCall::new(target, FileAction::Watch, "path", body.path, None)?;
    let seconds = number_between(body.timeout, "timeout", (1, MAX_WAIT_SECONDS), DEFAULT_WAIT_SECONDS)?;
    call.target.begin_stream()?;
    let path = match call.path.trim_end_matches('/') {
        "" => "/",
        path => path,
    };
    let directory = match path.rsplit_once('/') {
        Some(("", _)) | None => "/",
        Some((directory, _)) => directory,
    };
    let types = body.event_types.as_deref();
    let waited =
        tokio::time::timeout(Duration::from_secs(seconds), next_event(&call, directory, path, types));
    let event = match waited.await {
        Ok(event) => event?,
        Err(_elapsed) => None,
    };
    Ok(resource_response(json!({ "event": event, "timed_out": event.is_none() })))
}

/// The first event of a file; `None` if the watch ended.
async fn next_event(
    call: &FileCall,
    directory: &str,
    path: &str,
    types: Option<&[EventType]>,
) -> Result<Option<FileEventBody>, AioProblem> {
    let failed = |error| call.problem(error);
    let mut events = call.files().watch_files(&call.identity, directory, false).await.map_err(failed)?;
    let wants = |event: &FileEventBody| types.is_none_or(|types| event.is_one_of(types));
    if types.is_some_and(|types| types.contains(&EventType::Create))
        && let Some(event) = existing_file(call, directory).await
    {
        return Ok(Some(event));
    }
    while let Some(event) = events.next().await.map_err(failed)? {
        let found = FileEventBody::from_event(event, directory);
        if let Some(event) = found.filter(|event| event.path == path && wants(event)) {
            return Ok(Some(event));
        }
    }
    Ok(None)
}

/// A file that exists already counts as created if that was asked for.
async fn existing_file(call: &FileCall, directory: &str) -> Option<FileEventBody> {
    let infos = call.files().stat_files(&call.identity, std::slice::from_ref(&call.path)).await.ok()?;
    let info = infos.into_iter().next()?;
    let event = WatchEvent {
        sequence: 1,
        path: call.path.clone(),
        change: service::FileChange::Created,
        new_path: None,
        kind: Some(info.kind),
        size: Some(info.size),
        modified: Some(info.modified),
        inode: None,
    };
    FileEventBody::from_event(event, directory)
}

fn find_watch(target: &AioTarget, state: &AioState, id: &str) -> Result<Arc<FileWatcher>, AioProblem> {
    state.watches.find_watch(target.sandbox.id(), id).ok_or_else(no_watch)
}

fn no_watch() -> AioProblem {
    AioProblem::new(StatusCode::NOT_FOUND, "Watcher not found")
}

fn describe_watch(watcher: &FileWatcher) -> Value {
    json!({"watcher_id": watcher.id, "path": watcher.path, "recursive": watcher.recursive})
}

/// The envelope with its data, whose fields also stand beside it.
fn resource_response(data: Value) -> Response {
    let mut body = json!({"success": true, "message": DEFAULT_MESSAGE, "hint": null});
    if let (Some(body), Some(fields)) = (body.as_object_mut(), data.as_object()) {
        body.extend(fields.clone());
        body.insert("data".to_owned(), data);
    }
    Json(body).into_response()
}
