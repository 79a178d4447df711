//! The OpenSandbox API: lifecycle routes, with and without `/v1`, and behind the proxy paths of each
//! sandbox its execution API (port 44772), its egress API (port 18080) and its own ports.
//!
//! ```text
//! /v1/sandboxes…                     lifecycle.rs   endpoints.rs   policy.rs   unsupported.rs
//! /v1/pools…                         pools.rs
//! /v1/snapshots…                     snapshots.rs
//! /v1/sandboxes/{id}/proxy/44772/…   proxy.rs ─► execd/
//! /v1/sandboxes/{id}/proxy/18080/…   proxy.rs ─► egress.rs ─► policy.rs
//! /v1/sandboxes/{id}/proxy/{port}/…  proxy.rs ─► forward.rs ─► ports/, through the agent
//! {id}-{port} as a host or a header  port_label.rs ─► proxy.rs, handled like a path
//! ```

mod access;
mod create_request;
mod diagnostics;
mod egress;
mod endpoints;
mod execd;
mod forward;
mod hooks;
mod labels;
mod lifecycle;
mod operations;
mod policy;
mod pools;
mod port_label;
mod problem;
mod proxy;
mod query;
mod route_keys;
mod routes;
mod settings;
mod signed_routes;
mod snapshots;
mod sse;
mod types;
mod unsupported;
mod vault;
mod volumes;

use std::sync::Arc;

use axum::Router;
use domain::GuestSettings;
use service::Service;

use crate::kit::error_format::CODE_AND_MESSAGE;
use crate::registry::{Front, FrontRoutes, PortHandler};
use crate::settings::HttpSettings;

use access::{EGRESS_TOKEN, EXECD_TOKEN, KEY_HEADERS, PORT_TOKEN, ROUTING_HEADERS, SECURE_ACCESS};
use create_request::NetworkDefaults;
use proxy::{PortProxy, RENEWAL_HEADER};
use routes::lifecycle_routes;
use settings::OpenSandboxSettings;

/// The port of the execution API, as clients address it. Nothing listens on it inside the sandbox.
const EXECD_PORT: u16 = 44772;
/// The port of the egress API, as clients address it.
const EGRESS_PORT: u16 = 18080;

/// Clients of this API work as root in `/root`, unless the image names another user or directory.
fn guest_settings() -> GuestSettings {
    GuestSettings::root_only()
}

/// This front's row in the registry.
pub(crate) static FRONT: Front = Front {
    name: "opensandbox",
    guest: Some(|_| guest_settings()),
    sandboxes: None,
    router: |service, settings| {
        let (router, proxy) = build_router(service, settings);
        let ports: PortHandler = Arc::new(move |label, request| {
            let proxy = proxy.clone();
            Box::pin(async move { proxy.proxy_by_label(&label, request).await })
        });
        FrontRoutes { router, ports: Some(ports) }
    },
    settings: settings::SETTINGS,
    check_settings: settings::check_settings,
    on_operators_socket: false,
    path_prefixes: &[
        "/v1/sandboxes",
        "/sandboxes",
        "/v1/snapshots",
        "/snapshots",
        "/v1/pools",
        "/pools",
        "/v1/templates",
        "/templates",
        "/v1/metrics/events",
        "/status.ok",
    ],
    claims_label: port_label::claims_label,
    routing_headers: &ROUTING_HEADERS,
    key_headers: &KEY_HEADERS,
    open_paths: &[],
    stripped_headers: &[
        KEY_HEADERS[0],
        SECURE_ACCESS,
        RENEWAL_HEADER,
        EXECD_TOKEN,
        EGRESS_TOKEN,
        PORT_TOKEN,
        ROUTING_HEADERS[0],
        ROUTING_HEADERS[1],
        execd::START_HEADER,
    ],
    error_format: &CODE_AND_MESSAGE,
    openapi: operations::openapi_part,
    #[cfg(test)]
    paths: all_paths,
};

/// The state shared by all handlers of this front.
#[derive(Clone)]
pub(crate) struct OpenSandboxState {
    service: Service,
    settings: Arc<HttpSettings>,
    own_settings: OpenSandboxSettings,
    routes: Arc<signed_routes::RouteSigner>,
}

impl OpenSandboxState {
    fn network_defaults(&self) -> NetworkDefaults {
        let access = self.settings.default_network;
        NetworkDefaults { access, offers_filter: self.service.offers_filter() }
    }
}

/// Builds the routes of this front, and the handler for ports named by host or header.
fn build_router(service: Service, settings: Arc<HttpSettings>) -> (Router, PortProxy) {
    let own_settings = settings.fronts.get(FRONT.name).map(OpenSandboxSettings::from_values);
    let own_settings = own_settings.transpose().expect("settings are checked when the configuration is read");
    let own_settings = own_settings.unwrap_or_default();
    let OpenSandboxSettings { route_keys, short_signatures, .. } = &own_settings;
    let routes = Arc::new(signed_routes::RouteSigner::new(route_keys.clone(), *short_signatures));
    let front = OpenSandboxState { service, settings, own_settings, routes };
    let ports = PortProxy { front: front.clone(), execd: execd::build_router(front.clone()) };
    let proxied = proxy::proxy_routes()
        .into_iter()
        .fold(Router::new(), |router, (path, method)| router.route(&path, method));
    let routes = lifecycle_routes()
        .into_iter()
        .fold(Router::new(), |router, (path, method)| router.route(&path, method));
    (routes.with_state(front).merge(proxied.with_state(ports.clone())), ports)
}

/// Every path of this front.
#[cfg(test)]
fn all_paths() -> Vec<String> {
    let own = lifecycle_routes().into_iter().map(|(path, _)| path);
    own.chain(proxy::proxy_routes().into_iter().map(|(path, _)| path)).collect()
}
