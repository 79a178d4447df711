//! The ports of a sandbox, however they are addressed: by path, by host name or by header.

use std::time::{Duration, SystemTime};

use axum::Router;
use axum::extract::{FromRequestParts, Request, State};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, any};
use domain::{Owner, SandboxId};
use http::request::Parts;
use http::{HeaderValue, StatusCode, Uri, header, uri::PathAndQuery};
use hyper::upgrade::OnUpgrade;
use service::Sandbox;
use tower::ServiceExt;

use super::access::admit;
use super::address::{Place, port_and_signature};
use super::execd::Scope;
use super::problem::Problem;
use super::signed::Signed;
use super::types::Notes;
use super::{EGRESS_PORT, EXECD_PORT, Front, egress, execd, forward};
use crate::auth;
use crate::serve::Peer;
use crate::trace::Route;

const RENEWAL_HEADER: &str = "OpenSandbox-Access-Renew";

/// Serves the ports of sandboxes.
#[derive(Clone)]
pub(crate) struct Ports {
    pub(super) front: Front,
    /// The execution API, with the sandbox in the request's extensions.
    pub(super) execd: Router,
}

pub(super) fn table() -> Vec<(String, MethodRouter<Ports>)> {
    let forms = ["/sandboxes/{id}/proxy/{port}", "/sandboxes/{id}/proxy/{port}/{*path}"];
    // A wildcard does not match the bare slash.
    let forms = forms.into_iter().chain(["/sandboxes/{id}/proxy/{port}/"]);
    forms.flat_map(|path| [format!("/v1{path}"), path.to_owned()]).map(|path| (path, any(proxy))).collect()
}

/// How a client addressed a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// By a path on the server's own address, which all sandboxes share.
    Path,
    /// By a host or a header; the whole path belongs to the service.
    Gateway,
}

/// A port of a sandbox and the requested path.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Target {
    pub(super) id: SandboxId,
    pub(super) port: u16,
    /// The part of the path that names the port; redirects must stay below it.
    pub(super) mount: String,
    /// The rest, as the client wrote it.
    pub(super) path: String,
    pub(super) form: Form,
    /// The signature in the address, if any.
    pub(super) signed: Option<Signed>,
}

impl Target {
    fn parse(path: &str) -> Result<Self, Problem> {
        let below = path.strip_prefix("/v1").unwrap_or(path);
        let parts: Vec<&str> = below.splitn(6, '/').collect();
        let ["", "sandboxes", id, "proxy", port, rest @ ..] = parts.as_slice() else {
            return Err(Problem::no_sandbox(""));
        };
        let parsed = SandboxId::parse(id).ok().ok_or_else(|| Problem::no_sandbox(id))?;
        let (number, signed) = port_and_signature(port)?;
        let rest = rest.first().map(|rest| format!("/{rest}")).unwrap_or_default();
        let mount = path[..path.len() - rest.len()].to_owned();
        Ok(Self { id: parsed, port: number, mount, path: rest, form: Form::Path, signed })
    }

    fn named(address: Place, path: &str) -> Self {
        let Place { id, port, signed } = address;
        Self { id, port, mount: String::new(), path: path.to_owned(), form: Form::Gateway, signed }
    }
}

/// How the execution API was addressed, for requests that it forwards itself.
#[derive(Clone)]
pub(super) struct Reached {
    pub(super) mount: String,
    pub(super) form: Form,
    pub(super) signed: Option<Signed>,
}

impl FromRequestParts<Front> for Reached {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &Front) -> Result<Self, Problem> {
        parts.extensions.get::<Self>().cloned().ok_or_else(|| Problem::no_sandbox(""))
    }
}

/// Finds the port in a path that is otherwise malformed; 0 if there is none.
fn port_in(path: &str) -> u16 {
    let (_, named) = path.split_once("/proxy/").unwrap_or_default();
    let number = named.split(['/', '-']).next().unwrap_or_default();
    number.parse().unwrap_or_default()
}

async fn proxy(State(ports): State<Ports>, request: Request) -> Response {
    let path = request.uri().path();
    match Target::parse(path) {
        Ok(target) => ports.answer(target, request).await,
        Err(problem) => refuse(problem, port_in(path)),
    }
}

