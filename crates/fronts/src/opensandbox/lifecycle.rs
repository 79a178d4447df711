//! The lifecycle of sandboxes: create, get, list, label, renew, pause, resume, delete.

use std::collections::BTreeMap;
use std::time::SystemTime;

use axum::Json;
use axum::extract::State;
use domain::{Files, Key, Network, OnDeath, Owner, Phase};
use http::{HeaderMap, HeaderValue, StatusCode, Uri};
use service::{Acquired, ErrorKind, Filter, NAMES, Outcome, RETRIES, Revival, ServiceError};

use super::access::{Addressed, Caller, JsonBody};
use super::problem::{self, Problem};
use super::query::{Listing, Query};
use super::types::{
    CreateBody, ImageShown, ListBody, Pagination, RenewBody, Renewed, SandboxBody, parse_time, rfc3339,
};
use super::volumes;
use super::wish::Wish;
use super::{Front, labels, wish};
use crate::{answer, auth};

/// Response header: the sandbox had died, and this was done: `restart`, `replace` or `files-lost`.
const RESTARTED: &str = "coracle-restarted";
/// Response header: why the sandbox had died.
const RESTART_CAUSE: &str = "coracle-restart-cause";
/// Says in the answer to a create that the name led to a sandbox that exists, so that nothing else
/// in the request had an effect.
const EXISTING: &str = "coracle-existing";
/// Says in the answer to a create that network `auto` became `off`.
const NETWORK: &str = "coracle-network";

/// `POST /sandboxes`: responds once a command can run. If the client disconnects before, the sandbox
/// is removed. With `Idempotency-Key` or the extension `coracle.key`, a sandbox that was created under
/// the same key is returned instead.
pub(super) async fn create(
    State(front): State<Front>,
    Caller(owner): Caller,
    headers: HeaderMap,
    JsonBody(body): JsonBody<CreateBody>,
) -> Result<(StatusCode, HeaderMap, Json<SandboxBody>), Problem> {
    let Wish { mut create, name, credentials } = wish::parse(body, front.settings.default_network)?;
    wish::drop_sdk_limits(&mut create.spec.resources, |limit| front.service.may_lack_limit(limit));
    let restored = create.spec.snapshot.is_some();
    let key = key(&owner, &headers, name.as_deref())?;
    // A request that finds an existing sandbox needs no image.
    let found = key.as_ref().and_then(|key| front.service.find(key));
    let stays = found.is_some_and(|sandbox| match sandbox.phase {
        Phase::Failed(_) => sandbox.files == Files::Kept && sandbox.spec.on_death() == OnDeath::Restart,
        Phase::Stopping | Phase::Stopped => false,
        _ => true,
    });
    if !restored && create.pool.is_none() && !stays {
        let ensured = front.service.ensure_image(&owner, &create.spec, credentials).await;
        ensured.map_err(|error| not_pulled(error, &owner))?;
    }
    let made = match key {
        Some(key) => front.service.acquire(&key, create).await,
        None => {
            let created = front.service.create(&owner, create).await;
            created.map(|sandbox| Acquired { sandbox, fresh: true, revival: None })
        }
    };
    let Acquired { sandbox, fresh, revival } = made.map_err(|error| {
        let backend = matches!(error, ServiceError::Backend { .. });
        let problem = not_created(error, &owner);
        if restored && backend { not_restored(problem) } else { problem }
    })?;
    let mut headers = told_of(revival);
    headers.extend(answer::stand_in(sandbox.in_force.stand_in.as_deref()));
    if !fresh {
        headers.insert(EXISTING, HeaderValue::from_static("true"));
    } else if sandbox.spec.network == Network::Auto && !front.service.capabilities().network {
        headers.insert(NETWORK, HeaderValue::from_static("off"));
    }
    Ok((StatusCode::ACCEPTED, headers, Json(SandboxBody::of(&sandbox, ImageShown::No))))
}

