//! The ports of a sandbox, however they are addressed: by path, by host name or by header.

use std::time::Duration;

use axum::Router;
use axum::extract::{FromRequestParts, Request, State};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, any};
use domain::SandboxId;
use http::request::Parts;
use http::{HeaderValue, StatusCode, header};
use service::ServiceError;

use super::access::authorize_port;
use super::execd::ExecTarget;
use super::port_label::{PortAddress, parse_port_and_signature};
use super::problem::{Problem, ProblemCause};
use super::signed_routes::RouteSignature;
use super::types::SandboxNotes;
use super::{EGRESS_PORT, EXECD_PORT, OpenSandboxState, egress, execd, forward, vault};
use crate::kit::headers::header_text;
use crate::kit::nested::{self, InvalidPath};
use crate::ports::target::{AddressForm, AddressGrant, PortTarget};
use crate::server::concurrency::{self, RequestAdmission};
use crate::server::request_log::RouteLabel;

pub(super) const RENEWAL_HEADER: &str = "OpenSandbox-Access-Renew";

/// Serves the ports of sandboxes.
#[derive(Clone)]
pub(super) struct PortProxy {
    pub(super) front: OpenSandboxState,
    /// The execution API, with the sandbox in the request's extensions.
    pub(super) execd: Router,
}

pub(super) fn proxy_routes() -> Vec<(String, MethodRouter<PortProxy>)> {
    let forms = ["/sandboxes/{id}/proxy/{port}", "/sandboxes/{id}/proxy/{port}/{*path}"];
    // A wildcard does not match the bare slash.
    let forms = forms.into_iter().chain(["/sandboxes/{id}/proxy/{port}/"]);
    forms
        .flat_map(|path| [format!("/v1{path}"), path.to_owned()])
        .map(|path| (path, any(proxy_by_path)))
        .collect()
}

/// A port with the signature in its address, if any.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct SignedTarget {
    pub(super) target: PortTarget,
    pub(super) signature: Option<RouteSignature>,
}

impl SignedTarget {
    fn parse(path: &str) -> Result<Self, Problem> {
        let below = path.strip_prefix("/v1").unwrap_or(path);
        let parts: Vec<&str> = below.splitn(6, '/').collect();
        let ["", "sandboxes", id, "proxy", port, rest @ ..] = parts.as_slice() else {
            return Err(Problem::no_sandbox(""));
        };
        let parsed = SandboxId::parse(id).ok().ok_or_else(|| Problem::no_sandbox(id))?;
        let (port, signature) = parse_port_and_signature(port)?;
        let rest = rest.first().map(|rest| format!("/{rest}")).unwrap_or_default();
        let mount = path[..path.len() - rest.len()].to_owned();
        let (form, grant) = (AddressForm::Path, grant_of(signature.as_ref()));
        let target = PortTarget { id: parsed, port, mount, path: rest, form, grant };
        Ok(Self { target, signature })
    }

    fn from_address(address: PortAddress, path: &str) -> Self {
        let PortAddress { id, port, signed } = address;
        let (mount, path, form) = (String::new(), path.to_owned(), AddressForm::Gateway);
        let target = PortTarget { id, port, mount, path, form, grant: grant_of(signed.as_ref()) };
        Self { target, signature: signed }
    }
}

/// A signed address opens its port.
fn grant_of(signature: Option<&RouteSignature>) -> AddressGrant {
    signature.map_or(AddressGrant::Nothing, |_| AddressGrant::Port)
}

/// How the execution API was addressed, for requests that it forwards itself.
#[derive(Clone)]
pub(super) struct ReachedVia {
    pub(super) mount: String,
    pub(super) form: AddressForm,
    pub(super) grant: AddressGrant,
}

impl FromRequestParts<OpenSandboxState> for ReachedVia {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &OpenSandboxState) -> Result<Self, Problem> {
        parts.extensions.get::<Self>().cloned().ok_or_else(|| Problem::no_sandbox(""))
    }
}

/// Finds the port in a path that is otherwise malformed; 0 if there is none.
fn port_in(path: &str) -> u16 {
    let (_, named) = path.split_once("/proxy/").unwrap_or_default();
    let number = named.split(['/', '-']).next().unwrap_or_default();
    number.parse().unwrap_or_default()
}

async fn proxy_by_path(State(ports): State<PortProxy>, request: Request) -> Response {
    let path = request.uri().path();
    match SignedTarget::parse(path) {
        Ok(target) => ports.answer_request(target, request).await,
        Err(problem) => refusal_response(problem, port_in(path)),
    }
}

impl PortProxy {
    /// Answers a request that named a port by host or header, in the format of [`PortAddress`].
    pub(super) async fn proxy_by_label(self, label: &str, request: Request) -> Response {
        let mut response = match PortAddress::parse(label) {
            Ok(address) => {
                let target = SignedTarget::from_address(address, request.uri().path());
                self.answer_request(target, request).await
            }
            Err(problem) => problem.into_response(),
        };
        if response.extensions().get::<RouteLabel>().is_none() {
            response.extensions_mut().insert(RouteLabel("gateway".to_owned()));
        }
        response
    }

