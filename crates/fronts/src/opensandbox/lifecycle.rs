//! The lifecycle of sandboxes: create, get, list, label, renew, pause, resume, delete.

use std::collections::BTreeMap;
use std::time::SystemTime;

use axum::Json;
use axum::extract::State;
use domain::{NetworkAccess, Owner, SandboxKey};
use http::{HeaderMap, HeaderValue, StatusCode, Uri};
use service::{
    AcquiredSandbox, ErrorKind, ImageSource, NAME_KEY_SPACE, Outcome, RETRY_KEY_SPACE, SandboxFilter,
    ServiceError,
};

use super::access::{ApiKeyOwner, JsonBody, OwnedSandbox};
use super::create_request::CreateRequest;
use super::problem::{self, Problem};
use super::query::ListQuery;
use super::types::{
    CreateSandboxBody, ImageShown, Pagination, RenewBody, RenewedBody, SandboxBody, SandboxListBody,
};
use super::volumes;
use super::{OpenSandboxState, create_request, labels};
use crate::kit::headers::{header_text, restart_headers, stand_in_headers};
use crate::kit::query::QueryParams;
use crate::kit::time::{format_rfc3339, parse_time};

/// Says in the answer to a create that the name led to a sandbox that exists, so that nothing else
/// in the request had an effect.
const EXISTING_HEADER: &str = "coracle-existing";
/// Says in the answer to a create that network `auto` became `off`.
const NETWORK_HEADER: &str = "coracle-network";

/// `POST /sandboxes`: responds once a command can run. If the client disconnects before, the sandbox
/// is removed. With `Idempotency-Key` or the extension `coracle.key`, a sandbox that was created under
/// the same key is returned instead.
pub(super) async fn create_sandbox(
    State(state): State<OpenSandboxState>,
    ApiKeyOwner(owner): ApiKeyOwner,
    headers: HeaderMap,
    JsonBody(body): JsonBody<CreateSandboxBody>,
) -> Result<(StatusCode, HeaderMap, Json<SandboxBody>), Problem> {
    let CreateRequest { mut create, name } =
        create_request::parse_create_body(body, state.network_defaults())?;
    create_request::drop_sdk_limits(&mut create.spec.resources, |limit| state.service.may_lack_limit(limit));
    let restored = matches!(create.source, ImageSource::Snapshot(_));
    let is_named = matches!(create.source, ImageSource::Named { .. });
    let key = requested_key(&owner, &headers, name.as_deref())?;
    let made = match key {
        Some(key) => state.service.acquire(&key, create).await,
        None => {
            let created = state.service.create_sandbox(&owner, create).await;
            created.map(|sandbox| AcquiredSandbox { sandbox, fresh: true, revival: None })
        }
    };
    let AcquiredSandbox { sandbox, fresh, revival } = made.map_err(|error| {
        if is_named && matches!(error, ServiceError::Image { .. }) {
            return pull_problem(error, &owner);
        }
        let backend = matches!(error, ServiceError::Backend { .. });
        let problem = create_problem(error, &owner);
        if restored && backend { restore_problem(problem) } else { problem }
    })?;
    let mut headers = restart_headers(revival);
    headers.extend(stand_in_headers(sandbox.in_force.stand_in.as_deref()));
    if !fresh {
        headers.insert(EXISTING_HEADER, HeaderValue::from_static("true"));
    } else if sandbox.spec.network == NetworkAccess::Auto && !state.service.capabilities().network {
        headers.insert(NETWORK_HEADER, HeaderValue::from_static("off"));
    }
    Ok((StatusCode::ACCEPTED, headers, Json(SandboxBody::from_sandbox(&sandbox, ImageShown::No))))
}

