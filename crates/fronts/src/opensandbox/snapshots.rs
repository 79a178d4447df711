//! Snapshots: create, get, list, delete. Restoring one is done by creating a sandbox.

use std::collections::BTreeMap;

use axum::Json;
use axum::body::Body;
use axum::extract::{FromRequestParts, State};
use domain::{OnDeath, Owner, SandboxSettings, Snapshot, SnapshotId, SnapshotState};
use http::request::Parts;
use http::{StatusCode, Uri, header};
use serde::{Deserialize, Serialize};
use service::{ErrorKind, Outcome, SnapshotFilter};

use super::OpenSandboxState;
use super::access::{ApiKeyOwner, OwnedSandbox, parse_json, read_body};
use super::problem::{self, Problem};
use super::query::{self};
use super::types::{Pagination, SandboxNotes};
use crate::kit::query::QueryParams;
use crate::kit::query::path_param;
use crate::kit::time::format_rfc3339;

/// The caller and the snapshot named in the path.
pub(super) struct SnapshotTarget {
    owner: Owner,
    id: SnapshotId,
}

impl FromRequestParts<OpenSandboxState> for SnapshotTarget {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &OpenSandboxState) -> Result<Self, Problem> {
        let ApiKeyOwner(owner) = ApiKeyOwner::from_request_parts(parts, state).await?;
        let id = path_param(parts, "id").await;
        let id = SnapshotId::parse(&id).ok().ok_or_else(|| Problem::no_snapshot(&id))?;
        Ok(Self { owner, id })
    }
}

#[derive(Default, Deserialize)]
struct CreateSnapshotBody {
    name: Option<String>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct SnapshotBody {
    id: String,
    sandbox_id: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    status: SnapshotStatusBody,
    created_at: String,
    /// The settings that sandboxes restored from it inherit; an addition to the reference.
    #[serde(skip_serializing_if = "Option::is_none")]
    settings: Option<SettingsBody>,
}

/// The recorded settings. Only the names of environment variables are shown: values may be secrets.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct SettingsBody {
    network: &'static str,
    resource_limits: BTreeMap<&'static str, String>,
    /// Absent if the sandbox never expires.
    #[serde(skip_serializing_if = "Option::is_none")]
    timeout: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    idle_timeout: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    on_death: Option<&'static str>,
    env: Vec<String>,
    user: String,
    metadata: BTreeMap<String, String>,
    secure_access: bool,
}

impl SettingsBody {
    fn from_settings(snapshot: &Snapshot, settings: &SandboxSettings) -> Self {
        let limits = &settings.resources;
        let disk = Some(snapshot.disk).filter(|disk| disk.0 > 0);
        let limits = [
            ("cpu", limits.cpus.map(|cpus| cpus.to_string())),
            ("memory", limits.memory.map(|memory| memory.to_string())),
            ("pids", limits.pids.map(|pids| pids.to_string())),
            ("disk", disk.map(|disk| disk.to_string())),
        ];
        Self {
            network: settings.network.name(),
            resource_limits: limits.into_iter().filter_map(|(name, limit)| Some((name, limit?))).collect(),
            timeout: settings.timeout.map(|time| time.as_secs()),
            idle_timeout: settings.idle_timeout.map(|time| time.as_secs()),
            on_death: settings.on_death.map(OnDeath::name),
            env: settings.env.keys().cloned().collect(),
            user: settings.guest.default_user.clone(),
            metadata: settings.labels.clone(),
            secure_access: SandboxNotes::from_settings(settings).secure_access,
        }
    }
}

#[derive(Serialize)]
struct SnapshotStatusBody {
    state: &'static str,
    reason: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    message: Option<String>,
}

#[derive(Serialize)]
pub(super) struct SnapshotList {
    items: Vec<SnapshotBody>,
    pagination: Pagination,
}

