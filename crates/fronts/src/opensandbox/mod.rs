//! The OpenSandbox API: lifecycle under `/v1` and without it, and behind the proxy paths of
//! each sandbox its execution API (port 44772), its egress API (port 18080) and its own ports.
//!
//! ```text
//! /v1/sandboxes…                     lifecycle.rs   endpoints.rs   absent.rs
//! /v1/pools…                         pools.rs
//! /v1/snapshots…                     snapshots.rs
//! /v1/sandboxes/{id}/proxy/44772/…   proxy.rs ─► execd/
//! /v1/sandboxes/{id}/proxy/18080/…   proxy.rs ─► egress.rs
//! /v1/sandboxes/{id}/proxy/{port}/…  proxy.rs ─► forward.rs ─► the port, through the agent
//! ```

mod absent;
mod access;
mod egress;
mod endpoints;
mod execd;
mod forward;
mod interpreter;
mod labels;
mod lifecycle;
mod lines;
mod pools;
mod problem;
mod proxy;
mod query;
mod routes;
mod snapshots;
mod sse;
mod types;
mod volumes;
mod wish;

use std::sync::Arc;

use axum::Router;
use service::Service;

use crate::settings::Settings;

use routes::table;

/// The port under which clients look for the execution API. Nothing listens on it inside.
const EXECD_PORT: u16 = 44772;
/// The port under which clients look for the egress API.
const EGRESS_PORT: u16 = 18080;

/// What every handler of this front works with.
#[derive(Clone)]
pub(crate) struct Front {
    service: Service,
    settings: Arc<Settings>,
    terminals: Arc<execd::Terminals>,
    samples: Arc<execd::Samples>,
}

pub(crate) fn router(service: Service, settings: Arc<Settings>) -> Router {
    let front = Front { service, settings, terminals: Arc::default(), samples: Arc::default() };
    let gateway = proxy::Gateway { front: front.clone(), execd: execd::router(front.clone()) };
    let proxied =
        proxy::table().into_iter().fold(Router::new(), |router, (path, method)| router.route(&path, method));
    let routes =
        table().into_iter().fold(Router::new(), |router, (path, method)| router.route(&path, method));
    routes.with_state(front).merge(proxied.with_state(gateway))
}

/// Every path of this front.
#[cfg(test)]
pub(crate) fn paths() -> Vec<String> {
    let own = table().into_iter().map(|(path, _)| path);
    own.chain(proxy::table().into_iter().map(|(path, _)| path)).collect()
}
