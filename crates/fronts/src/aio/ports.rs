//! Ports of a sandbox: `/proxy/{port}/…` without and `/absproxy/{port}/…` with its own prefix, and ports that a host or a
//! header names.
//!
//! The address of a sandbox opens its whole API, so the service behind a port never gets to see it.

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use axum::routing::any;
use http::{HeaderMap, StatusCode, Uri, header};

use super::AioState;
use super::problem::AioProblem;
use super::routes::AioRoute;
use super::settings::PortHeader;
use super::target::AioTarget;
use crate::ports::forward::{self, ForwardError};
use crate::ports::target::{AddressGrant, PortTarget};

/// The header with which a trusted gateway names a port.
pub(super) const PORT_HEADER_NAME: &str = "x-aio-proxy-port";

pub(super) fn routes() -> Vec<AioRoute> {
    vec![
        ("/proxy/{port}", any(redirect_to_root)),
        ("/proxy/{port}/", any(forward_without_prefix)),
        ("/proxy/{port}/{*path}", any(forward_without_prefix)),
        ("/absproxy/{port}", any(redirect_to_root)),
        ("/absproxy/{port}/", any(forward_with_prefix)),
        ("/absproxy/{port}/{*path}", any(forward_with_prefix)),
    ]
}

/// Whether a path below the address of a sandbox belongs to a port and not to the API.
pub(super) fn is_port_path(path: &str) -> bool {
    path.starts_with("/proxy/") || path.starts_with("/absproxy/")
}

/// The port that the header of a trusted gateway names, if the operator has such a gateway.
pub(super) fn port_of_header(setting: PortHeader, headers: &HeaderMap) -> Result<Option<u16>, AioProblem> {
    match (setting, headers.get(PORT_HEADER_NAME)) {
        (PortHeader::Accepted, Some(value)) => {
            parse_port(value.to_str().unwrap_or_default(), ["header", PORT_HEADER_NAME]).map(Some)
        }
        (PortHeader::Accepted, None) | (PortHeader::Ignored, _) => Ok(None),
    }
}

/// Without the last slash, relative links of a page would lead to other ports.
async fn redirect_to_root(uri: Uri) -> Result<Response, AioProblem> {
    let port = parse_port(uri.path().rsplit('/').next().unwrap_or_default(), ["path", "port"])?;
    let query = uri.query().map(|query| format!("?{query}")).unwrap_or_default();
    // Relative, because a proxy in front of this server may have removed a part of the path.
    let location = format!("{port}/{query}");
    Ok((StatusCode::TEMPORARY_REDIRECT, [(header::LOCATION, location)]).into_response())
}

/// `/proxy/{port}/…`: the service gets the path below its port.
async fn forward_without_prefix(
    State(state): State<AioState>,
    target: AioTarget,
    uri: Uri,
    request: Request,
) -> Result<Response, AioProblem> {
    let below = uri.path().strip_prefix("/proxy/").unwrap_or_default();
    let (port, path) = below.split_at(below.find('/').unwrap_or(below.len()));
    let number = parse_port(port, ["path", "port"])?;
    let mount = format!("{}/proxy/{port}", target.mount);
    forward_to_port(&state, &target, number, mount, path.to_owned(), request).await
}

/// `/absproxy/{port}/…`: the service gets the path from `/absproxy` on.
async fn forward_with_prefix(
    State(state): State<AioState>,
    target: AioTarget,
    uri: Uri,
    request: Request,
) -> Result<Response, AioProblem> {
    let below = uri.path().strip_prefix("/absproxy/").unwrap_or_default();
    let number = parse_port(below.split('/').next().unwrap_or_default(), ["path", "port"])?;
    let mount = target.mount.clone();
    forward_to_port(&state, &target, number, mount, uri.path().to_owned(), request).await
}

/// Forwards a request whose host or header names the port; the whole path belongs to the service.
pub(super) async fn forward_named_port(
    state: &AioState,
    target: &AioTarget,
    port: u16,
    path: &str,
    request: Request,
) -> Response {
    let mount = target.mount.clone();
    forward_to_port(state, target, port, mount, path.to_owned(), request).await.into_response()
}

async fn forward_to_port(
    state: &AioState,
    target: &AioTarget,
    port: u16,
    mount: String,
    path: String,
    request: Request,
) -> Result<Response, AioProblem> {
    target.begin_stream()?;
    let (sandbox, timeout) = (&target.sandbox, state.settings.answer_timeout);
    let (id, form, grant) = (sandbox.id().clone(), target.form, AddressGrant::Sandbox);
    let port = PortTarget { id, port, mount, path, form, grant };
    let response = forward::forward_request(&state.service, timeout, sandbox, &port, request).await;
    response.map_err(forward_problem)
}

fn forward_problem(error: ForwardError) -> AioProblem {
    let message = error.to_string();
    match error {
        ForwardError::Connect => AioProblem::new(StatusCode::METHOD_NOT_ALLOWED, message),
        ForwardError::InvalidPath => AioProblem::bad_request(message),
        ForwardError::Unreachable(error) => error.into(),
        ForwardError::BadResponse(_) => AioProblem::new(StatusCode::BAD_GATEWAY, message),
        ForwardError::Timeout(_) => AioProblem::new(StatusCode::GATEWAY_TIMEOUT, message),
    }
}

/// Parses a port's number, of digits only.
fn parse_port(text: &str, loc: [&str; 2]) -> Result<u16, AioProblem> {
    let is_digits = text.bytes().all(|byte| byte.is_ascii_digit());
    let port = text.parse().ok().filter(|port: &u16| *port > 0 && is_digits);
    port.ok_or_else(|| AioProblem::invalid(loc, "a port is a number from 1 to 65535", "value_error"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_numbers_in_range() {
        for (text, expected) in [
            ("1", Some(1)),
            ("65535", Some(65535)),
            ("0", None),
            ("65536", None),
            ("+80", None),
            ("", None),
            ("x", None),
        ] {
            assert_eq!(parse_port(text, ["path", "port"]).ok(), expected, "{text}");
        }
    }

    #[test]
    fn header_names_a_port_only_if_the_operator_accepts_it() {
        let headers = HeaderMap::from_iter([(
            header::HeaderName::from_static(PORT_HEADER_NAME),
            header::HeaderValue::from_static("80"),
        )]);
        assert_eq!(port_of_header(PortHeader::Ignored, &headers).unwrap(), None);
        assert_eq!(port_of_header(PortHeader::Accepted, &headers).unwrap(), Some(80));
        assert_eq!(port_of_header(PortHeader::Accepted, &HeaderMap::new()).unwrap(), None);
    }
}
