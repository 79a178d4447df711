//! Lists, inspects and removes snapshots: the operator those of every owner, owners their own.

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use domain::{Snapshot, SnapshotId};
use serde::Serialize;
use serde_json::json;
use service::{ActKind, ErrorKind, ServiceError, ThingKind};

use super::access::{Scope, Selected};
use super::{Front, time};
use crate::answer;

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Shown {
    id: String,
    owner: String,
    sandbox_id: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    state: &'static str,
    image: String,
    size_bytes: u64,
    created_at: String,
}

/// `GET /coracle/v1/snapshots`: snapshots that the caller may see, newest first.
pub(super) async fn list(State(front): State<Front>, selected: Selected) -> Response {
    selected.record_list(&front.service, ThingKind::Snapshot);
    let found = front.service.any_snapshots(selected.owner());
    let items: Vec<Shown> = found.iter().map(Shown::of).collect();
    Json(json!({ "items": items })).into_response()
}

/// `GET /coracle/v1/snapshots/{id}`
pub(super) async fn inspect(
    State(front): State<Front>,
    Scope(whose): Scope,
    id: Result<Path<String>, PathRejection>,
) -> Response {
    let Some(id) = id_of(id) else { return not_found() };
    match front.service.any_snapshot(whose.as_ref(), &id) {
        Ok(snapshot) => {
            if whose.is_none() {
                let (kind, thing) = (ActKind::Inspected, ThingKind::Snapshot);
                front.service.record_look(&snapshot.owner, kind, thing, id.as_str());
            }
            Json(Shown::of(&snapshot)).into_response()
        }
        Err(error) => failed(&error),
    }
}

/// `DELETE /coracle/v1/snapshots/{id}`: responds once the snapshot is gone.
pub(super) async fn remove(
    State(front): State<Front>,
    Scope(whose): Scope,
    id: Result<Path<String>, PathRejection>,
) -> Response {
    let Some(id) = id_of(id) else { return not_found() };
    let removed = match &whose {
        Some(owner) => front.service.delete_snapshot(owner, &id).await,
        None => front.service.remove_any_snapshot(&id).await,
    };
    match removed {
        Ok(_) => StatusCode::NO_CONTENT.into_response(),
        Err(error) => failed(&error),
    }
}

fn id_of(id: Result<Path<String>, PathRejection>) -> Option<SnapshotId> {
    SnapshotId::parse(&id.ok()?.0).ok()
}

fn not_found() -> Response {
    answer::error(StatusCode::NOT_FOUND, "SNAPSHOT_NOT_FOUND", "snapshot not found")
}

fn failed(error: &ServiceError) -> Response {
    let (status, code) = match error.kind() {
        ErrorKind::NoSnapshot => return not_found(),
        ErrorKind::Snapshot(_) => (StatusCode::CONFLICT, "SNAPSHOT_IN_USE"),
        _ => (StatusCode::INTERNAL_SERVER_ERROR, "INTERNAL"),
    };
    answer::error(status, code, &error.to_string())
}

impl Shown {
    fn of(snapshot: &Snapshot) -> Self {
        Self {
            id: snapshot.id.to_string(),
            owner: snapshot.owner.as_str().to_owned(),
            sandbox_id: snapshot.sandbox.to_string(),
            name: snapshot.name.clone(),
            state: snapshot.state.name(),
            image: snapshot.image.clone(),
            size_bytes: snapshot.size.0,
            created_at: time(snapshot.created),
        }
    }
}
