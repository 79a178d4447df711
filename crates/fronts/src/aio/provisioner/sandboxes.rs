//! Finding, listing and removing sandboxes, and what responses say about one.

use axum::Json;
use axum::extract::{Path, State};
use domain::{Phase, SandboxKey};
use http::HeaderMap;
use serde::Serialize;
use serde_json::{Value, json};
use service::{ErrorKind, KeyLiveness, SandboxRef};

use super::ProvisionerState;
use super::access::ProvisionerCaller;
use super::create::sandbox_key;
use super::problem::ProvisionerProblem;
use crate::aio::address::SandboxAddress;
use crate::aio::notes::AioNotes;
use crate::kit::headers::header_text;

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
    headers: HeaderMap,
) -> Result<Json<ProvisionedSandbox>, ProvisionerProblem> {
    let key = sandbox_key(&owner, &id).map_err(|_invalid| ProvisionerProblem::no_sandbox(&id))?;
    let alive = state.service.probe_key(&key).await == KeyLiveness::Alive;
    let sandbox = state.service.sandbox_of_key(&key).filter(|_| alive);
    let sandbox = sandbox.ok_or_else(|| ProvisionerProblem::no_sandbox(&id))?;
    Ok(Json(describe_sandbox(&state, &headers, &key, &sandbox)))
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

/// `DELETE /api/sandboxes/{id}`: succeeds also if there is no such sandbox.
pub(super) async fn delete_sandbox(
    State(state): State<ProvisionerState>,
    ProvisionerCaller(owner): ProvisionerCaller,
    Path(id): Path<String>,
) -> Result<Json<Value>, ProvisionerProblem> {
    let key = sandbox_key(&owner, &id).ok();
    if let Some(sandbox) = key.and_then(|key| state.service.sandbox_of_key(&key)) {
        match sandbox.destroy().await {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error.into()),
            _ => {}
        }
    }
    Ok(Json(json!({"ok": true, "sandbox_id": id})))
}

/// `GET /api/sandboxes`: every sandbox that lives.
pub(super) async fn list_sandboxes(
    State(state): State<ProvisionerState>,
    ProvisionerCaller(owner): ProvisionerCaller,
    headers: HeaderMap,
) -> Json<Value> {
    let keys = state.service.keys_in_space(&owner, super::KEY_SPACE);
    let found = keys.iter().filter_map(|key| {
        let sandbox = state.service.sandbox_of_key(key)?;
        let lives = sandbox.read_state(|state| matches!(state.phase, Phase::Running | Phase::Exited(_)));
        lives.then(|| describe_sandbox(&state, &headers, key, &sandbox))
    });
    let sandboxes: Vec<_> = found.collect();
    Json(json!({"count": sandboxes.len(), "sandboxes": sandboxes}))
}

pub(super) fn describe_sandbox(
    state: &ProvisionerState,
    headers: &HeaderMap,
    key: &SandboxKey,
    sandbox: &SandboxRef,
) -> ProvisionedSandbox {
    let notes = AioNotes::of_sandbox(sandbox);
    let address = SandboxAddress::of_key(&state.service, key, &notes);
    let host = state.settings.public_address.as_deref().or_else(|| header_text(headers, "host"));
    let host = host.map_or_else(|| state.settings.listen.to_string(), str::to_owned);
    ProvisionedSandbox {
        sandbox_id: key.name().to_owned(),
        sandbox_url: format!("http://{host}{}", address.to_path()),
        status: "Running",
        user_id: notes.user_id.clone(),
        thread_id: notes.thread_id.clone(),
        max_shell_sessions: notes.max_shell_sessions,
        container_id: sandbox.id().to_string(),
        lark_cli_broker: false,
    }
}