impl SnapshotBody {
    fn from_snapshot(snapshot: &Snapshot) -> Self {
        let (reason, message) = match &snapshot.state {
            SnapshotState::Creating(progress) => ("snapshot_accepted", progress.clone()),
            SnapshotState::Ready => {
                ("snapshot_ready", Some(format!("{} above the image `{}`", snapshot.size, snapshot.image)))
            }
            SnapshotState::Failed(why) => ("snapshot_capture_failed", Some(why.clone())),
            SnapshotState::Deleting => ("snapshot_deleting", None),
        };
        Self {
            id: snapshot.id.to_string(),
            sandbox_id: snapshot.sandbox.to_string(),
            name: snapshot.name.clone(),
            status: SnapshotStatusBody { state: state_name(&snapshot.state), reason, message },
            created_at: format_rfc3339(snapshot.created),
            settings: snapshot
                .settings
                .as_ref()
                .map(|settings| SettingsBody::from_settings(snapshot, settings)),
        }
    }
}

/// Returns the state's name in this API.
fn state_name(state: &SnapshotState) -> &'static str {
    match state {
        SnapshotState::Creating(_) => "Creating",
        SnapshotState::Ready => "Ready",
        SnapshotState::Failed(_) => "Failed",
        SnapshotState::Deleting => "Deleting",
    }
}

/// `POST /sandboxes/{id}/snapshots`: the snapshot is accepted now and becomes ready later.
pub(super) async fn create_snapshot(
    State(state): State<OpenSandboxState>,
    sandbox: OwnedSandbox,
    body: Body,
) -> Result<(StatusCode, [(header::HeaderName, String); 1], Json<SnapshotBody>), Problem> {
    let bytes = read_body(body, state.settings.json_body_limit).await?;
    let request = if bytes.is_empty() { CreateSnapshotBody::default() } else { parse_json(&bytes)? };
    let taken = sandbox.find(&state)?.snapshots().take_snapshot(request.name).await;
    let snapshot = taken.map_err(|error| {
        let message = error.message_for(&sandbox.owner);
        let unsupported = error.kind() == ErrorKind::Unsupported;
        let problem = problem::problem_for_owner(&sandbox.owner, error, message);
        // The reference has one code for everything the runtime cannot do.
        if unsupported {
            return Problem {
                status: StatusCode::CONFLICT,
                code: "SNAPSHOT::UNSUPPORTED_RUNTIME",
                ..problem
            };
        }
        problem
    })?;
    let location = format!("/v1/snapshots/{}", snapshot.id);
    Ok((StatusCode::ACCEPTED, [(header::LOCATION, location)], Json(SnapshotBody::from_snapshot(&snapshot))))
}

/// `GET /snapshots`
pub(super) async fn list_snapshots(
    State(front): State<OpenSandboxState>,
    ApiKeyOwner(owner): ApiKeyOwner,
    uri: Uri,
) -> Result<Json<SnapshotList>, Problem> {
    let query = QueryParams::from_uri(&uri);
    let (page, page_size) = query::parse_page(&query)?;
    let given = |name: &str| query.first(name).filter(|text| !text.is_empty());
    let states = query.all("state");
    let shows = |one: &SnapshotState| {
        states.is_empty() || states.iter().any(|wanted| wanted.eq_ignore_ascii_case(state_name(one)))
    };
    let found = front.service.list_snapshots(
        &owner,
        &SnapshotFilter {
            sandbox: given("sandboxId"),
            name: given("name"),
            state: &shows,
            offset: (page - 1).saturating_mul(page_size),
            limit: page_size,
        },
    );
    let items = found.items.iter().map(SnapshotBody::from_snapshot).collect();
    Ok(Json(SnapshotList { items, pagination: Pagination::of(page, page_size, found.total) }))
}

/// `GET /snapshots/{id}`
pub(super) async fn get_snapshot(
    State(state): State<OpenSandboxState>,
    at: SnapshotTarget,
) -> Result<Json<SnapshotBody>, Problem> {
    let snapshot = state.service.find_snapshot(&at.owner, &at.id)?;
    Ok(Json(SnapshotBody::from_snapshot(&snapshot)))
}

/// `DELETE /snapshots/{id}`: responds once the snapshot is gone.
pub(super) async fn delete_snapshot(
    State(state): State<OpenSandboxState>,
    at: SnapshotTarget,
) -> Result<StatusCode, Problem> {
    match state.service.delete_snapshot(&at.owner, &at.id).await? {
        Outcome::Done | Outcome::Unchanged => Ok(StatusCode::NO_CONTENT),
    }
}