impl Ports {
    /// Answers a request that named a port by host or header, in the format of [`Place`].
    pub(crate) async fn reach(self, label: &str, request: Request) -> Response {
        let mut response = match Place::parse(label) {
            Ok(address) => {
                let target = Target::named(address, request.uri().path());
                self.answer(target, request).await
            }
            Err(problem) => problem.into_response(),
        };
        if response.extensions().get::<Route>().is_none() {
            response.extensions_mut().insert(Route("gateway".to_owned()));
        }
        response
    }

    async fn answer(self, target: Target, request: Request) -> Response {
        let front = &self.front;
        let found = front.service.look(&target.id);
        if found.is_none() && target.form == Form::Gateway {
            return refuse(Problem::no_sandbox(target.id.as_str()), target.port);
        }
        let owner = match admit(front, request.headers(), &target, found.as_ref()) {
            Ok(owner) => owner,
            Err(problem) => return refuse(problem, target.port),
        };
        let sandbox = match front.service.get(&owner, &target.id) {
            Ok(sandbox) => sandbox,
            Err(error) => return refuse(Problem::from(error), target.port),
        };
        let notes = Notes::of(&sandbox);
        if auth::text(request.headers(), RENEWAL_HEADER).is_none_or(|value| value.trim() != "skip") {
            renew_on_access(front, &owner, &sandbox, &notes).await;
        }
        match target.port {
            EXECD_PORT => {
                let lines = notes.lines(front.settings.default_lines);
                let Target { id, mount, path, form, signed, .. } = target;
                let scope = Scope { owner: owner.clone(), id: id.clone(), lines };
                let reached = Reached { mount, form, signed };
                let response = execute(self.execd.clone(), scope, reached, &path, request).await;
                if response.status() == StatusCode::INTERNAL_SERVER_ERROR {
                    return execd::gone(front, &owner, &id).unwrap_or(response);
                }
                response
            }
            EGRESS_PORT => egress::answer(&sandbox, request.method(), &target.path),
            _ => forward::forward(front, &owner, &target, request).await,
        }
    }
}

/// Formats a refusal for the API on `port`: the execution API uses `error` for a missing or invalid
/// token, the egress API uses plain text.
fn refuse(problem: Problem, port: u16) -> Response {
    let (kind, body) = match port {
        EXECD_PORT if matches!(problem.code, "MISSING_API_KEY" | "INVALID_API_KEY") => {
            ("application/json", serde_json::json!({ "error": problem.message }).to_string())
        }
        EGRESS_PORT => ("text/plain; charset=utf-8", problem.message.clone()),
        _ => return problem.into_response(),
    };
    let (mut parts, _) = problem.into_response().into_parts();
    parts.headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    Response::from_parts(parts, body.into())
}

/// Passes a request to the execution API, under the path it has there.
async fn execute(
    execd: Router,
    scope: Scope,
    reached: Reached,
    path: &str,
    mut request: Request,
) -> Response {
    let path = if path.is_empty() { "/" } else { path };
    let inner = match request.uri().query() {
        Some(query) => format!("{path}?{query}"),
        None => path.to_owned(),
    };
    let mut parts = request.uri().clone().into_parts();
    parts.path_and_query = PathAndQuery::try_from(inner).ok();
    let Ok(uri) = Uri::from_parts(parts) else {
        return Problem::invalid("invalid path").into_response();
    };
    *request.uri_mut() = uri;
    // The outer router has stored the parameters of its own path here.
    let extensions = request.extensions_mut();
    let (upgrade, peer) = (extensions.remove::<OnUpgrade>(), extensions.remove::<Peer>());
    extensions.clear();
    if let Some(upgrade) = upgrade {
        extensions.insert(upgrade);
    }
    if let Some(peer) = peer {
        extensions.insert(peer);
    }
    extensions.insert(scope);
    extensions.insert(reached);
    execd.oneshot(request).await.into_response()
}