fn requested_key(
    owner: &Owner,
    headers: &HeaderMap,
    name: Option<&str>,
) -> Result<Option<SandboxKey>, Problem> {
    const HEADER: &str = "idempotency-key";
    let (what, space, name) = match (headers.get(HEADER), name) {
        (None, None) => return Ok(None),
        (Some(_), Some(_)) => {
            let message = "`Idempotency-Key` and the extension `coracle.key` cannot be used together";
            return Err(Problem::invalid(message));
        }
        (None, Some(name)) => ("extension `coracle.key`", NAME_KEY_SPACE, name),
        (Some(_), None) => {
            ("`Idempotency-Key`", RETRY_KEY_SPACE, header_text(headers, HEADER).unwrap_or_default())
        }
    };
    let key = SandboxKey::new(owner, space, name);
    key.map(Some).map_err(|error| Problem::invalid(format!("{what}: {error}")))
}

/// Converts the error of a create. Its causes are included, since they name the step and the remedy.
fn create_problem(error: ServiceError, owner: &Owner) -> Problem {
    use ErrorKind::{Internal, Invalid, Mount, Unsupported};
    let with_causes = matches!(error.kind(), Internal | Invalid | Unsupported | Mount(_));
    let has_code = volumes::volume_error_status(&error).is_some();
    let code = match &error {
        ServiceError::Entrypoint(_) => Some("DOCKER::SANDBOX_START_FAILED"),
        error if error.lacks_image() => Some("DOCKER::SANDBOX_IMAGE_PULL_FAILED"),
        _ => None,
    };
    let message = if with_causes { error.message_for(owner) } else { error.to_string() };
    let problem = problem::problem_for_owner(owner, error, message);
    if has_code {
        return problem;
    }
    let problem = match code {
        // The client named something that does not exist: its error, with the reference's code.
        Some(code) => problem.with_code_for(StatusCode::BAD_REQUEST, code),
        None => problem,
    };
    problem.with_code_for(StatusCode::INTERNAL_SERVER_ERROR, "DOCKER::SANDBOX_START_FAILED")
}

/// Replaces the code of a backend error with the one for snapshots.
fn restore_problem(problem: Problem) -> Problem {
    match problem.status {
        StatusCode::BAD_REQUEST => {
            let code = "SNAPSHOT::INVALID_RESTORE_CONFIG";
            Problem { status: StatusCode::CONFLICT, code, ..problem }
        }
        _ => problem,
    }
}

/// Converts the error of a pull, including what the registry said.
fn pull_problem(error: ServiceError, owner: &Owner) -> Problem {
    let message = error.message_for(owner);
    problem::problem_for_owner(owner, error, message)
}

/// `GET /sandboxes`
pub(super) async fn list_sandboxes(
    State(state): State<OpenSandboxState>,
    ApiKeyOwner(owner): ApiKeyOwner,
    uri: Uri,
) -> Result<Json<SandboxListBody>, Problem> {
    let listing = ListQuery::parse(&QueryParams::from_uri(&uri))?;
    let page = state.service.list_sandboxes(
        &owner,
        &SandboxFilter {
            labels: listing.metadata.clone(),
            phase: &|phase| listing.includes_phase(*phase),
            offset: listing.offset(),
            limit: listing.page_size,
        },
    );
    let items =
        page.items.iter().map(|sandbox| SandboxBody::from_sandbox(sandbox, ImageShown::Yes)).collect();
    Ok(Json(SandboxListBody {
        items,
        pagination: Pagination::of(listing.page, listing.page_size, page.total),
    }))
}

/// `GET /sandboxes/{id}`
pub(super) async fn get_sandbox(
    State(state): State<OpenSandboxState>,
    at: OwnedSandbox,
) -> Result<Json<SandboxBody>, Problem> {
    let sandbox = at.find(&state)?.current_state();
    Ok(Json(SandboxBody::from_sandbox(&sandbox, ImageShown::Yes)))
}

/// `PATCH /sandboxes/{id}/metadata`: a string sets, `null` deletes, absent keys stay.
pub(super) async fn patch_metadata(
    State(state): State<OpenSandboxState>,
    at: OwnedSandbox,
    JsonBody(patch): JsonBody<BTreeMap<String, Option<String>>>,
) -> Result<Json<SandboxBody>, Problem> {
    for (key, value) in &patch {
        labels::check_key(key)?;
        value.as_deref().map_or(Ok(()), |value| labels::check_value(key, value))?;
    }
    let sandbox = at.find(&state)?.patch_labels(patch).await?;
    Ok(Json(SandboxBody::from_sandbox(&sandbox, ImageShown::Yes)))
}

