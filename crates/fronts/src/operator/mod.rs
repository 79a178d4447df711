//! The operator API, which no compatible API covers: health, version, metrics, the enforcement of each
//! sandbox, names, keys, volumes and lifecycle events. Owners see what is theirs; only the operator
//! manages keys.

mod access;
mod events;
mod images;
mod keys;
mod names;
mod operations;
mod owner_metrics;
mod processes;
mod restart;
mod sandboxes;
mod snapshots;
mod usage;
mod volumes;

use std::sync::Arc;
use std::time::SystemTime;

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, delete, get, post};
use axum::{Json, Router};
use jiff::Timestamp;
use service::Service;

use self::access::Operator;
pub(crate) use self::operations::{SCHEMAS, sections};
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
        ("/coracle/v1/sandboxes", get(sandboxes::list)),
        ("/coracle/v1/sandboxes/{id}", get(sandboxes::inspect).delete(sandboxes::remove)),
        ("/coracle/v1/sandboxes/{id}/restart", post(restart::restart)),
        ("/coracle/v1/sandboxes/{id}/usage", get(usage::samples)),
        ("/coracle/v1/sandboxes/{id}/processes", get(processes::list)),
        ("/coracle/v1/sandboxes/{id}/processes/{process}/logs", get(processes::logs)),
        ("/coracle/v1/snapshots", get(snapshots::list)),
        ("/coracle/v1/snapshots/{id}", get(snapshots::inspect).delete(snapshots::remove)),
        ("/coracle/v1/sandboxes/{id}/processes/{process}/signal", post(processes::signal)),
        ("/coracle/v1/usage", get(usage::hours)),
        ("/coracle/v1/events", get(events::events)),
        ("/coracle/v1/errors", get(events::errors)),
        ("/coracle/v1/capabilities", get(events::capabilities)),
        ("/coracle/v1/keys", get(keys::list).post(keys::issue)),
        ("/coracle/v1/keys/{id}", delete(keys::revoke)),
        ("/coracle/v1/volumes", get(volumes::list).post(volumes::create)),
        ("/coracle/v1/volumes/{name}", get(volumes::inspect).delete(volumes::remove)),
        ("/coracle/v1/images", get(images::list).post(images::pull).delete(images::remove)),
        ("/coracle/v1/images/import", post(images::import)),
        ("/coracle/v1/images/commit", post(images::commit)),
        ("/coracle/v1/images/gc", post(images::collect)),
        ("/coracle/v1/names/{name}", get(names::find)),
        ("/coracle/v1/names/{name}/release", post(names::release)),
    ]
}

/// Formats a time as RFC 3339.
fn time(time: SystemTime) -> String {
    Timestamp::try_from(time).unwrap_or(Timestamp::UNIX_EPOCH).to_string()
}

async fn health() -> Json<serde_json::Value> {
    Json(serde_json::json!({ "status": "healthy" }))
}

async fn version() -> Json<serde_json::Value> {
    Json(serde_json::json!({ "version": env!("CARGO_PKG_VERSION") }))
}

/// `GET /metrics`: Prometheus text. It covers the sandboxes of every owner, so with keys it requires
/// the operator's, which may also be sent as `Authorization: Bearer`. Metrics per owner follow if they
/// are configured.
async fn measurements(State(front): State<Front>, _: Operator) -> Response {
    let Some(handle) = &front.settings.metrics else {
        return answer::error(
            StatusCode::NOT_IMPLEMENTED,
            "NOT_MEASURED",
            "metrics are disabled on this server",
        );
    };
    let mut text = handle.render();
    if let Some(rows) = front.service.owner_metrics() {
        text.push_str(&owner_metrics::render(&rows));
    }
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response()
}
