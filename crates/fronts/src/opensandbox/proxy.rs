//! The paths below which the ports of a sandbox are reached.

use std::time::{Duration, SystemTime};

use axum::Router;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, any};
use domain::{Owner, SandboxId};
use http::{StatusCode, Uri, uri::PathAndQuery};
use hyper::upgrade::OnUpgrade;
use service::Sandbox;
use tower::ServiceExt;

use super::access::to_port;
use super::execd::Scope;
use super::problem::Problem;
use super::types::Notes;
use super::{EGRESS_PORT, EXECD_PORT, Front, egress, forward};
use crate::auth::{self, Refusal};

/// The expiry is moved on access at most so often.
const RENEWAL_STEP: Duration = Duration::from_secs(60);
const RENEWAL_HEADER: &str = "OpenSandbox-Access-Renew";

#[derive(Clone)]
pub(super) struct Gateway {
    pub(super) front: Front,
    /// The execution API, with the sandbox in the request's extensions.
    pub(super) execd: Router,
}

pub(super) fn table() -> Vec<(String, MethodRouter<Gateway>)> {
    let forms = ["/sandboxes/{id}/proxy/{port}", "/sandboxes/{id}/proxy/{port}/{*path}"];
    // A wildcard does not match the bare slash.
    let forms = forms.into_iter().chain(["/sandboxes/{id}/proxy/{port}/"]);
    forms.flat_map(|path| [format!("/v1{path}"), path.to_owned()]).map(|path| (path, any(proxy))).collect()
}

/// A port of a sandbox and what is asked of it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Target {
    pub(super) id: SandboxId,
    pub(super) port: u16,
    /// The part of the path that names the port; redirects must stay below it.
    pub(super) mount: String,
    /// The rest, as the client wrote it.
    pub(super) path: String,
}

impl Target {
    fn parse(path: &str) -> Result<Self, Problem> {
        let below = path.strip_prefix("/v1").unwrap_or(path);
        let parts: Vec<&str> = below.splitn(6, '/').collect();
        let ["", "sandboxes", id, "proxy", port, rest @ ..] = parts.as_slice() else {
            return Err(Problem::no_sandbox(""));
        };
        let parsed = SandboxId::parse(id).ok().ok_or_else(|| Problem::no_sandbox(id))?;
        let number: Option<u16> = port.parse().ok().filter(|port| *port > 0);
        let number = number.ok_or_else(|| {
            Problem::new(
                StatusCode::BAD_REQUEST,
                "DOCKER::INVALID_PORT",
                "a port is a number from 1 to 65535",
            )
        })?;
        let rest = rest.first().map(|rest| format!("/{rest}")).unwrap_or_default();
        let mount = path[..path.len() - rest.len()].to_owned();
        Ok(Self { id: parsed, port: number, mount, path: rest })
    }
}

async fn proxy(State(gateway): State<Gateway>, request: Request) -> Response {
    let target = match Target::parse(request.uri().path()) {
        Ok(target) => target,
        Err(problem) => return problem.into_response(),
    };
    let front = &gateway.front;
    let owner = match to_port(front, request.headers(), &target.id, target.port) {
        Ok(owner) => owner,
        Err(refusal) => return refuse(refusal, target.port),
    };
    let sandbox = match front.service.get(&owner, &target.id) {
        Ok(sandbox) => sandbox,
        Err(error) => return Problem::from(error).into_response(),
    };
    let notes = Notes::of(&sandbox);
    if auth::text(request.headers(), RENEWAL_HEADER) != Some("skip") {
        renew_on_access(front, &owner, &sandbox, &notes).await;
    }
    match target.port {
        EXECD_PORT => {
            let lines = notes.lines(front.settings.default_lines);
            execute(gateway.execd, Scope { owner, id: target.id, lines }, &target.path, request).await
        }
        EGRESS_PORT => egress::answer(&sandbox, request.method(), &target.path),
        _ => forward::forward(front, &owner, &target, request).await,
    }
}

/// Each of the three surfaces words its refusals in its own way.
fn refuse(refusal: Refusal, port: u16) -> Response {
    let problem = Problem::from(refusal);
    match port {
        EXECD_PORT => {
            let body = axum::Json(serde_json::json!({ "error": problem.message }));
            (problem.status, body).into_response()
        }
        EGRESS_PORT => (problem.status, problem.message).into_response(),
        _ => problem.into_response(),
    }
}

