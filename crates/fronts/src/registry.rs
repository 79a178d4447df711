//! The table of fronts: one row each, with everything that the shared layers need to know about it.
//!
//! Shared layers (router, hosts, authentication, limits, request log, OpenAPI) read these rows and
//! name no front. To remove a front, delete its folder, its row here and its `mod` line in `lib.rs`.

use std::sync::Arc;

use axum::Router;
use axum::extract::Request;
use axum::response::Response;
use domain::GuestSettings;
use futures_util::future::BoxFuture;
use service::Service;

use crate::front_sandboxes::FrontSandboxes;
use crate::front_settings::{FrontSetting, FrontSettingError, FrontValues, SettingValues};
use crate::hosts;
use crate::kit::error_format::{CODE_AND_MESSAGE, ErrorFormat};
use crate::openapi::{DOCUMENT_PATHS, OpenApiPart};
use crate::settings::HttpSettings;

/// Every front that was compiled in. The order is that of the OpenAPI document; no path, host label
/// or routing header belongs to two of them.
pub(crate) static FRONTS: &[&Front] = &[
    #[cfg(feature = "operator")]
    &crate::operator::FRONT,
    #[cfg(feature = "opensandbox")]
    &crate::opensandbox::FRONT,
    #[cfg(feature = "aio")]
    &crate::aio::FRONT,
    #[cfg(feature = "aio")]
    &crate::aio::PROVISIONER_FRONT,
];

/// The error format of requests that no front claims, and of bytes that are not a request.
pub(crate) static UNROUTED_ERRORS: &ErrorFormat = &CODE_AND_MESSAGE;

/// What the shared layers know about a front. Header names are compared without regard to case.
pub(crate) struct Front {
    pub(crate) name: &'static str,
    /// Builds its routes; called once for each listener that serves it.
    pub(crate) router: fn(Service, Arc<HttpSettings>) -> FrontRoutes,
    /// The users and directories that its clients expect in a sandbox; `None` if it makes none.
    pub(crate) guest: Option<fn(&FrontValues) -> GuestSettings>,
    /// How sandboxes for its clients are made without its own API; `None` if they cannot be.
    pub(crate) sandboxes: Option<&'static FrontSandboxes>,
    /// The settings of its section in the configuration.
    pub(crate) settings: &'static [FrontSetting],
    /// Checks the written settings of its section and adds the defaults of the others.
    pub(crate) check_settings: fn(SettingValues) -> Result<SettingValues, FrontSettingError>,
    /// Whether it is also served on the socket of operators, where no key is needed.
    pub(crate) on_operators_socket: bool,
    /// The beginnings of its paths, by whole segments. They decide the error format of a request that
    /// is refused before it is routed.
    pub(crate) path_prefixes: &'static [&'static str],
    /// Whether the first label of a host below the gateway's domain names a port in this front's form.
    pub(crate) claims_label: fn(&str) -> bool,
    /// Headers that name a port like such a label does; the first one present counts.
    pub(crate) routing_headers: &'static [&'static str],
    /// Headers in which a client may present an API key.
    pub(crate) key_headers: &'static [&'static str],
    /// Paths that need no key, so a server without keys serves them to any machine. They are also served
    /// at the limit of requests in progress, because only authenticated requests count.
    pub(crate) open_paths: &'static [&'static str],
    /// Headers that are meant for this server and never reach a port inside a sandbox, whichever front
    /// forwards the request. Headers in `key_headers` that are missing here pass unless they hold one
    /// of our keys.
    pub(crate) stripped_headers: &'static [&'static str],
    pub(crate) error_format: &'static ErrorFormat,
    pub(crate) openapi: fn() -> OpenApiPart,
    /// Every path that it routes.
    #[cfg(test)]
    pub(crate) paths: fn() -> Vec<String>,
}

/// The routes of a front, and the handler of requests that name a port by host or header.
pub(crate) struct FrontRoutes {
    pub(crate) router: Router,
    pub(crate) ports: Option<PortHandler>,
}

