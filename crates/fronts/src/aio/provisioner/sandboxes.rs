//! Finding, listing and removing sandboxes, and what responses say about one.

use std::time::Duration;

use axum::Json;
use axum::extract::{Path, State};
use domain::{Phase, SandboxKey};
use serde::Serialize;
use serde_json::{Value, json};
use service::{KeyLiveness, SandboxRef};

use super::ProvisionerState;
use super::access::ProvisionerCaller;
use super::create::sandbox_key;
use super::problem::ProvisionerProblem;
use super::sandbox_url::UrlOrigin;
use crate::aio::address::SandboxAddress;
use crate::aio::notes::AioNotes;

/// How long a delete waits for the sandbox to end. DeerFlow waits 15 seconds for the response.
const REMOVAL_TIMEOUT: Duration = Duration::from_secs(10);

/// A sandbox as DeerFlow sees it.
#[derive(Debug, Serialize)]
pub(super) struct ProvisionedSandbox {
    sandbox_id: String,
    sandbox_url: String,
    status: &'static str,
    user_id: Option<String>,
    thread_id: Option<String>,
    max_shell_sessions: u32,
    /// Another one for each incarnation.
    container_id: String,
    lark_cli_broker: bool,
}

/// `GET /api/capabilities`
pub(super) async fn get_capabilities(_: ProvisionerCaller) -> Json<Value> {
    Json(json!({"lark_cli_init_image": false, "lark_cli_broker_image": false}))
}

/// `GET /api/sandboxes/{id}`: a sandbox that does not answer counts as absent, since clients would use it.
pub(super) async fn get_sandbox(
    State(state): State<ProvisionerState>,
    ProvisionerCaller(owner): ProvisionerCaller,
    Path(id): Path<String>,
    origin: UrlOrigin,
) -> Result<Json<ProvisionedSandbox>, ProvisionerProblem> {
    let key = sandbox_key(&owner, &id).map_err(|_invalid| ProvisionerProblem::no_sandbox(&id))?;
    let alive = state.service.probe_key(&key).await == KeyLiveness::Alive;
    let sandbox = state.service.sandbox_of_key(&key).filter(|sandbox| alive && !sandbox.is_being_removed());
    let sandbox = sandbox.ok_or_else(|| ProvisionerProblem::no_sandbox(&id))?;
    Ok(Json(describe_sandbox(&state, &origin, &key, &sandbox)))
}

/// `GET /api/sandboxes/{id}/presence`: whether anything is left of a sandbox, alive or not.
pub(super) async fn get_presence(
    State(state): State<ProvisionerState>,
    ProvisionerCaller(owner): ProvisionerCaller,
    Path(id): Path<String>,
) -> Json<Value> {
    let key = sandbox_key(&owner, &id).ok();
    let sandbox = key.and_then(|key| state.service.sandbox_of_key(&key));
    let container = sandbox.as_ref().map(|sandbox| sandbox.id().as_str());
    Json(json!({"sandbox_id": id, "exists": sandbox.is_some(), "container_id": container}))
}

/// `DELETE /api/sandboxes/{id}`: succeeds also if there is no such sandbox. Afterwards the id is free, even if the
/// sandbox takes long to end.
pub(super) async fn delete_sandbox(
    State(state): State<ProvisionerState>,
    ProvisionerCaller(owner): ProvisionerCaller,
    Path(id): Path<String>,
) -> Result<Json<Value>, ProvisionerProblem> {
    if let Ok(key) = sandbox_key(&owner, &id) {
        let removed = state.service.remove_by_key(&key, REMOVAL_TIMEOUT).await;
        removed.map_err(|error| ProvisionerProblem::partial_cleanup(&error))?;
    }
    Ok(Json(json!({"ok": true, "sandbox_id": id})))
}

/// `GET /api/sandboxes`: every sandbox that lives or is being removed.
pub(super) async fn list_sandboxes(
    State(state): State<ProvisionerState>,
    ProvisionerCaller(owner): ProvisionerCaller,
    origin: UrlOrigin,
) -> Json<Value> {
    let keys = state.service.keys_in_space(&owner, super::KEY_SPACE);
    let found = keys.iter().filter_map(|key| {
        let sandbox = state.service.sandbox_of_key(key)?;
        let lives = sandbox.read_state(|state| matches!(state.phase, Phase::Running | Phase::Exited(_)));
        (lives || sandbox.is_being_removed()).then(|| describe_sandbox(&state, &origin, key, &sandbox))
    });
    let sandboxes: Vec<_> = found.collect();
    Json(json!({"count": sandboxes.len(), "sandboxes": sandboxes}))
}

pub(super) fn describe_sandbox(
    state: &ProvisionerState,
    origin: &UrlOrigin,
    key: &SandboxKey,
    sandbox: &SandboxRef,
) -> ProvisionedSandbox {
    let notes = AioNotes::of_sandbox(sandbox);
    let address = SandboxAddress::of_key(&state.service, key, &notes);
    ProvisionedSandbox {
        sandbox_id: key.name().to_owned(),
        sandbox_url: origin.sandbox_url(&address),
        status: if sandbox.is_being_removed() { "Terminating" } else { "Running" },
        user_id: notes.user_id.clone(),
        thread_id: notes.thread_id.clone(),
        max_shell_sessions: notes.max_shell_sessions,
        container_id: sandbox.id().to_string(),
        lark_cli_broker: false,
    }
}
