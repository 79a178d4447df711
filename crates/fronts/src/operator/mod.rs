//! What no compatible API has: health, version, measurements, what holds for one sandbox, names,
//! keys, volumes, and what becomes of sandboxes. Owners reach what is theirs; keys are the operator's alone.

mod access;
mod events;
mod keys;
mod names;
mod volumes;

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, delete, get, post};
use axum::{Json, Router};
use domain::SandboxId;
use serde::Serialize;
use service::{ErrorKind, Sandbox, Service, Usage};

use self::access::{Caller, Operator};
use crate::answer;
use crate::settings::Settings;

#[derive(Clone)]
pub(crate) struct Front {
    service: Service,
    settings: Arc<Settings>,
}

pub(crate) fn router(service: Service, settings: Arc<Settings>) -> Router {
    let routes = table().into_iter().fold(Router::new(), |router, (path, method)| router.route(path, method));
    routes.with_state(Front { service, settings })
}

/// Every path of this front.
pub(crate) fn table() -> Vec<(&'static str, MethodRouter<Front>)> {
    vec![
        ("/health", get(health)),
        ("/version", get(version)),
        ("/metrics", get(measurements)),
        ("/coracle/v1/sandboxes/{id}", get(sandbox)),
        ("/coracle/v1/events", get(events::events)),
        ("/coracle/v1/errors", get(events::errors)),
        ("/coracle/v1/capabilities", get(events::capabilities)),
        ("/coracle/v1/keys", get(keys::list).post(keys::issue)),
        ("/coracle/v1/keys/{id}", delete(keys::revoke)),
        ("/coracle/v1/volumes", get(volumes::list).post(volumes::create)),
        ("/coracle/v1/volumes/{name}", get(volumes::inspect).delete(volumes::remove)),
        ("/coracle/v1/names/{name}", get(names::find)),
        ("/coracle/v1/names/{name}/release", post(names::release)),
    ]
}

async fn health() -> Json<serde_json::Value> {
    Json(serde_json::json!({ "status": "healthy" }))
}

async fn version() -> Json<serde_json::Value> {
    Json(serde_json::json!({ "version": env!("CARGO_PKG_VERSION") }))
}

/// `GET /metrics`: Prometheus text. It counts everybody's sandboxes, so with keys it asks for the
/// operator's, as `Authorization: Bearer` too.
async fn measurements(State(front): State<Front>, _: Operator) -> Response {
    let Some(handle) = &front.settings.metrics else {
        return answer::error(StatusCode::NOT_IMPLEMENTED, "NOT_MEASURED", "this server measures nothing");
    };
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], handle.render()).into_response()
}

/// `GET /coracle/v1/sandboxes/{id}`: what this sandbox is made of and what really holds for it.
async fn sandbox(
    State(front): State<Front>,
    Caller(owner): Caller,
    id: Result<Path<String>, PathRejection>,
) -> Response {
    let not_found = || answer::error(StatusCode::NOT_FOUND, "SANDBOX_NOT_FOUND", "there is no such sandbox");
    let id = id.map(|Path(id)| id).unwrap_or_default();
    let Ok(id) = SandboxId::parse(&id) else { return not_found() };
    match front.service.get(&owner, &id) {
        Ok(sandbox) => {
            let usage = front.service.usage(&owner, &id).await.ok();
            Json(Report::of(&sandbox, usage)).into_response()
        }
        Err(error) if error.kind() == ErrorKind::NotFound => not_found(),
        Err(error) => answer::error(StatusCode::INTERNAL_SERVER_ERROR, "INTERNAL", &error.to_string()),
    }
}

#[derive(Serialize)]
struct Report {
    id: String,
    owner: String,
    origin: String,
    phase: &'static str,
    image: Image,
    #[serde(rename = "inForce")]
    in_force: BTreeMap<String, String>,
    weaker: Vec<String>,
    usage: BTreeMap<&'static str, u64>,
}

#[derive(Serialize)]
struct Image {
    requested: String,
    used: String,
}

impl Report {
    fn of(sandbox: &Sandbox, usage: Option<Usage>) -> Self {
        Self {
            id: sandbox.id.to_string(),
            owner: sandbox.owner.as_str().to_owned(),
            origin: sandbox.origin.clone(),
            phase: sandbox.phase.name(),
            image: Image { requested: sandbox.spec.image.clone(), used: sandbox.in_force.image.clone() },
            in_force: sandbox.in_force.measures.iter().cloned().collect(),
            weaker: sandbox.in_force.weaker.clone(),
            usage: usage.map(amounts).unwrap_or_default(),
        }
    }
}

/// What is measured, by name; what is not is left out.
fn amounts(usage: Usage) -> BTreeMap<&'static str, u64> {
    let all = [
        ("memoryBytes", usage.memory.map(|bytes| bytes.0)),
        ("memoryLimitBytes", usage.memory_limit.map(|bytes| bytes.0)),
        ("cpuMicros", usage.cpu_micros),
        ("cpuLimitMillis", usage.cpu_limit.map(u64::from)),
        ("pids", usage.pids),
        ("diskBytes", usage.disk.map(|bytes| bytes.0)),
        ("diskLimitBytes", usage.disk_limit.map(|bytes| bytes.0)),
        ("oomKills", usage.oom_kills),
    ];
    all.into_iter().filter_map(|(name, amount)| Some((name, amount?))).collect()
}
