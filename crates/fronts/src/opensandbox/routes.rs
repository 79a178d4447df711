//! Every lifecycle path, each with and without `/v1`, and the health check of the gateway.

use axum::routing::{MethodRouter, any, get, patch, post};

use super::{Front, absent, diagnostics, endpoints, lifecycle, pools, snapshots};

pub(super) fn table() -> Vec<(String, MethodRouter<Front>)> {
    let twice = |(path, method): (&str, MethodRouter<Front>)| {
        [(format!("/v1{path}"), method.clone()), (path.to_owned(), method)]
    };
    let mut table: Vec<_> = offered().into_iter().chain(not_offered()).flat_map(twice).collect();
    table.push(("/v1/metrics/events".to_owned(), post(lifecycle::take_measurement)));
    table.push(("/status.ok".to_owned(), get(async || "OK")));
    table
}

fn offered() -> Vec<(&'static str, MethodRouter<Front>)> {
    vec![
        ("/sandboxes", get(lifecycle::list).post(lifecycle::create)),
        ("/sandboxes/{id}", get(lifecycle::get).delete(lifecycle::delete)),
        ("/sandboxes/{id}/metadata", patch(lifecycle::patch_metadata)),
        ("/sandboxes/{id}/renew-expiration", post(lifecycle::renew)),
        ("/sandboxes/{id}/pause", post(lifecycle::pause)),
        ("/sandboxes/{id}/resume", post(lifecycle::resume)),
        ("/sandboxes/{id}/snapshots", post(snapshots::create)),
        ("/snapshots", get(snapshots::list)),
        ("/snapshots/{id}", get(snapshots::get).delete(snapshots::delete)),
        ("/sandboxes/{id}/endpoints/{port}", get(endpoints::resolve)),
        ("/pools", get(pools::list).post(pools::create)),
        ("/pools/{name}", get(pools::get).put(pools::set).delete(pools::delete)),
        ("/sandboxes/{id}/diagnostics/{kind}", get(diagnostics::show)),
        ("/sandboxes/{id}/networkpolicy", changeable(get(absent::policy))),
    ]
}

/// Adds handlers that refuse changes to a readable resource.
fn changeable(read: MethodRouter<Front>) -> MethodRouter<Front> {
    let change = absent::change_policy;
    read.put(change).patch(change).delete(change)
}

fn not_offered() -> Vec<(&'static str, MethodRouter<Front>)> {
    vec![("/templates", any(absent::templates)), ("/templates/{id}", any(absent::templates))]
}

#[cfg(test)]
mod tests {
    use axum::Router;

    use super::*;

    #[test]
    fn no_path_is_defined_twice() {
        // Axum panics on a path that is already taken.
        let router: Router<Front> =
            table().into_iter().fold(Router::new(), |router, (path, method)| router.route(&path, method));
        assert!(router.has_routes());
    }
}
