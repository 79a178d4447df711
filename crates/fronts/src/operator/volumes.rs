//! Named volumes of each owner, which outlive sandboxes.

use std::time::SystemTime;

use axum::Json;
use axum::body::Bytes as Body;
use axum::extract::rejection::{BytesRejection, PathRejection};
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use domain::volume::VolumeLifetime;
use domain::{Bytes, VolumeName};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::json;
use service::{
    ErrorKind, MountFault, OperatorActionKind, OperatorObjectKind, Outcome, ServiceError, VolumeStatus,
};

use super::OperatorState;
use super::access::{RequestOwner, SelectedOwners};
use crate::kit::error_format;

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct CreateVolumeRequest {
    name: String,
    /// For example `1Gi`; the server's default size if absent.
    #[serde(default)]
    size: Option<String>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct VolumeDetails {
    name: String,
    id: String,
    owner: String,
    size_bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    used_bytes: Option<u64>,
    /// Whether it is deleted with the last sandbox that uses it.
    deleted_with_sandboxes: bool,
    sandboxes: Vec<String>,
    created_at: String,
}

/// `GET /coracle/v1/volumes`
pub(super) async fn list_volumes(State(state): State<OperatorState>, selected: SelectedOwners) -> Response {
    selected.record_list(&state.service, OperatorObjectKind::Volume);
    let found = match selected.owner_or_own() {
        Some(owner) => state.service.list_volumes(owner).await,
        None => state.service.list_all_volumes().await,
    };
    match found {
        Ok(volumes) => {
            let items: Vec<VolumeDetails> = volumes.into_iter().map(volume_details).collect();
            Json(json!({ "items": items })).into_response()
        }
        Err(error) => volume_error_response(&error),
    }
}

/// `POST /coracle/v1/volumes`: 201, or 200 if a volume with that name and size already exists.
pub(super) async fn create_volume(
    State(state): State<OperatorState>,
    RequestOwner(owner): RequestOwner,
    body: Result<Body, BytesRejection>,
) -> Response {
    let (name, size) = match body
        .ok()
        .as_deref()
        .map_or_else(|| Err("request body missing".to_owned()), parse_create_request)
    {
        Ok(parsed) => parsed,
        Err(why) => return error_format::build_error(StatusCode::BAD_REQUEST, "INVALID_VOLUME", &why),
    };
    match state.service.create_volume(&owner, &name, size).await {
        Ok((volume, outcome)) => {
            let status = if outcome == Outcome::Done { StatusCode::CREATED } else { StatusCode::OK };
            (status, Json(volume_details(volume))).into_response()
        }
        Err(error) => volume_error_response(&error),
    }
}

/// `GET /coracle/v1/volumes/{name}`
pub(super) async fn inspect_volume(
    State(state): State<OperatorState>,
    selected: SelectedOwners,
    name: Result<Path<String>, PathRejection>,
) -> Response {
    let (Some(name), Some(owner)) = (parse_volume_name(name), selected.owner_or_own()) else {
        return volume_not_found();
    };
    match state.service.find_volume(owner, &name).await {
        Ok(volume) => {
            if selected.is_operator() {
                state.service.record_view(
                    owner,
                    OperatorActionKind::Inspected,
                    OperatorObjectKind::Volume,
                    name.as_str(),
                );
            }
            Json(volume_details(volume)).into_response()
        }
        Err(error) => volume_error_response(&error),
    }
}

/// `DELETE /coracle/v1/volumes/{name}`: removes it with its content. 409 while a sandbox uses it.
pub(super) async fn remove_volume(
    State(state): State<OperatorState>,
    selected: SelectedOwners,
    name: Result<Path<String>, PathRejection>,
) -> Response {
    let (Some(name), Some(owner)) = (parse_volume_name(name), selected.owner_or_own()) else {
        return volume_not_found();
    };
    let removed = if selected.is_operator() {
        state.service.remove_volume_as_operator(owner, &name).await
    } else {
        state.service.remove_volume(owner, &name).await
    };
    match removed {
        Ok(()) => StatusCode::NO_CONTENT.into_response(),
        Err(error) => volume_error_response(&error),
    }
}

fn parse_volume_name(name: Result<Path<String>, PathRejection>) -> Option<VolumeName> {
    VolumeName::parse(&name.ok()?.0).ok()
}

fn parse_create_request(body: &[u8]) -> Result<(VolumeName, Option<Bytes>), String> {
    let request: CreateVolumeRequest = serde_json::from_slice(body).map_err(|error| error.to_string())?;
    let name = VolumeName::parse(&request.name).map_err(|error| format!("`name`: {error}"))?;
    let size = request.size.as_deref().map(Bytes::parse).transpose();
    Ok((name, size.map_err(|error| format!("`size`: {error}"))?))
}

fn volume_details(status: VolumeStatus) -> VolumeDetails {
    let time = |time: SystemTime| Timestamp::try_from(time).unwrap_or(Timestamp::MAX).to_string();
    let volume = status.volume;
    VolumeDetails {
        name: volume.name.to_string(),
        id: volume.id.to_string(),
        owner: volume.owner.as_str().to_owned(),
        size_bytes: volume.size.0,
        used_bytes: status.used.map(|used| used.0),
        deleted_with_sandboxes: volume.lifetime == VolumeLifetime::WithSandboxes,
        sandboxes: status.sandboxes.iter().map(ToString::to_string).collect(),
        created_at: time(status.created),
    }
}

fn volume_not_found() -> Response {
    error_format::build_error(StatusCode::NOT_FOUND, "VOLUME_NOT_FOUND", "volume not found")
}

fn volume_error_response(error: &ServiceError) -> Response {
    let (status, code) = match error.kind() {
        ErrorKind::Mount(MountFault::NoVolume) => return volume_not_found(),
        ErrorKind::Busy => (StatusCode::CONFLICT, "VOLUME_IN_USE"),
        ErrorKind::Invalid => (StatusCode::BAD_REQUEST, "INVALID_VOLUME"),
        ErrorKind::Unsupported => (StatusCode::BAD_REQUEST, "VOLUMES_UNSUPPORTED"),
        ErrorKind::Exhausted { .. } => (StatusCode::TOO_MANY_REQUESTS, "EXHAUSTED"),
        _ => (StatusCode::INTERNAL_SERVER_ERROR, "INTERNAL"),
    };
    let cause = match (error, error.kind()) {
        (ServiceError::VolumeWork { source, .. }, ErrorKind::Invalid | ErrorKind::Unsupported) => {
            format!(": {source}")
        }
        _ => String::new(),
    };
    let hint = error.hint().map(|hint| format!("; hint: {hint}")).unwrap_or_default();
    let mut response = error_format::build_error(status, code, &format!("{error}{cause}{hint}"));
    error_format::add_hint(&mut response, error.hint());
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn volume_needs_a_name_and_may_have_a_size() {
        let (name, size) = parse_create_request(br#"{"name": "data", "size": "1Gi"}"#).unwrap();
        assert_eq!((name.as_str(), size), ("data", Some(Bytes(1 << 30))));
        assert_eq!(parse_create_request(br#"{"name": "data"}"#).unwrap().1, None);
        for wrong in
            ["", "{}", r#"{"name": "a/b"}"#, r#"{"name": "a", "size": "0"}"#, r#"{"name": "a", "x": 1}"#]
        {
            assert!(parse_create_request(wrong.as_bytes()).is_err(), "{wrong}");
        }
    }
}