/// Returns the headers that report the restart of a dead sandbox.
fn told_of(revival: Option<Revival>) -> HeaderMap {
    let mut headers = HeaderMap::new();
    if let Some(revival) = revival {
        headers.insert(RESTARTED, HeaderValue::from_static(revival.how.name()));
        headers.insert(RESTART_CAUSE, HeaderValue::from_static(revival.cause.name()));
    }
    headers
}

fn key(owner: &Owner, headers: &HeaderMap, name: Option<&str>) -> Result<Option<Key>, Problem> {
    const HEADER: &str = "idempotency-key";
    let (what, space, name) = match (headers.get(HEADER), name) {
        (None, None) => return Ok(None),
        (Some(_), Some(_)) => {
            let message = "`Idempotency-Key` and the extension `coracle.key` cannot be used together";
            return Err(Problem::invalid(message));
        }
        (None, Some(name)) => ("extension `coracle.key`", NAMES, name),
        (Some(_), None) => ("`Idempotency-Key`", RETRIES, auth::text(headers, HEADER).unwrap_or_default()),
    };
    let key = Key::new(owner, space, name);
    key.map(Some).map_err(|error| Problem::invalid(format!("{what}: {error}")))
}

/// Converts the error of a create. Its causes are included, since they name the step and the remedy.
fn not_created(error: ServiceError, owner: &Owner) -> Problem {
    use ErrorKind::{Internal, Invalid, Mount, Unsupported};
    let with_causes = matches!(error.kind(), Internal | Invalid | Unsupported | Mount(_));
    let has_code = volumes::status_of(&error).is_some();
    let code = match &error {
        ServiceError::Entrypoint(_) => Some("DOCKER::SANDBOX_START_FAILED"),
        error if error.lacks_image() => Some("DOCKER::SANDBOX_IMAGE_PULL_FAILED"),
        _ => None,
    };
    let message = if with_causes { error.told_to(owner) } else { error.to_string() };
    let problem = problem::told_to(owner, error, message);
    if has_code {
        return problem;
    }
    let problem = match code {
        // The client named something that does not exist: its error, with the reference's code.
        Some(code) => problem.coded(StatusCode::BAD_REQUEST, code),
        None => problem,
    };
    problem.coded(StatusCode::INTERNAL_SERVER_ERROR, "DOCKER::SANDBOX_START_FAILED")
}

/// Replaces the code of a backend error with the one for snapshots.
fn not_restored(problem: Problem) -> Problem {
    match problem.status {
        StatusCode::BAD_REQUEST => {
            let code = "SNAPSHOT::INVALID_RESTORE_CONFIG";
            Problem { status: StatusCode::CONFLICT, code, ..problem }
        }
        _ => problem,
    }
}

/// Converts the error of a pull, including what the registry said.
fn not_pulled(error: ServiceError, owner: &Owner) -> Problem {
    let message = error.told_to(owner);
    problem::told_to(owner, error, message)
}

/// `GET /sandboxes`
pub(super) async fn list(
    State(front): State<Front>,
    Caller(owner): Caller,
    uri: Uri,
) -> Result<Json<ListBody>, Problem> {
    let listing = Listing::parse(&Query::of(&uri))?;
    let page = front.service.list(
        &owner,
        &Filter {
            labels: listing.metadata.clone(),
            phase: &|phase| listing.shows(*phase),
            offset: listing.offset(),
            limit: listing.page_size,
        },
    );
    let items = page.items.iter().map(|sandbox| SandboxBody::of(sandbox, ImageShown::Yes)).collect();
    Ok(Json(ListBody { items, pagination: Pagination::of(listing.page, listing.page_size, page.total) }))
}

/// `GET /sandboxes/{id}`
pub(super) async fn get(State(front): State<Front>, at: Addressed) -> Result<Json<SandboxBody>, Problem> {
    let sandbox = front.service.get(&at.owner, &at.id)?;
    Ok(Json(SandboxBody::of(&sandbox, ImageShown::Yes)))
}

