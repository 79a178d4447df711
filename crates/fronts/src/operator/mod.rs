//! The operator API, which no compatible API covers: health, version, metrics, the enforcement of each
//! sandbox, names, keys, volumes and lifecycle events. Owners see what is theirs; only the operator
//! manages keys.

mod access;
mod events;
mod front_sandboxes;
mod images;
mod keys;
mod names;
mod network;
mod operations;
mod owner_metrics;
mod processes;
mod restart;
mod sandboxes;
mod snapshots;
mod usage;
mod volumes;

use std::sync::Arc;

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, delete, get, post};
use axum::{Json, Router};
use service::Service;

use self::access::OperatorOnly;
use crate::kit::error_format::{self, CODE_AND_MESSAGE};
use crate::registry::{Front, FrontRoutes};
use crate::settings::HttpSettings;

/// This front's row in the registry.
pub(crate) static FRONT: Front = Front {
    name: "operator",
    guest: None,
    sandboxes: None,
    router: |service, settings| FrontRoutes { router: build_router(service, settings), ports: None },
    settings: &[],
    check_settings: Ok,
    on_operators_socket: true,
    path_prefixes: &["/health", "/version", "/metrics", "/coracle"],
    claims_label: |_| false,
    routing_headers: &[],
    key_headers: &["open-sandbox-api-key", "x-api-key"],
    open_paths: &["/health", "/version"],
    stripped_headers: &["open-sandbox-api-key"],
    error_format: &CODE_AND_MESSAGE,
    openapi: operations::openapi_part,
    #[cfg(test)]
    paths: || operator_routes().into_iter().map(|(path, _)| path.to_owned()).collect(),
};

#[derive(Clone)]
pub(crate) struct OperatorState {
    service: Service,
    settings: Arc<HttpSettings>,
}

fn build_router(service: Service, settings: Arc<HttpSettings>) -> Router {
    let routes = operator_routes()
        .into_iter()
        .fold(Router::new(), |router, (path, method)| router.route(path, method));
    routes.with_state(OperatorState { service, settings })
}

/// Every path of this front.
fn operator_routes() -> Vec<(&'static str, MethodRouter<OperatorState>)> {
    vec![
        ("/health", get(get_health)),
        ("/version", get(get_version)),
        ("/metrics", get(get_metrics)),
        ("/coracle/v1/sandboxes", get(sandboxes::list_sandboxes).post(front_sandboxes::create_sandbox)),
        ("/coracle/v1/sandboxes/{id}/url", get(front_sandboxes::get_sandbox_url)),
        ("/coracle/v1/sandboxes/{id}", get(sandboxes::inspect_sandbox).delete(sandboxes::remove_sandbox)),
        ("/coracle/v1/sandboxes/{id}/restart", post(restart::restart_sandbox)),
        ("/coracle/v1/sandboxes/{id}/usage", get(usage::list_samples)),
        ("/coracle/v1/sandboxes/{id}/network", get(network::get_network_log)),
        ("/coracle/v1/sandboxes/{id}/processes", get(processes::list_processes)),
        ("/coracle/v1/sandboxes/{id}/processes/{process}/logs", get(processes::get_process_logs)),
        ("/coracle/v1/snapshots", get(snapshots::list_snapshots)),
        ("/coracle/v1/snapshots/{id}", get(snapshots::inspect_snapshot).delete(snapshots::remove_snapshot)),
        ("/coracle/v1/sandboxes/{id}/processes/{process}/signal", post(processes::signal_process)),
        ("/coracle/v1/usage", get(usage::list_hours)),
        ("/coracle/v1/events", get(events::stream_events)),
        ("/coracle/v1/errors", get(events::list_errors)),
        ("/coracle/v1/capabilities", get(events::get_capabilities)),
        ("/coracle/v1/keys", get(keys::list_keys).post(keys::issue_key)),
        ("/coracle/v1/keys/{id}", delete(keys::revoke_key)),
        ("/coracle/v1/volumes", get(volumes::list_volumes).post(volumes::create_volume)),
        ("/coracle/v1/volumes/{name}", get(volumes::inspect_volume).delete(volumes::remove_volume)),
        (
            "/coracle/v1/images",
            get(images::list_images).post(images::pull_image).delete(images::remove_image),
        ),
        ("/coracle/v1/images/import", post(images::import_image)),
        ("/coracle/v1/images/commit", post(images::commit_image)),
        ("/coracle/v1/images/gc", post(images::collect_images)),
        ("/coracle/v1/names/{name}", get(names::find_by_name)),
        ("/coracle/v1/names/{name}/release", post(names::release_name)),
    ]
}

async fn get_health() -> Json<serde_json::Value> {
    Json(serde_json::json!({ "status": "healthy" }))
}

async fn get_version() -> Json<serde_json::Value> {
    Json(serde_json::json!({ "version": env!("CARGO_PKG_VERSION") }))
}

/// `GET /metrics`: Prometheus text. It covers the sandboxes of every owner, so with keys it requires
/// the operator's, which may also be sent as `Authorization: Bearer`. Metrics per owner follow if they
/// are configured.
async fn get_metrics(State(state): State<OperatorState>, _: OperatorOnly) -> Response {
    let Some(handle) = &state.settings.metrics else {
        return error_format::build_error(
            StatusCode::NOT_IMPLEMENTED,
            "NOT_MEASURED",
            "metrics are disabled on this server",
        );
    };
    metrics::gauge!("coracle_tasks").set(count_tasks());
    let mut text = handle.render();
    if let Some(rows) = state.service.owner_metrics() {
        text.push_str(&owner_metrics::render_owner_metrics(&rows));
    }
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response()
}

/// How many tasks the server has: those that always run, those of sandboxes, and those of requests.
fn count_tasks() -> f64 {
    let count = tokio::runtime::Handle::current().metrics().num_alive_tasks();
    f64::from(u32::try_from(count).unwrap_or(u32::MAX))
}
