//! Combines the fronts on one listener.
//!
//! A request is routed to a front by the form of its `Host`, then by a routing header, then by its
//! path; `hosts.rs` handles the first two. Each front is one line here, so removing a front means
//! deleting its folder and that line.

use std::sync::Arc;

use axum::Router;
use axum::middleware::{from_fn, from_fn_with_state};
use service::Service;
use tokio::sync::Semaphore;

use crate::auth::Guard;
use crate::settings::Settings;
use crate::{answer, auth, hosts, limits, trace};

/// Builds the router for all fronts. Axum panics here if two fronts claim the same path.
pub fn router(service: Service, settings: Settings) -> Router {
    let slots = Arc::new(Semaphore::new(settings.concurrent_requests));
    let settings = Arc::new(settings);
    let guard = Guard { service: service.clone(), settings: settings.clone() };
    let router = crate::openapi::router();
    #[cfg(feature = "operator")]
    let router = router.merge(crate::operator::router(service.clone(), settings.clone()));
    #[cfg(feature = "opensandbox")]
    let (router, ports) = {
        let (routes, ports) = crate::opensandbox::router(service, settings.clone());
        (router.merge(routes), ports)
    };
    let router = complete(router);
    #[cfg(feature = "opensandbox")]
    let router = router.layer(from_fn_with_state(ports, hosts::answer));
    router
        .layer(from_fn_with_state(slots, limits::admit))
        .layer(from_fn_with_state(guard, auth::guard))
        .layer(from_fn(trace::record))
        .layer(from_fn_with_state(settings, hosts::recognise))
}

/// Builds the router for the operators' socket: only their API, without a key.
#[cfg(feature = "operator")]
pub fn operators_router(service: Service, settings: Settings) -> Router {
    complete(crate::operator::router(service, Arc::new(settings)))
        .fallback(answer::operators_only)
        .layer(from_fn(trace::record))
}

fn complete(router: Router) -> Router {
    router.fallback(answer::not_found).method_not_allowed_fallback(answer::wrong_method)
}

#[cfg(all(test, feature = "operator", feature = "opensandbox"))]
mod tests {
    /// Whether some path matches both patterns.
    fn overlap(one: &str, other: &str) -> bool {
        let (mut one, mut other) = (one.split('/'), other.split('/'));
        loop {
            match (one.next(), other.next()) {
                (None, None) => return true,
                (Some(part), _) | (_, Some(part)) if part.starts_with("{*") => return true,
                (Some(a), Some(b)) if a == b || a.starts_with('{') || b.starts_with('{') => {}
                _ => return false,
            }
        }
    }

    /// Every front with all its paths; a new front adds one line.
    fn fronts() -> Vec<(&'static str, Vec<String>)> {
        let operator = crate::operator::table().into_iter().map(|(path, _)| path.to_owned());
        vec![
            ("document", ["/openapi.json", "/docs"].map(str::to_owned).to_vec()),
            ("operator", operator.collect()),
            ("opensandbox", crate::opensandbox::paths()),
        ]
    }

    #[test]
    fn no_path_belongs_to_two_fronts() {
        let fronts = fronts();
        for (index, (name, paths)) in fronts.iter().enumerate() {
            for (other, others) in &fronts[index + 1..] {
                for path in paths {
                    let met = others.iter().find(|other| overlap(path, other));
                    assert_eq!(met, None, "`{path}` of {name} is also a path of {other}");
                }
            }
        }
    }

    #[test]
    fn overlapping_patterns_are_found() {
        for (one, other, expected) in [
            ("/a/{x}", "/a/b", true),
            ("/a/{*rest}", "/a/b/c", true),
            ("/a", "/b", false),
            ("/a/{x}", "/a", false),
            ("/a/{x}/c", "/{y}/b/c", true),
        ] {
            assert_eq!(overlap(one, other), expected, "{one} {other}");
            assert_eq!(overlap(other, one), expected, "{other} {one}");
        }
    }
}