/// `PATCH /sandboxes/{id}/metadata`: a string sets, `null` deletes, absent keys stay.
pub(super) async fn patch_metadata(
    State(front): State<Front>,
    at: Addressed,
    JsonBody(patch): JsonBody<BTreeMap<String, Option<String>>>,
) -> Result<Json<SandboxBody>, Problem> {
    for (key, value) in &patch {
        labels::check_key(key)?;
        value.as_deref().map_or(Ok(()), |value| labels::check_value(key, value))?;
    }
    let sandbox = front.service.patch_labels(&at.owner, &at.id, patch).await?;
    Ok(Json(SandboxBody::of(&sandbox, ImageShown::Yes)))
}

/// `POST /sandboxes/{id}/renew-expiration`
pub(super) async fn renew(
    State(front): State<Front>,
    at: Addressed,
    JsonBody(body): JsonBody<RenewBody>,
) -> Result<Json<Renewed>, Problem> {
    let wrong = |message| Problem::new(StatusCode::BAD_REQUEST, "DOCKER::INVALID_EXPIRATION", message);
    let expires = parse_time(&body.expires_at).ok_or_else(|| wrong("`expiresAt` is not a time"))?;
    if expires <= SystemTime::now() {
        return Err(wrong("`expiresAt` is not in the future"));
    }
    let renewed = front.service.renew(&at.owner, &at.id, expires).await;
    let sandbox = renewed.map_err(|error| match error.kind() {
        ErrorKind::Invalid => wrong("`expiresAt` is too far in the future"),
        _ => Problem::from(error).coded(StatusCode::CONFLICT, "DOCKER::INVALID_EXPIRATION"),
    })?;
    Ok(Json(Renewed { expires_at: rfc3339(sandbox.expires.unwrap_or(expires)) }))
}

/// A failed pause or resume says why. What the host cannot do at all is no fault of the request,
/// so it is 501.
fn not_frozen(error: ServiceError, owner: &Owner) -> Problem {
    let unsupported = error.kind() == ErrorKind::Unsupported;
    let message = problem::with_hint(&error, error.told_to(owner));
    let problem = Problem { message, ..Problem::from(error) };
    if unsupported { Problem { status: StatusCode::NOT_IMPLEMENTED, ..problem } } else { problem }
}

/// `POST /sandboxes/{id}/pause`
pub(super) async fn pause(State(front): State<Front>, at: Addressed) -> Result<StatusCode, Problem> {
    let paused = front.service.pause(&at.owner, &at.id).await;
    match paused.map_err(|error| not_frozen(error, &at.owner))? {
        Outcome::Done => Ok(StatusCode::ACCEPTED),
        Outcome::AlreadySo => {
            Err(Problem::conflict("DOCKER::SANDBOX_NOT_RUNNING", "the sandbox is already paused"))
        }
    }
}

/// `POST /sandboxes/{id}/resume`: continues a paused sandbox, and restarts one that has died.
pub(super) async fn resume(
    State(front): State<Front>,
    at: Addressed,
) -> Result<(StatusCode, HeaderMap), Problem> {
    const NOT_PAUSED: &str = "DOCKER::SANDBOX_NOT_PAUSED";
    let resumed = front.service.resume(&at.owner, &at.id).await;
    let resumed =
        resumed.map_err(|error| not_frozen(error, &at.owner).coded(StatusCode::CONFLICT, NOT_PAUSED))?;
    match resumed.outcome {
        Outcome::Done => Ok((StatusCode::ACCEPTED, told_of(resumed.revival))),
        Outcome::AlreadySo => Err(Problem::conflict(NOT_PAUSED, "the sandbox is not paused")),
    }
}

/// `DELETE /sandboxes/{id}`: responds once the sandbox is gone. A retry during the first attempt gets
/// the same response.
pub(super) async fn delete(State(front): State<Front>, at: Addressed) -> Result<StatusCode, Problem> {
    match front.service.destroy(&at.owner, &at.id).await? {
        Outcome::Done | Outcome::AlreadySo => Ok(StatusCode::NO_CONTENT),
    }
}

/// `POST /v1/metrics/events`: clients report how long they waited; the report is discarded.
pub(super) async fn take_measurement(Caller(_): Caller) -> StatusCode {
    StatusCode::NO_CONTENT
}
