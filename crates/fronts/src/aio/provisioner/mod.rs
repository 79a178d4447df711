//! The provisioner API, by which DeerFlow creates, finds and removes sandboxes.
//!
//! ```text
//! /api/capabilities                  what DeerFlow may ask for
//! /api/sandboxes                     request_checks.rs ─► create.rs; sandboxes.rs
//! /api/sandboxes/{id}[/presence]     sandboxes.rs
//! an address of a crashed sandbox    crash.rs
//! ```
//! DeerFlow chooses the id of a sandbox, which is a key of the core: one id leads to at most one sandbox.

mod access;
mod crash;
mod create;
mod operations;
mod problem;
mod request_checks;
mod sandbox_url;
mod sandboxes;
mod settings;
mod user_data;

use std::sync::Arc;

use axum::Router;
use axum::routing::{MethodRouter, get};
use service::Service;

use crate::registry::{Front, FrontRoutes};
use crate::settings::HttpSettings;

pub(super) use self::crash::replace_crashed;
pub(super) use self::request_checks::normalize_path;
pub(super) use self::sandbox_url::UrlOrigin;
pub(super) use self::settings::{MAX_ID, ProvisionerSettings};

/// The section of the configuration, which is named like the front.
pub(super) const PROVISIONER_SECTION: &str = "deerflow";

/// The key space of the ids that DeerFlow chooses.
const KEY_SPACE: &str = "deerflow";

/// The row of the provisioner API in the registry.
pub(crate) static FRONT: Front = Front {
    name: PROVISIONER_SECTION,
    guest: None,
    sandboxes: None,
    router: |service, settings| FrontRoutes { router: build_router(service, settings), ports: None },
    settings: settings::SETTINGS,
    check_settings: settings::check_settings,
    on_operators_socket: false,
    path_prefixes: &["/api"],
    claims_label: |_| false,
    routing_headers: &[],
    key_headers: &[access::KEY_HEADER],
    open_paths: &[],
    stripped_headers: &[],
    error_format: &problem::DETAIL_ERRORS,
    openapi: operations::openapi_part,
    #[cfg(test)]
    paths: || provisioner_routes().into_iter().map(|(path, _)| path.to_owned()).collect(),
};

/// The state shared by all handlers of the provisioner.
#[derive(Clone)]
pub(super) struct ProvisionerState {
    service: Service,
    settings: Arc<HttpSettings>,
    own_settings: Arc<ProvisionerSettings>,
}

fn build_router(service: Service, settings: Arc<HttpSettings>) -> Router {
    let own_settings = Arc::new(ProvisionerSettings::of_server(&settings));
    let state = ProvisionerState { service, settings, own_settings };
    let routes = provisioner_routes().into_iter();
    routes.fold(Router::new(), |router, (path, method)| router.route(path, method)).with_state(state)
}

fn provisioner_routes() -> Vec<(&'static str, MethodRouter<ProvisionerState>)> {
    vec![
        ("/api/capabilities", get(sandboxes::get_capabilities)),
        ("/api/sandboxes", get(sandboxes::list_sandboxes).post(create::create_sandbox)),
        ("/api/sandboxes/{id}", get(sandboxes::get_sandbox).delete(sandboxes::delete_sandbox)),
        ("/api/sandboxes/{id}/presence", get(sandboxes::get_presence)),
    ]
}