/// `POST /sandboxes/{id}/renew-expiration`
pub(super) async fn renew_expiration(
    State(state): State<OpenSandboxState>,
    at: OwnedSandbox,
    JsonBody(body): JsonBody<RenewBody>,
) -> Result<Json<RenewedBody>, Problem> {
    let wrong = |message: &str| Problem::new(StatusCode::BAD_REQUEST, "DOCKER::INVALID_EXPIRATION", message);
    let expires = parse_time(&body.expires_at).ok_or_else(|| wrong("`expiresAt` is not a time"))?;
    if expires <= SystemTime::now() {
        return Err(wrong("`expiresAt` is not in the future"));
    }
    let renewed = at.find(&state)?.renew_expiry(expires).await;
    let sandbox = renewed.map_err(|error| match error.kind() {
        ErrorKind::Invalid => wrong(&format!("`expiresAt` is too far in the future: {error}")),
        _ => Problem::from(error).with_code_for(StatusCode::CONFLICT, "DOCKER::INVALID_EXPIRATION"),
    })?;
    Ok(Json(RenewedBody { expires_at: format_rfc3339(sandbox.expires.unwrap_or(expires)) }))
}

/// A failed pause or resume says why. What the host cannot do at all is no fault of the request,
/// so it is 501.
fn pause_problem(error: ServiceError, owner: &Owner) -> Problem {
    let unsupported = error.kind() == ErrorKind::Unsupported;
    let message = problem::with_hint(&error, error.message_for(owner));
    let problem = Problem { message, ..Problem::from(error) };
    if unsupported { Problem { status: StatusCode::NOT_IMPLEMENTED, ..problem } } else { problem }
}

/// `POST /sandboxes/{id}/pause`
pub(super) async fn pause_sandbox(
    State(state): State<OpenSandboxState>,
    at: OwnedSandbox,
) -> Result<StatusCode, Problem> {
    let paused = at.find(&state)?.pause().await;
    match paused.map_err(|error| pause_problem(error, &at.owner))? {
        Outcome::Done => Ok(StatusCode::ACCEPTED),
        Outcome::Unchanged => {
            Err(Problem::conflict("DOCKER::SANDBOX_NOT_RUNNING", "the sandbox is already paused"))
        }
    }
}

/// `POST /sandboxes/{id}/resume`: continues a paused sandbox, and restarts one that has died.
pub(super) async fn resume_sandbox(
    State(state): State<OpenSandboxState>,
    at: OwnedSandbox,
) -> Result<(StatusCode, HeaderMap), Problem> {
    const NOT_PAUSED: &str = "DOCKER::SANDBOX_NOT_PAUSED";
    let resumed = at.find(&state)?.resume().await;
    let resumed = resumed
        .map_err(|error| pause_problem(error, &at.owner).with_code_for(StatusCode::CONFLICT, NOT_PAUSED))?;
    match resumed.outcome {
        Outcome::Done => Ok((StatusCode::ACCEPTED, restart_headers(resumed.revival))),
        Outcome::Unchanged => Err(Problem::conflict(NOT_PAUSED, "the sandbox is not paused")),
    }
}

/// `DELETE /sandboxes/{id}`: responds once the sandbox is gone. A retry during the first attempt gets
/// the same response.
pub(super) async fn delete_sandbox(
    State(state): State<OpenSandboxState>,
    sandbox: OwnedSandbox,
) -> Result<StatusCode, Problem> {
    match sandbox.find(&state)?.destroy().await? {
        Outcome::Done | Outcome::Unchanged => Ok(StatusCode::NO_CONTENT),
    }
}

/// `POST /v1/metrics/events`: clients report how long they waited; the report is discarded.
pub(super) async fn discard_measurement(ApiKeyOwner(_): ApiKeyOwner) -> StatusCode {
    StatusCode::NO_CONTENT
}
