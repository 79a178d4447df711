//! Every path of a sandbox's API, below its address.

use axum::Router;
use axum::middleware::from_fn;
use axum::routing::MethodRouter;

use super::envelope::ENVELOPE_ERRORS;
use super::problem::AioProblem;
use super::{
    AioState, access, bash, code, documents, files, mcp, observe, ports, sandbox_info, shell, skills,
    unsupported,
};
use crate::kit::nested;

/// A path with its handlers.
pub(super) type AioRoute = (&'static str, MethodRouter<AioState>);

pub(super) fn build_router(state: AioState) -> Router {
    let routes =
        sandbox_routes().into_iter().fold(Router::new(), |router, (path, method)| router.route(path, method));
    routes
        .fallback(async || AioProblem::not_found())
        .method_not_allowed_fallback(async || ENVELOPE_ERRORS.method_not_allowed())
        .layer(from_fn(|request, next| nested::label_route("aio", request, next)))
        .with_state(state)
}

/// Every path, by the part of the API that it belongs to.
pub(super) fn sandbox_routes() -> Vec<AioRoute> {
    let mut routes = Vec::new();
    routes.extend(documents::routes());
    routes.extend(access::routes());
    routes.extend(sandbox_info::routes());
    routes.extend(observe::routes());
    routes.extend(shell::routes());
    routes.extend(files::routes());
    routes.extend(code::routes());
    routes.extend(ports::routes());
    routes.extend(bash::routes());
    routes.extend(skills::routes());
    routes.extend(mcp::routes());
    routes.extend(unsupported::routes());
    routes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_path_is_defined_twice() {
        // Axum panics on a path that is already taken.
        let router: Router<AioState> = sandbox_routes()
            .into_iter()
            .fold(Router::new(), |router, (path, method)| router.route(path, method));
        assert!(router.has_routes());
    }
}
