//! `POST /api/sandboxes`: creates a sandbox, or finds the one that exists under the id.

use axum::Json;
use axum::extract::{Request, State};
use domain::{Entrypoint, OnDeath, Owner, SandboxKey, SandboxSpec};
use http::HeaderMap;
use service::{CreateSandboxRequest, ImageSource};

use super::access::ProvisionerCaller;
use super::problem::ProvisionerProblem;
use super::request_checks::{ProvisionBody, ProvisionRequest};
use super::sandbox_url::UrlOrigin;
use super::sandboxes::{ProvisionedSandbox, describe_sandbox};
use super::{KEY_SPACE, ProvisionerState, user_data};
use crate::aio::body::parse_json;
use crate::aio::notes::{AioNotes, FileErrors};
use crate::aio::{ORIGIN, guest, notes};
use crate::kit::body::read_body;
use crate::kit::headers::{restart_headers, stand_in_headers};

/// Responds when commands and file operations work.
pub(super) async fn create_sandbox(
    State(state): State<ProvisionerState>,
    ProvisionerCaller(owner): ProvisionerCaller,
    origin: UrlOrigin,
    request: Request,
) -> Result<(HeaderMap, Json<ProvisionedSandbox>), ProvisionerProblem> {
    let bytes = read_body(request.into_body(), state.settings.json_body_limit).await?;
    let max_shell_sessions = state.own_settings.effective_max_shell_sessions(&state.service);
    let request = parse_json::<ProvisionBody>(&bytes)?.check(max_shell_sessions)?;
    let key = sandbox_key(&owner, &request.id)?;
    let create = create_request(&state, &owner, &request)?;
    request.check_existing(&state.service, &key)?;
    let acquired = state.service.acquire(&key, create).await?;
    // Another request may have made the sandbox meanwhile.
    request.check_existing(&state.service, &key)?;
    let found = state.service.sandbox(&owner, &acquired.sandbox.id).ok();
    let sandbox = found.ok_or_else(|| ProvisionerProblem::no_sandbox(&request.id))?;
    let mut headers = restart_headers(acquired.revival);
    headers.extend(stand_in_headers(acquired.sandbox.in_force.stand_in.as_deref()));
    Ok((headers, Json(describe_sandbox(&state, &origin, &key, &sandbox))))
}

/// The key of the core that an id stands for.
pub(super) fn sandbox_key(owner: &Owner, id: &str) -> Result<SandboxKey, ProvisionerProblem> {
    SandboxKey::new(owner, KEY_SPACE, id).map_err(|error| ProvisionerProblem::bad_request(error.to_string()))
}

fn create_request(
    state: &ProvisionerState,
    owner: &Owner,
    request: &ProvisionRequest,
) -> Result<CreateSandboxRequest, ProvisionerProblem> {
    let settings = &state.own_settings;
    let notes = AioNotes {
        epoch: notes::draw_epoch(),
        file_errors: FileErrors::Http,
        max_shell_sessions: request
            .shell_sessions
            .unwrap_or_else(|| settings.default_shell_sessions(&state.service)),
        user_id: Some(request.user.clone()),
        thread_id: request.thread.clone(),
    };
    Ok(CreateSandboxRequest {
        origin: ORIGIN,
        source: ImageSource::from_name(&settings.image),
        spec: SandboxSpec {
            entrypoint: Entrypoint::None,
            resources: settings.effective_limits(|limit| state.service.may_lack_limit(limit)),
            network: settings.network.unwrap_or(state.settings.default_network),
            mounts: user_data::choose_mounts(settings, owner, request)?,
            guest: guest::guest_with_skills(settings.uid, settings.gid, &request.skills_root),
            on_death: Some(OnDeath::Replace),
            ..SandboxSpec::with_defaults()
        },
        labels: Default::default(),
        notes: notes.to_bytes(),
        timeout: None,
        idle_timeout: Some(settings.idle_timeout),
        defaulted: Vec::new(),
        merge_notes: AioNotes::inherit_epoch,
    })
}