    async fn answer_request(self, addressed: SignedTarget, request: Request) -> Response {
        let (front, target) = (&self.front, &addressed.target);
        let found = front.service.sandbox_of(None, &target.id).ok();
        if found.is_none() && target.form == AddressForm::Gateway {
            return refusal_response(Problem::no_sandbox(target.id.as_str()), target.port);
        }
        let owner = match authorize_port(front, request.headers(), &addressed, found.as_ref()) {
            Ok((owner, proof)) => {
                match concurrency::admit_request(&front.service, request.extensions(), &owner, proof) {
                    Ok(()) => owner,
                    Err(error) => return refusal_response(error.into(), target.port),
                }
            }
            Err(problem) => return refusal_response(problem, target.port),
        };
        let Some(sandbox) = found.filter(|sandbox| *sandbox.owner() == owner) else {
            let problem = Problem::from(ServiceError::NoSandbox(target.id.clone()));
            return refusal_response(problem, target.port);
        };
        let notes = SandboxNotes::of_sandbox(&sandbox);
        let skips =
            header_text(request.headers(), RENEWAL_HEADER).is_some_and(|value| value.trim() == "skip");
        if let Some(seconds) = notes.renew_on_access.filter(|_| !skips) {
            let interval = front.own_settings.renewal_interval;
            sandbox.renew_on_access(Duration::from_secs(seconds), interval).await;
        }
        match target.port {
            EXECD_PORT => {
                let lines = notes.line_dialect(front.own_settings.lines);
                let PortTarget { mount, path, form, grant, .. } = addressed.target;
                let admission = request.extensions().get::<RequestAdmission>().cloned();
                let scope = ExecTarget { sandbox: sandbox.clone(), lines, admission };
                let reached = ReachedVia { mount, form, grant };
                let called = nested::call_router(self.execd.clone(), &path, request, |extensions| {
                    extensions.insert(scope);
                    extensions.insert(reached);
                });
                let invalid = |_: InvalidPath| Problem::invalid("invalid path").into_response();
                let response = called.await.unwrap_or_else(invalid);
                if response.status() == StatusCode::INTERNAL_SERVER_ERROR {
                    return execd::gone_response(&sandbox).unwrap_or(response);
                }
                response
            }
            EGRESS_PORT if vault::is_vault_path(&target.path) => {
                vault::answer_vault(&sandbox, &target.path, request).await
            }
            EGRESS_PORT => egress::answer_egress(&sandbox, &target.path, request).await,
            _ => forward::forward_request(front, &sandbox, target, request).await,
        }
    }
}

/// Formats a refusal for the API on `port`: the execution API uses `error` for a missing or invalid
/// token, the egress API uses plain text.
fn refusal_response(problem: Problem, port: u16) -> Response {
    let (kind, body) = match port {
        EXECD_PORT if problem.cause == ProblemCause::ApiKey => {
            ("application/json", serde_json::json!({ "error": problem.message }).to_string())
        }
        EGRESS_PORT => ("text/plain; charset=utf-8", problem.message.clone()),
        _ => return problem.into_response(),
    };
    let (mut parts, _) = problem.into_response().into_parts();
    parts.headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    Response::from_parts(parts, body.into())
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
            let target = SignedTarget::parse(&path).unwrap().target;
            assert_eq!((target.mount, target.path.as_str(), target.port), (mount, rest, 8080), "{path}");
        }
    }

    #[test]
    fn signature_is_part_of_the_mount() {
        let path = format!("/v1/sandboxes/{ID}/proxy/8080-t2k-abc/x");
        let SignedTarget { target, signature } = SignedTarget::parse(&path).unwrap();
        assert_eq!((target.port, target.path.as_str()), (8080, "/x"));
        assert!(target.mount.ends_with("/8080-t2k-abc"));
        assert_eq!(target.grant, AddressGrant::Port);
        assert_eq!(signature.unwrap().expires, "t2k");
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
            if let Ok(SignedTarget { target, .. }) = SignedTarget::parse(&path) {
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
        let status = |path: String| SignedTarget::parse(&path).unwrap_err().status;
        assert_eq!(status(format!("/sandboxes/{ID}/proxy/0/x")), StatusCode::BAD_REQUEST);
        assert_eq!(status(format!("/sandboxes/{ID}/proxy/65536/x")), StatusCode::BAD_REQUEST);
        assert_eq!(status("/sandboxes/..%2f/proxy/80/x".to_owned()), StatusCode::NOT_FOUND);
    }

    async fn refused(problem: Problem, port: u16) -> (http::HeaderMap, String) {
        let (parts, body) = refusal_response(problem, port).into_parts();
        let body = axum::body::to_bytes(body, 1000).await.unwrap();
        (parts.headers, String::from_utf8(body.to_vec()).unwrap())
    }

    #[tokio::test]
    async fn refusal_keeps_its_code_and_retry_after() {
        let problem = |code| {
            let cause = if code == "INVALID_API_KEY" { ProblemCause::ApiKey } else { ProblemCause::Other };
            let problem = Problem::new(StatusCode::UNAUTHORIZED, code, "why");
            Problem { retry_after: Some(7), cause, ..problem }
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
