//! Sandboxes for the clients of one front, made without its own API, and their addresses.

use axum::Json;
use axum::body::Bytes as Body;
use axum::extract::rejection::{BytesRejection, PathRejection};
use axum::extract::{Path, Request, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use domain::{NetworkAccess, Owner, SandboxKey};
use http::request::Parts;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use service::{AcquiredSandbox, ErrorKind, NAME_KEY_SPACE, ServiceError};

use super::OperatorState;
use super::access::RequestOwner;
use super::sandboxes::{parse_sandbox_id, sandbox_not_found};
use crate::front_sandboxes::{
    FrontSandboxRequest, FrontSandboxes, find_front_sandboxes, fronts_with_sandboxes, sandbox_guests,
};
use crate::kit::error_format;
use crate::server::request_log::unique_hex;

/// How many random digits a generated name has.
const NAME_DIGITS: usize = 8;

/// A create as it was sent, checked.
struct GuestCreate {
    sandboxes: &'static FrontSandboxes,
    name: String,
    request: FrontSandboxRequest,
}

/// `POST /coracle/v1/sandboxes`: makes a sandbox for the clients of the front that `guest` names, or finds the one that has
/// the name. 201, or 200 if it exists.
pub(super) async fn create_sandbox(
    State(state): State<OperatorState>,
    RequestOwner(owner): RequestOwner,
    parts: Parts,
    body: Result<Body, BytesRejection>,
) -> Response {
    let parsed = body.map_err(|error| error.to_string()).and_then(|body| parse_create(&body));
    let GuestCreate { sandboxes, name, request } = match parsed {
        Ok(create) => create,
        Err(why) => return invalid_sandbox(&why, None),
    };
    let key = match SandboxKey::new(&owner, NAME_KEY_SPACE, &name) {
        Ok(key) => key,
        Err(error) => return invalid_sandbox(&error.to_string(), None),
    };
    let create = match (sandboxes.plan_sandbox)(&state.service, &state.settings, &request) {
        Ok(create) => create,
        Err(error) => return invalid_sandbox(&error.message, error.hint),
    };
    let AcquiredSandbox { sandbox, fresh, revival } = match state.service.acquire(&key, create).await {
        Ok(acquired) => acquired,
        Err(error) => return create_error_response(&error, &owner),
    };
    let found = state.service.sandbox(&owner, &sandbox.id).ok();
    let url =
        found.and_then(|found| (sandboxes.sandbox_url)(&state.service, &state.settings, &parts, &found));
    let Some(url) = url else {
        let message = format!("sandbox `{name}` exists and was not created with this guest");
        let mut response = error_format::build_error(StatusCode::CONFLICT, "NAME_TAKEN", &message);
        error_format::add_hint(&mut response, Some("choose another name, or remove it with `coracle rm`"));
        return response;
    };
    let lacks_network = sandbox.spec.network == NetworkAccess::Auto && !state.service.capabilities().network;
    let mut body = json!({
        "id": sandbox.id.as_str(),
        "name": name,
        "url": url,
        "existing": !fresh && revival.is_none(),
        "lacksNetwork": lacks_network,
        "standIn": sandbox.in_force.stand_in,
        "weaker": sandbox.in_force.degraded,
    });
    if let Some(revival) = revival {
        body["restarted"] = json!(revival.how.name());
        body["cause"] = json!(revival.cause.name());
    }
    let status = if fresh { StatusCode::CREATED } else { StatusCode::OK };
    (status, Json(body)).into_response()
}

/// `GET /coracle/v1/sandboxes/{id}/url`: the address of the API of a sandbox, which opens it without a key.
pub(super) async fn get_sandbox_url(
    State(state): State<OperatorState>,
    RequestOwner(owner): RequestOwner,
    id: Result<Path<String>, PathRejection>,
    request: Request,
) -> Response {
    let id = parse_sandbox_id(id);
    let Some(sandbox) = id.and_then(|id| state.service.sandbox(&owner, &id).ok()) else {
        return sandbox_not_found();
    };
    let (parts, _) = request.into_parts();
    let url = fronts_with_sandboxes()
        .find_map(|(_, front)| (front.sandbox_url)(&state.service, &state.settings, &parts, &sandbox));
    match url {
        Some(url) => Json(json!({ "id": sandbox.id().as_str(), "url": url })).into_response(),
        None => {
            let message = "the API of this sandbox has no address of its own";
            let mut response = error_format::build_error(StatusCode::NOT_FOUND, "NO_ADDRESS", message);
            let hint = sandbox_guests().next().map(|guest| {
                format!(
                    "`coracle create --guest {guest}` makes sandboxes that have one; a port has one in any case"
                )
            });
            error_format::add_hint(&mut response, hint.as_deref());
            response
        }
    }
}

fn parse_create(body: &[u8]) -> Result<GuestCreate, String> {
    let mut fields: Map<String, Value> =
        serde_json::from_slice(body).map_err(|error| format!("the body is not a JSON object: {error}"))?;
    let text = |value: Value| String::deserialize(value).ok();
    let guest = fields.remove("guest").and_then(text).ok_or("`guest` is missing or not text")?;
    let name = match fields.remove("name") {
        None | Some(Value::Null) => format!("{guest}-{}", &unique_hex()[..NAME_DIGITS]),
        Some(name) => text(name).ok_or("`name` is not text")?,
    };
    let sandboxes = find_front_sandboxes(&guest).ok_or_else(|| {
        let known: Vec<_> = sandbox_guests().map(|name| format!("`{name}`")).collect();
        format!("unknown guest `{guest}`; known: {}", known.join(", "))
    })?;
    let request =
        FrontSandboxRequest::deserialize(Value::Object(fields)).map_err(|error| error.to_string())?;
    Ok(GuestCreate { sandboxes, name, request })
}

fn invalid_sandbox(why: &str, hint: Option<&str>) -> Response {
    let mut response = error_format::build_error(StatusCode::BAD_REQUEST, "INVALID_SANDBOX", why);
    error_format::add_hint(&mut response, hint);
    response
}

fn create_error_response(error: &ServiceError, owner: &Owner) -> Response {
    let (status, code) = match error.kind() {
        ErrorKind::Conflict { .. } | ErrorKind::Busy | ErrorKind::Taken => (StatusCode::CONFLICT, "CONFLICT"),
        ErrorKind::Exhausted { .. } => (StatusCode::TOO_MANY_REQUESTS, "EXHAUSTED"),
        ErrorKind::Unsupported | ErrorKind::Invalid | ErrorKind::Mount(_) | ErrorKind::Hook => {
            (StatusCode::BAD_REQUEST, "INVALID_SANDBOX")
        }
        _ => (StatusCode::INTERNAL_SERVER_ERROR, "INTERNAL"),
    };
    let mut response = error_format::build_error(status, code, &error.message_for(owner));
    error_format::add_hint(&mut response, error.hint());
    response
}