/// Extends the expiry if the sandbox was created with access renewal, unless it was extended a moment
/// ago. A failure must not fail the proxied request.
async fn renew_on_access(front: &Front, owner: &Owner, sandbox: &Sandbox, notes: &Notes) {
    let (Some(seconds), Some(expires)) = (notes.renew_on_access, sandbox.expires) else { return };
    let wanted = SystemTime::now() + Duration::from_secs(seconds);
    if expires + front.settings.renewal_interval < wanted
        && let Err(error) = front.service.renew(owner, &sandbox.id, wanted).await
    {
        tracing::warn!(%error, "failed to renew sandbox on access; the next access retries");
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{Just, Strategy, prop, prop_assert, prop_assert_eq, prop_oneof, proptest};

    use super::*;

    const ID: &str = "abcdefghij0123456789";

    #[test]
    fn path_after_the_port_is_unchanged() {
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

    #[test]
    fn signature_is_part_of_the_mount() {
        let path = format!("/v1/sandboxes/{ID}/proxy/8080-t2k-abc/x");
        let target = Target::parse(&path).unwrap();
        assert_eq!((target.port, target.path.as_str()), (8080, "/x"));
        assert!(target.mount.ends_with("/8080-t2k-abc"));
        assert_eq!(target.signed.unwrap().expires, "t2k");
    }

    /// Paths that are almost valid, and some that are not.
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
        fn target_reproduces_the_path(path in any_path()) {
            if let Ok(target) = Target::parse(&path) {
                prop_assert!(target.port > 0);
                prop_assert_eq!(format!("{}{}", target.mount, target.path), path.as_str());
                prop_assert!(target.path.is_empty() || target.path.starts_with('/'));
                let named = format!("/sandboxes/{}/proxy/", target.id);
                let (_, port) = target.mount.split_once(&named).expect("the mount names the sandbox");
                let port = port.split('-').next().unwrap_or_default();
                prop_assert_eq!(port.parse::<u16>().ok(), Some(target.port));
            }
        }
    }

    #[test]
    fn malformed_ports_and_ids_are_refused() {
        let status = |path: String| Target::parse(&path).unwrap_err().status;
        assert_eq!(status(format!("/sandboxes/{ID}/proxy/0/x")), StatusCode::BAD_REQUEST);
        assert_eq!(status(format!("/sandboxes/{ID}/proxy/65536/x")), StatusCode::BAD_REQUEST);
        assert_eq!(status("/sandboxes/..%2f/proxy/80/x".to_owned()), StatusCode::NOT_FOUND);
    }

    async fn refused(problem: Problem, port: u16) -> (http::HeaderMap, String) {
        let (parts, body) = refuse(problem, port).into_parts();
        let body = axum::body::to_bytes(body, 1000).await.unwrap();
        (parts.headers, String::from_utf8(body.to_vec()).unwrap())
    }

    #[tokio::test]
    async fn refusal_keeps_its_code_and_retry_after() {
        let problem = |code| {
            let problem = Problem::new(StatusCode::UNAUTHORIZED, code, "why");
            Problem { retry_after: Some(7), ..problem }
        };
        for (code, port, expected) in [
            ("INVALID_API_KEY", EXECD_PORT, r#"{"error":"why"}"#),
            ("SOMETHING_ELSE", EXECD_PORT, r#"{"code":"SOMETHING_ELSE","message":"why"}"#),
            ("INVALID_API_KEY", 8080, r#"{"code":"INVALID_API_KEY","message":"why"}"#),
            ("INVALID_API_KEY", EGRESS_PORT, "why"),
        ] {
            let (headers, body) = refused(problem(code), port).await;
            assert_eq!((body.as_str(), &headers["retry-after"]), (expected, &HeaderValue::from(7)));
            let kind = headers["content-type"].to_str().unwrap();
            assert_eq!(kind.starts_with("text/plain"), port == EGRESS_PORT, "{kind}");
        }
    }

    #[test]
    fn port_is_found_in_malformed_paths() {
        for (path, port) in [
            ("/v1/sandboxes/no-id/proxy/18080/policy", 18080),
            ("/sandboxes//proxy/44772", 44772),
            ("/sandboxes/a/proxy/18080-x-y/policy", 18080),
            ("/sandboxes/a/proxy/x", 0),
            ("/", 0),
        ] {
            assert_eq!(port_in(path), port, "{path}");
        }
    }
}
