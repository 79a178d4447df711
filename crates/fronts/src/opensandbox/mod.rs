//! The OpenSandbox API: lifecycle routes, with and without `/v1`, and behind the proxy paths of each
//! sandbox its execution API (port 44772), its egress API (port 18080) and its own ports.
//!
//! ```text
//! /v1/sandboxes…                     lifecycle.rs   endpoints.rs   absent.rs
//! /v1/pools…                         pools.rs
//! /v1/snapshots…                     snapshots.rs
//! /v1/sandboxes/{id}/proxy/44772/…   proxy.rs ─► execd/
//! /v1/sandboxes/{id}/proxy/18080/…   proxy.rs ─► egress.rs
//! /v1/sandboxes/{id}/proxy/{port}/…  proxy.rs ─► forward.rs ─► the port, through the agent
//! {id}-{port} as a host or a header  address.rs ─► proxy.rs, handled like a path
//! ```

mod absent;
mod access;
mod address;
mod diagnostics;
mod egress;
mod endpoints;
mod execd;
mod forward;
mod labels;
mod lifecycle;
mod lines;
mod operations;
mod pools;
mod problem;
mod proxy;
mod query;
mod routes;
mod signed;
mod snapshots;
mod sse;
mod types;
mod volumes;
mod wish;

use std::sync::Arc;

use axum::Router;
use service::Service;

use crate::settings::Settings;

pub(crate) use access::ROUTING_HEADERS;
pub(crate) use address::claims;
pub(crate) use operations::{SCHEMAS, sections};
pub(crate) use proxy::Ports;
use routes::table;

/// The port of the execution API, as clients address it. Nothing listens on it inside the sandbox.
const EXECD_PORT: u16 = 44772;
/// The port of the egress API, as clients address it.
const EGRESS_PORT: u16 = 18080;

/// The state shared by all handlers of this front.
#[derive(Clone)]
pub(crate) struct Front {
    service: Service,
    settings: Arc<Settings>,
    terminals: Arc<execd::Terminals>,
    samples: Arc<execd::Samples>,
    routes: Arc<signed::Routes>,
}

/// Builds the routes of this front, and the handler for ports named by host or header.
pub(crate) fn router(service: Service, settings: Arc<Settings>) -> (Router, Ports) {
    let routes = signed::Routes::new(settings.gateway.keys.clone(), settings.gateway.short);
    let (terminals, samples, routes) = (Arc::default(), Arc::default(), Arc::new(routes));
    let front = Front { service, settings, terminals, samples, routes };
    let ports = Ports { front: front.clone(), execd: execd::router(front.clone()) };
    let proxied =
        proxy::table().into_iter().fold(Router::new(), |router, (path, method)| router.route(&path, method));
    let routes =
        table().into_iter().fold(Router::new(), |router, (path, method)| router.route(&path, method));
    (routes.with_state(front).merge(proxied.with_state(ports.clone())), ports)
}

/// Every path of this front.
#[cfg(test)]
pub(crate) fn paths() -> Vec<String> {
    let own = table().into_iter().map(|(path, _)| path);
    own.chain(proxy::table().into_iter().map(|(path, _)| path)).collect()
}
