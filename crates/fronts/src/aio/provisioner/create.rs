//! `POST /api/sandboxes`: creates a sandbox, or finds the one that exists under the id.

use axum::Json;
use axum::extract::{Request, State};
use domain::{Entrypoint, NetworkAccess, OnDeath, Owner, SandboxKey, SandboxSpec};
use http::HeaderMap;
use serde::Deserialize;
use service::{CreateSandboxRequest, ImageSource};

use super::access::ProvisionerCaller;
use super::problem::ProvisionerProblem;
use super::sandboxes::{ProvisionedSandbox, describe_sandbox};
use super::{KEY_SPACE, ProvisionerState};
use crate::aio::body::{parse_json, require_field};
use crate::aio::notes::{AioNotes, DEFAULT_SHELL_SESSIONS, FileErrors};
use crate::aio::problem::AioProblem;
use crate::aio::{ORIGIN, guest};
use crate::kit::body::read_body;

/// The longest id of a sandbox.
const MAX_ID_BYTES: usize = 63;
/// The longest id of a conversation.
const MAX_THREAD_BYTES: usize = 64;
/// The longest name of a user.
const MAX_USER_BYTES: usize = 128;

#[derive(Deserialize)]
pub(super) struct CreateSandboxBody {
    sandbox_id: Option<String>,
    thread_id: Option<String>,
    user_id: Option<String>,
    max_shell_sessions: Option<u32>,
}

/// Responds when commands and file operations work.
pub(super) async fn create_sandbox(
    State(state): State<ProvisionerState>,
    ProvisionerCaller(owner): ProvisionerCaller,
    headers: HeaderMap,
    request: Request,
) -> Result<Json<ProvisionedSandbox>, ProvisionerProblem> {
    let bytes = read_body(request.into_body(), state.settings.json_body_limit).await?;
    let body: CreateSandboxBody = parse_json(&bytes)?;
    let id = check_sandbox_id(require_field(body.sandbox_id, "sandbox_id")?)?;
    let key = sandbox_key(&owner, &id)?;
    let user = check_name("user_id", body.user_id.unwrap_or_else(|| "default".to_owned()), MAX_USER_BYTES)?;
    let thread =
        body.thread_id.map(|thread| check_name("thread_id", thread, MAX_THREAD_BYTES)).transpose()?;
    let notes = AioNotes {
        epoch: draw_epoch(),
        file_errors: FileErrors::Http,
        max_shell_sessions: body.max_shell_sessions.unwrap_or(DEFAULT_SHELL_SESSIONS),
        user_id: Some(user),
        thread_id: thread,
    };
    let create = CreateSandboxRequest {
        origin: ORIGIN,
        source: ImageSource::from_name("host"),
        spec: SandboxSpec {
            entrypoint: Entrypoint::None,
            network: NetworkAccess::Off,
            guest: guest::guest_settings(),
            on_death: Some(OnDeath::Replace),
            ..SandboxSpec::with_defaults()
        },
        labels: Default::default(),
        notes: notes.to_bytes(),
        timeout: None,
        idle_timeout: None,
        defaulted: Vec::new(),
        merge_notes: AioNotes::inherit_epoch,
    };
    state.service.acquire(&key, create).await?;
    let sandbox = state.service.sandbox_of_key(&key).ok_or_else(|| ProvisionerProblem::no_sandbox(&id))?;
    Ok(Json(describe_sandbox(&state, &headers, &key, &sandbox)))
}

/// The key of the core that an id stands for.
pub(super) fn sandbox_key(owner: &Owner, id: &str) -> Result<SandboxKey, ProvisionerProblem> {
    SandboxKey::new(owner, KEY_SPACE, id).map_err(|error| ProvisionerProblem::bad_request(error.to_string()))
}

/// An epoch that no earlier sandbox had. Guessing one does not help: addresses are signed.
fn draw_epoch() -> u64 {
    let digits = crate::server::request_log::unique_hex();
    u64::from_str_radix(&digits[..16], 16).expect("sixteen hexadecimal digits fit")
}

fn check_sandbox_id(id: String) -> Result<String, AioProblem> {
    let starts = id.bytes().next().is_some_and(|byte| byte.is_ascii_alphanumeric());
    if !starts || id.len() > MAX_ID_BYTES || !id.bytes().all(is_name_byte) {
        let message = "must be 1 to 63 letters, digits, `-` and `_`, and begin with a letter or digit";
        return Err(AioProblem::invalid_field("sandbox_id", message));
    }
    Ok(id)
}

fn check_name(field: &str, name: String, max_bytes: usize) -> Result<String, AioProblem> {
    if name.is_empty() || name.len() > max_bytes || !name.bytes().all(is_name_byte) {
        let message = format!("must be 1 to {max_bytes} letters, digits, `-` and `_`");
        return Err(AioProblem::invalid_field(field, message));
    }
    Ok(name)
}

fn is_name_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_')
}
