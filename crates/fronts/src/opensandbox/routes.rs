//! Every lifecycle path, each with and without `/v1`, and the health check of the gateway.

use axum::routing::{MethodRouter, any, get, patch, post};

use super::{OpenSandboxState, diagnostics, endpoints, lifecycle, policy, pools, snapshots, unsupported};

pub(super) fn lifecycle_routes() -> Vec<(String, MethodRouter<OpenSandboxState>)> {
    let twice = |(path, method): (&str, MethodRouter<OpenSandboxState>)| {
        [(format!("/v1{path}"), method.clone()), (path.to_owned(), method)]
    };
    let mut table: Vec<_> =
        supported_routes().into_iter().chain(unsupported_routes()).flat_map(twice).collect();
    table.push(("/v1/metrics/events".to_owned(), post(lifecycle::discard_measurement)));
    table.push(("/status.ok".to_owned(), get(async || "OK")));
    table
}

fn supported_routes() -> Vec<(&'static str, MethodRouter<OpenSandboxState>)> {
    vec![
        ("/sandboxes", get(lifecycle::list_sandboxes).post(lifecycle::create_sandbox)),
        ("/sandboxes/{id}", get(lifecycle::get_sandbox).delete(lifecycle::delete_sandbox)),
        ("/sandboxes/{id}/metadata", patch(lifecycle::patch_metadata)),
        ("/sandboxes/{id}/renew-expiration", post(lifecycle::renew_expiration)),
        ("/sandboxes/{id}/pause", post(lifecycle::pause_sandbox)),
        ("/sandboxes/{id}/resume", post(lifecycle::resume_sandbox)),
        ("/sandboxes/{id}/snapshots", post(snapshots::create_snapshot)),
        ("/snapshots", get(snapshots::list_snapshots)),
        ("/snapshots/{id}", get(snapshots::get_snapshot).delete(snapshots::delete_snapshot)),
        ("/sandboxes/{id}/endpoints/{port}", get(endpoints::resolve_endpoint)),
        ("/pools", get(pools::list_pools).post(pools::create_pool)),
        ("/pools/{name}", get(pools::get_pool).put(pools::set_pool_capacity).delete(pools::delete_pool)),
        ("/sandboxes/{id}/diagnostics/{kind}", get(diagnostics::get_diagnostics)),
        (
            "/sandboxes/{id}/networkpolicy",
            get(policy::network_policy)
                .put(policy::network_policy)
                .patch(policy::network_policy)
                .delete(policy::network_policy),
        ),
    ]
}

fn unsupported_routes() -> Vec<(&'static str, MethodRouter<OpenSandboxState>)> {
    vec![
        ("/templates", any(unsupported::refuse_templates)),
        ("/templates/{id}", any(unsupported::refuse_templates)),
    ]
}

#[cfg(test)]
mod tests {
    use axum::Router;

    use super::*;

    #[test]
    fn no_path_is_defined_twice() {
        // Axum panics on a path that is already taken.
        let router: Router<OpenSandboxState> = lifecycle_routes()
            .into_iter()
            .fold(Router::new(), |router, (path, method)| router.route(&path, method));
        assert!(router.has_routes());
    }
}
