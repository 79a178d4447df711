//! Lists, inspects and removes snapshots: the operator those of every owner, owners their own.

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use domain::{Snapshot, SnapshotId};
use serde::Serialize;
use serde_json::json;
use service::{ErrorKind, OperatorActionKind, OperatorObjectKind, ServiceError};

use super::OperatorState;
use super::access::{SelectedOwners, VisibleOwners};
use crate::kit::error_format;
use crate::kit::time::format_rfc3339;

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct SnapshotDetails {
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
pub(super) async fn list_snapshots(State(state): State<OperatorState>, selected: SelectedOwners) -> Response {
    selected.record_list(&state.service, OperatorObjectKind::Snapshot);
    let found = state.service.list_any_snapshots(selected.owner());
    let items: Vec<SnapshotDetails> = found.iter().map(SnapshotDetails::from_snapshot).collect();
    Json(json!({ "items": items })).into_response()
}

/// `GET /coracle/v1/snapshots/{id}`
pub(super) async fn inspect_snapshot(
    State(state): State<OperatorState>,
    VisibleOwners(whose): VisibleOwners,
    id: Result<Path<String>, PathRejection>,
) -> Response {
    let Some(id) = parse_snapshot_id(id) else { return snapshot_not_found() };
    match state.service.find_any_snapshot(whose.as_ref(), &id) {
        Ok(snapshot) => {
            if whose.is_none() {
                let (kind, thing) = (OperatorActionKind::Inspected, OperatorObjectKind::Snapshot);
                state.service.record_view(&snapshot.owner, kind, thing, id.as_str());
            }
            Json(SnapshotDetails::from_snapshot(&snapshot)).into_response()
        }
        Err(error) => snapshot_error_response(&error),
    }
}

/// `DELETE /coracle/v1/snapshots/{id}`: responds once the snapshot is gone.
pub(super) async fn remove_snapshot(
    State(state): State<OperatorState>,
    VisibleOwners(whose): VisibleOwners,
    id: Result<Path<String>, PathRejection>,
) -> Response {
    let Some(id) = parse_snapshot_id(id) else { return snapshot_not_found() };
    let removed = match &whose {
        Some(owner) => state.service.delete_snapshot(owner, &id).await,
        None => state.service.remove_any_snapshot(&id).await,
    };
    match removed {
        Ok(_) => StatusCode::NO_CONTENT.into_response(),
        Err(error) => snapshot_error_response(&error),
    }
}

fn parse_snapshot_id(id: Result<Path<String>, PathRejection>) -> Option<SnapshotId> {
    SnapshotId::parse(&id.ok()?.0).ok()
}

fn snapshot_not_found() -> Response {
    error_format::build_error(StatusCode::NOT_FOUND, "SNAPSHOT_NOT_FOUND", "snapshot not found")
}

fn snapshot_error_response(error: &ServiceError) -> Response {
    let (status, code) = match error.kind() {
        ErrorKind::NoSnapshot => return snapshot_not_found(),
        ErrorKind::Snapshot => (StatusCode::CONFLICT, "SNAPSHOT_IN_USE"),
        _ => (StatusCode::INTERNAL_SERVER_ERROR, "INTERNAL"),
    };
    error_format::build_error(status, code, &error.to_string())
}

impl SnapshotDetails {
    fn from_snapshot(snapshot: &Snapshot) -> Self {
        Self {
            id: snapshot.id.to_string(),
            owner: snapshot.owner.as_str().to_owned(),
            sandbox_id: snapshot.sandbox.to_string(),
            name: snapshot.name.clone(),
            state: snapshot.state.name(),
            image: snapshot.image.clone(),
            size_bytes: snapshot.size.0,
            created_at: format_rfc3339(snapshot.created),
        }
    }
}
