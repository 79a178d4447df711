//! Resolves the address of a sandbox port: always on this server, below the proxy path or in the
//! form of the gateway mode.

use std::collections::BTreeMap;
use std::time::SystemTime;

use axum::Json;
use axum::extract::State;
use domain::SandboxId;
use http::{HeaderMap, Uri};
use serde::Serialize;
use service::SandboxRef;

use super::access::{OwnedSandbox, PortText, ROUTING_HEADERS, SECURE_ACCESS, SECURE_PURPOSE, token_of};
use super::port_label;
use super::problem::Problem;
use super::types::SandboxNotes;
use super::{EGRESS_PORT, EXECD_PORT, OpenSandboxState};
use crate::kit::headers::request_host;
use crate::kit::query::QueryParams;
use crate::settings::{ApiPorts, GatewayMode, GatewaySettings};

#[derive(Debug, PartialEq, Eq, Serialize)]
pub(super) struct PortEndpoint {
    /// `host[:port]/path`, without a scheme.
    endpoint: String,
    /// Headers that the client must add to every request there: the sandbox's tokens, and its routing
    /// header.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    headers: BTreeMap<&'static str, String>,
}

/// `GET /sandboxes/{id}/endpoints/{port}`
pub(super) async fn resolve_endpoint(
    State(state): State<OpenSandboxState>,
    at: OwnedSandbox,
    PortText(port): PortText,
    uri: Uri,
    headers: HeaderMap,
) -> Result<Json<PortEndpoint>, Problem> {
    let query = QueryParams::from_uri(&uri);
    let by_path = query.is_on("use_server_proxy");
    let expires = parse_expires(&query)?;
    if expires.is_some() && by_path {
        return Err(Problem::invalid("`expires` cannot be combined with `use_server_proxy`"));
    }
    let port = port_label::parse_port(&port)?;
    let sandbox = at.find(&state)?;
    // The host that the client used is the one name known to work for it.
    let host = state.settings.public_address.clone().or_else(|| request_host(&uri, &headers));
    let host = host.ok_or_else(|| Problem::invalid("the header `Host` is missing"))?;
    let (suffix, tokens) = match expires {
        // A signed address needs no tokens, so that it can be shared.
        Some(expires) => {
            let signed = state.routes.sign(&sandbox, port, expires)?;
            (format!("-{}-{}", signed.expires, signed.signature), BTreeMap::new())
        }
        None => (String::new(), token_headers(&sandbox, port)),
    };
    let mode = if by_path { &GatewayMode::Off } else { mode_of_port(&state.settings.gateway, port) };
    Ok(Json(build_endpoint(mode, host, &at.id, &format!("{port}{suffix}"), tokens)))
}

/// Returns the form in which a port is addressed.
fn mode_of_port(gateway: &GatewaySettings, port: u16) -> &GatewayMode {
    let is_api = port == EXECD_PORT || port == EGRESS_PORT;
    if is_api && gateway.api_ports == ApiPorts::ByPath { &GatewayMode::Off } else { &gateway.mode }
}

/// Returns the token headers that open a port.
fn token_headers(sandbox: &SandboxRef, port: u16) -> BTreeMap<&'static str, String> {
    let (header, purpose) = token_of(port);
    let secure = SandboxNotes::of_sandbox(sandbox).secure_access.then_some((SECURE_ACCESS, SECURE_PURPOSE));
    let both = [Some((header, &*purpose)), secure].into_iter().flatten();
    both.map(|(header, purpose)| (header, sandbox.ports().access_token(purpose).expose().to_owned()))
        .collect()
}

/// Builds the address in the form of the mode; `port` includes its signature.
fn build_endpoint(
    mode: &GatewayMode,
    host: String,
    id: &SandboxId,
    port: &str,
    mut headers: BTreeMap<&'static str, String>,
) -> PortEndpoint {
    let endpoint = match mode {
        GatewayMode::Off => format!("{host}/v1/sandboxes/{id}/proxy/{port}"),
        GatewayMode::Wildcard { domain } => format!("{id}-{port}.{domain}"),
        GatewayMode::Header => {
            headers.insert(ROUTING_HEADERS[0], format!("{id}-{port}"));
            host
        }
    };
    PortEndpoint { endpoint, headers }
}

/// Parses the time until which a signed address is valid; `None` if it need not be signed.
fn parse_expires(query: &QueryParams) -> Result<Option<u64>, Problem> {
    let Some(seconds) = query.parse_number::<u64>("expires").map_err(Problem::invalid)? else {
        return Ok(None);
    };
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    if seconds <= now.as_secs() {
        return Err(Problem::invalid("`expires` is not in the future"));
    }
    Ok(Some(seconds))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_has_the_form_of_its_mode() {
        let id = SandboxId::parse("abcdefghij0123456789").unwrap();
        for (mode, expected, header) in [
            (GatewayMode::Off, "h:1/v1/sandboxes/abcdefghij0123456789/proxy/80-e-s", None),
            (GatewayMode::Wildcard { domain: "d:2".to_owned() }, "abcdefghij0123456789-80-e-s.d:2", None),
            (GatewayMode::Header, "h:1", Some("abcdefghij0123456789-80-e-s")),
        ] {
            let made = build_endpoint(&mode, "h:1".to_owned(), &id, "80-e-s", BTreeMap::new());
            assert_eq!(made.endpoint, expected);
            assert_eq!(made.headers.get(ROUTING_HEADERS[0]).map(String::as_str), header);
        }
    }

    #[test]
    fn api_ports_are_addressed_by_path_if_configured() {
        let mode = GatewayMode::Wildcard { domain: "localhost:8080".to_owned() };
        let mut gateway = GatewaySettings { mode: mode.clone(), ..GatewaySettings::default() };
        assert_eq!(mode_of_port(&gateway, EXECD_PORT), &mode);
        gateway.api_ports = ApiPorts::ByPath;
        assert_eq!(mode_of_port(&gateway, EXECD_PORT), &GatewayMode::Off);
        assert_eq!(mode_of_port(&gateway, EGRESS_PORT), &GatewayMode::Off);
        assert_eq!(mode_of_port(&gateway, 8000), &mode);
    }
}