/// Hands a request to the execution API under the path it has there.
async fn execute(execd: Router, scope: Scope, path: &str, mut request: Request) -> Response {
    let path = if path.is_empty() { "/" } else { path };
    let inner = match request.uri().query() {
        Some(query) => format!("{path}?{query}"),
        None => path.to_owned(),
    };
    let mut parts = request.uri().clone().into_parts();
    parts.path_and_query = PathAndQuery::try_from(inner).ok();
    let Ok(uri) = Uri::from_parts(parts) else {
        return Problem::invalid("this path cannot be used").into_response();
    };
    *request.uri_mut() = uri;
    // The outer router leaves the parameters of its own path there.
    let upgrade = request.extensions_mut().remove::<OnUpgrade>();
    request.extensions_mut().clear();
    if let Some(upgrade) = upgrade {
        request.extensions_mut().insert(upgrade);
    }
    request.extensions_mut().insert(scope);
    execd.oneshot(request).await.into_response()
}

/// Moves the expiry if the sandbox was created with that wish. A failure to do so must not fail
/// the request that happened to come by.
async fn renew_on_access(front: &Front, owner: &Owner, sandbox: &Sandbox, notes: &Notes) {
    let (Some(seconds), Some(expires)) = (notes.renew_on_access, sandbox.expires) else { return };
    let wanted = SystemTime::now() + Duration::from_secs(seconds);
    if expires + RENEWAL_STEP < wanted
        && let Err(error) = front.service.renew(owner, &sandbox.id, wanted).await
    {
        tracing::warn!(%error, "could not renew a sandbox on access");
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{Just, Strategy, prop, prop_assert, prop_assert_eq, prop_oneof, proptest};

    use super::*;

    const ID: &str = "abcdefghij0123456789";

    #[test]
    fn what_follows_the_port_stays_as_it_was_written() {
        for (path, mount, rest) in [
            (
                format!("/v1/sandboxes/{ID}/proxy/8080/a%2Fb//c"),
                format!("/v1/sandboxes/{ID}/proxy/8080"),
                "/a%2Fb//c",
            ),
            (format!("/sandboxes/{ID}/proxy/8080"), format!("/sandboxes/{ID}/proxy/8080"), ""),
            (format!("/sandboxes/{ID}/proxy/8080/"), format!("/sandboxes/{ID}/proxy/8080"), "/"),
        ] {
            let target = Target::parse(&path).unwrap();
            assert_eq!((target.mount, target.path.as_str(), target.port), (mount, rest, 8080), "{path}");
        }
    }

    /// Paths that are nearly right, and some that are not.
    fn any_path() -> impl Strategy<Value = String> {
        let id = prop_oneof![Just(ID.to_owned()), "[a-z0-9./%-]{0,24}", Just("..".to_owned())];
        let port = prop_oneof!["[0-9]{1,6}", "[0-9a-z+ .-]{0,6}"];
        let rest = prop_oneof![Just(String::new()), "/[ -~]{0,40}", "/(\\.\\./|%2e%2e/|//|a/){0,6}"];
        let near = (prop::bool::ANY, id, port, rest).prop_map(|(versioned, id, port, rest)| {
            format!("{}/sandboxes/{id}/proxy/{port}{rest}", if versioned { "/v1" } else { "" })
        });
        prop_oneof![9 => near, 1 => ".{0,60}"]
    }

    proptest! {
        #[test]
        fn a_target_is_exactly_what_was_written(path in any_path()) {
            if let Ok(target) = Target::parse(&path) {
                prop_assert!(target.port > 0);
                prop_assert_eq!(format!("{}{}", target.mount, target.path), path.as_str());
                prop_assert!(target.path.is_empty() || target.path.starts_with('/'));
                let named = format!("/sandboxes/{}/proxy/", target.id);
                let (_, port) = target.mount.split_once(&named).expect("it names the sandbox");
                prop_assert_eq!(port.parse::<u16>().ok(), Some(target.port));
            }
        }
    }

    #[test]
    fn a_port_is_a_number_and_an_id_an_id() {
        let status = |path: String| Target::parse(&path).unwrap_err().status;
        assert_eq!(status(format!("/sandboxes/{ID}/proxy/0/x")), StatusCode::BAD_REQUEST);
        assert_eq!(status(format!("/sandboxes/{ID}/proxy/65536/x")), StatusCode::BAD_REQUEST);
        assert_eq!(status("/sandboxes/..%2f/proxy/80/x".to_owned()), StatusCode::NOT_FOUND);
    }
}