/// Answers a request that named a port with this label.
pub(crate) type PortHandler = Arc<dyn Fn(String, Request) -> BoxFuture<'static, Response> + Send + Sync>;

/// The users and directories that the clients of a front expect, for pools that are prepared for them.
/// `values` are the checked settings of all fronts.
pub fn guest_of_front(name: &str, values: &FrontValues) -> Option<GuestSettings> {
    FRONTS.iter().find(|front| front.name == name)?.guest.map(|guest| guest(values))
}

/// The fronts that have such settings.
pub fn fronts_with_guest() -> impl Iterator<Item = &'static str> {
    FRONTS.iter().filter(|front| front.guest.is_some()).map(|front| front.name)
}

/// The only front of a listener that serves one sandbox at its root, in the extensions of its requests.
#[derive(Clone, Copy)]
pub(crate) struct RootFront(pub(crate) &'static Front);

/// Returns how errors look to the client of a request.
pub(crate) fn error_format_of(request: &Request) -> &'static ErrorFormat {
    if let Some(RootFront(front)) = request.extensions().get() {
        return front.error_format;
    }
    let front = hosts::front_of_named_port(request).or_else(|| front_of_path(request.uri().path()));
    front.map_or(UNROUTED_ERRORS, |front| front.error_format)
}

fn front_of_path(path: &str) -> Option<&'static Front> {
    FRONTS.iter().copied().find(|front| front.path_prefixes.iter().any(|prefix| is_below(path, prefix)))
}

fn is_below(path: &str, prefix: &str) -> bool {
    path.strip_prefix(prefix).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// Whether a path needs no key.
pub(crate) fn is_open_path(path: &str) -> bool {
    DOCUMENT_PATHS.contains(&path) || FRONTS.iter().any(|front| front.open_paths.contains(&path))
}

/// Headers of all fronts that never reach a port inside a sandbox.
pub(crate) fn stripped_headers() -> impl Iterator<Item = &'static str> {
    FRONTS.iter().flat_map(|front| front.stripped_headers).copied()
}

/// Headers of all fronts that may hold one of our keys or a value for the service inside.
pub(crate) fn shared_key_headers() -> impl Iterator<Item = &'static str> {
    let is_stripped = |name: &str| stripped_headers().any(|stripped| stripped.eq_ignore_ascii_case(name));
    FRONTS.iter().flat_map(|front| front.key_headers).copied().filter(move |name| !is_stripped(name))
}

#[cfg(test)]
mod tests {
    use super::*;

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

    #[test]
    fn no_path_belongs_to_two_fronts() {
        let document = ("document", DOCUMENT_PATHS.map(str::to_owned).to_vec());
        let rows = FRONTS.iter().map(|front| (front.name, (front.paths)()));
        let fronts: Vec<_> = std::iter::once(document).chain(rows).collect();
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

    #[test]
    fn every_path_begins_with_a_prefix_of_its_front_only() {
        for front in FRONTS {
            for path in (front.paths)() {
                let owners: Vec<_> = FRONTS
                    .iter()
                    .filter(|other| other.path_prefixes.iter().any(|prefix| is_below(&path, prefix)))
                    .map(|other| other.name)
                    .collect();
                assert_eq!(owners, [front.name], "{path}");
            }
        }
    }

    #[test]
    fn open_paths_are_routed() {
        for front in FRONTS {
            let paths = (front.paths)();
            for path in front.open_paths {
                assert!(paths.iter().any(|routed| routed == path), "{path} of {}", front.name);
            }
        }
    }

    #[test]
    fn prefixes_match_whole_segments() {
        assert!(is_below("/v1/sandboxes", "/v1/sandboxes") && is_below("/v1/sandboxes/x", "/v1/sandboxes"));
        assert!(!is_below("/v1/sandboxes-x", "/v1/sandboxes") && !is_below("/v1", "/v1/sandboxes"));
    }
}
