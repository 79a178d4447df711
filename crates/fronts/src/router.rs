//! Combines the fronts on one listener.
//!
//! A request is routed to a front by the form of its `Host`, then by a routing header, then by its
//! path; `hosts.rs` handles the first two. The fronts are the rows of `registry.rs`.

use std::sync::Arc;

use axum::Router;
use axum::extract::Request;
use axum::middleware::{from_fn, from_fn_with_state};
use axum::response::Response;
use http::StatusCode;
use service::Service;

use crate::auth::KeylessGuard;
use crate::front_sandboxes::{RootAccess, RootRoutes, RootSandbox};
use crate::home_page::ServerState;
use crate::kit::error_format;
use crate::registry::{self, FRONTS, FrontRoutes, RootFront};
use crate::server::concurrency::ConcurrencyLimits;
use crate::server::{concurrency, request_log};
use crate::settings::HttpSettings;
use crate::{auth, home_page, hosts};

/// Builds the router for all fronts. Axum panics here if two fronts claim the same path.
pub fn build_router(service: Service, settings: HttpSettings) -> Router {
    let limits = ConcurrencyLimits::new(&settings);
    let settings = Arc::new(settings);
    if let Some(root) = &settings.root {
        return build_root_router(service, &settings, root, limits);
    }
    let guard = KeylessGuard { service: service.clone(), settings: settings.clone() };
    let (mut router, mut ports) = (crate::openapi::document_router(), Vec::new());
    for front in FRONTS {
        let FrontRoutes { router: routes, ports: handler } =
            (front.router)(service.clone(), settings.clone());
        router = router.merge(routes);
        ports.extend(handler.map(|handler| (front.name, handler)));
    }
    let router = router.fallback(move |request: Request| answer_unrouted(service.clone(), request));
    reject_methods(router)
        .layer(from_fn_with_state(Arc::new(ports), hosts::answer_named_port))
        .layer(from_fn_with_state(limits, concurrency::limit_concurrency))
        .layer(from_fn_with_state(guard, auth::guard_keyless_server))
        .layer(from_fn(request_log::log_request))
        .layer(from_fn_with_state(settings, hosts::record_port_label))
}

/// Builds the router of a server that serves one sandbox, in the API of one front, at its root.
fn build_root_router(
    service: Service,
    settings: &Arc<HttpSettings>,
    root: &RootSandbox,
    limits: ConcurrencyLimits,
) -> Router {
    let front = RootFront(root.registry_row());
    let RootRoutes { router, access } = (root.front().root_routes)(service, Arc::clone(settings), root.key());
    let router = router.layer(from_fn_with_state(limits, concurrency::limit_concurrency));
    let router = match access {
        RootAccess::Open => router.layer(from_fn_with_state(Arc::clone(settings), auth::guard_open_root)),
        RootAccess::Credential => router,
    };
    router.layer(from_fn(request_log::log_request)).layer(axum::Extension(front))
}

/// Builds the router for the operators' socket: only their API, without a key.
pub fn operators_router(service: Service, settings: HttpSettings) -> Router {
    let settings = Arc::new(settings);
    let served = FRONTS.iter().filter(|front| front.on_operators_socket);
    let routes = served.fold(Router::new(), |router, front| {
        router.merge((front.router)(service.clone(), settings.clone()).router)
    });
    reject_methods(routes).fallback(operator_api_only).layer(from_fn(request_log::log_request))
}

/// Adds the response to a method that a path does not have.
fn reject_methods(router: Router) -> Router {
    router.method_not_allowed_fallback(async |request: Request| {
        registry::error_format_of(&request).method_not_allowed()
    })
}

/// The response to a path of no front. A person who opens the server's address in a browser gets a page.
async fn answer_unrouted(service: Service, request: Request) -> Response {
    if !home_page::is_wanted_by(&request) {
        return registry::error_format_of(&request).path_not_found();
    }
    home_page::build_response(match service.backend_answers().await {
        true => ServerState::BackendAnswers,
        false => ServerState::NoBackend,
    })
}

/// The response to any other path on the operators' socket, which does not serve the other APIs.
async fn operator_api_only(request: Request) -> Response {
    let message = "this socket serves only the operator API, below /coracle/v1";
    let hint = "look at and remove what owners have with --all-owners or --owner NAME; \
                all else goes to the server's HTTP address, with a key";
    let format = registry::error_format_of(&request);
    let mut response = format.build_error(StatusCode::NOT_FOUND, "NOT_FOUND", message);
    error_format::add_hint(&mut response, Some(hint));
    response
}
